"""The implementation of `recurrence_token` for GPUs."""
