"""Untrusted work in a process of its own that may open nothing: `confine` closes it in, `process` runs it."""
