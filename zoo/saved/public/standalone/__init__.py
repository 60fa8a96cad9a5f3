"""Conversion of models into folders with a modelling file, for transformers' `trust_remote_code`."""
