"""Kernels of a step outside the forward pass: changes of rows, inputs, the step's end, and sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from case import Case
from measuring import Device

from pagemill_kernels.request_rows import reference as rows_reference
from pagemill_kernels.request_rows import triton_launch as request_rows
from pagemill_kernels.request_rows.layout import (
    NUM_COMPUTED_TOKENS,
    NUM_TOKENS,
    DeviceStepInputs,
    RowLayout,
    RowState,
    StepRows,
)
from pagemill_kernels.request_rows.staging import Staging
from pagemill_kernels.sampling import randomness, reference, triton_launch
from pagemill_kernels.sampling.batch import Draws, Edits, Penalties, Reports, SamplingBatch, TokenMasks
from pagemill_kernels.sampling.filters import DRAWS
from pagemill_kernels.sampling.penalties import PENALTIES

NUM_TOP = 5
"""Log probabilities reported beside the chosen token's."""


def rows(device: Device, num_requests: int, context_tokens: int) -> list[Case]:
    """Return the cases of rows of decodes at that context length."""
    layout = RowLayout.of(num_requests, context_tokens + 1, 16)
    state = RowState(layout, [0], device.device)
    state.tables.copy_(torch.arange(layout.table_width))
    state.tokens.copy_(torch.arange(layout.tokens_width))
    state.records[:, NUM_COMPUTED_TOKENS], state.records[:, NUM_TOKENS] = context_tokens, context_tokens + 1
    numbers = np.arange(num_requests + 1, dtype=np.int32)
    _, step = Staging().upload(numbers[:-1], numbers, numbers, device.device)
    of_kinds = RowState(RowLayout.of(num_requests, context_tokens + 1, 16, num_kinds=2), [0, 0], device.device)
    of_kinds.tables.copy_(state.tables)
    of_kinds.tokens.copy_(state.tokens)
    of_kinds.records.copy_(state.records)
    return [
        _changes(device, layout, num_requests),
        _inputs(device, state, step, context_tokens),
        _inputs(device, of_kinds, step, context_tokens),
        _end(device, state, step),
    ]


def _changes(device: Device, layout: RowLayout, num_requests: int) -> Case:
    """Return a case in which each request gets a block, as in every sixteenth of its steps."""
    staging, none = Staging(), np.zeros(0, dtype=np.int32)
    for row in range(num_requests):
        staging.put(layout.block(row, 0), [row + 1])
    writes, _ = staging.upload(none, np.zeros(1, dtype=np.int32), none, device.device)
    ours, expected = (RowState(layout, [0], device.device) for _ in range(2))

    def written(state: RowState, write: Callable[..., None]) -> torch.Tensor:
        write(state, writes)
        return state.tables

    return Case(
        f"changes of {num_requests} rows",
        lambda: written(ours, request_rows.write_rows),
        lambda: written(expected, rows_reference.write_rows),
        tolerance=0.0,
    )


