"""The process that compiles forms for the first time, apart from the server: a client's form may take unbounded time or
memory, or crash the compiler.

`check` starts it as a plain script; `sandbox.confine` limits its resources. It compiles for a vocabulary of the 256
bytes, which costs about as much as a real one and detects forms that no answer can begin.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from pagemill_api.grammars.limits import check_limits
from pagemill_api.grammars.parser import MAX_MESSAGE_CHARS, fault_of, parser_limits
from pagemill_api.grammars.source import grammar_text
from pagemill_api.sandbox.confine import enter_sandbox, read_frame, timed, write_frame
from pagemill_api.structural_tags import JsonSchema, Or, read_tag, write_tag
from pagemill_protocol.request.structured_outputs import StructuredOutputs

_EOS = 256


class ByteTokenizer:
    """A tokenizer with one token per byte and an end token."""

    eos_token_id = _EOS
    bos_token_id = None
    tokens = [bytes([value]) for value in range(256)] + [b"<eos>"]
    special_token_ids = [_EOS]  # noqa: RUF012 read by llguidance

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def check(form: dict[str, Any], tokenizer: LLTokenizer) -> dict[str, Any]:
    """Return the error of a form (`text`; empty if none), and the wrong option of a structural tag (`part`) with its
    `kind`."""
    outputs = msgspec.convert(form, StructuredOutputs)
    fault = _fault(outputs, tokenizer)
    if fault and outputs.structural_tag:
        for part, option in enumerate(_options(outputs.structural_tag)):
            if found := _fault(option, tokenizer):
                kind = "json_schema" if option.kind == "json_schema" else "grammar"
                return {"text": found, "part": part, "kind": kind}
    return {"text": fault}


def _options(tag: str) -> list[StructuredOutputs]:
    """Return the options of a tag that is only a choice."""
    try:
        form = read_tag(json.loads(tag))
    except (ValueError, RecursionError):
        return []
    options = form.elements if isinstance(form, Or) else []
    return [
        StructuredOutputs(json_schema=json.dumps(each.json_schema))
        if isinstance(each, JsonSchema)
        else StructuredOutputs(structural_tag=write_tag(each))
        for each in options
    ]


def _fault(outputs: StructuredOutputs, tokenizer: LLTokenizer) -> str:
    try:
        check_limits(outputs)
        # A special token of a trigger is compiled as text here: only engines know which tokens are special.
        matcher = LLMatcher(tokenizer, grammar_text(outputs), log_level=0, limits=parser_limits())
    except ValueError as error:
        return str(error)[:MAX_MESSAGE_CHARS]
    fault = fault_of(matcher)
    if fault:
        return fault
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    return fault_of(matcher) or ("the only answer that fits it is empty" if mask == 1 << _EOS else "")


def main() -> None:
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    setup = read_frame(requests)
    if setup is None:
        return
    tokenizer = LLTokenizer(TokenizerWrapper(ByteTokenizer()))
    check({"json_schema": '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "pattern": "^a+$"}}}'}, tokenizer)
    enter_sandbox(setup["memory_bytes"])
    write_frame(replies, {"errors": {}})
    while (request := read_frame(requests)) is not None:
        work = request["variables"]
        with timed(work["cpu_limit_s"], setup["wall_limit_s"]):
            verdict = check(work["form"], tokenizer)
        write_frame(replies, verdict)


if __name__ == "__main__":
    main()
