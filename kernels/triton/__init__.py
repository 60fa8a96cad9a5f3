"""What all Triton kernels share: launches, the layout of chunks and documents, and tiles. Nothing here is an op."""
