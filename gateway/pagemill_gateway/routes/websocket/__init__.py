"""`GET /v1/responses` as a WebSocket: many responses, one after the other, over one connection."""
