"""The settings of a server's TLS, for modules that read settings; `certificates` opens the files and imports `ssl`."""

from __future__ import annotations

from pathlib import Path

import msgspec


class TLSConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Certificate of a server, in PEM; both files are loaded again when they change."""

    cert_file: str
    """File of the server's certificate, followed by the intermediate certificates."""
    key_file: str
    """File of its private key, not encrypted."""


def tls_files(cert_file: Path | None, key_file: Path | None) -> TLSConfig | None:
    """Return the settings of two options. Raises `ValueError` for one without the other."""
    if cert_file is None and key_file is None:
        return None
    if cert_file is None or key_file is None:
        raise ValueError("tls: --tls-cert-file and --tls-key-file belong together. Name both.")
    return TLSConfig(cert_file=str(cert_file), key_file=str(key_file))
