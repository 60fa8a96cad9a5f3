"""The implementation of `skip_readout` for GPUs."""
