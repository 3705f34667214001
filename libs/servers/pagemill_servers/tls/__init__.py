"""TLS of servers and towards engines: settings, certificates that may change, and handshakes that are counted."""
