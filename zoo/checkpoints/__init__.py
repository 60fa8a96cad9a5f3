"""The checkpoint file: how it is written, sealed, signed and read, also where it lies in shards."""
