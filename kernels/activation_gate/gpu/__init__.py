"""The implementation of `activation_gate` for GPUs."""
