"""Bodies and answers of Ollama's API; `pagemill_protocol.dialects.ollama` makes dialects of them."""
