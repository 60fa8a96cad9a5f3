"""The implementation of `linear_cross_entropy` for GPUs."""
