"""TLS of servers and of the gateway's connections to engines, with files that are loaded again when they change, as
kubelets and cert-manager replace them. Open connections keep the certificate they were made with.

uvicorn serves with the context of `ServerTLS`; any client connects with that of `EngineTrust`.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pagemill_servers.tls.config import TLSConfig

logger = logging.getLogger("pagemill.tls")

CHECK_INTERVAL_S = 1.0


class TLSError(Exception):
    """The files cannot be used; the message names them, the reason and the remedy."""


class ServerTLS:
    """The TLS context of a server. Raises `TLSError` for files that cannot be used: create it before the port is
    served."""

    def __init__(self, config: TLSConfig) -> None:
        self._config = config
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self._loaded = self._read()
        try:
            _load(self.context, config)
        except (OSError, ssl.SSLError) as error:
            raise TLSError(
                f"tls: cert_file {config.cert_file} and key_file {config.key_file} cannot be used: {error}. Name a "
                "certificate chain and its unencrypted key in PEM."
            ) from error

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[ssl.SSLContext]:
        """Yield the context; while the block runs, the files are loaded again whenever they change."""
        following = asyncio.create_task(self._follow())
        try:
            yield self.context
        finally:
            following.cancel()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self.refresh()

    def refresh(self) -> None:
        """Load changed files. Invalid files are ignored with a warning."""
        found = self._read()
        if found == self._loaded or found is None:
            return
        self._loaded = found
        try:
            _load(
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._config
            )  # a half-written change must not break the context
            _load(self.context, self._config)
        except (OSError, ssl.SSLError) as error:
            logger.warning("the changed certificate is not used, the one before stays: %s", error)
        else:
            logger.info("the certificate was loaded again from %s", self._config.cert_file)

    def _read(self) -> tuple[bytes, bytes] | None:
        try:
            return Path(self._config.cert_file).read_bytes(), Path(self._config.key_file).read_bytes()
        except OSError:
            return None


class EngineTrust(ssl.SSLContext):
    """The TLS context of clients, which accepts servers whose certificate was issued by an authority of `ca_file`.

    `ca_file` empty: any authority that this machine trusts.
    `server_name`: the name in all their certificates, since addresses of pods are not known in advance; empty: the host
    of each URL. Raises `TLSError` for a file that cannot be used.
    """

    def __new__(cls, ca_file: str = "", server_name: str = "") -> EngineTrust:
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

    def __init__(self, ca_file: str = "", server_name: str = "") -> None:
        self._ca_file = ca_file
        self._server_name = server_name
        try:
            self._read = Path(ca_file).read_text("ascii") if ca_file else ""
            self._current = ssl.create_default_context(cadata=self._read or None)
        except (OSError, ssl.SSLError, UnicodeDecodeError) as error:
            raise TLSError(
                f"engine_tls.ca_file: {ca_file} cannot be used: {error}. Name certificates of authorities in PEM."
            ) from error

    def wrap_bio(self, incoming: Any, outgoing: Any, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """Wrap one connection; event loops call it."""
        self._refresh()
        if self._server_name:
            options["server_hostname"] = self._server_name
        return self._current.wrap_bio(incoming, outgoing, *arguments, **options)

    def _refresh(self) -> None:
        """Read the file again for each new connection, so that a removed authority is no longer trusted."""
        if not self._ca_file:
            return
        try:
            found = Path(self._ca_file).read_text("ascii")
            if found == self._read:
                return
            self._read = found
            self._current = ssl.create_default_context(cadata=found)
        except (OSError, ssl.SSLError, UnicodeDecodeError) as error:
            logger.warning("the changed engine_tls.ca_file is not used, the one before stays: %s", error)


def _load(context: ssl.SSLContext, config: TLSConfig) -> None:
    # Without a password function OpenSSL would ask for one on the terminal.
    context.load_cert_chain(config.cert_file, config.key_file, password=lambda: b"")
