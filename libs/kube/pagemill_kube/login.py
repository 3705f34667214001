"""Credentials from a kubeconfig as kubectl reads it, with the official client: its plugins, renewals and proxies.

It imports the package `kubernetes` (22 MiB of memory), so only the command line and operators outside a cluster import
it. Neighbour: `credentials`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from kubernetes.aio import config as official
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from pagemill_kube.credentials import Credentials
from pagemill_kube.errors import CredentialsError


class Login(NamedTuple):
    credentials: Credentials
    context: str
    """Name of the context."""
    namespace: str


async def log_in(kubeconfig: Path | None, context: str | None = None) -> Login:
    """Log in. `None` selects the file and the context that kubectl would use. Raises `CredentialsError`."""
    file = None if kubeconfig is None else str(kubeconfig)
    # It warns about a missing file, which the error reports too.
    logging.getLogger("kubernetes").setLevel(logging.ERROR)
    configuration = Configuration()
    try:
        contexts, active = official.list_kube_config_contexts(file)  # type: ignore[no-untyped-call]
        chosen = next((each for each in contexts if each["name"] == context), None) if context else active
        if chosen is None:
            known = ", ".join(each["name"] for each in contexts)
            raise CredentialsError(f"the kubeconfig has no context {context}; it has {known or 'none'}")
        await official.load_kube_config(file, context=chosen["name"], client_configuration=configuration)  # type: ignore[no-untyped-call]
        tls = RESTClientObject(configuration).ssl_context
    except (official.ConfigException, OSError) as error:
        raise CredentialsError(str(error)) from None
    credentials = Credentials(configuration.host, tls, _Renewed(configuration), proxy=configuration.proxy)
    return Login(credentials, chosen["name"], chosen["context"].get("namespace") or "default")


class _Renewed:
    """Bearer tokens that the official client renews when needed."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration

    async def __call__(self) -> str:
        settings = await self._configuration.auth_settings()
        return str(settings.get("BearerToken", {}).get("value") or "")
