"""What the components say to each other and to clients. No torch, no sockets of its own."""
