"""Families that transformers does not have give the greedy answers of plain formulas in torch.

The formulas come from papers and model cards; the checkpoints are tiny, random, and have the published names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import (
    EPS,
    HEAD_DIM,
    KINDS,
    NUM_HEADS,
    NUM_LAYERS,
    SIZE,
    VOCAB_SIZE,
    Kind,
    Layer,
    Weights,
    write_checkpoint,
)
from torch import Tensor

from pagemill_kernels.cpu import library
from pagemill_models.families import baichuan
from pagemill_protocol.request.sampling import SamplingParams

NUM_TOKENS = 24
LENGTHS = (1, 2, 15, 16, 17, 33, 90, 200)
ASKS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, prompt_logprobs=0)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotated(heads: Tensor) -> Tensor:
    """Return the heads [tokens, heads, head_dim] with their rotary embedding."""
    frequencies = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=heads.dtype) / HEAD_DIM)
    angles = torch.arange(len(heads), dtype=heads.dtype)[:, None, None] * frequencies
    left, right = heads.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def attention(kind: Kind, layer: Layer, x: Tensor) -> Tensor:
    query, key, value = (
        torch.nn.functional.linear(x, *each).view(len(x), -1, HEAD_DIM)
        for each in (layer.query, layer.key, layer.value)
    )
    if not kind.alibi:
        query, key = rotated(query), rotated(key)
    shared = NUM_HEADS // kind.num_kv_heads
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * HEAD_DIM**-0.5
    back = torch.arange(len(x))[:, None] - torch.arange(len(x))
    if kind.alibi:
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / NUM_HEADS) for head in range(NUM_HEADS)]).to(x.dtype)
        scores = scores - slopes[:, None, None] * back
    weights = scores.masked_fill(back < 0, -torch.inf).softmax(-1)
    attended = torch.einsum("hqk,khd->qhd", weights, value).reshape(len(x), SIZE)
    return torch.nn.functional.linear(attended, *layer.output)


@torch.no_grad()
def reference_logits(kind: Kind, weights: Weights, tokens: list[int]) -> Tensor:
    """Return the logits [tokens, vocabulary]."""
    embedding, norm, head = (weights[f"{name}.weight"] for name in kind.around)
    hidden = embedding[tokens]
    for index in range(NUM_LAYERS):
        layer = kind.layer(weights, index)
        hidden = hidden + attention(kind, layer, rms_norm(hidden, layer.norms[0]))
        x = rms_norm(hidden, layer.norms[1])
        hidden = hidden + (torch.nn.functional.silu(x @ layer.gate.T) * (x @ layer.up.T)) @ layer.down.T
    if kind.normalized_head:
        head = head / head.square().sum(-1, keepdim=True).sqrt()
    return rms_norm(hidden, norm) @ head.T


def continuation(kind: Kind, weights: Weights, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        tokens.append(int(reference_logits(kind, weights, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def logprobs_of(kind: Kind, weights: Weights, prompt: list[int]) -> tuple[Tensor, float]:
    """Return the log probabilities of the prompt's tokens after the first in float64, and the error of float32."""
    exact, rounded = (
        reference_logits(kind, {name: weight.to(dtype) for name, weight in weights.items()}, prompt)[:-1].log_softmax(
            -1
        )
        for dtype in (torch.float64, torch.float32)
    )
    names = torch.tensor(prompt[1:], dtype=torch.int64)[:, None]
    of_prompt = exact.gather(1, names).squeeze(1)
    errors = (rounded.gather(1, names).squeeze(1) - of_prompt).abs()
    return of_prompt, float(errors.max()) if len(errors) else 0.0


@pytest.mark.slow
@pytest.mark.sample("qwen")
@pytest.mark.parametrize("name", KINDS)
def test_answers_equal_plain_formulas(
    name: str,
    tmp_path: Path,
    runner_loader: Callable[..., Any],
    make_driver: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = KINDS[name]
    if kind.normalized_head:
        monkeypatch.setattr(baichuan, "NORMALIZED_VOCABULARY", VOCAB_SIZE)
    if kind.alibi:
        monkeypatch.setattr(baichuan, "SIZES_OF_13B", (SIZE, NUM_HEADS))
    weights = write_checkpoint(kind, tmp_path)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]
    expected = [continuation(kind, weights, prompt) for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) == len(LENGTHS)
    for backend in ("cpu_native", "cpu") if library.load() else ("cpu",):
        driver = make_driver(runner_loader(tmp_path, backend=backend))
        for settings in ({}, {"max_num_batched_tokens": 13}, {"num_blocks": 16, "enable_prefix_caching": False}):
            results = driver.generate(prompts, [ASKS] * len(prompts), **settings)
            assert [result.token_ids for result in results] == expected
            for prompt, result in zip(prompts, results, strict=True):
                of_prompt, rounding = logprobs_of(kind, weights, prompt)
                differences = (torch.tensor(result.prompt_logprobs).double() - of_prompt).abs()
                assert (differences <= 1e-4 + 1e-5 * of_prompt.abs() + 2 * rounding).all()
        hits = driver.greedy(prompts * 2, NUM_TOKENS, waves=True)
        assert [result.token_ids for result in hits] == expected * 2
        assert sum(result.num_cached_tokens for result in hits[len(prompts) :]) >= 16 + 32 + 80 + 192


def test_a_planted_fault_in_the_layout_of_groups_is_detected(
    tmp_path: Path, runner_loader: Callable[..., Any], make_driver: Callable[[Any], Any]
) -> None:
    kind = KINDS["internlm2"]
    weights = write_checkpoint(kind, tmp_path)
    for index in range(NUM_LAYERS):
        name = f"model.layers.{index}.attention.wqkv.weight"
        weights[name] = (
            weights[name].view(2, 4, HEAD_DIM, SIZE).transpose(0, 1).reshape(8 * HEAD_DIM, SIZE).contiguous()
        )
    driver = make_driver(runner_loader(tmp_path, backend="cpu"))
    prompt = list(range(40))
    assert driver.greedy([prompt], NUM_TOKENS)[0].token_ids != continuation(kind, weights, prompt)
