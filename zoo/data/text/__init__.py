"""Text as data: documents, tokens in shards, windows, and mixtures of sources."""
