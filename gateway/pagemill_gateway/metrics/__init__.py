"""What a gateway measures, in the names of `pagemill_protocol.metrics`: by each worker, and once by the head."""
