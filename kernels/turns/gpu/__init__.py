"""The implementation of `turns` for GPUs."""
