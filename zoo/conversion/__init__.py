"""Public checkpoints: what other projects' layouts mean in our terms, and back."""
