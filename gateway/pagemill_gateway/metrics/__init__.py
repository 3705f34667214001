"""What a gateway measures, with the names of `pagemill_protocol.metrics`, in each worker and in the control process."""
