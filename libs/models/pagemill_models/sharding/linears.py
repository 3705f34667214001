"""All linear layers of a model with their numbers, roles, and how ranks divide them.

Adapters, which add to the products of a step, and `shard`, which divides them, find a layer here by its number, and its
stored matrices by name. The numbers of a layer are consecutive, in the order in which its blocks declare them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Literal, NamedTuple

from pagemill_models.declaration.caches import ChannelDeltaRuleSpec, DeltaRuleSpec, RecurrentSpec
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    BlockSpec,
    DecoderSpec,
    LatentAttentionSpec,
    LinearSpec,
    MatrixSpec,
    MoESpec,
)

Role = Literal[
    "qkv", "head_gates", "state_inputs", "state_rates", "state_decay_down", "state_decay_up", "state_gate_down",
    "state_gate_up", "query_down", "query", "latent_down", "latent_up", "output",
    "up", "down", "router", "expert_up", "expert_down", "shared_up", "shared_down", "shared_gate",
    "before_experts", "behind_experts",
    "embedding", "embedding_projection", "layer_inputs", "layer_projection", "head_projection", "head", "classifier",
]  # fmt: skip
Split = Literal["rows", "columns", "vocabulary", "whole"]

SPLITS: dict[Role, Split] = {
    "qkv": "rows",
    "head_gates": "rows",
    "state_inputs": "rows",
    "state_rates": "rows",
    "state_decay_down": "whole",
    "state_decay_up": "rows",
    "state_gate_down": "whole",
    "state_gate_up": "rows",
    "query_down": "whole",
    "query": "rows",
    "latent_down": "whole",
    "latent_up": "rows",
    "output": "columns",
    "up": "rows",
    "down": "columns",
    "router": "whole",
    "expert_up": "rows",
    "expert_down": "columns",
    "shared_up": "rows",
    "shared_down": "columns",
    "shared_gate": "whole",
    "before_experts": "whole",
    "behind_experts": "whole",
    "embedding": "vocabulary",
    "embedding_projection": "whole",
    "layer_inputs": "vocabulary",
    "layer_projection": "whole",
    "head_projection": "whole",
    "head": "vocabulary",
    "classifier": "whole",
}
"""What a rank holds: outputs (heads, channels or inner units), the inputs of the same units, rows of the vocabulary, or
all. The products of a matrix that is divided by its columns are partial sums."""


class StoredRows(NamedTuple):
    """The rows of a linear layer that one stored matrix fills."""

    name: str
    first: int
    end: int


class LinearUse(NamedTuple):
    number: int
    layer: int | None
    """Index of the layer; None outside of the layers."""
    role: Role
    spec: LinearSpec
    expert: int | None = None

    @property
    def split(self) -> Split:
        return SPLITS[self.role]

    @property
    def is_table(self) -> bool:
        """Whether rows are read by token ids, and nothing is multiplied."""
        return self.role in ("embedding", "layer_inputs")

    def stored(self) -> list[StoredRows]:
        """Return the stored matrices, with the rows that they fill."""
        found: list[StoredRows] = []
        for part in self.spec.parts:
            first = found[-1].end if found else 0
            found.append(StoredRows(f"{part.name}.weight", first, first + part.rows))
        return found


def linears(decoder: DecoderSpec) -> list[LinearUse]:
    """Return all linear layers in the order of their numbers. The embedding counts as one; a tied head, too."""
    numbers = count()
    found = [
        LinearUse(next(numbers), index, role, spec, expert)
        for index, layer in enumerate(decoder.layers)
        for block in layer.blocks()
        for role, spec, expert in _of_block(block)
    ]
    return found + [LinearUse(next(numbers), None, role, spec) for role, spec in _outside(decoder)]


def _of_block(block: BlockSpec) -> Iterator[tuple[Role, LinearSpec, int | None]]:
    """Yield the linear layers of a block in the order of `block.linears()`."""
    if isinstance(block, AttentionSpec):
        yield "qkv", block.qkv, None
        if block.head_gates is not None:
            yield "head_gates", block.head_gates, None
    elif isinstance(block, RecurrentSpec):
        yield "state_inputs", block.inputs, None
        if isinstance(block, DeltaRuleSpec | ChannelDeltaRuleSpec):
            yield "state_rates", block.rates, None
        if isinstance(block, ChannelDeltaRuleSpec):
            yield "state_decay_down", block.decay_down, None
            yield "state_decay_up", block.decay_up, None
            yield "state_gate_down", block.gate_down, None
            yield "state_gate_up", block.gate_up, None
    elif isinstance(block, LatentAttentionSpec):
        if block.query_down is not None:
            yield "query_down", block.query_down, None
        yield "query", block.query, None
        yield "latent_down", block.down, None
        yield "latent_up", block.up, None
    elif isinstance(block, MoESpec):
        yield from _of_experts(block)
        return
    else:
        yield "up", block.up, None
        yield "down", block.down, None
        return
    yield "output", block.output, None


def _of_experts(block: MoESpec) -> Iterator[tuple[Role, LinearSpec, int | None]]:
    yield "router", block.router, None
    for index, expert in enumerate(block.experts):
        yield "expert_up", expert.up, index
        yield "expert_down", expert.down, index
    if block.shared is not None:
        yield "shared_up", block.shared.mlp.up, None
        yield "shared_down", block.shared.mlp.down, None
        if block.shared.gate is not None:
            yield "shared_gate", block.shared.gate, None
    if block.before is not None and block.behind is not None:
        yield "before_experts", block.before, None
        yield "behind_experts", block.behind, None


def _outside(decoder: DecoderSpec) -> Iterator[tuple[Role, LinearSpec]]:
    entry, head = decoder.embedding, decoder.head
    if decoder.embeds:
        yield "embedding", LinearSpec(entry.size, (MatrixSpec(name=entry.name, rows=entry.num_rows),))
        if entry.projection is not None:
            yield "embedding_projection", entry.projection
        if entry.layer_inputs is not None:
            yield "layer_inputs", entry.layer_inputs.table
            yield "layer_projection", entry.layer_inputs.projection
    if head is not None and head.projection is not None:
        yield "head_projection", head.projection
    if (product := decoder.head_linear()) is not None:
        yield "head", product
    for dense in () if decoder.classifier is None else decoder.classifier.layers:
        yield "classifier", dense.linear
