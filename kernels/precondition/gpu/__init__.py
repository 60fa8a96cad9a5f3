"""The implementation of `precondition` for GPUs."""
