"""The HTTP process: data port, control port. No torch."""
