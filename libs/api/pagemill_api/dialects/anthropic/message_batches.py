"""Message batches of Anthropic's API (`/v1/messages/batches`) in terms of OpenAI's batches, which the gateway runs.

The requests become lines of an input file for `/v1/messages`, and the lines of output and error files become results.
A batch has the same id in both APIs, with another prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, StringConstraints, model_validator

from pagemill_api.dialects.anthropic.render import error_body
from pagemill_api.openai.fields import RequestModel, refusal
from pagemill_protocol.errors import PagemillError, show
from pagemill_protocol.json_pieces import on_one_line

PATH = "/v1/messages/batches"
ENDPOINT: Literal["/v1/messages"] = "/v1/messages"
WINDOW = "24h"
MAX_REQUESTS = 100_000
NUM_REQUESTS = "num_requests"
"""The key of the metadata with the number of requests, which is not known from a file that was not read yet."""
_PREFIX, _OWN_PREFIX = "msgbatch_", "batch_"
_ENDINGS = {"batch_cancelled": "canceled", "batch_expired": "expired"}
"""Codes of lines that were not run."""
OVER = ("failed", "completed", "expired", "cancelled")


class BatchedMessage(RequestModel):
    custom_id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    params: dict[str, Any]


class MessageBatchRequest(RequestModel):
    requests: list[BatchedMessage] = Field(min_length=1, max_length=MAX_REQUESTS)

    @model_validator(mode="after")
    def _consistent(self) -> MessageBatchRequest:
        known: set[str] = set()
        for index, request in enumerate(self.requests):
            if request.custom_id in known:
                message = f"An earlier request has the `custom_id` {show(request.custom_id)} too. Send another one."
                raise refusal(f"requests[{index}].custom_id", message)
            known.add(request.custom_id)
            if request.params.get("stream"):
                message = "A request of a batch cannot be streamed. Remove `stream`."
                raise refusal(f"requests[{index}].params.stream", message)
        return self

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of the input file."""
        for request in self.requests:
            line = {"custom_id": request.custom_id, "method": "POST", "url": ENDPOINT, "body": request.params}
            yield on_one_line(orjson.dumps(line)) + b"\n"


def own_id(batch_id: str) -> str:
    """Return the id of the batch that the gateway runs; "" for an id of another form."""
    return _OWN_PREFIX + batch_id.removeprefix(_PREFIX) if batch_id.startswith(_PREFIX) else ""


def client_id(own: str) -> str:
    return _PREFIX + own.removeprefix(_OWN_PREFIX)


def shown(batch: Mapping[str, Any], endings: Mapping[str, int], origin: str) -> dict[str, Any]:
    """Return a batch, which is given in OpenAI's shape, in Anthropic's.

    `endings`: of a batch that is over, how many lines have no answer, by what happened to them. `origin`: of the URL by
    which the client reaches this server, without a path.
    """
    is_over = batch["status"] in OVER
    cancelled_at = batch["cancelling_at"] or batch["cancelled_at"]
    status = "ended" if is_over else "canceling" if batch["status"] == "cancelling" else "in_progress"
    total, succeeded = int((batch["metadata"] or {}).get(NUM_REQUESTS, 0)), batch["request_counts"]["completed"]
    counts = {"processing": total, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    if is_over:
        counts |= {**endings, "processing": 0, "succeeded": succeeded}
        counts["errored"] = total - sum(value for name, value in counts.items() if name != "errored")
    batch_id = client_id(batch["id"])
    return {
        "id": batch_id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": counts,
        "created_at": _time(batch["created_at"]),
        "expires_at": _time(batch["expires_at"]),
        "ended_at": _time(batch[f"{batch['status']}_at"]) if is_over else None,
        "cancel_initiated_at": _time(cancelled_at) if cancelled_at else None,
        "archived_at": None,
        "results_url": f"{origin}{PATH}/{batch_id}/results" if is_over else None,
    }


def ending_of(line: bytes) -> str | None:
    """Return what happened to a line of an error file that was not run: `canceled` or `expired`; None for others."""
    try:
        error = orjson.loads(line).get("error") or {}
    except orjson.JSONDecodeError:  # only the beginning of an answer
        return None
    return _ENDINGS.get(str(error.get("code")))


def result_of(line: bytes) -> bytes:
    """Return a line of results for one of an output file or an error file."""
    given = orjson.loads(line)
    response, error = given["response"], given["error"]
    if response is None:
        ending = _ENDINGS.get(error["code"])
        result: dict[str, Any] = {"type": ending} if ending else {"type": "errored", "error": _error(error["message"])}
    elif 200 <= response["status_code"] < 300:
        result = {"type": "succeeded", "message": response["body"]}
    else:
        body = response["body"] or _error("The answer has no body.", response["status_code"])
        result = {"type": "errored", "error": body if "type" in body else _error(body["error"]["message"])}
    return on_one_line(orjson.dumps({"custom_id": given["custom_id"], "result": result})) + b"\n"


def _error(message: str, status: int = 500) -> Any:
    return orjson.loads(error_body(PagemillError(message, status=status)))


def _time(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")
