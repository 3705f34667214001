"""One OpenAI-compatible URL over all engine pods."""
