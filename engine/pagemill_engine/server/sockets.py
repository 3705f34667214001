"""Binds listening sockets before anything slow happens, so that a port in use is known at once."""

from __future__ import annotations

import errno
import socket

from pagemill_engine.failure import StartupError


def bind(host: str, port: int, field: str) -> socket.socket:
    """Return a listening TCP socket; `port` 0 takes a free one.

    Raises `StartupError` that names the setting and the remedy.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, OverflowError, UnicodeError) as error:
        message = f"Cannot listen on host {host!r}, {field} {port}: {error}. Name an address of this machine."
        raise StartupError("AddressInvalid", message, field=_host_field(field)) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise _refusal(error, host, port, field) from error
    listener.setblocking(False)
    return listener


def bound_address(listener: socket.socket) -> tuple[str, int]:
    """Return the numeric address and the port."""
    host, port = listener.getsockname()[:2]
    return str(host), int(port)


def bound_port(listener: socket.socket) -> int:
    return bound_address(listener)[1]


def _refusal(error: Exception, host: str, port: int, field: str) -> StartupError:
    code = getattr(error, "errno", None)
    option = "--" + field.replace("_", "-")
    if code == errno.EADDRINUSE:
        message = (
            f"`{field}` {port} on {host} is already in use by another process. "
            f"Stop that process, or choose another port with {option}."
        )
        return StartupError("PortInUse", message, field=field)
    if code == errno.EACCES:
        message = f"This user may not listen on `{field}` {port}. Choose a port above 1023 with {option}."
        return StartupError("PortForbidden", message, field=field)
    message = f"Cannot listen on {host}, `{field}` {port}: {error}."
    return StartupError("AddressInvalid", message, field=_host_field(field) if code == errno.EADDRNOTAVAIL else field)


def _host_field(port_field: str) -> str:
    return port_field.replace("port", "host")
