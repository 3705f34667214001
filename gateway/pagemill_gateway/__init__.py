"""The gateway: one OpenAI-compatible URL for all engine pods."""
