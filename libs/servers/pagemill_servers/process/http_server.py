"""uvicorn on a socket that is bound already, for a process that handles its stop signals and its drain itself.

The protocol bounds what a client can make the process hold (`connection`, `connection_limits`, `tls.handshakes`).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from pagemill_servers.connection_limits import ConnectionLimits
from pagemill_servers.tls.handshakes import secured


class HttpServer(uvicorn.Server):
    def __init__(
        self,
        app: ASGIApp,
        protocol: type[asyncio.Protocol],
        limits: ConnectionLimits,
        certificate: ssl.SSLContext | None,
        *,
        keep_alive_s: int,
        flush_timeout_s: int,
    ) -> None:
        """`certificate`: None serves without TLS. `flush_timeout_s`: how long connections have at the end to read
        their last bytes."""
        super().__init__(
            uvicorn.Config(
                app,
                http=secured(protocol, certificate, limits),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,  # no address or scheme of a client is used
                server_header=False,
                timeout_keep_alive=keep_alive_s,
                timeout_graceful_shutdown=flush_timeout_s,
            )
        )

    def refuse_connections(self) -> None:
        """Stop accepting connections; open ones stay."""
        for server in self.servers:
            server.close()

    def end(self) -> None:
        """Begin the end: `serve` returns when connections had their time for their last bytes."""
        self.should_exit = True

    def cut_connections(self) -> None:
        """Close connections at the end without waiting for their last bytes."""
        self.force_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process: uvicorn would stop listening before the drain."""
        yield
