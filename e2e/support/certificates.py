"""Makes certificates of authorities that only a case knows."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificate(folder: Path, name: str, server_name: str) -> dict[str, str]:
    """Return a self-signed certificate for a server, which is its own authority, as the entries of a TLS Secret."""
    files = {"tls.crt": folder / f"{name}.crt", "tls.key": folder / f"{name}.key"}
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "1", "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{server_name}"]
    subprocess.run(
        [*command, "-keyout", str(files["tls.key"]), "-out", str(files["tls.crt"])], check=True, capture_output=True
    )
    return {entry: path.read_text() for entry, path in files.items()}
