"""Servers that authenticate clients: a gateway with keys and a control token, and an engine's internal routes.

Unauthenticated clients get 401 whatever they send; authenticated ones get well-formed errors, however invalid their
requests are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_client import generate
from server_processes import (
    ANSWER_TIMEOUT_S,
    GOOD,
    MODEL,
    Answer,
    HttpServer,
    examples,
    request,
    start_http_server,
    without_a_hang,
)
from waiting import wait_until
from wrong_keys import wrong_keys

from pagemill_api.openapi import document
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.resource.served import QueueLimits
from pagemill_protocol.versions import protocol_headers
from pagemill_servers.auth import hash_key

KEY, CONTROL_TOKEN, ENGINE_TOKEN = "sk-right", "control-secret", "internal-secret"
DOCUMENTED = json.loads(document("servers", "1", with_stores=True))["paths"]
PLAIN = {path.replace("{model}", MODEL) for path, methods in DOCUMENTED.items() if "PlainError" in json.dumps(methods)}
"""Routes whose errors are text without a code."""
READY = ("/v2/health/live", "/v2/health/ready")
PATHS = [
    (method.upper(), path.replace("{model}", MODEL).replace("{id}", "file-1"))
    for path, methods in DOCUMENTED.items()
    for method, operation in methods.items()
    if operation.get("security") != []
]
OPEN = {path for path, methods in DOCUMENTED.items() if any(each.get("security") == [] for each in methods.values())}


@pytest.fixture(scope="module")
def keyed_server(engine_server: HttpServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """Start a separate gateway in front of the common engine."""
    values = {
        "port": 0,
        "control_port": 0,
        "control_token": CONTROL_TOKEN,
        "api_keys": [f"{hash_key(KEY)} tenant=red requests_per_minute=1000000 tokens_per_day=1000000000"],
        "catalog": msgspec.to_builtins(good_catalog(engine_server)),
    }
    folder = tmp_path_factory.mktemp("keyed-server")
    http_server = start_http_server("keyed", "pagemill_gateway", folder, values, {"Authorization": f"Bearer {KEY}"})
    yield http_server
    http_server.stop()


def good_catalog(engine: HttpServer) -> Catalog:
    endpoint = Endpoint(id="engine-0", data_url=engine.url, control_url=engine.control_url)
    return Catalog([CatalogModel(deployment=MODEL, name=MODEL, engine_token=ENGINE_TOKEN, endpoints=[endpoint])])


# -- clients without a key ---------------------------------------------------------------------------------------------


def test_every_documented_route_needs_a_key(keyed_server: HttpServer) -> None:
    for method, path in PATHS:
        answer = keyed_server.exchange(request(b"{", method=method, path=path, headers=[(b"Connection", b"close")]))
        assert answer is not None
        assert answer.status == 401, (method, path)
    assert {"/", "/health", "/ping", "/livez", "/readyz", "/version", "/docs", "/openapi.json", *READY} == OPEN


@examples(60)
@given(wrong_keys(KEY), st.sampled_from(PATHS), st.sampled_from([json.dumps(GOOD).encode(), b"{", b"\xff", b""]))
def test_without_a_valid_key_every_route_is_401(
    keyed_server: HttpServer, authorization: bytes, route: tuple[str, str], body: bytes
) -> None:
    method, path = route
    headers = [(b"Authorization", authorization), (b"Connection", b"close")]
    answer = without_a_hang(lambda: keyed_server.exchange(request(body, method=method, path=path, headers=headers)))
    assert answer is not None
    assert (answer.status, answer.error()["code"]) == (401, None if path in PLAIN else "invalid_api_key")
    assert answer.headers["x-request-id"]


def test_two_headers_with_a_key_are_refused_and_other_places_are_ignored(keyed_server: HttpServer) -> None:
    right, wrong = (b"Authorization", b"Bearer sk-right"), (b"Authorization", b"Bearer sk-wrong")
    for headers in ([wrong, right], [right, wrong], [right, right]):
        answer = keyed_server.exchange(request(headers=headers))
        assert answer is not None
        assert answer.status == 400
        assert "authorization" in answer.error()["message"]
    for headers in (
        [wrong, (b"X-Api-Key", b"sk-right")],
        [(b"Api-Key", b"sk-right")],
        [(b"Cookie", b"Authorization=Bearer sk-right")],
    ):
        answer = keyed_server.exchange(request(headers=headers))
        assert answer is not None
        assert answer.status == 401
    answer = keyed_server.exchange(request(path="/v1/completions?api_key=sk-right"))
    assert answer is not None
    assert answer.status == 401
    answer = keyed_server.exchange(request(headers=[right]))
    assert answer is not None
    assert answer.status == 200


def test_no_key_gives_access_to_the_platforms_metrics(keyed_server: HttpServer) -> None:
    assert (keyed_server.get("/metrics").status, keyed_server.get("/metrics").error()["code"]) == (404, "not_found")
    keyed_server.serves()


# -- the control port --------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=10), children, max_size=3),
    max_leaves=8,
)
URLS = st.sampled_from(
    ["http://127.0.0.1:1", "http://[::1]:1", "http://[::1", "http://a b:1", "http://x:99999", "https://x", "ftp://x"]
) | st.text(max_size=30).map("http://{}".format)
ENDPOINTS = st.fixed_dictionaries(
    {"id": st.text(max_size=5), "data_url": URLS, "control_url": URLS},
    optional={"terminating": st.booleans() | JSON, "probed_ready": st.booleans()},
)
ENDLESS = "{% for a in range(10**9) %}{% endfor %}"
NUMBERS = st.integers(-2, 2**70) | st.sampled_from([0.0, 1e-9, 1e300, -1.0])
MODELS = st.fixed_dictionaries(
    {"deployment": st.text(max_size=8), "name": st.text(max_size=8)},
    optional={
        "namespace": st.text(max_size=8),
        "aliases": st.lists(st.text(max_size=5), max_size=3),
        "weight": NUMBERS,
        "engine_token": st.text(max_size=10),
        "prefix_scope": st.text(max_size=10),
        "routing_policy": st.text(max_size=10),
        "session_header": st.text(max_size=10),
        "chat_template": st.text(max_size=40) | st.sampled_from(["{%", "{{ 1/0 }}", ENDLESS]),
        "queue": st.fixed_dictionaries(dict.fromkeys(QueueLimits.__struct_fields__, NUMBERS)) | JSON,
        "wakes": st.booleans(),
        "endpoints": st.lists(ENDPOINTS, max_size=3),
        "unheard_of": JSON,
    },
)  # fmt: skip
CATALOGS = st.one_of(
    st.lists(MODELS, max_size=3).map(lambda models: json.dumps({"models": models}).encode("utf-8", "surrogatepass")),
    JSON.map(lambda value: json.dumps({"models": value}).encode()),
    st.binary(max_size=60),
    st.sampled_from([b"[" * 100_000, b'{"models":' * 5_000, b'{"models":[' + b"{}," * 50_000 + b"{}]}"]),
)


def look(http_server: HttpServer, path: str, **query: str) -> Answer:
    headers = {"Authorization": f"Bearer {CONTROL_TOKEN}"}
    answer = httpx2.get(http_server.control_url + path, params=query, headers=headers, timeout=ANSWER_TIMEOUT_S)
    return Answer(answer.status_code, dict(answer.headers), answer.content)


def put_catalog(http_server: HttpServer, raw: bytes, token: str = CONTROL_TOKEN) -> Answer:
    headers = {"Authorization": f"Bearer {token}", **protocol_headers()}
    answer = httpx2.put(http_server.control_url + "/catalog", content=raw, headers=headers, timeout=ANSWER_TIMEOUT_S)
    return Answer(answer.status_code, dict(answer.headers), answer.content)


def test_any_catalogue_is_accepted_or_refused_as_a_whole(keyed_server: HttpServer, engine_server: HttpServer) -> None:
    """An accepted catalogue without sense harms no other client, and a valid one is served afterwards."""
    good = msgspec.json.encode(good_catalog(engine_server))

    @examples(30)
    @given(CATALOGS)
    def every(raw: bytes) -> None:
        answer = without_a_hang(lambda: put_catalog(keyed_server, raw)).check()
        assert answer.status in (200, 400), answer
        assert without_a_hang(lambda: look(keyed_server, "/status")).status == 200
        assert without_a_hang(lambda: look(keyed_server, "/metrics")).status == 200
        models = keyed_server.get("/v1/models").check()
        for card in json.loads(models.body)["data"][:2]:
            tried = keyed_server.post({**GOOD, "model": card["id"]}, headers={"X-Request-Timeout-S": "0.01"})
            assert tried.status in (200, 400, 404, 502, 503, 504), tried
            if tried.status != 200:
                tried.error()

    every()
    assert put_catalog(keyed_server, good).status == 200
    wait_until(lambda: keyed_server.post(GOOD).status == 200)


@examples(60)
@given(st.text(max_size=30) | st.integers().map(str) | st.sampled_from(["٣", "1e3", " 1", "+1", "0x10", "9" * 5000]))
def test_any_requested_number_of_decisions_is_shown_or_refused(keyed_server: HttpServer, limit: str) -> None:
    answer = without_a_hang(lambda: look(keyed_server, "/debug/decisions", limit=limit)).check()
    if answer.status != 200:
        assert (answer.status, answer.error()["param"]) == (400, "limit")


# -- internal routes of engines ----------------------------------------------------------------------------------------

BIG = st.sampled_from([0, 1, 2, 255, 49151, 49152, 2**31 - 1, 2**31, 2**63 - 1]) | st.integers(-3, 300)
TOKEN_IDS = st.lists(st.integers(0, 49151), min_size=1, max_size=6) | st.lists(BIG, max_size=300)
WILD = st.floats() | st.integers(-(2**63), 2**64 - 1) | st.sampled_from([0.0, 0.5, 1.0, 2.0, 1e300])
SAMPLING = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 4)},
    optional={
        "n": st.integers(1, 3) | BIG,
        "best_of": st.integers(1, 3) | BIG,
        "use_beam_search": st.booleans(),
        "length_penalty": WILD,
        "temperature": WILD,
        "top_k": WILD,
        "top_p": WILD,
        "min_p": WILD,
        "seed": WILD,
        "presence_penalty": WILD,
        "repetition_penalty": WILD,
        "logit_bias": st.dictionaries(BIG, WILD, max_size=3),
        "logprobs": BIG,
        "stop": st.lists(st.text(max_size=3), max_size=3),
        "stop_token_ids": TOKEN_IDS,
        "min_tokens": BIG,
        "ignore_eos": st.booleans(),
    },
)
RESUMES = st.lists(
    st.fixed_dictionaries(
        {"index": st.integers(0, 3) | BIG, "token_ids": TOKEN_IDS, "num_text_chars": st.integers(0, 9) | BIG},
        optional={"finished": st.booleans(), "finish_reason": st.sampled_from(["stop", "length", "abort", "error"])},
    ),
    max_size=3,
)
GENERATE = st.fixed_dictionaries(
    {"request_id": st.uuids().map(str), "model": st.just(MODEL), "prompt_token_ids": TOKEN_IDS, "sampling": SAMPLING},
    optional={
        "dialect": st.sampled_from(["chat", "completions"]),
        "stream": st.booleans(),
        "include_usage": st.booleans(),
        "priority": BIG | st.integers(-(2**63), 2**63 - 1),
        "prompt_text": st.text(max_size=5),
        "prompt_index": st.integers(0, 2) | BIG,
        "cache_salt": st.text(max_size=5),
        "resume": RESUMES,
        "cached_tokens": BIG,
        "predicted_cached_tokens": BIG,
    },
)


@pytest.mark.model
def test_no_internal_request_harms_the_engine(model_server: HttpServer) -> None:
    """The requests are ones that a gateway would never send, or of another version, and the model is real."""
    headers = {"Authorization": f"Bearer {ENGINE_TOKEN}"}
    served = 0

    @examples(60)
    @given(GENERATE)
    def every(body: dict[str, Any]) -> None:
        nonlocal served
        answer = generate(model_server.url, msgspec.msgpack.encode(body), headers)
        if answer.status != 200:
            assert 400 <= answer.status < 500, answer
            assert answer.error()["message"]
            return
        assert answer.frames[-1][0].last
        assert answer.frames[-1][0].error is None, answer.frames[-1]
        served += 1

    every()
    assert served, "no example was accepted"
    model_server.serves()
