"""The callbacks of training, one file each."""
