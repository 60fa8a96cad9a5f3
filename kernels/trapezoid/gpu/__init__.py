"""The implementation of `trapezoid` for GPUs."""
