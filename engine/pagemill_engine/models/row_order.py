"""Orders of rows: from where files store them to where an executor wants them.

A product's rows are stacked parts; a part may store its own in groups (`RowGroups`). Queries and keys are wanted with
the values that turn together half a head apart: then one rotation over whole heads serves interleaved and partial
rotary embeddings, since a score does not change when its query and key are reordered alike.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from pagemill_protocol.models.declaration import AttentionSpec, LatentAttentionSpec, LinearSpec, RopeSpec, RowGroups


def stacked_order(spec: LinearSpec, order: Tensor | None) -> Tensor | None:
    """The stored row that each row of `spec`'s product is, taken in `order`; `None`: as they are stored."""
    if all(part.groups is None for part in spec.parts):
        return order
    pieces, start = [], 0
    for part in spec.parts:
        own = torch.arange(part.rows) if part.groups is None else _ungrouped(part.groups)
        pieces.append(own + start)
        start += part.rows
    stored = torch.cat(pieces)
    return stored if order is None else stored[order]


def _ungrouped(groups: RowGroups) -> Tensor:
    """All rows of the groups' first size, then all of the second."""
    rows = torch.arange(groups.count * sum(groups.sizes)).view(groups.count, -1)
    ends = list(accumulate(groups.sizes))
    return torch.cat([piece.flatten() for piece in rows.tensor_split(ends[:-1], dim=1)])


def head_order(rope: RopeSpec | None, head_dim: int) -> Tensor | None:
    """The stored value of a head that each of its values is; `None`: as they are stored."""
    if rope is None or (rope.rotary_dim == head_dim and not rope.interleaved):
        return None
    turning, half = torch.arange(rope.rotary_dim), rope.rotary_dim // 2
    first, second = (turning[::2], turning[1::2]) if rope.interleaved else (turning[:half], turning[half:])
    still = torch.arange(rope.rotary_dim, head_dim)
    middle = len(still) // 2
    return torch.cat([first, still[:middle], second, still[middle:]])


def heads_order(order: Tensor | None, num_heads: int) -> Tensor | None:
    """`head_order` for several heads side by side."""
    if order is None:
        return None
    return (torch.arange(num_heads)[:, None] * len(order) + order).flatten()


def qkv_order(spec: AttentionSpec) -> Tensor | None:
    """Of the rows of `spec.qkv`: values stay."""
    order = head_order(spec.rope, spec.head_dim)
    turning = heads_order(order, spec.num_heads + spec.num_kv_heads)
    if turning is None:
        return None
    return torch.cat([turning, torch.arange(len(turning), spec.qkv.out_features)])


def latent_query_order(spec: LatentAttentionSpec) -> Tensor | None:
    """Of the rows of `spec.query`: in each head those behind `key_dim` turn."""
    return heads_order(_behind(spec.key_dim, spec.rope), spec.num_heads)


def latent_order(spec: LatentAttentionSpec) -> Tensor | None:
    """Of the rows of `spec.down`: those of the shared key turn."""
    return _behind(spec.latent_size, spec.rope)


def _behind(still: int, rope: RopeSpec) -> Tensor | None:
    order = head_order(rope, rope.rotary_dim)
    return None if order is None else torch.cat([torch.arange(still), order + still])
