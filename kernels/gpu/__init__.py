"""Shared parts of all Triton kernels: launches, the layout of chunks and documents, and tiles. No ops are here."""
