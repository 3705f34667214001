"""The attempts of one request: how many there may be, and what the failure of one means. Pure."""
