"""What goes on around the steps of training, one file each."""
