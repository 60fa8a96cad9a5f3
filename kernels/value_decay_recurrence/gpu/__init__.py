"""The implementation of `value_decay_recurrence` for GPUs."""
