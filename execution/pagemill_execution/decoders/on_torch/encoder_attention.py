"""Attention of encoders: each token of a prompt attends to all of its tokens, and no cache is kept.

The prompts of a step follow one another without padding. Only for attention they are gathered into rectangles of
equally long rows. A row's length follows from its own prompt, so that a prompt's result does not depend on the others
of its step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill_execution.decoders.on_torch.blocks import head_norm, normalize
from pagemill_execution.decoders.on_torch.context import ForwardContext
from pagemill_execution.decoders.on_torch.layers import Layer, Linear
from pagemill_execution.decoders.row_order import qkv_order
from pagemill_kernels.registry import Ops
from pagemill_models.declaration.declaration import AttentionSpec

ROW_TOKENS = 16
"""The row length of a rectangle is a multiple of this many tokens."""
WINDOW_CHUNK = 256
"""Queries per piece of windowed attention, which computes fewer scores outside the window."""


class Rectangle(NamedTuple):
    """Prompts of nearly one length, as the rows of a matrix."""

    tokens: Tensor
    """int64 [rows * length]: index of the step's token at each position; padding repeats the row's first token."""
    places: Tensor
    """int64 [tokens]: position of each token in the rectangle, in the order of the step's tokens."""
    lengths: Tensor
    """int64 [rows, 1]."""
    num_rows: int
    length: int

    def to(self, device: torch.device) -> Rectangle:
        return self._replace(
            tokens=self.tokens.to(device), places=self.places.to(device), lengths=self.lengths.to(device)
        )

    @property
    def is_padded(self) -> bool:
        return len(self.places) < self.num_rows * self.length


class EncoderPlan(NamedTuple):
    rectangles: list[Rectangle]
    order: Tensor | None
    """int64 [tokens]: index of each of the step's tokens in the concatenated rectangles; None: they are in order."""


def plan_rectangles(lengths: Sequence[int], device: torch.device) -> EncoderPlan:
    """Plan the rectangles of a step. `lengths`: those of the prompts, in the order of their tokens."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(-(-length // ROW_TOKENS) * ROW_TOKENS, []).append(index)
    rectangles, sources = [], []
    for length, rows in sorted(by_length.items()):
        counts = torch.tensor([lengths[row] for row in rows])[:, None]
        firsts = starts[torch.tensor(rows)][:, None]
        columns = torch.arange(length)[None]
        is_token = columns < counts
        tokens = torch.where(is_token, firsts + columns, firsts)
        sources.append(tokens[is_token])
        places = is_token.flatten().nonzero()[:, 0]
        rectangle = Rectangle(tokens.flatten(), places, counts, len(rows), length)
        rectangles.append(rectangle.to(device))
    together = torch.cat(sources)
    order = together.argsort()
    is_ordered = bool((together[1:] > together[:-1]).all())
    return EncoderPlan(rectangles, None if is_ordered else order.to(device))


class EncoderAttention:
    def __init__(self, spec: AttentionSpec, ops: Ops, dtype: torch.dtype, number: int, rotation: int | None) -> None:
        """Build the layer.

        `number`: that of its first linear layer. `rotation`: index of its rotary embedding among the model's.
        """
        self.spec = spec
        self.dtype = dtype
        self.qkv = Linear(spec.qkv, ops, dtype, number, qkv_order(spec))
        self.output = Linear(spec.output, ops, dtype, number + 1)
        self.query_norm = head_norm(spec.query_norm, spec, ops, dtype)
        self.key_norm = head_norm(spec.key_norm, spec, ops, dtype)
        self._rotation = rotation

    def layers(self) -> Iterator[Layer]:
        yield self.qkv
        yield self.output
        yield from (norm for norm in (self.query_norm, self.key_norm) if norm is not None)

    def inner(self, x: Tensor, context: ForwardContext) -> Tensor:
        spec = self.spec
        heads = self.qkv(x, context).to(self.dtype).view(len(x), -1, spec.head_dim)
        first_value = spec.num_heads + spec.num_kv_heads
        if self.query_norm is not None:
            normalize(self.query_norm, heads[:, : spec.num_heads], context)
        if self.key_norm is not None:
            normalize(self.key_norm, heads[:, spec.num_heads : first_value], context)
        if self._rotation is not None:
            _rotate(heads[:, :first_value], *context.rotations[self._rotation])
        plan: EncoderPlan = context.attention_plans[spec.window]
        pieces = [self._attend(heads, rectangle) for rectangle in plan.rectangles]
        together = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return together if plan.order is None else together[plan.order]

    def _attend(self, heads: Tensor, rectangle: Rectangle) -> Tensor:
        """Compute attention, [tokens of the rectangle, heads * head_dim]."""
        spec, (rows, length) = self.spec, (rectangle.num_rows, rectangle.length)
        gathered = heads.index_select(0, rectangle.tokens).view(rows, length, -1, spec.head_dim).transpose(1, 2)
        first_value = spec.num_heads + spec.num_kv_heads
        query, key, value = gathered.tensor_split((spec.num_heads, first_value), dim=1)
        if spec.window is None or length <= spec.window:
            attended = self._scaled(query, key, value, _padding(rectangle, 0, length))
        else:
            attended = self._windowed(query, key, value, rectangle, spec.window)
        return attended.transpose(1, 2).reshape(rows * length, -1).index_select(0, rectangle.places)

    def _windowed(self, query: Tensor, key: Tensor, value: Tensor, rectangle: Rectangle, window: int) -> Tensor:
        pieces = []
        for begin in range(0, rectangle.length, WINDOW_CHUNK):
            end = min(begin + WINDOW_CHUNK, rectangle.length)
            first, last = max(0, begin - window + 1), min(rectangle.length, end + window - 1)
            at = torch.arange(begin, end, device=query.device)[:, None]
            seen = torch.arange(first, last, device=query.device)[None]
            near = (at - seen).abs() < window
            real = _padding(rectangle, first, last)
            # Padding positions must see something: their values are gathered too and must be finite.
            mask = near[None, None] if real is None else (near[None, None] & real) | (at == seen)[None, None]
            pieces.append(self._scaled(query[:, :, begin:end], key[:, :, first:last], value[:, :, first:last], mask))
        return torch.cat(pieces, dim=2)

    def _scaled(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        shared = self.spec.num_heads != self.spec.num_kv_heads
        return F.scaled_dot_product_attention(query, key, value, mask, scale=self.spec.scale, enable_gqa=shared)


def _padding(rectangle: Rectangle, first: int, last: int) -> Tensor | None:
    """Return which positions from `first` to `last` are tokens, [rows, 1, 1, positions]; None: all of them."""
    if not rectangle.is_padded:
        return None
    places = torch.arange(first, last, device=rectangle.lengths.device)[None]
    return (places < rectangle.lengths)[:, None, None]


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads in place, [tokens, heads, head_dim]. cos and sin: [tokens, 1, head_dim / 2]."""
    first, second = heads.chunk(2, dim=2)
    turned = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(turned)
