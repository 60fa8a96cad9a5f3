"""The implementation of `delta_gates` for GPUs."""
