"""Rows of requests on the device: changes, a step's inputs and its end equal their references."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from triton_device import DEVICE

from pagemill_kernels.request_rows import layout, reference
from pagemill_kernels.request_rows import triton_launch as rows
from pagemill_kernels.request_rows.layout import DeviceStepInputs, RowLayout, RowState, RowWrites, StepRows
from pagemill_kernels.request_rows.staging import PIECE, Staging
from pagemill_kernels.sampling import randomness

BLOCK_SIZE = 16
MAX_LEN = 700
LAYOUT = RowLayout.of(9, MAX_LEN, BLOCK_SIZE)
OF_KINDS = LAYOUT._replace(num_kinds=3)
PADDING = [99, 98, 97]


def filled(rows_layout: RowLayout = LAYOUT) -> RowState:
    """Return a state in which every row has its own blocks, tokens and parameters."""
    generator = np.random.default_rng(0)
    state = RowState(rows_layout, PADDING[: rows_layout.num_kinds], DEVICE)
    staging = Staging()
    for row in range(LAYOUT.padding_row):
        record = generator.integers(-(2**31), 2**31, layout.NUM_FIELDS).astype(np.int32)
        num_computed = int(generator.integers(0, 300))
        record[layout.NUM_TOKENS] = num_computed + int(generator.integers(1, 350))
        record[layout.NUM_PROMPT_TOKENS] = record[layout.NUM_TOKENS] - int(generator.integers(0, 20))
        record[layout.NUM_COMPUTED_TOKENS] = num_computed
        record[layout.CHOICE] = row % 3
        staging.put(LAYOUT.record(row), record)
        for kind in range(rows_layout.num_kinds):
            blocks = generator.integers(0, 90, LAYOUT.table_width).astype(np.int32)
            staging.put(rows_layout.block(row, 0, kind), blocks)
        staging.put(rows_layout.token(row, 0), generator.integers(0, 2**31, LAYOUT.tokens_width).astype(np.int32))
    no_rows = np.zeros(0, dtype=np.int32)
    writes, _ = staging.upload(no_rows, np.zeros(1, dtype=np.int32), no_rows, DEVICE)
    reference.write_rows(state, writes)
    return state


def copied(state: RowState) -> RowState:
    other = RowState(LAYOUT, PADDING[:1], DEVICE)
    other.values.copy_(state.values)
    return other


def step(at: list[int], counts: list[int], samples: list[int]) -> StepRows:
    """`samples`: how many tokens each request may sample."""
    starts, sampled = (np.concatenate(([0], np.cumsum(each))).astype(np.int32) for each in (counts, samples))
    return Staging().upload(np.array(at, dtype=np.int32), starts, sampled, DEVICE)[1]


NAMES = [each for each in DeviceStepInputs.__slots__ if each != "states"]
"""What kernels of rows fill."""


def inputs_of(
    num_tokens: int, num_requests: int, num_sampled: int, rows_layout: RowLayout = LAYOUT
) -> DeviceStepInputs:
    made = DeviceStepInputs.empty(num_tokens, num_requests, num_sampled, rows_layout, DEVICE)
    for name in NAMES:
        getattr(made, name).fill_(-7)
    return made


def assert_equal(ours: DeviceStepInputs, expected: DeviceStepInputs) -> None:
    for name in NAMES:
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name


STEPS = {
    "decodes": ([3, 0, 8], [1, 1, 1], [1, 1, 1]),
    "one chunk": ([4], [300], [0]),
    "the end of a prompt": ([4], [17], [1]),
    "mixed, some in the middle of their prompts": ([5, 1, 7, 2], [1, 280, 1, 33], [1, 0, 1, 1]),
    "a request without tokens": ([5, 1, 7], [1, 0, 2], [1, 0, 1]),
    "proposed tokens": ([5, 1, 7, 2], [1, 5, 40, 3], [1, 5, 0, 2]),
    "padding behind": ([6, 2, 9, 9], [1, 1, 1, 1], [1, 1, 0, 0]),
}


@pytest.mark.parametrize("rows_layout", [LAYOUT, OF_KINDS], ids=["one kind", "three kinds"])
@pytest.mark.parametrize("name", STEPS)
def test_a_steps_inputs_equal_the_reference(name: str, rows_layout: RowLayout) -> None:
    at, counts, samples = STEPS[name]
    state, wanted = filled(rows_layout), step(at, counts, samples)
    ours, expected = (inputs_of(sum(counts), len(at), sum(samples), rows_layout) for _ in range(2))
    arguments = (state, wanted, max(counts), sum(samples), BLOCK_SIZE)
    rows.build_inputs(*arguments, ours)
    reference.build_inputs(*arguments, expected)
    assert_equal(ours, expected)
    # By the definition of a slot, token by token, for each kind.
    starts, tables = wanted.query_start_loc.tolist(), state.tables.tolist()
    for kind in range(rows_layout.num_kinds):
        for i, row in enumerate(at):
            first = int(state.records[row, layout.NUM_COMPUTED_TOKENS])
            slots = [
                tables[kind][row][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                for position in range(first, first + counts[i])
            ]
            assert ours.slots[kind, starts[i] : starts[i + 1]].tolist() == slots


def test_requests_of_more_than_a_hundred_thousand_tokens_are_supported() -> None:
    """The end of a long prompt and a decode after one: positions, blocks and tokens are far into their rows."""
    long = RowLayout.of(3, 131_072, BLOCK_SIZE)
    state = RowState(long, PADDING[:1], DEVICE)
    generator = torch.Generator().manual_seed(0)
    state.tables.copy_(torch.randint(0, 1 << 20, state.tables.shape, generator=generator))
    state.tokens.copy_(torch.randint(0, 1 << 17, state.tokens.shape, generator=generator))
    for row, (num_computed, num_tokens) in enumerate([(100_000, 100_300), (131_070, 131_071)]):
        state.records[row, layout.NUM_COMPUTED_TOKENS] = num_computed
        state.records[row, layout.NUM_TOKENS] = num_tokens
        state.records[row, layout.NUM_PROMPT_TOKENS] = num_tokens
    wanted = step([0, 1], [300, 1], [1, 1])
    found = []
    for module in (rows, reference):
        inputs = DeviceStepInputs.empty(301, 2, 2, long, DEVICE)
        for name in NAMES:
            getattr(inputs, name).fill_(-7)
        module.build_inputs(state, wanted, 300, 2, BLOCK_SIZE, inputs)
        after = RowState(long, PADDING[:1], DEVICE)
        after.values.copy_(state.values)
        module.advance_rows(after, wanted, torch.tensor([5, 6], device=DEVICE))
        found.append((inputs, after.values))
    assert_equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][0].positions[299:301].tolist() == [100_299, 131_070]
    assert found[0][0].slots[0, 300] == state.tables[0, 1, 131_070 // BLOCK_SIZE] * BLOCK_SIZE + 131_070 % BLOCK_SIZE


@pytest.mark.parametrize("rows_layout", [LAYOUT, OF_KINDS], ids=["one kind", "three kinds"])
def test_inputs_may_be_in_longer_buffers(rows_layout: RowLayout) -> None:
    at, counts, samples = STEPS["decodes"]
    state, wanted = filled(rows_layout), step(at, counts, samples)
    whole, expected = inputs_of(8, 8, 8, rows_layout), inputs_of(8, 8, 8, rows_layout)
    rows.build_inputs(state, wanted, 1, 3, BLOCK_SIZE, whole.first(4, 4))
    reference.build_inputs(state, wanted, 1, 3, BLOCK_SIZE, expected.first(4, 4))
    assert_equal(whole, expected)
    assert whole.block_tables[:, 3:].eq(-7).all()


def test_the_key_of_a_sample_follows_the_specification() -> None:
    seed, choice, generated = 0xFEDCBA9876543210, 5, 11
    record = np.zeros(layout.NUM_FIELDS, dtype=np.int32)
    record[[layout.NUM_TOKENS, layout.NUM_PROMPT_TOKENS, layout.CHOICE]] = [20 + generated, 20, choice]
    record[[layout.SEED_LOW, layout.SEED_HIGH]] = np.array([seed], dtype=np.uint64).view(np.int32)
    state = filled()
    state.records[2, : layout.NUM_FIELDS] = torch.from_numpy(record)
    out = inputs_of(1, 1, 1)
    rows.build_inputs(state, step([2], [1], [1]), 1, 1, BLOCK_SIZE, out)
    key = out.settings[4:].cpu().numpy().view(np.uint64)
    assert key == randomness.keys(np.array([seed], dtype=np.uint64), np.array([choice]), np.array([generated]))


@pytest.mark.parametrize("name", STEPS)
def test_the_end_of_a_step_equals_the_reference(name: str) -> None:
    at, counts, samples = STEPS[name]
    ours, wanted = filled(), step(at, counts, samples)
    expected, before = copied(ours), ours.values.clone()
    sampled = torch.arange(sum(samples), device=DEVICE) * 1000 - 1
    rows.advance_rows(ours, wanted, sampled)
    reference.advance_rows(expected, wanted, sampled)
    assert torch.equal(ours.values, expected.values)
    assert not torch.equal(ours.values, before)


@pytest.mark.parametrize("num_accepted", range(5))
def test_proposed_tokens_that_were_sampled_become_the_rows_own(num_accepted: int) -> None:
    """Four are proposed; the row's other numbers are those of a decode of as many steps."""
    state, row = filled(), 4
    state.records[row, layout.NUM_COMPUTED_TOKENS] = before = int(state.records[row, layout.NUM_TOKENS]) - 1
    proposed = state.tokens[row, before + 1 : before + 5].tolist()
    sampled = torch.tensor([*proposed[:num_accepted], 77, 78, 79, 80, 81][:5], device=DEVICE)
    expected = copied(state)
    for module, each in ((rows, state), (reference, expected)):
        module.advance_rows(each, step([row], [5], [5]), sampled)
    assert torch.equal(state.values, expected.values)
    assert state.records[row, layout.NUM_COMPUTED_TOKENS] == before + 1 + num_accepted
    assert state.records[row, layout.NUM_TOKENS] == before + 2 + num_accepted
    assert state.tokens[row, before + 1 : before + 2 + num_accepted].tolist() == [*proposed[:num_accepted], 77]


