"""The implementation of `linear` for GPUs."""
