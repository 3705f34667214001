"""TLS of the data port: a certificate and its key from files, loaded again when they change, as kubelets and
cert-manager replace them. Connections that are open keep theirs.

What speaks TLS is uvicorn with the context of here; engines have their own connections (`relay.engine_pool`).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from pagemill_gateway.config import SettingsError, TLSConfig

logger = logging.getLogger("pagemill.gateway.tls")

CHECK_INTERVAL_S = 1.0


class ServerTLS:
    """Create it before the port is served. Raises `SettingsError` for files that cannot be used."""

    def __init__(self, config: TLSConfig) -> None:
        self._config = config
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self._loaded = self._read()
        try:
            _load(self.context, config)
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(
                f"tls: cert_file {config.cert_file} and key_file {config.key_file} cannot be used: {error}. Name a "
                "certificate chain and its unencrypted key in PEM."
            ) from error

    async def follow(self) -> None:
        """Load the files again whenever they change, until cancelled. Files that do not fit are not used."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self.refresh()

    def refresh(self) -> None:
        found = self._read()
        if found == self._loaded or found is None:
            return
        self._loaded = found
        try:
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._config)  # half a change must not spoil the context
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


def _load(context: ssl.SSLContext, config: TLSConfig) -> None:
    # Without a password function OpenSSL would ask for one on the terminal.
    context.load_cert_chain(config.cert_file, config.key_file, password=lambda: b"")