def test_a_sampled_token_is_the_next_steps_input() -> None:
    state = filled()
    state.records[4, layout.NUM_COMPUTED_TOKENS] = state.records[4, layout.NUM_TOKENS] - 2
    rows.advance_rows(state, step([4], [2], [1]), torch.tensor([4321], device=DEVICE))
    out = inputs_of(1, 1, 1)
    rows.build_inputs(state, step([4], [1], [1]), 1, 1, BLOCK_SIZE, out)
    assert out.token_ids.tolist() == [4321]


def test_changes_of_any_length_are_written_to_their_rows() -> None:
    state = filled()
    staging, expected = Staging(), state.values.clone()
    changes = {0: 3, 40: 1, 300: 0, LAYOUT.token(1, 0): LAYOUT.tokens_width, LAYOUT.token(3, 1): 2 * PIECE + 5}
    for to, size in changes.items():
        values = np.arange(size, dtype=np.int32) - to
        staging.put(to, values if size > 1 else values.tolist())
        expected[to : to + size] = torch.from_numpy(values)
    no_rows = np.zeros(0, dtype=np.int32)
    writes, _ = staging.upload(no_rows, np.zeros(1, dtype=np.int32), no_rows, DEVICE)
    rows.write_rows(state, writes)
    assert torch.equal(state.values, expected)


