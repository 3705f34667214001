"""The path of one request from the client to an engine and back: preparation, attempts, forwarding, retries."""
