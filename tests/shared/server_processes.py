"""Server processes for black-box tests: they are started, get raw bytes, and are measured from outside."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
import psutil
from hypothesis import HealthCheck, settings
from waiting import START_LIMIT_S, WAIT_LIMIT_S, busy_factor, event_in, wait_until

from examples import num_examples

MODEL = "tiny"
MAX_MODEL_LEN = 512
ANSWER_TIMEOUT_S = 60.0
"""A timeout for a machine under load; tests measure speed in other ways."""
HANG_S = 1.0
NUM_HANGS = 4
"""An operation hangs if it takes this long this often; otherwise the machine was busy."""
MIB = 2**20
GOOD = {"model": MODEL, "prompt": "hello", "max_tokens": 2, "ignore_eos": True}
Pieces = bytes | Iterable[bytes]
Asked = TypeVar("Asked")


def examples(number: int) -> settings:
    """Return settings with this number of examples, which `--hypothesis-profile=thorough` multiplies."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(max_examples=num_examples(number), deadline=None, suppress_health_check=checks)


@dataclass
class Answer:
    """One response as it was received."""

    status: int
    headers: dict[str, str]
    body: bytes

    def error(self) -> dict[str, Any]:
        """Return the error in the format of OpenAI or of a dialect; fail for any other answer."""
        return error_of(self.body)

    def check(self) -> Answer:
        """Check that the answer is a success or a refusal in the error format, and no 5xx."""
        assert self.status < 500, self
        if self.status >= 400:
            self.error()
        else:
            assert b'"server_error"' not in self.body, self.body
        return self


