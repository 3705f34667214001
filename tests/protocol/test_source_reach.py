"""A source whose server opens no connection is reported within seconds, through a proxy too."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pagemill_models.sources import find_kind
from pagemill_models.sources.base import SourceKind
from pagemill_models.sources.schemes.s3 import S3
from pagemill_models.sources.store import reach
from pagemill_models.sources.store.reach import check_reachable
from pagemill_protocol.source_errors import FetchError

SOURCE = "s3://models/tiny"


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def fault(kind: SourceKind | None = None, source: str = SOURCE) -> str:
    with pytest.raises(FetchError) as refused:
        check_reachable(kind or S3(), source)
    return f"{refused.value.reason}: {refused.value.message}"


def test_a_server_that_accepts_is_reached(monkeypatch: pytest.MonkeyPatch, listener: int) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener}")
    check_reachable(S3(), SOURCE)


def test_a_refused_connection_names_source_server_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    port = closed_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    found = fault()
    assert found.startswith(f"SourceUnreachable: `{SOURCE}`: http://127.0.0.1:{port} cannot be reached (port {port}: ")
    assert "network policies" in found


def test_a_silent_server_or_resolver_is_waited_for_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a policy that drops what it forbids; a resolver's calls know no timeout."""
    release = threading.Event()

    def silent(*arguments: Any) -> None:
        release.wait(60)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    monkeypatch.setattr(reach, "TIMEOUT_S", 0.05)
    before = time.monotonic()
    found = fault(find_kind("oci://registry.example.org:5000/team/m:v1"), "oci://registry.example.org:5000/team/m:v1")
    release.set()
    assert time.monotonic() - before < 30
    assert "https://registry.example.org:5000 cannot be reached (port 5000: no answer within 0.05 s)" in found


def test_through_a_proxy_the_proxy_is_tried(monkeypatch: pytest.MonkeyPatch, listener: int) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://bucket.invalid")
    monkeypatch.setenv("HTTPS_PROXY", f"127.0.0.1:{listener}")
    check_reachable(S3(), SOURCE)
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{closed_port()}")
    assert "the proxy 127.0.0.1" in fault()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{listener}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    check_reachable(S3(), SOURCE)


@pytest.mark.parametrize(
    ("source", "environment", "server"),
    [
        ("hf://org/name", {}, "https://huggingface.co"),
        ("s3://models/tiny", {"AWS_REGION": "eu-central-1"}, "https://s3.eu-central-1.amazonaws.com"),
        ("s3://models/tiny", {"AWS_ENDPOINT_URL_S3": "http://minio:9000"}, "http://minio:9000"),
        ("gs://models/tiny", {}, "https://storage.googleapis.com"),
        ("gs://models/tiny", {"GOOGLE_SERVICE_ACCOUNT_KEY": '{"gcs_base_url": "http://fake:1"}'}, ""),
        ("oci://registry:5000/team/m:v1", {}, "https://registry:5000"),
        ("oci://localhost:5000/team/m:v1", {}, "http://localhost:5000"),
        ("pvc://claim/tiny", {}, ""),
    ],
)
def test_the_server_of_a_source_is_known(
    monkeypatch: pytest.MonkeyPatch, source: str, environment: dict[str, str], server: str
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_kind(source).server_of(source) == server
