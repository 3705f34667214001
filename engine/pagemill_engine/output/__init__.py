"""Turns tokens into client bytes: detokenization, stop strings, SSE events. It runs in the HTTP process."""
