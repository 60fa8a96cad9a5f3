"""The implementation of `forget_gate` for GPUs."""
