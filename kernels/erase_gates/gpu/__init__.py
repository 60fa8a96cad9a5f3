"""The implementation of `erase_gates` for GPUs."""
