"""The implementation of `trapezoid_token` for GPUs."""
