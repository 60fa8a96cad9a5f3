"""The implementation of `gated_linear` for GPUs."""
