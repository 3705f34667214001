"""The metrics of a gateway's workers and control process, with the names of `pagemill_protocol.metrics`."""
