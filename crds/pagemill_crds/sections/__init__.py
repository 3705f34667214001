"""The sections of `spec`, one module each, in the order of the resource."""
