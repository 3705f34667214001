"""Decides whether a choice ends with its newest token. Stop strings are not seen here: they arrive as aborts."""

from __future__ import annotations

from pagemill_engine.scheduler.sequence import Sequence
from pagemill_protocol.request.generate import FinishReason


def finish_reason(request: Sequence) -> FinishReason | None:
    """Return the reason why the newest output token ends the sequence, or None.

    Stop tokens count only after `min_tokens` others. A form that allows no further token ends the sequence before that.
    """
    token_ids = request.token_ids
    num_output_tokens = len(token_ids) - request.num_prompt_tokens
    if token_ids[-1] in request.stop_ids and num_output_tokens > request.sampling.min_tokens:
        return "stop"
    if request.grammar is not None and request.grammar.ended:
        return "stop"
    if len(token_ids) >= request.max_total_tokens and num_output_tokens > 0:
        return "length"
    return None
