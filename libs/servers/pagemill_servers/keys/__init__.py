"""API keys: one line describes each, identified by its hash; gateways, engines and files use the same format."""
