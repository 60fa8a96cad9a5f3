"""The implementation of `features` for GPUs."""
