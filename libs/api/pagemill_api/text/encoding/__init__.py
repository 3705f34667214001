"""Text to token ids: in this process for tokenizers whose steps are known, in a limited one for all others."""
