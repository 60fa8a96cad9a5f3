"""The implementation of `token_shift` for GPUs."""
