# /// script
# dependencies = ["schemathesis==4.32.5", "pydantic"]
# ///
"""Makes requests from the OpenAPI document that the gateway serves: allowed ones, which are served or refused by name,
and others, which are refused. The seed is fixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import requests
import schemathesis
from checks import EMBEDDING_MODEL, MODEL, base_url, check, report_all
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks

SEED = 42
NUM_EXAMPLES = 8
"""Of each operation with a body; the others have few parameters."""
ANSWER_LIMIT_S = 60.0
MODELS = dict.fromkeys(("/v1/embeddings", "/v1/score", "/v1/rerank"), EMBEDDING_MODEL)
NUM_CHOICES, NUM_TOKENS = 2, 4
"""The most that a request asks for, because the model computes."""
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "num_predict")
LENGTH_OF = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/completions", "/v1/messages"), "max_tokens"),
    **dict.fromkeys(("/v2/models/{model}/generate", "/v2/models/{model}/generate_stream"), "max_tokens"),
    **dict.fromkeys(("/", "/generate", "/generate_stream"), "max_new_tokens"),
    **dict.fromkeys(("/api/chat", "/api/generate"), "num_predict"),
    "/v1/responses": "max_output_tokens",
}
"""The field of the most tokens, which each request gets."""
OF_OPTIONS = {
    **dict.fromkeys(("/", "/generate", "/generate_stream"), "parameters"),
    **dict.fromkeys(("/api/chat", "/api/generate"), "options"),
}
"""The field that has it, if it is not the body."""
WIDTHS = ("n", "best_of", "beam_width", "num_beams")
ALWAYS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
UNLIMITED = {"/v1/responses/compact"}
"""A summary has no limit of tokens that a request could lower: the small model writes until the context is full."""
SERVER = base_url().removesuffix("/v1")
DOCUMENT = schemathesis.openapi.from_url(f"{SERVER}/openapi.json")
OPERATIONS = [found.ok() for found in DOCUMENT.get_all_operations() if isinstance(found, Ok)]


def try_all(mode: GenerationMode, *extra: Callable[..., Any], only_bodies: bool) -> None:
    """Send a sample of requests of each operation. Raises with all that was found."""
    found: list[Exception] = []
    with requests.Session() as session:
        for operation in OPERATIONS:
            takes_body = bool(operation.body)
            if (only_bodies and not takes_body) or (not only_bodies and operation.path in UNLIMITED):
                continue

            @seed(SEED)
            @settings(
                max_examples=NUM_EXAMPLES if takes_body else 2,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def every(case: Case[Any]) -> None:
                if isinstance(case.body, dict):
                    make_small(case.path, case.body)
                answer = case.call(SERVER, session, timeout=ANSWER_LIMIT_S)
                case.validate_response(answer, checks=[*ALWAYS, *extra])

            try:
                every()
            except Exception as error:
                error.add_note(f"{operation.method} {operation.path}")
                found.append(error)
    if found:
        raise ExceptionGroup(f"{len(found)} operations", found)


def make_small(path: str, body: dict[str, Any]) -> None:
    """Replace valid values by other valid ones, so that an invalid body stays invalid."""
    if isinstance(body.get("model"), str) and 0 < len(body["model"]) <= 512:
        body["model"] = MODELS.get(path, MODEL)
    fields = OF_OPTIONS.get(path)
    if fields is not None and body.get(fields) is None:
        body[fields] = {}
    options = body if fields is None else body[fields]
    if not isinstance(options, dict):
        return
    for name in WIDTHS:
        if type(options.get(name)) is int and NUM_CHOICES < options[name] < 2**31:
            options[name] = NUM_CHOICES
    for name in LENGTHS:
        if type(options.get(name)) is int and NUM_TOKENS < options[name] < 2**31:
            options[name] = 16 if name == "max_output_tokens" else NUM_TOKENS
    named = LENGTH_OF.get(path)
    if named is not None and options.get(named) is None:
        options[named] = 16 if named == "max_output_tokens" else NUM_TOKENS


@check("a sample of allowed requests for every operation of the document")
def allowed() -> None:
    try_all(GenerationMode.POSITIVE, only_bodies=False)


@check("a sample of forbidden requests for every operation with a body")
def forbidden() -> None:
    try_all(GenerationMode.NEGATIVE, checks.negative_data_rejection, only_bodies=True)


report_all()
