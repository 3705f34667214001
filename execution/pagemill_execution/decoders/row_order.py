"""Orders of rows: maps the order in files to that of an executor.

The rows of a linear layer are stacked parts; a part may be stored in groups (`RowGroups`). Executors want queries and
keys with the values that rotate together half a head apart: then one rotation over whole heads serves interleaved and
partial rotary embeddings, since a score does not change when its query and key are reordered alike.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pagemill_models.declaration.declaration import AttentionSpec, LatentAttentionSpec, LinearSpec, RopeSpec, RowGroups

Order = NDArray[np.int64]


def stacked_order(spec: LinearSpec, order: Order | None) -> Order | None:
    """Return the stored row of each row of `spec`'s matrix, taken in `order`; None: the stored order."""
    if all(part.groups is None for part in spec.parts):
        return order
    pieces, start = [], 0
    for part in spec.parts:
        own = np.arange(part.rows) if part.groups is None else ungrouped(part.groups)
        pieces.append(own + start)
        start += part.rows
    stored = np.concatenate(pieces)
    return stored if order is None else stored[order]


def ungrouped(groups: RowGroups) -> Order:
    """Return all rows of the groups' first size, then all of the second."""
    rows = np.arange(groups.count * sum(groups.sizes)).reshape(groups.count, -1)
    ends = list(accumulate(groups.sizes))
    return np.concatenate([piece.reshape(-1) for piece in np.split(rows, ends[:-1], axis=1)])


def head_order(rope: RopeSpec | None, head_dim: int) -> Order | None:
    """Return the stored index of each value of a head; None: the stored order."""
    if rope is None or (rope.rotary_dim == head_dim and not rope.interleaved):
        return None
    turning, half = np.arange(rope.rotary_dim), rope.rotary_dim // 2
    first, second = (turning[::2], turning[1::2]) if rope.interleaved else (turning[:half], turning[half:])
    still = np.arange(rope.rotary_dim, head_dim)
    middle = len(still) // 2
    return np.concatenate([first, still[:middle], second, still[middle:]])


def heads_order(order: Order | None, num_heads: int) -> Order | None:
    """Return the order of several heads side by side."""
    if order is None:
        return None
    return (np.arange(num_heads)[:, None] * len(order) + order).reshape(-1)


def norm_order(spec: AttentionSpec, size: int) -> Order | None:
    """Return the order of a norm's `size` values over queries or keys, for one head or all of them."""
    return heads_order(head_order(spec.rope, spec.head_dim), size // spec.head_dim)


def qkv_order(spec: AttentionSpec) -> Order | None:
    """Return the order of the rows of `spec.qkv`: queries, keys, values, gates. Values and gates keep theirs."""
    order = head_order(spec.rope, spec.head_dim)
    if spec.key_parts != 2:
        assert order is None
        return None
    turning = heads_order(order, spec.num_heads + spec.num_kv_heads)
    if turning is None and not spec.gated:
        return None
    query_rows, key_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    turning = np.arange(query_rows + key_rows) if turning is None else turning
    gates = np.arange(query_rows if spec.gated else 0) + query_rows
    # Gates are stored behind the queries, and are put behind the values.
    keys = turning[query_rows:] + len(gates)
    values = np.arange(key_rows) + query_rows + len(gates) + key_rows
    return np.concatenate([turning[:query_rows], keys, values, gates])


def latent_query_order(spec: LatentAttentionSpec) -> Order | None:
    """Return the order of the rows of `spec.query`: in each head those behind `key_dim` are rotated."""
    return heads_order(_behind(spec.key_dim, spec.rope), spec.num_heads)


def latent_order(spec: LatentAttentionSpec) -> Order | None:
    """Return the order of the rows of `spec.down`: those of the shared key are rotated."""
    return _behind(spec.latent_size, spec.rope)


def _behind(still: int, rope: RopeSpec | None) -> Order | None:
    order = None if rope is None else head_order(rope, rope.rotary_dim)
    return None if order is None else np.concatenate([np.arange(still), order + still])
