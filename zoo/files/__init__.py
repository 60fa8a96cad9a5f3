"""Files that are complete, undamaged and of bounded size, even after a crash during a write."""
