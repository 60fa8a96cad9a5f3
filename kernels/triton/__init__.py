"""What all Triton kernels share: their launches, where chunks and documents lie, and tiles. Nothing here is an op."""
