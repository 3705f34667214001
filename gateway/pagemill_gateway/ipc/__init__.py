"""Messages between the control process and its workers over a Unix socket. msgspec as msgpack, no pickle."""
