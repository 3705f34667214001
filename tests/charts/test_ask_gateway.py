"""The program that `helm test` runs, with a server that answers like the gateway."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from certificates import write_certificate
from waiting import WAIT_LIMIT_S

SCRIPT = Path(__file__).resolve().parents[2] / "charts" / "pagemill" / "files" / "ask_gateway.py"
KEY = "sk-test"


@dataclass
class Gateway:
    """A server with models and their answers: a text, or an error status."""

    models: dict[str, str | int] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    needs_key: bool = True
    url: str = ""

    def get_models(self) -> tuple[int, dict[str, Any]]:
        return 200, {"object": "list", "data": [{"id": name} for name in self.models]}

    def chat(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.asked.append(body)
        answer = self.models[body["model"]]
        if isinstance(answer, int):
            return answer, {"error": {"message": "no engine is ready"}}
        return 200, {"choices": [{"message": {"content": answer}}]}


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with serving(None) as served:
        yield served


@contextmanager
def serving(tls: ssl.SSLContext | None) -> Iterator[Gateway]:
    served = Gateway()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(*served.get_models())

        def do_POST(self) -> None:
            self.answer(*served.chat(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def answer(self, status: int, body: dict[str, Any]) -> None:
            if served.needs_key and self.headers["Authorization"] != f"Bearer {KEY}":
                status, body = 401, {"error": {"message": "no key", "code": "invalid_api_key"}}
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        served.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield served
        server.shutdown()
        thread.join()


def ask(gateway: Gateway, *arguments: str, key: str = "") -> subprocess.CompletedProcess[str]:
    """Run the program like the pod: its text is one argument, and it imports nothing from the repository."""
    argv = [sys.executable, "-I", "-c", SCRIPT.read_text(), "--url", gateway.url, "--timeout-s", "5", *arguments]
    return subprocess.run(argv, env={"PAGEMILL_API_KEY": key}, capture_output=True, text=True, timeout=WAIT_LIMIT_S)


def test_a_model_that_answers_passes(gateway: Gateway) -> None:
    gateway.models = {"starting": 503, "chat": "Hello."}
    done = ask(gateway, key=KEY)
    assert done.returncode == 0, done.stderr
    assert "ok: the gateway lists 2 models" in done.stdout
    assert "starting has no engine that is ready" in done.stdout
    assert "ok: chat answered 'Hello.'" in done.stdout
    assert gateway.asked[-1]["max_tokens"] == 4


@pytest.mark.slow
def test_only_the_gateways_own_certificate_is_trusted(tmp_path: Path) -> None:
    """Its names do not matter, because an address in the cluster is rarely one of them."""
    cert_file, key_file = write_certificate(tmp_path)
    (other := tmp_path / "other").mkdir()
    foreign, _ = write_certificate(other)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert_file, key_file)
    with serving(context) as gateway:
        gateway.models = {"chat": "Hello."}
        gateway.url = gateway.url.replace("127.0.0.1", "localhost")
        assert "ok: chat answered" in ask(gateway, "--certificate", cert_file, key=KEY).stdout
        refused = ask(gateway, "--certificate", foreign, "--timeout-s", "1", key=KEY)
    assert refused.returncode != 0
    assert "CERTIFICATE_VERIFY_FAILED" in refused.stderr


def test_without_models_the_list_is_sufficient(gateway: Gateway) -> None:
    gateway.needs_key = False
    done = ask(gateway, "--anonymous")
    assert done.returncode == 0, done.stderr
    assert "lists 0 models" in done.stdout


def test_without_a_key_a_refusal_passes(gateway: Gateway) -> None:
    done = ask(gateway)
    assert done.returncode == 0, done.stderr
    assert "refuses a request without an API key" in done.stdout


def test_an_open_gateway_that_should_require_keys_fails(gateway: Gateway) -> None:
    gateway.needs_key = False
    done = ask(gateway)
    assert done.returncode == 1
    assert "401 was expected" in done.stderr


@pytest.mark.parametrize(
    ("models", "arguments", "message"),
    [
        ({"chat": 500}, [], "chat answered 500"),
        ({"chat": 503}, ["--model", "chat"], "chat answered 503"),
        ({"chat": "Hello."}, ["--model", "other"], "'other' is not among them"),
    ],
)
def test_a_required_model_that_does_not_answer_fails(
    gateway: Gateway, models: dict[str, str | int], arguments: list[str], message: str
) -> None:
    gateway.models = models
    done = ask(gateway, *arguments, key=KEY)
    assert done.returncode == 1
    assert message in done.stderr


def test_a_wrong_key_fails(gateway: Gateway) -> None:
    done = ask(gateway, key="sk-wrong")
    assert done.returncode == 1
    assert "/v1/models answered 401: no key" in done.stderr


def test_a_gateway_that_never_answers_fails_in_time(gateway: Gateway) -> None:
    gateway.url = "http://127.0.0.1:1"
    done = ask(gateway, "--timeout-s", "0.1", key=KEY)
    assert done.returncode == 1
    assert "does not answer" in done.stderr
