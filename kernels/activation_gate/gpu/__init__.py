"""The implementation of `sigmoid_gate` for GPUs."""
