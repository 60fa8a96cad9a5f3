"""Shared parts of all ops: the choice of an implementation, autograd, arguments, chunks and documents."""
