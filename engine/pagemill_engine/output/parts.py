"""Divides a large engine output into parts that are processed one after the other, in a few milliseconds each.

`processor` processes tokens one at a time, so the answer does not depend on how outputs are divided.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pagemill_engine.ipc.messages import TokensOut

PART_TOKENS = 64
"""Most tokens of one part, of the answer or of the report on the prompt: with 20 alternatives 2 ms of work."""


def is_large(output: TokensOut) -> bool:
    return len(output.token_ids) > PART_TOKENS or len(output.prompt_logprobs) > PART_TOKENS


def parts_of(output: TokensOut) -> Iterator[TokensOut]:
    """Yield the parts: first those that only report on the prompt, then the tokens, the last with the rest."""
    replace, report, token_ids = msgspec.structs.replace, output.prompt_logprobs, output.token_ids
    for at in range(0, len(report), PART_TOKENS):
        part = report[at : at + PART_TOKENS]
        yield replace(output, token_ids=[], logprobs=None, prompt_logprobs=part, finish_reason=None)
    for at in range(0, max(1, len(token_ids)), PART_TOKENS):
        end = at + PART_TOKENS
        yield replace(
            output,
            token_ids=token_ids[at:end],
            logprobs=None if output.logprobs is None else output.logprobs[at:end],
            prompt_logprobs=[],
            finish_reason=output.finish_reason if end >= len(token_ids) else None,
        )
