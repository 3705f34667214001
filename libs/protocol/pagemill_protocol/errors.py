"""Errors as clients see them: one exception type, rendered in OpenAI's body shape.

Every component raises `PagemillError`, directly or through a function below; the HTTP middleware renders it as
`{"error": {"message", "type", "param", "code"}}` with its status. It never carries text of other requests, memory
addresses or stack traces. The shape and the status codes follow the OpenAI API reference; 499 is nginx's code for a
client that left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
MODEL_NOT_FOUND = "model_not_found"
ENGINE_CRASHED = "engine_crashed"
"""Code of an engine's last message when its own computation brought it down: one of its requests may be the cause."""
ENGINE_FAILED = "engine_failed"
"""Code of an engine's last message when it was killed or its server failed: none of its requests is the cause."""

RENDERING_FAILED = "rendering_failed"
"""Code of an answer that was generated and cannot be rendered. Every engine would fail in the same way."""

REQUEST_CRASHED_ENGINE = "request_crashed_engine"
POISON_REQUEST = "poison_request"
FINAL_CODES = frozenset({RENDERING_FAILED, REQUEST_CRASHED_ENGINE, POISON_REQUEST})
"""The codes of failures that no repetition heals. Clients repeat a 5xx by themselves unless a header says so."""

BODY_CODINGS = "gzip, deflate, zstd"
"""The codings in which servers read bodies."""


class ContextOverflow(NamedTuple):
    """The numbers of a prompt, or of a prompt and an answer, that are too long for a model."""

    num_prompt_tokens: int
    """At least so many."""
    num_answer_tokens: int
    """0: the prompt alone is too long."""
    max_model_len: int


class PagemillError(Exception):
    """A refusal or failure, with the data that a client needs to react to it.

    `status`: HTTP status. `param`: dotted name of the wrong request field. `code`: machine-readable cause.
    `retry_after_s`: seconds, sent as `Retry-After`.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.is_final = code in FINAL_CODES
        """Whether the same request would fail in the same way again."""
        self.context: ContextOverflow | None = None
        """Of an error about the length of the context, for dialects that have their own words for it."""

    def body(self) -> dict[str, Any]:
        """Return the response body in OpenAI's error shape."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {} if self.status != 401 else {"WWW-Authenticate": 'Bearer realm="pagemill"'}
        if self.status == 415 and self.param == "content-encoding":
            headers["Accept-Encoding"] = BODY_CODINGS
        if self.is_final:
            headers["x-should-retry"] = "false"
        elif self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after_s)))
        return headers


ErrorBody = Callable[[PagemillError], bytes]
"""Renders an error as the body of a response, in the shape of one API."""


def error_body(error: PagemillError) -> bytes:
    """Return the body in OpenAI's shape."""
    import orjson  # programs that write no HTTP answers, such as the GPU bench, run without it

    return orjson.dumps(error.body())


def invalid_field(param: str, message: str, *, code: str = "invalid_value") -> PagemillError:
    """Return a 400 error about one request field; `message` names the value and the remedy."""
    return PagemillError(message, param=param, code=code)


MAX_SHOWN_CHARS = 40


def show(value: object) -> str:
    """Return a client's value in JSON's words for messages, shortened."""
    if isinstance(value, str):
        return json.dumps(value[:MAX_SHOWN_CHARS], ensure_ascii=False) + ("..." if len(value) > MAX_SHOWN_CHARS else "")
    if value is None or isinstance(value, bool | float):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return show_python(value)


def show_python(value: object) -> str:
    """Return the representation of a value of the Python API for messages, shortened."""
    # Python refuses to convert integers of thousands of digits to text.
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:MAX_SHOWN_CHARS]


def beyond_context(
    max_model_len: int, details: str, param: str, *, num_prompt_tokens: int = 0, num_answer_tokens: int = 0
) -> PagemillError:
    """Return a 400 error. The first sentence is OpenAI's; clients search messages of this kind for it.

    `num_prompt_tokens`: at least so many; 0: not known.
    """
    error = PagemillError(
        f"This model's maximum context length is {max_model_len} tokens. {details}",
        param=param,
        code=CONTEXT_LENGTH_EXCEEDED,
    )
    num_prompt_tokens = num_prompt_tokens or max_model_len + 1
    error.context = ContextOverflow(num_prompt_tokens, num_answer_tokens, max_model_len)
    return error


