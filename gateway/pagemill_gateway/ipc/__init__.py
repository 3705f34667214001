"""Between the brain's process and its workers: messages over a Unix socket. msgspec as msgpack, no pickle."""