def error_of(body: bytes) -> dict[str, Any]:
    reported = json.loads(body)
    if isinstance(reported["error"], str):
        assert set(reported) <= {"error", "error_type"}, reported
        assert reported["error"]
        return {"message": reported["error"], "type": reported.get("error_type"), "param": None, "code": None}
    assert set(reported) == {"error"} or (set(reported) == {"type", "error"} and reported["type"] == "error"), reported
    error: dict[str, Any] = reported["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    return error


def request(
    body: Any = GOOD,
    *,
    method: str = "POST",
    path: str = "/v1/completions",
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> bytes:
    """Return a whole HTTP request; a `body` of bytes is sent unchanged, any other as JSON after `headers`."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: server", *(b": ".join(pair) for pair in headers)]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(raw), b"", raw])


@dataclass
class HttpServer:
    """A server process and its address."""

    name: str
    process: subprocess.Popen[bytes]
    url: str
    control_url: str
    log: Path
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of every request by `post`, `get` and `serves`, for example a key."""
    control_token: str = ""
    """The token of the control port, if it requires one."""
    client: httpx2.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx2.Client(base_url=self.url, headers=self.headers, timeout=ANSWER_TIMEOUT_S)

    def connect(self, *, receive_buffer_bytes: int | None = None) -> socket.socket:
        parts = urlsplit(self.url)
        connection = socket.socket()
        connection.settimeout(ANSWER_TIMEOUT_S)
        if receive_buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        connection.connect((parts.hostname, parts.port))
        return connection

    def exchange(self, pieces: Pieces) -> Answer | None:
        """Send these bytes over a new connection; return the answer, or None if the server closed without one."""
        with contextlib.closing(self.connect()) as connection:
            with contextlib.suppress(ConnectionError):
                for piece in [pieces] if isinstance(pieces, bytes) else pieces:
                    connection.sendall(piece)
            return read_answer(connection)

    def post(self, body: Any, path: str = "/v1/completions", headers: dict[str, str] | None = None) -> Answer:
        """Send a request over a reused connection."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = self.client.post(path, content=raw, headers={"Content-Type": "application/json", **(headers or {})})
        return Answer(response.status_code, dict(response.headers), response.content)

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        response = self.client.get(path, headers=headers)
        return Answer(response.status_code, dict(response.headers), response.content)

    def serves(self) -> None:
        """Check that a valid request is answered."""
        answer = self.post(GOOD)
        assert answer.status == 200, answer
        assert json.loads(answer.body)["usage"]["completion_tokens"] == 2

    def rss_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def cpu_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def metric(self, name: str) -> float:
        """Return the sum over all series of that name."""
        text = httpx2.get(self.control_url + "/metrics", timeout=ANSWER_TIMEOUT_S).text
        lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
        assert lines, f"{self.name} has no metric {name}"
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def stop(self) -> None:
        self.client.close()
        self.process.terminate()
        try:
            self.process.wait(WAIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def read_answer(connection: socket.socket, method: str = "GET") -> Answer | None:
    """Read the whole next response to a request with that method; return None if the server closes instead."""
    response = http.client.HTTPResponse(connection, method=method)
    try:
        response.begin()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    except (ConnectionError, http.client.BadStatusLine):
        return None
    finally:
        response.close()


def read_to_end(connection: socket.socket) -> bytes:
    """Return everything that the server sends until it closes."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            received += piece
    return received


@contextmanager
def costing_little(http_server: HttpServer) -> Iterator[None]:
    """Fail if the HTTP server uses four seconds of CPU time during the block, which limits how long others wait for it.

    The time of waits depends on other processes of the machine; on shared cores, CPU time at most doubles,
    and slow processors take twice as long as fast ones.
    """
    before = http_server.cpu_s()
    yield
    spent = http_server.cpu_s() - before
    assert spent < 4.0, f"{spent:.2f} s of CPU time"


@contextmanager
def growing_little(http_server: HttpServer) -> Iterator[None]:
    """Fail if the HTTP server's memory grows by 160 MiB or more at any time of the block."""
    before, peak, over = http_server.rss_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.005):
            peak = max(peak, http_server.rss_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    assert peak - before < 160 * MIB, f"{(peak - before) / MIB:.0f} MiB more"


def without_a_hang(ask: Callable[[], Asked]) -> Asked:
    """Return the result of `ask`; fail if it takes more than a second of one core in every attempt."""
    for _ in range(NUM_HANGS):
        began_s = time.monotonic()
        answer = ask()
        took_s = time.monotonic() - began_s
        if took_s < HANG_S * busy_factor():
            return answer
    raise AssertionError(f"{took_s:.2f} s for {answer}, the {NUM_HANGS}th time")


def start_http_server(
    name: str,
    module: str,
    folder: Path,
    values: dict[str, Any],
    headers: dict[str, str] | None = None,
    *,
    good: tuple[str, dict[str, Any]] = ("/v1/completions", GOOD),
    data_limit_bytes: int = 0,
) -> HttpServer:
    """Run the module's server until it answers a valid request, sent with `headers`.

    `data_limit_bytes` is an rlimit of the private memory of each of its processes.
    """
    http_server = launch_http_server(name, module, folder, values, headers, data_limit_bytes=data_limit_bytes)
    try:
        wait_until(lambda: http_server.client.post(good[0], json=good[1]).status_code == 200, limit_s=START_LIMIT_S)
    except Exception as error:
        http_server.stop()
        raise RuntimeError(http_server.log.read_text()) from error
    return http_server


def launch_http_server(
    name: str,
    module: str,
    folder: Path,
    values: dict[str, Any],
    headers: dict[str, str] | None = None,
    *,
    data_limit_bytes: int = 0,
) -> HttpServer:
    """Run the module's server until it listens."""
    path, log = folder / "settings.json", folder / "log"
    path.write_text(json.dumps(values))
    with log.open("wb") as sink:
        command = [sys.executable, "-m", module, "--settings", str(path)]
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    if data_limit_bytes:
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (data_limit_bytes, data_limit_bytes))
    reported = event_in(log, "listening", process)
    urls = (_url(reported, "url", "port"), _url(reported, "control_url", "control_port"))
    token = values.get("control_token") or values.get("server", {}).get("internal_token", "")
    return HttpServer(name, process, *urls, log, headers or {}, token)


def _url(reported: dict[str, Any], url: str, port: str) -> str:
    """Return the URL of a port; the gateway reports URLs and the engine ports."""
    return str(reported.get(url) or f"http://127.0.0.1:{reported[port]}")
