"""The implementation of `norm` for GPUs."""
