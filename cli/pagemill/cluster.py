"""Commands that ask a cluster: the credentials of a kube context, read as kubectl reads them."""

from __future__ import annotations

import logging
from pathlib import Path

from kubernetes.aio import config as credentials
from kubernetes.aio.client import Configuration

HELP = "run this where `kubectl get llmd` works, or name a file with --kubeconfig"


class ClusterError(Exception):
    """No cluster can be asked; the message says why and what to do."""


async def connect(context: str | None, kubeconfig: Path | None) -> tuple[Configuration, str, str]:
    """Credentials, the context's name and its namespace. Raises `ClusterError`."""
    file = None if kubeconfig is None else str(kubeconfig)
    # It warns of a file that is not there; the error says so.
    logging.getLogger("kubernetes").setLevel(logging.ERROR)
    configuration = Configuration()
    try:
        contexts, active = credentials.list_kube_config_contexts(file)  # type: ignore[no-untyped-call]
        chosen = next((each for each in contexts if each["name"] == context), None) if context else active
        if chosen is None:
            known = ", ".join(each["name"] for each in contexts)
            raise ClusterError(f"--context {context}: the kubeconfig has no such context; it has {known or 'none'}")
        await credentials.load_kube_config(file, context=chosen["name"], client_configuration=configuration)  # type: ignore[no-untyped-call]
    except (credentials.ConfigException, OSError) as error:
        raise ClusterError(f"no cluster is known here: {error}; {HELP}") from None
    return configuration, chosen["name"], chosen["context"].get("namespace") or "default"
