"""The implementation of `selective_scan` for GPUs."""
