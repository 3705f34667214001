"""Servers that were started without a configured token, and web pages that send requests to their control ports.

Every browser sends a page's requests to ports of its user's machine. Pages change nothing and learn nothing there;
programs of the same user find the token in a file; probes and scrapes need no token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import msgspec
import pytest
from light_model import light_model
from link_client import generate
from server_processes import ANSWER_TIMEOUT_S, GOOD, MAX_MODEL_LEN, MODEL, Answer, HttpServer, start_http_server
from waiting import wait_until

from pagemill_operator.backends.local.ports import free_port
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_protocol.versions import protocol_headers
from pagemill_servers.auth import hash_key
from pagemill_servers.secrets.token_file import read_generated_token

ENGINE = {
    "model": light_model(),
    "served_names": [MODEL],
    "null_runner": True,
    "num_kv_blocks": 1024,
    "max_model_len": MAX_MODEL_LEN,
    "step_time": {"knots_tokens": [1, 512], "knot_ms": [2.0, 2.0]},
}
ENGINE_ROUTES = [
    ("POST", "/internal/drain"),
    ("POST", "/internal/drained"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("GET", "/internal/state"),
    ("GET", "/internal/bundle"),
]
GATEWAY_ROUTES = [("PUT", "/catalog"), ("GET", "/status"), ("GET", "/debug/decisions"), ("GET", "/internal/load")]
OPEN = ["/livez", "/readyz", "/metrics", "/version"]
PAGE = {"Host": "evil.example", "Origin": "http://evil.example", "Content-Type": "text/plain"}
PAGES = [
    PAGE,
    {"Origin": "http://evil.example", "Content-Type": "text/plain"},
    {"Origin": "null", "Content-Type": "text/plain"},
    {"Host": "evil.example", "Content-Type": "text/plain"},
    {"Host": "evil.example:8001", "Origin": "http://evil.example:8001", "Content-Type": "text/plain"},
]
IDS = ["page", "page of this address", "file or sandbox", "bound name, own GET", "bound name"]


@pytest.fixture(scope="module", autouse=True)
def runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Create the runtime folder of all servers in these tests, and of programs that look for their tokens."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield folder


def start_engine(folder: Path, port: int = 0, control_port: int = 0) -> HttpServer:
    values = {"engine": ENGINE, "server": {"port": port, "control_port": control_port, "drain_timeout_s": 2.0}}
    return start_http_server("open", "pagemill_engine.server", folder, values)


def start_gateway(
    folder: Path, engine: HttpServer, headers: dict[str, str] | None = None, **settings: object
) -> HttpServer:
    endpoint = {"id": "engine-0", "data_url": engine.url, "control_url": engine.control_url}
    model = {"namespace": "ns", "deployment": MODEL, "name": MODEL, "endpoints": [endpoint]}
    values = {"port": 0, "control_port": 0, "catalog": {"models": [model]}, **settings}
    return start_http_server("open-gateway", "pagemill_gateway", folder, values, headers)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    http_server = start_engine(tmp_path_factory.mktemp("open-engine"))
    yield http_server
    http_server.stop()


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.full, id="one process"), pytest.param(2, id="several processes")],
)
def gateway(
    request: pytest.FixtureRequest, engine: HttpServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpServer]:
    http_server = start_gateway(tmp_path_factory.mktemp("open-gateway"), engine, workers=request.param)
    yield http_server
    http_server.stop()


def ask(http_server: HttpServer, method: str, path: str, headers: dict[str, str], *, content: bytes = b"") -> Answer:
    with httpx2.stream(
        method, http_server.control_url + path, headers=headers, content=content, timeout=ANSWER_TIMEOUT_S
    ) as response:
        # Streams never end, so their beginning is sufficient.
        body = b"" if response.status_code == 200 else response.read()
        return Answer(response.status_code, dict(response.headers), body)


def right(http_server: HttpServer) -> dict[str, str]:
    """Return the headers that a program of the same user sends."""
    return {"Authorization": f"Bearer {read_generated_token(http_server.control_url)}", **protocol_headers()}


def status_of(http_server: HttpServer, method: str, path: str) -> int:
    headers = {**right(http_server), "Content-Type": "application/json"}
    return ask(http_server, method, path, headers, content=b'{"models": 1}').status


# -- data ports --------------------------------------------------------------------------------------------------------

BOUND = {"Host": "page.example.com"}
"""A page's own name that resolves to this machine; its requests have no foreign origin."""


