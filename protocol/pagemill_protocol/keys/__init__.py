"""API keys: one line about each, known by its hash; the same at gateways, engines and in files."""
