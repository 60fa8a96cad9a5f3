"""What ops share: their choice of an implementation, autograd, arguments, chunks and documents."""
