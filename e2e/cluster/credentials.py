"""Creates a cluster's certificate, the tokens of its components, and the kubeconfigs with them."""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class CredentialsError(Exception):
    """Raised if openssl is missing or fails; the message names the remedy."""


def make_certificate(path: Path, names: Sequence[str]) -> None:
    """Create a self-signed certificate `path.crt` with its key; `names` are like `DNS:localhost` or `IP:127.0.0.1`."""
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", f"/CN={path.name}"]
    argv += ["-addext", f"subjectAltName={','.join(names)}", "-keyout", f"{path}.key", "-out", f"{path}.crt"]
    try:
        subprocess.run(argv, check=True, capture_output=True)
    except FileNotFoundError as error:
        raise CredentialsError(
            "`openssl` makes the server's certificate and is not on PATH: install Debian's openssl."
        ) from error


def make_tokens(path: Path, users: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Create a token for each user and write all to the API server's token file; return them by user."""
    tokens = {user: secrets.token_hex(16) for user in users}
    path.touch(mode=0o600)
    path.write_text("".join(f'{tokens[user]},{user},{user},"{",".join(users[user])}"\n' for user in users))
    return tokens


def write_kubeconfig(path: Path, *, server: str, authority: Path, token: str) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "e2e",
        "clusters": [{"name": "e2e", "cluster": {"server": server, "certificate-authority": str(authority)}}],
        "users": [{"name": "e2e", "user": {"token": token}}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "e2e"}}],
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(config))
    return path
