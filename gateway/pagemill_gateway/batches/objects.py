"""The stored objects, files and batches, and their form for clients."""

from __future__ import annotations

import re
import secrets
import time
from typing import Any, Literal

import msgspec

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
FINAL: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def new_object_id(prefix: str) -> str:
    """Return a new id. Ids sort by the time of their creation."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


def created_at_ns(object_id: str) -> int:
    """Return the time of the creation of an object, from its id."""
    return int(object_id.rpartition("_")[2].rpartition("-")[2][:16], 16)


def is_object_id(value: str) -> bool:
    """Whether the value has the form of our ids, so that it may become part of a path."""
    return _ID.fullmatch(value) is not None


class BatchFile(msgspec.Struct, kw_only=True):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str

    def shown(self) -> dict[str, Any]:
        return {"object": "file", "status": "processed", **msgspec.structs.asdict(self)}


class LineFault(msgspec.Struct, frozen=True):
    code: str
    message: str
    line: int | None = None
    """The line's number from 1; `None` for a fault of the whole file."""

    def shown(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "param": None, "line": self.line}


class Batch(msgspec.Struct, kw_only=True):
    id: str
    account: str
    """The owner, `Caller.account`."""
    key_hash: str
    """The hash of the API key that created the batch; its lines are requests of that key."""
    endpoint: str
    input_file_id: str
    output_file_id: str
    """Like `error_file_id`, shown to clients only when the file exists."""
    error_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    times: dict[str, int] = {}
    """The time of the first change to each status, in Unix seconds."""
    faults: list[LineFault] = []
    """The faults of a batch that failed as a whole."""
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    has_output: bool = False
    has_errors: bool = False
    input_digest: str = ""
    """The digest of the input file as it was first read."""

    def became(self, status: Status) -> None:
        self.status = status
        self.times.setdefault(status, int(time.time()))

    def shown(self) -> dict[str, Any]:
        faults = {"object": "list", "data": [each.shown() for each in self.faults]}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": faults if self.faults else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id if self.has_output else None,
            "error_file_id": self.error_file_id if self.has_errors else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.times.get(status) for status in _TIMES},
            "request_counts": {"total": self.num_lines, "completed": self.num_completed, "failed": self.num_failed},
            "metadata": self.metadata,
        }
