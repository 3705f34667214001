"""Both HTTP servers follow their OpenAPI document: allowed requests are served or refused by name, others refused.

schemathesis generates the requests from the document and checks status, content type and format of every answer.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import given
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks
from server_processes import ANSWER_TIMEOUT_S, MODEL, Answer, HttpServer, examples, without_a_hang

from pagemill_api.dialects.error_shapes import error_body_at
from pagemill_api.openapi import document
from pagemill_servers.errors import method_not_allowed

AnyOperation = APIOperation[Any, Any, Any, Any]
DOCUMENT = json.loads(document("servers", "1"))
GATEWAY = json.loads(document("servers", "1", with_stores=True))
"""The document of a gateway, with the routes of stored objects."""
ALONE = json.loads(document("servers", "1", with_metrics=True))
"""The document of an engine, which may be the only server."""
OPERATIONS = [
    found.ok() for found in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations() if isinstance(found, Ok)
]
TAKING = [each for each in OPERATIONS if "requestBody" in DOCUMENT["paths"][each.path][each.method.lower()]]
ALWAYS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


def label(operation: AnyOperation) -> str:
    return str(operation.label)


def tried(case: Case[Any], http_server: HttpServer, session: requests.Session) -> Answer:
    """Send the request with the name of an existing model and a limit of a few tokens."""
    if isinstance(case.body, dict):
        _make_small(case.body)
    response = without_a_hang(lambda: case.call(http_server.url, session, timeout=ANSWER_TIMEOUT_S))
    extra = [checks.negative_data_rejection] if case.meta and case.meta.generation.mode.is_negative else []
    case.validate_response(response, checks=[*ALWAYS, *extra])
    answer = Answer(response.status_code, {k: v[0] for k, v in response.headers.items()}, response.content)
    return answer if "HEAD" in case.method else answer.check()


def _make_small(body: dict[str, Any]) -> None:
    """Replace valid values by other valid ones, so that an invalid body stays invalid."""
    if isinstance(body.get("model"), str) and 0 < len(body["model"]) <= 512:
        body["model"] = MODEL
    for name, most in (("n", 2), ("best_of", 2), ("beam_width", 2), ("max_tokens", 4), ("max_completion_tokens", 4)):
        if type(body.get(name)) is int and body[name] > 1:
            body[name] = min(body[name], most) if body[name] < 2**31 else body[name]
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) is None:
            body[name] = 4


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS, ids=label)
def test_allowed_requests_are_served_or_refused_by_name(
    http_servers: list[HttpServer], operation: AnyOperation
) -> None:
    served = 0

    @examples(15 if operation in TAKING else 5)
    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    def every(case: Case[Any]) -> None:
        nonlocal served
        for http_server in http_servers:
            served += tried(case, http_server, session).status == 200

    with requests.Session() as session:
        every()
    if operation not in TAKING and "{" not in operation.path:
        assert served, "no example was accepted"
    for http_server in http_servers:
        http_server.serves()


@pytest.mark.parametrize("operation", TAKING, ids=label)
def test_forbidden_requests_are_refused_by_name(http_servers: list[HttpServer], operation: AnyOperation) -> None:
    @examples(20)
    @given(case=operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def every(case: Case[Any]) -> None:
        for http_server in http_servers:
            tried(case, http_server, session)

    with requests.Session() as session:
        every()
    for http_server in http_servers:
        http_server.serves()


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
def test_methods_outside_of_the_document_get_405(http_servers: list[HttpServer], method: str) -> None:
    for http_server in http_servers:
        for path, methods in DOCUMENT["paths"].items():
            describes_models = method == "GET" and path.startswith("/v2/models/{model}/")  # a name may contain slashes
            opens_websocket = (http_server.name, method, path) == ("gateway", "GET", "/v1/responses")
            if method.lower() not in methods and not describes_models and not opens_websocket:
                answer = http_server.client.request(method, path.replace("{model}", MODEL))
                expected = error_body_at(path)(method_not_allowed(method, path.replace("{model}", MODEL)))
                assert (answer.status_code, answer.content) == (405, expected), path


def test_stored_objects_are_on_the_data_port_of_a_gateway_only(
    engine_server: HttpServer, gateway_server: HttpServer
) -> None:
    for path in GATEWAY["paths"].keys() - DOCUMENT["paths"].keys():
        method = next(iter(GATEWAY["paths"][path])).upper()
        url = path.replace("{id}", "file-1")
        assert engine_server.client.request(method, url).json()["error"]["code"] == "not_found"
        shown = gateway_server.client.request(method, url).json()["error"]["code"]
        assert shown in ("batches_not_configured", "responses_not_stored", "response_not_found"), path


def test_metrics_are_on_the_data_port_of_an_engine_only(engine_server: HttpServer, gateway_server: HttpServer) -> None:
    shown = engine_server.get("/metrics")
    assert (shown.status, shown.headers["content-type"].partition(";")[0]) == (200, "text/plain")
    assert gateway_server.get("/metrics").error()["code"] == "not_found"


def test_each_server_serves_exactly_the_routes_of_its_document(http_servers: list[HttpServer]) -> None:
    for http_server in http_servers:
        served = json.loads(http_server.get("/openapi.json").body)
        assert served["paths"] == (GATEWAY["paths"] if http_server.name == "gateway" else ALONE["paths"])
    assert set(ALONE["paths"]) - set(DOCUMENT["paths"]) == {"/metrics"}
    platform = ["/catalog", "/status", "/debug/decisions", "/internal/load", "/internal/state", "/internal/bundle"]
    platform += ["/internal/drain", "/internal/drained", "/redoc", "/pause", "/sleep", "/update_weights"]
    platform += ["/invocations", "/collective_rpc", "/v1/load_lora_adapter", "/reset_prefix_cache"]
    for http_server in http_servers:
        for path in platform:
            for method in ("GET", "POST", "PUT"):
                answer = http_server.client.request(method, path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), path
