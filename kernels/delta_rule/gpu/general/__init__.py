"""Kernels of the delta rule with erase keys of their own, decays per channel or reads before the decay."""
