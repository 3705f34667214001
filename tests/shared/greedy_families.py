"""Greedy answers of transformers' models without a cache, as references for engines."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

NUM_TOKENS = 24
LENGTHS = (1, 2, 15, 16, 17, 33, 90, 200)


@dataclass
class Family:
    folder: Path
    reference: Any
    prompts: list[list[int]]
    expected: list[list[int]]
    """Greedy continuations by transformers."""
    median_gap: float
    """The median difference between the log probabilities of the two best tokens."""

    @cached_property
    def exact(self) -> Any:
        """Return the reference in float64."""
        model = copy.deepcopy(self.reference).double()
        model.set_experts_implementation("eager")
        return model


def family_of(model: Any, folder: Path, vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> Family:
    """Return the references of `model`, which is already written to `folder`."""
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    answers = [greedy_reference(model, prompt) for prompt in prompts]
    gaps = torch.tensor([gap for _, each in answers for gap in each])
    return Family(folder, model, prompts, [tokens for tokens, _ in answers], float(gaps.median()))


@torch.no_grad()
def greedy_reference(model: Any, prompt: list[int], num_tokens: int = NUM_TOKENS) -> tuple[list[int], list[float]]:
    """Return the continuation and all differences; the whole sequence is computed for each token."""
    sequence, gaps = torch.tensor([prompt]), []
    for _ in range(num_tokens):
        best = model(sequence, use_cache=False).logits[0, -1].log_softmax(-1).topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        sequence = torch.cat((sequence, best.indices[None, :1]), dim=-1)
    return sequence[0, len(prompt) :].tolist(), gaps


@torch.no_grad()
def prompt_logprobs(family: Family, prompt: list[int]) -> tuple[torch.Tensor, float]:
    """Return log probabilities of the tokens after the first in float64, and the largest error of float32."""
    results = []
    for model in (family.reference, family.exact):
        rows = model(torch.tensor([prompt]), use_cache=False).logits[0, :-1].log_softmax(-1)
        results.append(rows.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None]).squeeze(1).double())
    rounded, exact = results
    return exact, float((rounded - exact).abs().max()) if len(exact) else 0.0


def tokens_of(results: list[Any]) -> list[list[int]]:
    return [result.token_ids for result in results]
