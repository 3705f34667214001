"""One request from the client to an engine and back: prepare, send, pass frames on, retry, finish."""
