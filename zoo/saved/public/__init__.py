"""Public checkpoints: the layouts of Hugging Face and flash-linear-attention in this project's terms, and back."""
