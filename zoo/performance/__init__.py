"""Benchmarks of ops (`kernels`), training steps (`training`) and generation (`decode`)."""
