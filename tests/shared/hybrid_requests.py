"""One hybrid for each kind of state, and requests whose answers are compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hybrid_models import MODELS, SHORT, STATE_SPACES

from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

KINDS = {
    "delta rule": MODELS["qwen3.5"],
    "state space": STATE_SPACES["bamba"],
    "short convolution": SHORT["lfm2"],
}
Answers = dict[tuple[str, int], dict[str, Any]]
"""What each choice of each request got."""
Change = Callable[[GenerateRequest], GenerateRequest]


def requests_of(asked: Mapping[str, tuple[int, dict[str, Any]]], max_tokens: int) -> list[GenerateRequest]:
    """Return a request for each name: the length of its prompt, and what it asks for."""
    return [
        GenerateRequest(
            request_id=name,
            model="m",
            prompt_token_ids=[(7 * index + 11 * place * place) % 90 for place in range(length)],
            sampling=SamplingParams(seed=index, **{"max_tokens": max_tokens, **kind}),
        )
        for index, (name, (length, kind)) in enumerate(asked.items())
    ]


def take(answers: Answers, output: Any) -> None:
    """Add what a step has sampled for a choice."""
    answer = answers.setdefault((output.request_id, output.choice), {"token_ids": [], "logprobs": []})
    answer["token_ids"] += output.token_ids
    answer["logprobs"] += output.logprobs or []
    answer["finish_reason"], answer["error"] = output.finish_reason, output.error
