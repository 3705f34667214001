"""Commands that ask a cluster: the credentials of a kube context, read as kubectl reads them."""

from __future__ import annotations

from pathlib import Path

from pagemill_kube.client import Client
from pagemill_kube.errors import CredentialsError
from pagemill_kube.login import log_in

HELP = "run this where `kubectl get llmd` works, or name a file with --kubeconfig"


class ClusterError(Exception):
    """No cluster can be asked; the message says why and what to do."""


async def connect(context: str | None, kubeconfig: Path | None) -> tuple[Client, str, str]:
    """A client that the caller closes, the context's name and its namespace. Raises `ClusterError`."""
    try:
        login = await log_in(kubeconfig, context)
    except CredentialsError as error:
        named = "" if context is None else f"--context {context}: "
        raise ClusterError(f"no cluster is known here: {named}{error}; {HELP}") from None
    return Client(login.credentials), login.context, login.namespace
