"""Model definitions from shared blocks, by Hugging Face architecture name."""
