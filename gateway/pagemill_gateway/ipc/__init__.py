"""Messages between the control process and its workers over a Unix socket, in msgpack by msgspec."""
