"""TCP ports of this machine: checks whether a port is free, and finds free ones."""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import socket

from pagemill_operator.backends.base import BackendError
from pagemill_servers.process.listening import open_listener

# These lie below the ports that Linux and macOS give to outgoing connections: such a connection could take the port
# before the server starts, or while it is restarted.
_CANDIDATES = range(20_000, 30_000)
_next_candidates = itertools.cycle(random.sample(_CANDIDATES, len(_CANDIDATES)))


class PortInUse(BackendError):
    """Another process listens on the requested port."""


def ensure_bindable(host: str, port: int) -> None:
    """Raise `PortInUse` or `BackendError` with the remedy if a server could not listen on host:port."""
    if not 0 <= port <= 65535:
        raise BackendError(f"--port {port} is not a port; use 1 to 65535, or 0 for a free one")
    try:
        open_listener(host, port).close()
    except PermissionError:
        raise BackendError(f"--port {port} needs more rights than this user has; use a port above 1023") from None
    except socket.gaierror as error:
        raise BackendError(f"--host {host}: {error.strerror}; use 127.0.0.1 or an address of this machine") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} of {host} is in use by another process; choose another one with --port"
            raise PortInUse(message) from None
        raise BackendError(f"--host {host}: {error.strerror}; use 127.0.0.1 or an address of this machine") from None


def port_or_free_one(port: int | None, host: str = "127.0.0.1") -> int:
    """Return `port` if nothing else listens there, or else another free port."""
    if port is not None:
        with contextlib.suppress(OSError):
            open_listener(host, port).close()
            return port
    return free_port(host)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free now and that no outgoing connection is given; each call returns another one."""
    for port in itertools.islice(_next_candidates, len(_CANDIDATES)):
        try:
            open_listener(host, port).close()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port
    raise PortInUse(f"all ports of {host} from {_CANDIDATES[0]} to {_CANDIDATES[-1]} are in use; stop their processes")
