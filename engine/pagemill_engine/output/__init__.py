"""From tokens to client bytes: detokenization, stop strings, SSE events. Runs in the HTTP process."""