def test_a_page_whose_name_resolves_to_this_machine_cannot_use_a_model(engine: HttpServer, gateway: HttpServer) -> None:
    for http_server in (engine, gateway):
        asked = [
            http_server.post(GOOD, headers=BOUND),
            *(http_server.get(path, headers=BOUND) for path in ("/v1/models", "/nope")),
        ]
        for answer in asked:
            assert (answer.status, answer.error()["code"]) == (403, "foreign_host")
            assert "setting `allowed_hosts`" in answer.error()["message"]
        for own in ("localhost:8080", "127.0.0.1", "[::1]:1", "gpu-box"):
            assert http_server.post(GOOD, headers={"Host": own}).status == 200
        assert http_server.get("/livez", headers=BOUND).status == 200


def test_a_configured_name_or_keys_open_the_data_port(engine: HttpServer, tmp_path: Path) -> None:
    """With keys, a page has no key."""
    (named := tmp_path / "named").mkdir()
    (keyed := tmp_path / "keyed").mkdir()
    key = {"Authorization": "Bearer k"}
    for folder, settings, headers in (
        (named, {"allowed_hosts": ["Page.example.com"]}, BOUND),
        (keyed, {"api_keys": [hash_key("k")]}, BOUND | key),
    ):
        http_server = start_gateway(folder, engine, headers=key, **settings)
        try:
            assert http_server.post(GOOD, headers=headers).status == 200
        finally:
            http_server.stop()


def test_an_engine_behind_a_gateway_requires_the_internal_token_of_clients(tmp_path: Path) -> None:
    server = {"port": 0, "control_port": 0, "internal_token": "s3cret", "only_gateways": True}
    right = {"Authorization": "Bearer s3cret"}
    http_server = start_http_server(
        "behind", "pagemill_engine.server", tmp_path, {"engine": ENGINE, "server": server}, right
    )
    try:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            for wrong in ({"Authorization": ""}, {"Authorization": "Bearer other"}):
                assert http_server.post(GOOD, path, wrong).error()["code"] == "invalid_api_key", path
        assert http_server.get("/v1/models", {"Authorization": ""}).status == 401
        http_server.serves()
    finally:
        http_server.stop()


# -- web pages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=IDS)
@pytest.mark.parametrize(("method", "path"), ENGINE_ROUTES)
def test_no_web_page_can_change_or_read_an_engine(
    engine: HttpServer, method: str, path: str, page: dict[str, str]
) -> None:
    for headers in (page, {**page, **right(engine)}):
        answer = ask(engine, method, path, headers)
        assert answer.status == 403, answer
        assert answer.error()["code"] in ("foreign_origin", "foreign_host")
    assert ask(engine, "GET", "/readyz", {}).status == 200
    engine.serves()


@pytest.mark.parametrize("page", PAGES, ids=IDS)
@pytest.mark.parametrize(("method", "path"), GATEWAY_ROUTES)
def test_no_web_page_can_change_or_read_a_gateway(
    gateway: HttpServer, method: str, path: str, page: dict[str, str]
) -> None:
    for headers in (page, {**page, **right(gateway)}):
        answer = ask(gateway, method, path, headers, content=b'{"models": []}')
        assert answer.status == 403, answer
        assert answer.error()["code"] in ("foreign_origin", "foreign_host")
    gateway.serves()


