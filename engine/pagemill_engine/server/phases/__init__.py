"""The phases of a server's life: starting, serving, sleeping, draining; and the stream that reports its state."""
