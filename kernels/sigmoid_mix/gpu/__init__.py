"""The implementation of `sigmoid_mix` for GPUs."""
