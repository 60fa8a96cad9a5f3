"""GGUF files of llama.cpp: which of its architectures holds which public layout, its vocabularies, and the file."""
