"""Executes steps on an accelerator: captured graphs, rows of requests in its memory, sleep."""
