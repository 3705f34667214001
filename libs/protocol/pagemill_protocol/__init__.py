"""The messages between components and to clients. No torch, no sockets of its own."""