def test_all_data_of_a_step_is_copied_at_once_with_the_alignment_for_wide_reads() -> None:
    staging = Staging()
    staging.put(5, [1, 2, 3])
    counts = np.array([0, 1, 2], dtype=np.int32)
    writes, at = staging.upload(counts[1:], counts, np.array([0, 0, 1], dtype=np.int32), DEVICE)
    parts = [writes.pieces, writes.values, *at]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert all(part.storage_offset() * part.itemsize % 16 == 0 for part in parts)
    assert (at.rows.tolist(), at.query_start_loc.tolist(), at.sample_start_loc.tolist()) == (
        [1, 2],
        [0, 1, 2],
        [0, 0, 1],
    )


def test_rows_are_contiguous_and_the_last_one_is_for_padding() -> None:
    state, last = RowState(OF_KINDS, PADDING, DEVICE), OF_KINDS.padding_row
    for kind, padding in enumerate(PADDING):
        assert state.tables[kind, last].eq(padding).all()
        assert not state.tables[kind, :last].any()
    places = [(state.records[last], OF_KINDS.record(last)), (state.tokens[last], OF_KINDS.token(last, 0))]
    places += [(state.tables[kind, last], OF_KINDS.block(last, 0, kind)) for kind in range(len(PADDING))]
    for part, place in places:
        assert part.data_ptr() - state.values.data_ptr() == 4 * place
    assert OF_KINDS.size == OF_KINDS.token(last, OF_KINDS.tokens_width) == state.values.numel()