def prepared() -> bytes:
    sampling = SamplingParams(max_tokens=1)
    return msgspec.msgpack.encode(
        GenerateRequest(request_id="r", model=MODEL, prompt_token_ids=[1, 2, 3], sampling=sampling)
    )


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_no_web_page_can_use_an_engines_route_for_gateways(engine: HttpServer, page: dict[str, str]) -> None:
    for headers, status in ((page, 403), ({**page, **right(engine)}, 403), ({}, 401), (right(engine), 200)):
        assert generate(engine.url, prepared(), headers).status == status


# -- programs ----------------------------------------------------------------------------------------------------------


def test_without_the_token_a_program_is_refused_with_the_path_of_the_tokens_file(
    engine: HttpServer, gateway: HttpServer, runtime_folder: Path
) -> None:
    asked = [(engine, *route) for route in ENGINE_ROUTES] + [(gateway, *route) for route in GATEWAY_ROUTES]
    for http_server, method, path in asked:
        token = read_generated_token(http_server.control_url)
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            answer = ask(http_server, method, path, headers, content=b'{"models": []}')
            assert answer.status == 401, answer
            message = answer.error()["message"]
            (file,) = [each for each in runtime_folder.rglob("*.token") if str(each) in message]
            assert file.read_text().strip() == token
            assert token not in message
        assert ask(http_server, "GET", "/readyz", {}).status == 200
    gateway.serves()


def test_with_the_token_a_program_can_put_an_engine_to_sleep_and_wake_it(engine: HttpServer) -> None:
    assert status_of(engine, "POST", "/sleep") == 200
    assert ask(engine, "GET", "/readyz", {}).status == 503
    assert status_of(engine, "POST", "/wake_up") == 200
    assert status_of(engine, "GET", "/is_sleeping") == status_of(engine, "GET", "/internal/state") == 200
    engine.serves()


def test_with_the_token_a_program_can_read_a_gateway_and_replace_its_catalogue(gateway: HttpServer) -> None:
    for path in ("/status", "/debug/decisions", "/internal/load"):
        assert status_of(gateway, "GET", path) == 200
    assert status_of(gateway, "PUT", "/catalog") == 400, "the body must be read and refused as invalid"
    gateway.serves()


@pytest.mark.parametrize("path", OPEN)
def test_probes_and_scrapes_need_no_token(engine: HttpServer, gateway: HttpServer, path: str) -> None:
    for http_server in (engine, gateway):
        for headers in ({}, PAGE):
            assert ask(http_server, "GET", path, headers).status == 200
            assert ask(http_server, "HEAD", path, headers).status == 200


# -- the token's file --------------------------------------------------------------------------------------------------


def test_the_token_is_in_a_private_file_that_the_server_names_and_removes(
    engine: HttpServer, tmp_path: Path, runtime_folder: Path
) -> None:
    http_server = start_engine(tmp_path)
    try:
        (event,) = [json.loads(line) for line in http_server.log.read_text().splitlines() if "control_token" in line]
        file = Path(event["file"])
        assert file.is_relative_to(runtime_folder)
        assert file.stat().st_mode & 0o777 == 0o600
        assert (
            read_generated_token(engine.control_url)
            != read_generated_token(http_server.control_url)
            == file.read_text().strip()
        )
    finally:
        http_server.stop()
    assert not file.exists()
    engine.serves()
    assert status_of(engine, "GET", "/is_sleeping") == 200, "a server must remove only its own file"


def test_a_gateway_follows_an_engine_that_was_restarted_with_another_token(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    folders = [tmp_path / name for name in ("before", "after", "gateway")]
    for folder in folders:
        folder.mkdir()
    engine = start_engine(folders[0], *ports)
    try:
        gateway = start_gateway(folders[2], engine, reconnect_max_s=0.5)
        try:
            before = read_generated_token(engine.control_url)
            engine.stop()
            engine = start_engine(folders[1], *ports)
            assert read_generated_token(engine.control_url) != before
            wait_until(lambda: gateway.post({"model": MODEL, "prompt": "hi", "max_tokens": 1}).status == 200)
            gateway.serves()
        finally:
            gateway.stop()
    finally:
        engine.stop()
