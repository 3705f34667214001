"""Finds within seconds that no connection to a source's server opens, as behind a network policy that drops packets.

The libraries that fetch wait and retry for minutes then. Through a proxy, the connection to the proxy is tried. `fetch`
and `headers` call this before they list the files.
"""

from __future__ import annotations

import socket
import threading
from urllib.parse import urlsplit

from pagemill_models.sources.base import SourceKind
from pagemill_models.sources.settings import proxy_of
from pagemill_protocol.source_errors import FetchError

TIMEOUT_S = 8.0
"""Seconds for the name and the connection together; a cluster's DNS alone may be asked for longer."""


def check_reachable(kind: SourceKind, source: str) -> None:
    """Open a connection to the server of a remote source and close it. Raises `FetchError`."""
    server = kind.server_of(source)
    proxy = proxy_of(server) if server else None
    parts = urlsplit(proxy or server)
    if not parts.hostname:
        return
    host, port = parts.hostname, parts.port or (80 if parts.scheme == "http" else 443)
    if cause := _cause(host, port):
        what = f"the proxy {host}" if proxy else server
        elsewhere = f", or name another server in {kind.variables[0]}" if kind.variables else ""
        message = f"`{source}`: {what} cannot be reached (port {port}: {cause})"
        raise FetchError(kind.unreachable, f"{message}. Check the network, network policies and proxies{elsewhere}.")


def _cause(host: str, port: int) -> str:
    """Return why no connection opens; empty if one does."""
    causes = [f"no answer within {TIMEOUT_S:g} s"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), TIMEOUT_S).close()
            causes[0] = ""
        except (OSError, UnicodeError) as error:
            if not isinstance(error, TimeoutError):
                causes[0] = getattr(error, "strerror", None) or str(error)

    # Resolving a name cannot be interrupted; a thread that still waits for it ends with the process.
    thread = threading.Thread(target=connect, name="reach", daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return causes[0]