def test_data_that_does_not_fit_is_refused_by_name() -> None:
    state, wanted = filled(), step([3, 0], [1, 1], [1, 1])
    with pytest.raises(ValueError, match="2 requests, of which 2 sample, do not fit into inputs of 2 and 1"):
        rows.build_inputs(state, wanted, 1, 2, BLOCK_SIZE, inputs_of(2, 2, 1))
    short = dataclasses.replace(inputs_of(2, 2, 2), settings=torch.zeros(11, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="2 requests, of which 2 sample, do not fit into inputs of 2 and 1"):
        rows.build_inputs(state, wanted, 1, 2, BLOCK_SIZE, short)
    narrow = dataclasses.replace(short, block_tables=short.block_tables[..., :-1].contiguous())
    with pytest.raises(ValueError, match="block_tables is"):
        rows.build_inputs(state, wanted, 1, 2, BLOCK_SIZE, narrow)
    with pytest.raises(ValueError, match=r"rows is torch\.int64"):
        rows.build_inputs(state, wanted._replace(rows=wanted.rows.long()), 1, 2, BLOCK_SIZE, inputs_of(2, 2, 2))
    pieces = torch.zeros(3, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"pieces is torch\.int32"):
        rows.write_rows(state, RowWrites(pieces, pieces[0]))
    with pytest.raises(ValueError, match=r"sampled is torch\.int32"):
        rows.advance_rows(state, wanted, torch.zeros(2, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match=r"sample_start_loc is \[1\], \[3\] is needed"):
        rows.advance_rows(
            state, wanted._replace(sample_start_loc=wanted.sample_start_loc[:1]), torch.zeros(2, device=DEVICE).long()
        )


@pytest.mark.gpu
def test_a_step_of_realistic_size_equals_the_reference() -> None:
    state = filled()
    at = [row % LAYOUT.padding_row for row in range(512)]
    wanted = step(at, [1] * 512, [1] * 512)
    ours, expected = inputs_of(512, 512, 512), inputs_of(512, 512, 512)
    rows.build_inputs(state, wanted, 1, 512, BLOCK_SIZE, ours)
    reference.build_inputs(state, wanted, 1, 512, BLOCK_SIZE, expected)
    assert_equal(ours, expected)
