"""Text data: documents, token shards, windows, and mixtures of sources."""
