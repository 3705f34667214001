"""An adapter's matrices in the form and order of an executor: packed for the native kernels, or as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from pagemill_execution.adapters.reading import AdapterValues, PartOfAdapter, Pause
from pagemill_execution.decoders.row_order import Order, latent_order, latent_query_order, qkv_order, stacked_order
from pagemill_kernels.adapters.native import PackedAdapter, PartOfB
from pagemill_kernels.arrays import Array, widened
from pagemill_models.declaration.declaration import AttentionSpec, DecoderSpec, LatentAttentionSpec
from pagemill_models.sharding.linears import LinearUse

Packed = Mapping[int, Any]
"""An adapter's matrices by the numbers of linear layers."""
Pack = Callable[[DecoderSpec, AdapterValues, Pause], Packed]


def pack_natively(decoder: DecoderSpec, values: AdapterValues, pause: Pause = lambda: None) -> dict[int, PackedAdapter]:
    """Pack for the native kernels: A and B in bfloat16."""
    return {
        use.number: PackedAdapter(_stacked_a(parts), list(_parts_of_b(decoder, use, parts)))
        for use, parts in _by_linear(values, pause)
    }


def pack_for_torch(decoder: DecoderSpec, values: AdapterValues, pause: Pause = lambda: None) -> dict[int, Any]:
    """Return `AdapterMatrices` in float32."""
    import torch

    from pagemill_kernels.adapters.reference import AdapterMatrices

    return {
        use.number: AdapterMatrices(
            torch.from_numpy(widened(_stacked_a(parts))),
            torch.from_numpy(_whole_b(decoder, use, parts)),
        )
        for use, parts in _by_linear(values, pause)
    }


def num_bytes(packed: Packed) -> int:
    """Return the memory of packed matrices."""
    return sum(
        each.num_bytes if isinstance(each, PackedAdapter) else sum(tensor.nbytes for tensor in each)
        for each in packed.values()
    )


def _stacked_a(parts: Sequence[PartOfAdapter]) -> Array:
    types = {part.a.dtype for part in parts}
    return np.concatenate([part.a if len(types) == 1 else widened(part.a) for part in parts])


def _by_linear(values: AdapterValues, pause: Pause) -> Iterator[tuple[LinearUse, list[PartOfAdapter]]]:
    ordered = sorted(values.parts, key=lambda part: (part.use.number, part.first_row))
    for _, found in groupby(ordered, key=lambda part: part.use.number):
        parts = list(found)
        pause()
        yield parts[0].use, parts


def _parts_of_b(decoder: DecoderSpec, use: LinearUse, parts: Sequence[PartOfAdapter]) -> Iterator[PartOfB]:
    order, first_rank = row_order(decoder, use), 0
    for part in parts:
        if order is None:
            yield PartOfB(part.first_row, first_rank, part.b)
        else:
            at = np.nonzero((order >= part.first_row) & (order < part.first_row + len(part.b)))[0]
            # Orders keep the rows of one stored matrix together, but for gates, which are behind the values.
            for own in np.split(at, np.nonzero(np.diff(at) != 1)[0] + 1):
                yield PartOfB(int(own[0]), first_rank, np.ascontiguousarray(part.b[order[own] - part.first_row]))
        first_rank += part.b.shape[1]


def _whole_b(decoder: DecoderSpec, use: LinearUse, parts: Sequence[PartOfAdapter]) -> Array:
    rows = use.spec.in_features if use.is_table else use.spec.out_features
    whole = np.zeros((rows, sum(part.b.shape[1] for part in parts)), dtype=np.float32)
    first_rank = 0
    for part in parts:
        rank = part.b.shape[1]
        whole[part.first_row : part.first_row + len(part.b), first_rank : first_rank + rank] = part.b
        first_rank += rank
    order = row_order(decoder, use)
    return whole if order is None else np.ascontiguousarray(whole[order])


def row_order(decoder: DecoderSpec, use: LinearUse) -> Order | None:
    """Return the stored row of each of the executors' rows of a linear layer; None: the stored order."""
    if use.layer is None:
        return None if use.is_table else stacked_order(use.spec, None)
    order = None
    for block in decoder.layers[use.layer].blocks():
        if isinstance(block, AttentionSpec) and use.role == "qkv":
            order = qkv_order(block)
        elif isinstance(block, LatentAttentionSpec) and use.role == "query":
            order = latent_query_order(block)
        elif isinstance(block, LatentAttentionSpec) and use.role == "latent_down":
            order = latent_order(block)
    return stacked_order(use.spec, order)
