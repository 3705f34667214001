"""Which family of addresses is a cluster's first one is known from the API server's address in pods."""

from __future__ import annotations

import pytest

from pagemill_kube.client import Client
from pagemill_kube.config import in_cluster_url
from pagemill_kube.credentials import Credentials


async def _no_token() -> str:
    return ""


@pytest.mark.parametrize(
    ("host", "is_ipv6"), [("10.96.0.1", False), ("fd00:10:96::1", True), ("kubernetes.default.svc", False)]
)
async def test_the_api_servers_address_shows_the_first_family(
    monkeypatch: pytest.MonkeyPatch, host: str, is_ipv6: bool
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    client = Client(Credentials(in_cluster_url(), None, _no_token))
    assert client.is_ipv6 is is_ipv6
    await client.close()
