"""The process that encodes with a tokenizer whose steps have no known bound, apart from the server.

`limited_encoder` starts it as a plain script; `sandbox.confine` limits its resources before it reads the tokenizer. It
runs `local_encoder`: each request names a method, and its errors are returned with their fields.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models

from pagemill_api.sandbox.confine import enter_sandbox, read_frame, timed, write_frame
from pagemill_api.text.backend import encode_texts, loading
from pagemill_api.text.control_tokens import ControlTokenMarks
from pagemill_api.text.encoding.local_encoder import LocalEncoder
from pagemill_api.text.rules.tokenizer_json import parse
from pagemill_api.text.rules.tokenizer_rules import check_rules
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.source_errors import UnreadableModelError

METHODS = ("encode", "encode_within", "encode_cut", "encode_pair")


def read(tokenizer_json: str) -> tuple[LocalEncoder | None, dict[str, str]]:
    """Return the encoder, or why the tokenizer cannot be read."""
    try:
        with loading():
            parsed = parse(tokenizer_json)
            return LocalEncoder(tokenizer_json, parsed, ControlTokenMarks(parsed), check_rules(parsed)), {}
    except UnreadableModelError as error:
        return None, {"tokenizer": error.message}


def answer(encoder: LocalEncoder, request: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a method, or the fields of its error."""
    assert request["name"] in METHODS
    work = request["variables"]
    try:
        found = getattr(encoder, request["name"])(*work["arguments"], **work["named"])
    except PagemillError as error:
        fields = ("message", "status", "type", "param", "code", "retry_after_s")
        return {"error": {name: getattr(error, name) for name in fields}}
    return {"ids": found} if isinstance(found, list) else found._asdict()


def main() -> None:
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    setup = read_frame(requests)
    if setup is None:
        return
    encode_texts(Backend(models.BPE({"a": 0}, [])), ["a"], add_special_tokens=False)  # a confined one opens no files
    enter_sandbox(setup["memory_bytes"])
    with timed(setup["cpu_limit_s"], setup["wall_limit_s"]):
        encoder, errors = read(setup.pop("sources")["tokenizer"])
        gc.collect()
    write_frame(replies, {"errors": errors})
    while encoder is not None and (request := read_frame(requests)) is not None:
        with timed(request["variables"]["cpu_limit_s"], setup["wall_limit_s"]):
            reply = answer(encoder, request)
        write_frame(replies, reply)


if __name__ == "__main__":
    main()
