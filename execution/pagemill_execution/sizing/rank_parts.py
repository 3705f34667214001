"""The parts of a model that several processes hold, and their bytes, from its declaration and the headers of its files.

`preparing` sizes the KV cache by them and `pagemill plan` shows them; `starting.load_ranks` loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from pagemill_execution.config import ExecutionConfig
from pagemill_execution.sizing.budget import RankSizes, Sizes
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.sliced import SlicedTensors
from pagemill_execution.weights.source import WeightSource
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.sharding.shard import layers_of_stages, shard, stage
from pagemill_models.sharding.slices import Range, ShardError, Slices, dealt
from pagemill_models.spec.model_spec import ModelSpec


class RankPlace(NamedTuple):
    """Where a rank is among `size` ranks that are divided into stages of equally many ranks."""

    layers: Range
    part: int
    """Its number among the ranks of its stage."""
    num_parts: int
    before: int | None
    """The rank that sends it hidden states; None: it embeds tokens."""
    behind: int | None
    """The rank that it sends hidden states to; None: it computes logits."""


def place_of(rank: int, size: int, stages: Sequence[Range]) -> RankPlace:
    """Return where a rank is. Ranks are numbered from the last stage on, so that rank 0 has the head."""
    num_stages = len(stages)
    num_parts = size // num_stages
    turn, part = divmod(rank, num_parts)
    number = num_stages - 1 - turn
    before = rank + num_parts if number > 0 else None
    behind = rank - num_parts if turn > 0 else None
    return RankPlace(stages[number], part, num_parts, before, behind)


class RankPart(NamedTuple):
    spec: ModelSpec
    slices: Slices
    place: RankPlace

    def weights(self, whole: WeightSource, decoder: DecoderSpec) -> SlicedTensors:
        """Return what the rank reads. `decoder`: the whole model's declaration."""
        return SlicedTensors(whole, decoder, self.spec.decoder, self.slices)


def check_division(spec: ModelSpec, size: int, num_stages: int) -> None:
    """Raise `LoadError` for a model that so many ranks cannot divide."""
    if size % num_stages:
        raise LoadError("SettingsUnsupported", f"{size} ranks cannot be divided into {num_stages} equal stages.")
    if num_stages > spec.num_layers:
        raise LoadError(
            "SettingsUnsupported",
            f"{spec.num_layers} layers cannot be divided into {num_stages} stages. Lower pipelineParallel to at most "
            f"{spec.num_layers}.",
        )
    if spec.pooling is not None:
        raise LoadError(
            "SettingsUnsupported",
            "A model that embeds or scores runs in one process. Set tensorParallel and pipelineParallel to 1.",
        )
    part_of(spec, 0, size, dealt(spec.num_layers, num_stages))


def part_of(spec: ModelSpec, rank: int, size: int, stages: Sequence[Range]) -> RankPart:
    """Return a rank's spec and what it reads. Raises `LoadError` for a model that so many ranks cannot divide.

    `stages`: the layers of each (`stages_of`).
    """
    place = place_of(rank, size, stages)
    try:
        own = spec.decoder if len(stages) == 1 else stage(spec.decoder, *place.layers)
        part = shard(own, place.part, place.num_parts)
    except ShardError as error:
        raise LoadError("SettingsUnsupported", f"{error} Lower tensorParallel.") from error
    return RankPart(msgspec.structs.replace(spec, decoder=part.decoder), part.slices, place)


def without_layers(spec: ModelSpec) -> RankPart:
    """Return a whole model's embedding and head."""
    own = shard(msgspec.structs.replace(spec.decoder, layers=()), 0, 1)
    return RankPart(msgspec.structs.replace(spec, decoder=own.decoder), own.slices, place_of(0, 1, [(0, 0)]))


def stages_of(config: ExecutionConfig, spec: ModelSpec) -> list[Range]:
    """Return the layers of each stage of several ranks. Raises `LoadError`."""
    check_division(spec, config.num_ranks, config.pipeline_parallel_size)
    if config.pipeline_parallel_size == 1:
        return [(0, spec.num_layers)]
    return layers_of_stages(spec.decoder, config.pipeline_parallel_size)


def rank_sizes(
    config: ExecutionConfig,
    stages: Sequence[Range],
    weights: WeightSource,
    spec: ModelSpec,
    sizes_of: Callable[[WeightSource, ModelSpec], Sizes],
) -> list[RankSizes]:
    """Return the part of each of several ranks. Raises `LoadError`."""
    parts = [part_of(spec, rank, config.num_ranks, stages) for rank in range(config.num_ranks)]
    return [RankSizes(part.spec, sizes_of(part.weights(weights, spec.decoder), part.spec)) for part in parts]


def together(whole: Sizes, ranks: Sequence[RankSizes]) -> Sizes:
    """Return the sizes of all ranks together; what several have counts several times."""
    if not ranks:
        return whole
    weight_bytes = sum(each.sizes.weight_bytes for each in ranks)
    kv_bytes = sum(each.sizes.kv_bytes_per_token for each in ranks)
    adapter_bytes = sum(each.sizes.adapter_bytes for each in ranks)
    return whole._replace(weight_bytes=weight_bytes, kv_bytes_per_token=kv_bytes, adapter_bytes=adapter_bytes)


def describe_ranks(ranks: Sequence[RankSizes], tensor_parallel_size: int) -> list[str]:
    """Return a line for each stage: its layers, what its ranks hold, and how unevenly heads are dealt."""
    stages = [ranks[first : first + tensor_parallel_size] for first in range(0, len(ranks), tensor_parallel_size)]
    found = [_describe(members, first * tensor_parallel_size) for first, members in enumerate(stages)]
    if len(stages) == 1:
        return found
    return [f"{members[0].spec.num_layers} layers: {text}" for members, text in zip(stages, found, strict=True)]


def _describe(members: Sequence[RankSizes], first: int) -> str:
    heads = [each.spec.num_kv_heads for each in members]
    texts = [
        f"{each.sizes.weight_bytes / 1024**2:.0f} MiB and {each.sizes.kv_bytes_per_token / 1024:.1f} KiB per token"
        for each in members
    ]
    if len(members) > 2 and len(set(texts)) == 1:
        sizes = f"ranks {first} to {first + len(members) - 1} each {texts[0]}"
    else:
        sizes = ", ".join(f"rank {first + number} {text}" for number, text in enumerate(texts))
    if len(set(heads)) == 1:
        return sizes
    busiest = max(heads) * len(heads) / sum(heads)
    dealt_heads = " and ".join(map(str, heads))
    return f"{sizes}; key/value heads are dealt as {dealt_heads}, so attention takes {busiest:.2f} of an even part"
