"""Creates certificates for tests with the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path


def write_certificate(folder: Path, name: str = "gateway.test") -> tuple[str, str]:
    """Return the files of a new self-signed certificate for that name and 127.0.0.1, and of its key."""
    cert_file, key_file = str(folder / "tls.crt"), str(folder / "tls.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1", "-days", "1"]
    subprocess.run([*command, "-keyout", key_file, "-out", cert_file], check=True, capture_output=True)
    return cert_file, key_file
