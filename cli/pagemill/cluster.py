"""The connection of commands to a cluster, with the credentials of a kube context that kubectl would use."""

from __future__ import annotations

from pathlib import Path

from pagemill_kube.client import Client
from pagemill_kube.errors import CredentialsError
from pagemill_kube.login import log_in

HELP = "run this where `kubectl get llmd` works, or name a file with --kubeconfig"


class ClusterError(Exception):
    """There is no usable cluster; the message names the cause and the remedy."""


async def connect(context: str | None, kubeconfig: Path | None) -> tuple[Client, str, str]:
    """Return a client that the caller must close, the context's name and its namespace. Raises `ClusterError`."""
    try:
        login = await log_in(kubeconfig, context)
    except CredentialsError as error:
        named = "" if context is None else f"--context {context}: "
        raise ClusterError(f"no cluster is configured here: {named}{error}; {HELP}") from None
    return Client(login.credentials), login.context, login.namespace
