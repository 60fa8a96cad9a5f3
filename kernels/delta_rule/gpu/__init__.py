"""The implementation of `delta_rule` for GPUs."""
