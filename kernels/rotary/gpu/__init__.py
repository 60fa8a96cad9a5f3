"""The implementation of `rotary` for GPUs."""
