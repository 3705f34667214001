"""The shapes to which steps are padded for CUDA graphs: little padding, and a short time for capturing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pagemill_execution.runners.device.device_rows import DeviceStep
from pagemill_execution.runners.device.graphs import decode_shapes, mixed_shapes, shapes_to_capture


@pytest.mark.parametrize("max_num_seqs", [1, 3, 100, 256, 1024])
def test_every_decode_up_to_the_largest_has_a_size_with_little_padding(max_num_seqs: int) -> None:
    sizes = [shape.num_requests for shape in decode_shapes(max_num_seqs)]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(max_num_seqs, 512)
    for num_requests in range(1, sizes[-1] + 1):
        padded = next(size for size in sizes if size >= num_requests)
        assert padded - num_requests < max(8, num_requests)
        assert padded - num_requests < 32


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens"), [(1, 1), (1, 24), (4, 24), (256, 8192), (256, 3000), (64, 500)]
)
def test_every_step_with_prompts_up_to_the_largest_has_a_shape(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    shapes = mixed_shapes(max_num_seqs, max_num_batched_tokens)
    assert shapes == sorted(set(shapes))
    largest = max_num_batched_tokens
    assert shapes[-1].num_tokens == largest
    for num_tokens in [*range(1, min(largest, 1024) + 1), *range(1025, largest + 1, 31)]:
        for num_requests in {1, min(num_tokens, 16, max_num_seqs), min(num_tokens, max_num_seqs)}:
            fitting = [
                shape for shape in shapes
                if shape.num_tokens >= num_tokens
                and shape.num_requests >= num_requests + (shape.num_tokens > num_tokens)
            ]  # fmt: skip
            share = 1 / 2 if num_tokens <= 1024 else 1 / 7
            assert fitting[0].num_tokens - num_tokens < max(32, num_tokens * share + 1)


def test_no_graph_is_captured_for_steps_longer_than_their_launches() -> None:
    sizes = {shape.num_tokens for shape in mixed_shapes(256, 8192, 2345)}
    assert (max(sizes), {1024, 1152} <= sizes) == (2304, True)
    assert max(shape.num_tokens for shape in mixed_shapes(256, 8192, 10)) == 1024, (
        "launches of larger steps cost next to nothing"
    )
    assert mixed_shapes(256, 700, 10)[-1].num_tokens == 700
    assert len(shapes_to_capture(256, 8192)) < 90, "capturing must take seconds"


@given(
    counts=st.lists(st.integers(1, 9), max_size=4), padding=st.integers(0, 40), num_padding=st.integers(0, 6),
)  # fmt: skip
def test_padding_tokens_are_distributed_over_padding_requests(
    counts: list[int], padding: int, num_padding: int
) -> None:
    assume(num_padding > 0 or padding == 0)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    rows = np.arange(len(counts), dtype=np.int32)
    names, samples = [f"r{row}" for row in rows], np.arange(len(rows) + 1, dtype=np.int32)
    step = DeviceStep(names, rows, starts, samples, max(counts, default=0), rows.astype(np.int64))
    padded = step.padded(sum(counts) + padding, len(counts) + num_padding, 7)
    assert padded.rows.tolist() == [*rows, *[7] * num_padding]
    assert padded.sample_start_loc.tolist() == [*samples, *[len(rows)] * num_padding]
    assert padded.query_start_loc[: len(starts)].tolist() == starts.tolist()
    each = np.diff(padded.query_start_loc)
    assert (len(each), padded.num_tokens, padded.longest) == (
        len(padded.rows),
        sum(counts) + padding,
        max(each, default=0),
    )
    shares = each[len(counts) :]
    assert shares.min(initial=0) >= 0
    assert np.ptp(shares) <= 1 if num_padding else True
