"""Random adapters of a declared model: as the seams of both executors take them, and as merged weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from declared_families import RandomTensors

from pagemill_execution.decoders.row_order import latent_order, latent_query_order, qkv_order, stacked_order
from pagemill_kernels import arrays
from pagemill_kernels.adapters.native import NativeAdapters, PackedAdapter, pack
from pagemill_kernels.adapters.reference import AdapterMatrices, PlainAdapterRows
from pagemill_kernels.adapters.triton_launch import AdapterStack, TritonAdapterRows, stacked
from pagemill_models.declaration.declaration import AttentionSpec, DecoderSpec, LatentAttentionSpec
from pagemill_models.sharding.linears import LinearUse, Role, StoredRows, linears
from pagemill_models.sharding.shard import Shard
from pagemill_models.sharding.slices import TensorSlice


class Matrices(NamedTuple):
    use: LinearUse
    a: Any
    """float32 [rank, in]."""
    b: Any
    """float32 [out, rank]; rows as they are stored. Both have values of bfloat16."""


Scripted = dict[int, Matrices]
"""By the number of a linear layer."""


def scripted(decoder: DecoderSpec, seed: int, roles: Sequence[Role] = (), rank: int = 5, size: float = 0.2) -> Scripted:
    """Return an adapter of the layers with these roles, or of all."""
    generator = np.random.default_rng(seed)
    found = {}
    for use in linears(decoder):
        if use.role == "classifier" or (roles and use.role not in roles):
            continue
        # The embedding's A has a column for each token, its B a row for each value.
        ins, outs = use.spec.in_features, use.spec.out_features
        ins, outs = (outs, ins) if use.is_table else (ins, outs)
        a = generator.standard_normal((rank, ins), dtype=np.float32) * np.float32(size)
        b = generator.standard_normal((outs, rank), dtype=np.float32) * np.float32(size)
        found[use.number] = Matrices(use, _as_bfloat16(a), _as_bfloat16(b))
    return found


class MergedTensors(RandomTensors):
    """The tensors of a model into which an adapter is merged."""

    def __init__(self, decoder: DecoderSpec, adapter: Scripted) -> None:
        super().__init__(decoder)
        self._deltas: dict[str, Any] = {}
        for use, a, b in adapter.values():
            whole = (b @ a).T if use.is_table else b @ a
            for stored in use.stored():
                self._deltas[stored.name] = self._deltas.get(stored.name, 0) + whole[stored.first : stored.end]

    def array(self, name: str) -> Any:
        return super().array(name) + self._deltas.get(name, np.float32(0))


def of_shard(adapter: Scripted, part: Shard) -> Scripted:
    """Return a rank's part: rows of B, columns of A, or both whole, as the matrices of the product are divided."""
    found = {}
    for number, use in enumerate(linears(part.decoder)):
        if number not in adapter:
            continue
        whole, a, b = adapter[number]
        kept = [stored for stored in whole.stored() if stored.name in part.decoder.shapes()]
        rows = np.concatenate([_rows(stored, part.slices.get(stored.name)) for stored in kept])
        columns = _indices(part.slices.get(whole.stored()[0].name), 1, whole.spec.in_features)
        if use.is_table:
            found[number] = Matrices(use, a[:, rows], b)
        else:
            found[number] = Matrices(use, a[:, columns], b[rows])
    return found


def _rows(stored: StoredRows, found: TensorSlice | None) -> Any:
    return stored.first + _indices(found, 0, stored.end - stored.first)


def _indices(found: TensorSlice | None, dimension: int, size: int) -> Any:
    if found is None or found.dimension != dimension:
        return np.arange(size)
    return np.concatenate([np.arange(first, end) for first, end in found.ranges])


def slots_of(counts: Sequence[int], of_requests: Sequence[int]) -> Any:
    return np.repeat(np.array(of_requests, dtype=np.int32), counts)


def natively(decoder: DecoderSpec, loaded: dict[int, Scripted], of_requests: Sequence[int]) -> Any:
    """Return what makes the native rows of a step, whose requests have these slots."""
    packed: dict[int, dict[int, PackedAdapter]] = {
        slot: {number: pack(each.a, _in_order(decoder, each)) for number, each in adapter.items()}
        for slot, adapter in loaded.items()
    }
    adapters = NativeAdapters(packed, len(linears(decoder)))
    return lambda counts: adapters.rows(slots_of(counts, of_requests))


def on_torch(decoder: DecoderSpec, loaded: dict[int, Scripted], of_requests: Sequence[int]) -> Any:
    """Return what makes torch's rows of a step."""
    tensors = {
        slot: {
            number: AdapterMatrices(torch.from_numpy(each.a), torch.from_numpy(_in_order(decoder, each)))
            for number, each in adapter.items()
        }
        for slot, adapter in loaded.items()
    }
    return lambda counts: PlainAdapterRows(torch.from_numpy(slots_of(counts, of_requests)).long(), tensors)


def on_triton(decoder: DecoderSpec, loaded: dict[int, Scripted], of_requests: Sequence[int]) -> Any:
    """Return what makes Triton's rows of a step."""
    uses, slots = linears(decoder), range(max(loaded, default=0) + 1)
    stacks: dict[int, AdapterStack] = {}
    for use in uses:
        if use.expert:
            continue  # stacked with the first expert's
        same = [each.number for each in uses if (each.layer, each.role) == (use.layer, use.role)]
        found = [_tensors(decoder, loaded.get(slot, {}).get(number)) for slot in slots for number in same]
        if any(found):
            stacks[use.number] = stacked(found, len(same))
    return lambda counts: TritonAdapterRows(torch.from_numpy(slots_of(counts, of_requests)).long(), stacks)


def _tensors(decoder: DecoderSpec, each: Matrices | None) -> AdapterMatrices | None:
    if each is None:
        return None
    return AdapterMatrices(torch.from_numpy(each.a), torch.from_numpy(_in_order(decoder, each)))


def _in_order(decoder: DecoderSpec, each: Matrices) -> Any:
    """Return B with its rows in the executors' order."""
    order = None
    if each.use.layer is not None and each.use.role != "embedding":
        attention = next(
            (
                block
                for block in decoder.layers[each.use.layer].blocks()
                if isinstance(block, AttentionSpec | LatentAttentionSpec)
            ),
            None,
        )
        if isinstance(attention, AttentionSpec):
            order = qkv_order(attention) if each.use.role == "qkv" else None
        elif attention is not None:
            order = {"query": latent_query_order, "latent_down": latent_order}.get(each.use.role, lambda _: None)(
                attention
            )
    order = None if each.use.role == "embedding" else stacked_order(each.use.spec, order)
    return np.ascontiguousarray(each.b if order is None else each.b[order])


def _as_bfloat16(values: Any) -> Any:
    return arrays.widened(arrays.rounded(values))