def context_length_exceeded(
    num_prompt_tokens: int, max_model_len: int, param: str = "messages", *, at_least: bool = False
) -> PagemillError:
    """Return a 400 error. `at_least`: the prompt was not counted to its end."""
    return beyond_context(
        max_model_len,
        f"The prompt has {'at least ' if at_least else ''}{num_prompt_tokens} tokens, which leaves none for the answer."
        " Shorten the prompt. The deployment's maxModelLen sets this length.",
        param,
        num_prompt_tokens=num_prompt_tokens,
    )


def unauthorized(message: str = "Send a valid API key in the header `Authorization: Bearer KEY`.") -> PagemillError:
    return PagemillError(message, status=401, type="authentication_error", code="invalid_api_key")


def model_not_found(name: str, known: list[str]) -> PagemillError:
    listing = ", ".join(sorted(known)[:20]) or "none"
    return PagemillError(
        f"The model `{name[:200]}` does not exist here. Models served: {listing}.",
        status=404,
        param="model",
        code=MODEL_NOT_FOUND,
    )


def not_found(path: str) -> PagemillError:
    return PagemillError(f"No route `{path[:200]}` here.", status=404, code="not_found")


def request_timeout() -> PagemillError:
    return PagemillError("The request body did not arrive in time.", status=408, type="timeout_error", code="timeout")


def client_too_slow() -> PagemillError:
    return PagemillError(
        "The answer was not read as fast as it was generated and became too large to buffer. Read faster, or request "
        "less: fewer choices, fewer log probabilities.",
        status=408,
        type="timeout_error",
        code="client_too_slow",
    )


def answer_too_large(limit_bytes: int) -> PagemillError:
    return PagemillError(
        f"The answer has more than {limit_bytes} bytes, too many for one that is not streamed. Send `stream: true`, or "
        "lower `n`, `max_tokens` or the number of log probabilities.",
        code="answer_too_large",
    )


def answers_too_large(num_bytes: int) -> PagemillError:
    return unavailable(
        f"The answers that are being generated take {num_bytes} bytes, more than this engine has for them, and this "
        "one takes the most. Try again shortly, send `stream: true`, or request less: fewer choices, fewer log "
        "probabilities.",
        retry_after_s=5,
    )


def body_too_large(limit_bytes: int) -> PagemillError:
    return PagemillError(
        f"The request body is larger than {limit_bytes} bytes. Send less text in one request.",
        status=413,
        code="request_too_large",
    )


def headers_too_large(limit_bytes: int) -> PagemillError:
    return PagemillError(
        f"The request's headers are larger than {limit_bytes} bytes.", status=431, code="headers_too_large"
    )


def client_closed_request() -> PagemillError:
    return PagemillError("The client closed the request.", status=499, type="client_error", code="client_closed")


def internal_error(message: str = "The server failed to process this request.") -> PagemillError:
    return PagemillError(message, status=500, type="server_error", code="internal_error")


def rendering_failed() -> PagemillError:
    return PagemillError(
        "The answer was generated but could not be rendered. It is not tried again. The engine's log has the details.",
        status=500,
        type="server_error",
        code=RENDERING_FAILED,
    )


def bad_upstream(message: str) -> PagemillError:
    return PagemillError(message, status=502, type="server_error", code="bad_upstream", retry_after_s=1)


def request_crashed_engine() -> PagemillError:
    return PagemillError(
        "Engines failed whenever they computed this request, the last one while it was computed alone. No other "
        "request can be the cause. It is not tried again. The engines' logs have the details.",
        status=500,
        type="server_error",
        code=REQUEST_CRASHED_ENGINE,
    )


def poison_request() -> PagemillError:
    """Return the error for a request with the content of one that crashed engines."""
    return PagemillError(
        "Engines failed whenever they computed a request with this content, so it is not sent to one for an hour after "
        "that. Change the request. Another version of the model's weights is tried at once.",
        status=500,
        type="server_error",
        code=POISON_REQUEST,
    )


def unavailable(message: str, retry_after_s: float = 5, code: str = "server_is_overloaded") -> PagemillError:
    return PagemillError(message, status=503, type="server_error", code=code, retry_after_s=min(retry_after_s, 120))


def deadline_exceeded() -> PagemillError:
    return PagemillError(
        "The request did not finish before its deadline.", status=504, type="timeout_error", code="deadline_exceeded"
    )
