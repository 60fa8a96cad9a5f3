"""The implementation of `linear_recurrence` for GPUs."""
