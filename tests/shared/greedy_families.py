"""Greedy answers of transformers' models without a cache, as references for engines.

`greedy_answers.json` holds answers that were computed before. They are not trusted: one computation over a prompt and
its answer shows whether each token is the most likely one, instead of one computation per token. Where one is not, or
none is kept, the rest is computed token by token. So a wrong or missing entry costs time and changes no result. To
write the answers of the models that `make test` runs: `WRITE_GREEDY_ANSWERS=1 .venv/bin/pytest -m "not gpu and not
full" tests/engine/model`, in one process.
"""

from __future__ import annotations

import atexit
import copy
import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

NUM_TOKENS = 24
LENGTHS = (1, 2, 15, 16, 17, 33, 90, 200)
ANSWERS = Path(__file__).with_name("greedy_answers.json")
_answers: dict[str, list[list[int]]] = json.loads(ANSWERS.read_text())
_used: dict[str, list[list[int]]] = {}
_digests: WeakKeyDictionary[Any, bytes] = WeakKeyDictionary()


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


def greedy_reference(model: Any, prompt: list[int], num_tokens: int = NUM_TOKENS) -> tuple[list[int], list[float]]:
    """Return the continuation and all differences between the log probabilities of the two best tokens."""
    [tokens], gaps = greedy_references(model, [prompt], num_tokens)
    return tokens, gaps


@torch.no_grad()
def greedy_references(
    model: Any, prompts: list[list[int]], num_tokens: int = NUM_TOKENS
) -> tuple[list[list[int]], list[float]]:
    """Return the continuations of a batch of prompts of one length, and all differences."""
    length, gaps = len(prompts[0]), []
    sequences = torch.tensor(prompts)
    key = _key(model, prompts, num_tokens)
    known = _answers.get(key) if _can_be_checked_at_once(model) else None
    if known is not None:
        answers = torch.tensor(known)
        best, differences = _best(model, torch.cat((sequences, answers[:, :-1]), dim=-1), num_tokens)
        num_equal = int((best == answers).all(0).long().cumprod(0).sum())
        sequences = torch.cat((sequences, answers[:, :num_equal]), dim=-1)
        gaps += differences[:, :num_equal].flatten().tolist()
    while sequences.shape[1] < length + num_tokens:
        best, differences = _best(model, sequences, 1)
        gaps += differences.flatten().tolist()
        sequences = torch.cat((sequences, best), dim=-1)
    tokens = sequences[:, length:].tolist()
    _used[key] = tokens
    return tokens, gaps


def _best(model: Any, sequences: torch.Tensor, num_last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most likely tokens after the last positions, and by how much they exceed the second ones."""
    best = model(sequences, use_cache=False).logits[:, -num_last:].log_softmax(-1).topk(2, dim=-1)
    return best.indices[..., 0], best.values[..., 0] - best.values[..., 1]


def _can_be_checked_at_once(model: Any) -> bool:
    """Whether what follows a token never changes its logits: some rotations depend on the length of the sequence."""
    config = model.config.to_json_string()
    return "longrope" not in config and '"dynamic"' not in config


def _key(model: Any, prompts: list[list[int]], num_tokens: int) -> str:
    if model not in _digests:
        digest = hashlib.blake2b(model.config.model_type.encode())
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
        _digests[model] = digest.digest()
    return hashlib.blake2b(_digests[model] + repr((prompts, num_tokens)).encode(), digest_size=8).hexdigest()


def _write_answers() -> None:
    lines = (f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in sorted(_used.items()))
    ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if os.environ.get("WRITE_GREEDY_ANSWERS"):
    atexit.register(_write_answers)


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
