"""Images as the data of a run."""
