"""The implementation of `linear_kl` for GPUs."""
