"""The checkpoint file: writing, sealing, signing and reading it, with or without ZeRO shards."""
