"""Bodies and answers of Ollama's API; `pagemill_api.dialects.ollama.ollama` makes dialects of them."""
