"""Binds listening sockets before anything slow happens, so that a port in use is known at once."""

from __future__ import annotations

import errno
import socket

from pagemill_servers.process.settings import SettingsError

ANY_ADDRESS = "::"
_WITHOUT_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""Errors of sockets for IPv6 where the kernel, or an interface of it, lacks IPv6."""


class ListenError(SettingsError):
    """A port that cannot be listened on."""

    def __init__(self, reason: str, message: str, field: str) -> None:
        super().__init__(message)
        self.reason = reason
        """`AddressInvalid`, `PortInUse` or `PortForbidden`."""
        self.field = field
        """The setting at fault."""


def bind(host: str, port: int, field: str) -> socket.socket:
    """Return a listening TCP socket; `port` 0 takes a free one. Raises `ListenError`; `field`: the setting of the
    port."""
    try:
        return open_listener(host, port)
    except (socket.gaierror, UnicodeError) as error:
        message = f"Cannot listen on host {host!r}, `{field}` {port}: {error}. Name an address of this machine."
        raise ListenError("AddressInvalid", message, _host_field(field)) from error
    except (OSError, OverflowError) as error:
        raise _refusal(error, host, port, field) from error


def open_listener(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket. The host `::` is every address of IPv6 and IPv4, and of IPv4 alone where a machine
    or a container has no IPv6. Raises `OSError`, `OverflowError` and `UnicodeError`.
    """
    try:
        return _listener(host, port)
    except OSError as error:
        if host != ANY_ADDRESS or error.errno not in _WITHOUT_IPV6:
            raise
        return _listener("0.0.0.0", port)


def _listener(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        if host == ANY_ADDRESS:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def bind_both(host: str, port: int, control_host: str, control_port: int) -> tuple[socket.socket, socket.socket]:
    """Bind the data and the control port of a server. Raises `ListenError`."""
    data = bind(host, port, "port")
    try:
        return data, bind(control_host, control_port, "control_port")
    except ListenError:
        data.close()
        raise


def bound_address(listener: socket.socket) -> tuple[str, int]:
    """Return the numeric address and the port."""
    host, port = listener.getsockname()[:2]
    return str(host), int(port)


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    host, port = bound_address(listener)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _refusal(error: Exception, host: str, port: int, field: str) -> ListenError:
    code = getattr(error, "errno", None)
    option = "--" + field.replace("_", "-")
    if code == errno.EADDRINUSE:
        message = (
            f"`{field}` {port} on {host} is already in use by another process. "
            f"Stop that process, or choose another port with {option}."
        )
        return ListenError("PortInUse", message, field)
    if code == errno.EACCES:
        message = f"This user may not listen on `{field}` {port}. Choose a port above 1023 with {option}."
        return ListenError("PortForbidden", message, field)
    message = f"Cannot listen on {host}, `{field}` {port}: {error}."
    return ListenError("AddressInvalid", message, _host_field(field) if code == errno.EADDRNOTAVAIL else field)


def _host_field(port_field: str) -> str:
    return port_field.replace("port", "host")
