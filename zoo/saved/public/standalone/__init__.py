"""Models with a modelling file of their own, for transformers' `trust_remote_code`."""
