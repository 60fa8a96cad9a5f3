"""The implementation of `bonus_readout` for GPUs."""