def _inputs(device: Device, state: RowState, step: StepRows, context_tokens: int) -> Case:
    """Return the case of building inputs: mostly block tables are read and written."""
    num_requests, num_kinds = len(step.rows), state.layout.num_kinds

    def built(build: Callable[..., None]) -> torch.Tensor:
        inputs = DeviceStepInputs.empty(num_requests, num_requests, num_requests, state.layout, device.device)
        build(state, step, 1, num_requests, 16, inputs)
        return torch.cat([inputs.token_ids, inputs.positions, inputs.slots.flatten(), inputs.seq_lens.long()])

    return Case(
        f"inputs of {num_requests} decodes at {context_tokens}"
        + (f", {num_kinds} cache kinds" if num_kinds > 1 else ""),
        lambda: built(request_rows.build_inputs),
        lambda: built(rows_reference.build_inputs),
        num_bytes=2 * 4 * num_kinds * num_requests * (context_tokens // 16 + 1),
        tolerance=0.0,
    )


def _end(device: Device, state: RowState, step: StepRows) -> Case:
    """Return the case of a step's end; the records are reset before each run, which is part of its time."""
    before = state.records.clone()
    sampled = torch.arange(len(step.rows), device=device.device)

    def ended(advance: Callable[..., None]) -> torch.Tensor:
        state.records.copy_(before)
        advance(state, step, sampled)
        found = torch.cat([state.records.flatten(), state.tokens[:, -2:].flatten()])
        state.records.copy_(before)
        return found

    return Case(
        f"end of a step of {len(step.rows)}",
        lambda: ended(request_rows.advance_rows),
        lambda: ended(rows_reference.advance_rows),
        tolerance=0.0,
    )


def sampling(device: Device, num_rows: int, vocab_size: int) -> list[Case]:
    logits = device.random(num_rows, vocab_size, dtype=torch.float32) * 3
    places = np.zeros(num_rows, np.int64)
    keys = randomness.keys(np.arange(num_rows, dtype=np.uint64), places, places)
    asked: dict[str, dict[str, float]] = {
        "temperature": {},
        "top-p 0.9": {"top_p": 0.9},
        "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    }
    draws: dict[str, Draws | None] = {"greedy": None}
    draws |= {
        name: Draws(DRAWS.filled(num_rows, {"temperature": 0.8, **values}), keys) for name, values in asked.items()
    }
    shape = f"{num_rows} x {vocab_size}"
    return [
        *(_draw(f"sampler, {shape}, {name}", logits, each) for name, each in draws.items()),
        _masks(f"masks of structured output, {shape}", logits),
        *_penalties(shape, logits),
        _report(f"log probabilities, {shape}, top {NUM_TOP}", logits),
    ]


def _draw(name: str, logits: torch.Tensor, draws: Draws | None) -> Case:
    batch = SamplingBatch(draws)
    peers = {"torch argmax": lambda: logits.argmax(-1)} if draws is None else {}
    return Case(
        name,
        lambda: triton_launch.draw(logits, logits, draws),
        lambda: torch.from_numpy(reference.sample_tokens(logits.cpu().numpy().copy(), batch).token_ids).to(
            logits.device
        ),
        num_bytes=logits.nbytes,
        peers=peers,
        tolerance=0.0,
    )


def _masks(name: str, logits: torch.Tensor) -> Case:
    """Return the case of masks for every row; the copy that they change and their upload are part of the time."""
    num_rows, vocab_size = logits.shape
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (num_rows, -(-vocab_size // 32)), dtype=np.int32)
    masks = TokenMasks(np.arange(num_rows), words)

    def forbidden(by: Any, where: torch.Tensor) -> torch.Tensor:
        masked = where.clone()
        by.apply_masks(masked.numpy() if by is reference else masked, masks)
        return masked.nan_to_num(neginf=-1e9)

    return Case(
        name,
        lambda: forbidden(triton_launch, logits),
        lambda: forbidden(reference, logits.cpu()).to(logits.device),
        num_bytes=5 * logits.nbytes,
        tolerance=0.0,
    )


def _penalties(shape: str, logits: torch.Tensor) -> list[Case]:
    """Return the cases of penalties for every row; the copy that they change is part of the time."""
    num_rows, vocab_size = logits.shape
    numbers, ones = np.arange(num_rows), np.ones(num_rows, np.float32)
    tokens = torch.arange(vocab_size, device=logits.device)
    values = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.3}
    penalties = Penalties(
        numbers, PENALTIES.filled(num_rows, values), numbers,
        in_prompt=(tokens % 7 == 0).expand(num_rows, -1).contiguous(),
        in_output=(tokens % 11 == 0).int().expand(num_rows, -1).contiguous(),
    )  # fmt: skip
    edits = Edits(numbers, numbers % vocab_size, ones)

    def changed(by: Any, where: torch.Tensor, asked: Penalties) -> torch.Tensor:
        copied = where.clone()
        logits: Any = copied.numpy() if by is reference else copied
        by.add_edits(logits, edits)
        by.apply_penalties(logits, asked)
        return copied

    tables = {name: getattr(penalties, name).cpu().numpy() for name in ("in_prompt", "in_output")}
    on_host = penalties._replace(**tables)
    sampled = tokens[numbers % vocab_size]

    def counted() -> torch.Tensor:
        """Reset the counts before each run, which is most of its time."""
        penalties.in_output.copy_(before)
        triton_launch.count(penalties, sampled)
        found: torch.Tensor = penalties.in_output.clone()
        penalties.in_output.copy_(before)
        return found

    def expected() -> torch.Tensor:
        table: torch.Tensor = before.clone()
        table[numbers, sampled] += 1
        return table

    before = penalties.in_output.clone()
    return [
        Case(
            f"penalties and biases, {shape}",
            lambda: changed(triton_launch, logits, penalties),
            lambda: changed(reference, logits.cpu(), on_host).to(logits.device),
            num_bytes=4 * logits.nbytes + penalties.in_prompt.nbytes + penalties.in_output.nbytes,
        ),
        Case(f"counts of sampled tokens, {shape}", counted, expected, tolerance=0.0),
    ]


def _report(name: str, logits: torch.Tensor) -> Case:
    num_rows = len(logits)
    tokens = logits.argmin(-1)
    reports = Reports(np.arange(num_rows), np.full(num_rows, NUM_TOP))

    def by_torch() -> torch.Tensor:
        logprobs = logits.log_softmax(-1)
        return torch.cat([logprobs.gather(1, tokens[:, None]), logprobs.topk(NUM_TOP).values], dim=1)

    return Case(
        name,
        lambda: triton_launch.report(logits, tokens, reports)[0],
        by_torch,
        num_bytes=logits.nbytes,
        peers={"torch": by_torch},
    )
