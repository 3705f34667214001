"""Runs a model whole or divided among threads, over random weights of its declaration."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from declared_families import RandomTensors
from in_process_ranks import in_process_groups

from pagemill_execution.decoders.native.decoder import NativeDecoder
from pagemill_execution.decoders.on_torch.context import ForwardContext, RowsContext
from pagemill_execution.decoders.on_torch.decoder import Decoder
from pagemill_execution.decoders.on_torch.device_rotations import DeviceRotations
from pagemill_execution.decoders.on_torch.encoder_attention import plan_rectangles
from pagemill_execution.decoders.on_torch.filling import load_weights
from pagemill_execution.decoders.rope import Rotations, decoder_tables
from pagemill_execution.decoders.step_model import CachedTokens, StateArrays, StepTokens
from pagemill_execution.runners.torch_model import HostTensorGroup, tensors_of
from pagemill_execution.weights.sliced import SlicedTensors
from pagemill_kernels.native_ops import native_ops
from pagemill_kernels.paged_attention.batch import AttentionBatch
from pagemill_kernels.ranks.group import RankGroup
from pagemill_kernels.ranks.shared_memory import SharedMemoryGroup
from pagemill_kernels.recurrent.batch import StateBatch
from pagemill_kernels.registry import Backend, ops_for
from pagemill_models.declaration.caches import RecurrentSpec
from pagemill_models.declaration.declaration import AnyAttentionSpec, DecoderSpec
from pagemill_models.sharding.shard import Shard
from pagemill_models.spec.model_spec import ModelSpec

LENGTHS = (9, 21)
BLOCK_SIZE, NUM_BLOCKS, MAX_TOKENS = 16, 24, 192
NUM_STATES = len(LENGTHS)
DIVIDED_SECONDS = 60.0
Found = TypeVar("Found")


def by_threads(run: Callable[[Any], Found], size: int, groups: Sequence[RankGroup[Any]] | None = None) -> list[Found]:
    """Return what each rank's thread returns; the first error of a rank ends all of them and is raised.

    `groups`: the ends of a group, if it is not one of threads.
    """
    found: dict[int, Found] = {}
    errors: list[BaseException] = []

    def work(group: RankGroup[Any]) -> None:
        try:
            found[group.rank] = run(group)
        except BaseException as error:
            errors.append(error)
            group.abort(f"rank {group.rank}: {error}")

    threads = [threading.Thread(target=work, args=(group,)) for group in groups or in_process_groups(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DIVIDED_SECONDS)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(size)]


def token_ids(decoder: DecoderSpec, count: int, seed: int = 5) -> Any:
    return np.random.default_rng(seed).integers(0, decoder.vocab_size, count)


def batch_of(decoder: DecoderSpec, starts: Sequence[int], counts: Sequence[int]) -> tuple[AttentionBatch, Any, Any]:
    """Return the batch, positions and slots of requests that compute `counts` tokens behind `starts`."""
    blocks = NUM_BLOCKS // len(counts)
    tables = np.arange(NUM_BLOCKS, dtype=np.int32).reshape(len(counts), blocks)
    positions = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    slots = [
        tables[index][at // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE
        for index, at in enumerate(positions)
    ]
    batch = AttentionBatch(
        query_start_loc=np.cumsum([0, *counts]),
        seq_lens=np.array(starts) + np.array(counts),
        block_tables=tables,
        block_size=BLOCK_SIZE,
        padding_block=NUM_BLOCKS,
    )
    return batch, np.concatenate(positions), np.concatenate(slots)


def empty_caches(decoder: DecoderSpec) -> list[Any]:
    """Return the caches of all layers: arrays of keys and values, and `StateArrays`."""
    return [_empty_cache(list(layer.blocks())) for layer in decoder.layers]


def _empty_cache(blocks: list[Any]) -> Any:
    vectors = next((each for each in blocks if isinstance(each, AnyAttentionSpec)), None)
    recurrent = next((each for each in blocks if isinstance(each, RecurrentSpec)), None)
    cache = None
    if vectors is not None:
        num_heads = vectors.cache_heads if vectors.causal else 2 * vectors.num_kv_heads  # of the step alone
        cache = np.zeros((NUM_BLOCKS + 1, num_heads, BLOCK_SIZE, vectors.head_dim), dtype=np.float32)
    if recurrent is None:
        return np.zeros(0, dtype=np.float32) if cache is None else cache
    spec, rows = recurrent.cache, len(LENGTHS)
    shapes = (*(spec.parts or ((0,),)), (spec.width - 1, spec.channels))
    states, windows = (np.zeros((NUM_STATES + 1, *shape), dtype=np.float32) for shape in shapes)
    log = np.zeros((rows, BLOCK_SIZE, spec.inputs_per_token), dtype=np.float32)
    return StateArrays(states, windows, log, np.zeros((rows, *shapes[-1]), dtype=np.float32), cache)


def state_batch(starts: Sequence[int], counts: Sequence[int]) -> StateBatch:
    """Return the rows of requests that compute `counts` tokens behind `starts`, each with a state of its own."""
    before, ends = np.array(starts), np.array(starts) + np.array(counts)
    boundaries, rows = before // BLOCK_SIZE, np.arange(len(counts))
    writes = [(row, ends[row] // BLOCK_SIZE - boundaries[row], row) for row in rows]
    return StateBatch(
        rows=rows,
        query_start_loc=np.cumsum([0, *counts]),
        sources=np.where(boundaries > 0, rows, NUM_STATES),
        num_logged=before - boundaries * BLOCK_SIZE,
        writes=np.array([each for each in writes if each[1]], dtype=np.int64).reshape(-1, 3),
        block_size=BLOCK_SIZE,
    )


def outputs_on_torch(
    whole: DecoderSpec,
    part: Shard,
    group: RankGroup[Any] | None,
    adapters: Any = None,
    source: Any = None,
    before: Sequence[Any] = (),
    backend: Backend = "cpu",
) -> list[Any]:
    """Return hidden states, and logits where there is a head, of two steps of `LENGTHS` tokens and one token each.

    `adapters`: makes the adapters of the rows of each step, from the number of tokens of each request. `source`: the
    tensors of the whole model. `before`: the hidden states of each step from the stage before.
    """
    ops, decoder = ops_for(backend), part.decoder
    weights: Any = SlicedTensors(source or RandomTensors(whole), whole, decoder, part.slices)
    model = Decoder(ModelSpec(decoder=decoder), ops, torch.float32)
    load_weights(model, weights)
    rotations = DeviceRotations(decoder_tables(decoder, MAX_TOKENS, weights), torch.float32, ops.device)
    caches = list(map(tensors_of, empty_caches(decoder)))
    types, tensors = decoder.embedding.token_types, None if group is None else HostTensorGroup(group)
    found, starts = [], [0] * len(LENGTHS)
    with torch.inference_mode():
        for counts in (LENGTHS, (1,) * len(LENGTHS)) if decoder.is_causal else (LENGTHS,):
            batch, positions, slots = batch_of(decoder, starts, counts)
            plans: dict[int | None, Any] = {window: plan_rectangles(counts, ops.device) for window in decoder.windows()}
            if decoder.is_causal:
                plans = {
                    window: ops.plan_attention(batch, window, torch.float32, ops.device) for window in decoder.windows()
                }
            at = torch.from_numpy(positions)
            rows = None if adapters is None else adapters(counts)
            context = ForwardContext(
                positions=at,
                rotations=rotations.at(at),
                kv_caches=caches,
                kv_slots=dict.fromkeys(decoder.windows(), torch.from_numpy(slots)),
                attention_plans=plans,
                token_types=None if types is None else at % min(2, types.num_rows),
                adapters=rows,
                group=tensors,
                hidden=torch.from_numpy(before[len(found)]) if before else None,
                states=ops.plan_states(state_batch(starts, counts)) if any(decoder.recurrent()) else None,
            )
            ids = torch.from_numpy(token_ids(decoder, len(positions), seed=starts[0]))
            hidden = model(ids, context)
            found.append(hidden.numpy().copy())
            if model.lm_head is not None:
                found.append(model.compute_logits(hidden, RowsContext(rows, tensors)).numpy().copy())
            starts = [start + count for start, count in zip(starts, counts, strict=True)]
    return found


def outputs_natively(
    whole: DecoderSpec,
    part: Shard,
    group: RankGroup[Any] | None,
    adapters: Any = None,
    source: Any = None,
    lengths: Sequence[int] = LENGTHS,
    before: Sequence[Any] = (),
) -> list[Any]:
    """Return what `outputs_on_torch` does, from the native decoder."""
    decoder = part.decoder
    weights: Any = SlicedTensors(source or RandomTensors(whole), whole, decoder, part.slices)
    rotations = Rotations(decoder_tables(decoder, MAX_TOKENS, weights))
    ops = native_ops("cpu_native", "float32")
    reduce = group if isinstance(group, SharedMemoryGroup) else None
    model = NativeDecoder(ModelSpec(decoder=decoder), ops, weights, rotations, group, reduce)
    caches = empty_caches(decoder)
    model.use_caches(caches)
    types = decoder.embedding.token_types
    found, starts = [], [0] * len(lengths)
    for counts in (lengths, (1,) * len(lengths)) if decoder.is_causal else (lengths,):
        batch, positions, slots = batch_of(decoder, starts, counts)
        ids = token_ids(decoder, len(positions), seed=starts[0])
        rows = None if adapters is None else adapters(counts)
        cached = dict.fromkeys(decoder.windows(), CachedTokens(slots, batch))
        step = StepTokens(
            ids,
            positions,
            cached,
            before[len(found)] if before else None,
            states=state_batch(starts, counts) if any(decoder.recurrent()) else None,
            token_types=None if types is None else positions % min(2, types.num_rows),
        )
        hidden = model.hidden(step, rows)
        found.append(hidden.copy())
        if model.head is not None:
            found.append(model.logits(hidden, rows).copy())
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
    return found


def whole_of(decoder: DecoderSpec) -> Shard:
    return Shard(decoder, {})


def smaller(decoder: DecoderSpec, num_layers: int) -> DecoderSpec:
    return msgspec.structs.replace(decoder, layers=decoder.layers[:num_layers])
