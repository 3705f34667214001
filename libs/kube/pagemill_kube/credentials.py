"""The address of the API server and the credentials for it: the service account of the pod, or a kubeconfig file.

A kubelet replaces a service account's token every hour, so it is read again for each request; requests are rare here.
Neighbour: `login` reads a kubeconfig with the official client, as kubectl does; the gateway does not use it.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml

from pagemill_kube.config import in_cluster_url
from pagemill_kube.errors import CredentialsError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Credentials:
    def __init__(
        self,
        base_url: str,
        tls: ssl.SSLContext | None,
        authorization: Callable[[], Awaitable[str]],
        *,
        proxy: str | None = None,
    ) -> None:
        """Describe a server. `authorization`: returns the header's value, or an empty text; called for each request."""
        self.base_url = base_url.rstrip("/")
        self.tls = tls
        self.proxy = proxy
        self._authorization = authorization

    async def headers(self) -> dict[str, str]:
        """Return the headers of a request. Raises `CredentialsError`."""
        authorization = await self._authorization()
        return {"Authorization": authorization} if authorization else {}


class _Bearer:
    """A fixed token, or the current token of a file."""

    def __init__(self, token: str = "", file: Path | None = None) -> None:
        self._token = token
        self._file = file

    async def __call__(self) -> str:
        token = self._token
        if self._file is not None:
            try:
                token = self._file.read_text().strip()
            except OSError as error:
                raise CredentialsError(f"cannot read {self._file}: {error.strerror}") from error
        return f"Bearer {token}" if token else ""


def in_cluster(base_url: str = "", folder: Path = SERVICE_ACCOUNT) -> Credentials:
    """Return the credentials of the pod's service account. Raises `CredentialsError`."""
    token_file = folder / "token"
    if not token_file.exists():
        raise CredentialsError(
            f"{token_file} does not exist. Let the pod mount its service account's token "
            "(automountServiceAccountToken), or give a kubeconfig outside a cluster."
        )
    try:
        tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    except (OSError, ssl.SSLError) as error:
        raise CredentialsError(f"{folder / 'ca.crt'} is no certificate: {error}") from error
    return Credentials(base_url or in_cluster_url(), tls, _Bearer(file=token_file))


def from_kubeconfig(path: Path, server: str = "") -> Credentials:
    """Return the credentials of a kubeconfig: tokens and client certificates. Raises `CredentialsError`.

    Programs that fetch credentials are not run; `login` runs them.
    """
    try:
        content = yaml.safe_load(path.read_text())
        context = _named(content["contexts"], content["current-context"])["context"]
        cluster = _named(content["clusters"], context["cluster"])["cluster"]
        user = _named(content["users"], context["user"]).get("user") or {}
        server = server or cluster["server"]
        return Credentials(
            server,
            _tls(cluster, user, path.parent) if server.startswith("https://") else None,
            _Bearer(user.get("token", ""), path.parent / user["tokenFile"] if "tokenFile" in user else None),
        )
    except OSError as error:
        raise CredentialsError(f"kubeconfig {path}: {error.filename or path}: {error.strerror}") from error
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, StopIteration, binascii.Error, ssl.SSLError) as error:
        raise CredentialsError(f"kubeconfig {path} cannot be used: {type(error).__name__}: {error}") from error


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(entry for entry in entries if entry["name"] == name)


def _tls(cluster: dict[str, Any], user: dict[str, Any], folder: Path) -> ssl.SSLContext:
    authority = _content(cluster, "certificate-authority", folder)
    tls = ssl.create_default_context(cadata=authority.decode() if authority else None)
    certificate, key = _content(user, "client-certificate", folder), _content(user, "client-key", folder)
    if certificate and key:
        _load_certificate(tls, certificate + b"\n" + key)
    return tls


def _content(section: dict[str, Any], field: str, folder: Path) -> bytes | None:
    if f"{field}-data" in section:
        return base64.b64decode(section[f"{field}-data"], validate=True)
    return (folder / section[field]).read_bytes() if field in section else None


def _load_certificate(tls: ssl.SSLContext, pem: bytes) -> None:
    """Load a client certificate through a temporary file, since the library accepts only files."""
    descriptor, name = tempfile.mkstemp(prefix="pagemill-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
        tls.load_cert_chain(name)
    finally:
        os.unlink(name)
