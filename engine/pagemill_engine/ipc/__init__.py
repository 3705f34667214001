"""Messages and sockets between the HTTP process and the engine process: msgspec over zmq, no pickle."""
