"""Files that are whole, undamaged and of a size to work with, whatever happens while they are written."""
