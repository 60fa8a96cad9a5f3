"""The implementation of `discretise` for GPUs."""
