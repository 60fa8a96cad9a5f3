"""The implementation of `rotation` for GPUs."""
