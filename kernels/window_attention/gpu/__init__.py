"""The implementation of attention with log decays for GPUs."""
