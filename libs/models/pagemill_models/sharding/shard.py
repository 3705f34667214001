"""Divides a model among ranks (tensor parallel) and its layers among stages (pipeline), as smaller declarations.

Attention and recurrent layers are divided by heads, MLPs and experts by inner units, short convolutions by channels,
embedding and head by rows of the vocabulary; the rest is on every rank. What does not divide is dealt as evenly as it
goes. Ranks add what matrices with a part of the columns compute, in the order of ranks; biases of these are on rank 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from pagemill_models.declaration.caches import (
    ChannelDeltaRuleSpec,
    DeltaRuleSpec,
    ShortConvolutionSpec,
    StateSpaceSpec,
)
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    BlockSpec,
    DecoderSpec,
    LatentAttentionSpec,
    LinearSpec,
    MLPSpec,
    MoESpec,
    NormPart,
    NormSpec,
)
from pagemill_models.sharding.slices import (
    Range,
    Ranges,
    ShardError,
    Slices,
    TensorSlice,
    dealt,
    dealt_by_size,
    merged,
    scaled,
    with_columns,
    with_rows,
)

replace = msgspec.structs.replace
_LARGEST_UNIT = 256
_STATES = "heads with states"


class Shard(NamedTuple):
    decoder: DecoderSpec
    slices: Slices
    """What this rank reads of the tensors of its declaration."""


class HeadsOfRank(NamedTuple):
    queries: Range
    keys: Range
    """Key and value heads."""
    is_first: bool
    """Whether no earlier rank has one of these key and value heads."""


def shard(decoder: DecoderSpec, rank: int, size: int) -> Shard:
    """Return the part of one of `size` ranks. Raises `ShardError`."""
    if decoder.by_transformers:
        raise ShardError(
            f"`{decoder.architecture}` runs by its class in transformers, which cannot be divided among ranks."
        )
    if size == 1:
        return Shard(decoder, {})
    if decoder.vocab_size < size:
        raise ShardError(f"A vocabulary of {decoder.vocab_size} tokens cannot be divided among {size} ranks.")
    part = _Part(rank, size)
    layers = tuple(
        layer.with_branches(lambda branch: replace(branch, block=part.block(branch.block))) for layer in decoder.layers
    )
    rows = dealt(decoder.vocab_size, size)[rank]
    entry = replace(decoder.embedding, num_rows=rows[1] - rows[0])
    if entry.layer_inputs is not None:
        if entry.layer_inputs.num_rows != decoder.vocab_size:
            raise ShardError(f"`{entry.layer_inputs.name}` has other rows than the vocabulary and is not divided.")
        entry = replace(entry, layer_inputs=replace(entry.layer_inputs, num_rows=entry.num_rows))
    divided = replace(decoder, layers=layers, embedding=entry, vocabulary=rows)
    names = {f"{entry.name}.weight"}
    names |= set() if entry.layer_inputs is None else {f"{entry.layer_inputs.name}.weight"}
    names |= {f"{decoder.head.name}.weight"} if decoder.head is not None else set()
    for name in names & divided.shapes().keys():
        part.slices[name] = TensorSlice(0, (rows,))
    if decoder.head is not None and decoder.head.bias:
        (matrix,) = _some(divided.head_linear()).parts
        part.slices[matrix.stored_bias] = TensorSlice(0, (rows,))
    return Shard(divided, part.slices)


def stage(decoder: DecoderSpec, first: int, last: int) -> DecoderSpec:
    """Return the layers from `first` to before `last`. The first layer's stage embeds; the last one's has the head."""
    if not 0 <= first < last <= len(decoder.layers):
        raise ShardError(f"Layers {first} to {last} are no stage of a model with {len(decoder.layers)} layers.")
    ends = last == len(decoder.layers)
    if first or not ends:
        _check_divisible(decoder)
    return replace(
        decoder,
        layers=decoder.layers[first:last],
        embeds=decoder.embeds and first == 0,
        norm=decoder.norm if ends else None,
        head=decoder.head if ends else None,
        classifier=decoder.classifier if ends else None,
    )


def layers_of_stages(decoder: DecoderSpec, num_stages: int) -> list[Range]:
    """Return the layers of each stage, so that each multiplies about as many values in a step.

    Not by bytes: a few rows of a step already take the time of their products, however few bits the weights have, and
    stages have steps to compute at the same time only when several requests run. The last stage has the head, too;
    embedding reads a few rows. All experts of a mixture count, since requests together use all of them.
    """
    bare = replace(decoder, embeds=False, norm=None, head=None, classifier=None)
    sizes = [_num_values(replace(bare, layers=(layer,))) for layer in decoder.layers]
    sizes[-1] += _num_values(replace(decoder, embeds=False, layers=()))
    return dealt_by_size(sizes, num_stages)


def num_multiplied(decoder: DecoderSpec) -> int:
    """Return how many values of a rank's matrices a step multiplies; embedding reads a few rows."""
    return _num_values(replace(decoder, embeds=False))


def _num_values(decoder: DecoderSpec) -> int:
    return sum(map(math.prod, decoder.shapes().values()))


def _check_divisible(decoder: DecoderSpec) -> None:
    """Raise `ShardError` for a model whose layers read more than what the layer before gives."""
    if decoder.embedding.layer_inputs is not None:
        raise ShardError(f"`{decoder.architecture}` has inputs of layers, which stages do not pass on yet.")
    if any(isinstance(each, AttentionSpec) and each.cache_layer is not None for each in decoder.attentions()):
        raise ShardError(f"`{decoder.architecture}` has layers with the keys of others; stages do not divide it yet.")


def heads_of(num_heads: int, num_kv_heads: int, size: int, what: str = "attention heads") -> list[HeadsOfRank]:
    """Return each rank's heads. Where there are fewer key and value heads than ranks, several ranks have the same one.

    In a recurrent layer, value heads are dealt as queries are, and key heads or groups of state spaces as keys. Raises
    `ShardError` if a rank would have no query head.
    """
    per_key = num_heads // num_kv_heads
    if num_kv_heads >= size:
        return [HeadsOfRank(scaled(keys, per_key), keys, True) for keys in dealt(num_kv_heads, size)]
    found = []
    for key, (first, end) in enumerate(dealt(size, num_kv_heads)):
        if per_key < end - first:
            raise ShardError(f"{num_heads} {what} cannot be divided among {size} ranks.")
        for index, queries in enumerate(dealt(per_key, end - first)):
            own = (key * per_key + queries[0], key * per_key + queries[1])
            found.append(HeadsOfRank(own, (key, key + 1), index == 0))
    return found


def units_of(num_values: int, size: int) -> list[Range]:
    """Return each rank's part of an MLP's inner values, or of a short convolution's channels.

    Units are as large as it goes, so that the groups of quantized matrices stay whole. Raises `ShardError`.
    """
    if num_values < size:
        raise ShardError(f"A block of {num_values} inner values cannot be divided among {size} ranks.")
    unit = _LARGEST_UNIT
    while num_values % unit or num_values // unit < size:
        unit //= 2
    return [scaled(units, unit) for units in dealt(num_values // unit, size)]


class _Part:
    """Makes the blocks of one rank, and collects what it reads."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.slices: Slices = {}

    def block(self, spec: BlockSpec) -> BlockSpec:
        if isinstance(spec, AttentionSpec):
            return self._attention(spec)
        if isinstance(spec, LatentAttentionSpec):
            return self._latent_attention(spec)
        if isinstance(spec, MoESpec):
            return self._experts(spec)
        if isinstance(spec, DeltaRuleSpec):
            return self._delta_rule(spec)
        if isinstance(spec, ChannelDeltaRuleSpec):
            return self._channel_delta_rule(spec)
        if isinstance(spec, StateSpaceSpec):
            return self._state_space(spec)
        if isinstance(spec, ShortConvolutionSpec):
            return self._short_convolution(spec)
        assert isinstance(spec, MLPSpec)
        return self._mlp(spec)

    def _attention(self, spec: AttentionSpec) -> AttentionSpec:
        queries, keys, _ = own = heads_of(spec.num_heads, spec.num_kv_heads, self._size)[self._rank]
        size, counts = spec.head_dim, (spec.num_heads, spec.num_kv_heads)
        parts = [(counts[0], queries)] * (1 + spec.gated) + [(counts[1], keys)] * spec.key_parts
        rows = self._parts_of([(count * size, scaled(heads, size)) for count, heads in parts])
        if spec.sinks is not None:
            self.slices[spec.sinks] = TensorSlice(0, (queries,))
        slopes = spec.alibi_slopes
        return replace(
            spec,
            num_heads=queries[1] - queries[0],
            num_kv_heads=keys[1] - keys[0],
            qkv=self._rows(spec.qkv, rows),
            head_gates=None if spec.head_gates is None else self._rows(spec.head_gates, (queries,)),
            output=self._columns(spec.output, (scaled(queries, size),)),
            query_norm=self._norm(spec.query_norm, size, queries, adds=True),
            key_norm=self._norm(spec.key_norm, size, keys, adds=own.is_first),
            alibi_slopes=None if slopes is None else slopes[slice(*queries)],
        )

    def _latent_attention(self, spec: LatentAttentionSpec) -> LatentAttentionSpec:
        heads = heads_of(spec.num_heads, spec.num_heads, self._size)[self._rank].queries
        return replace(
            spec,
            num_heads=heads[1] - heads[0],
            query=self._rows(spec.query, (scaled(heads, spec.key_dim + spec.shared_size),)),
            up=self._rows(spec.up, (scaled(heads, spec.key_dim + spec.value_dim),)),
            output=self._columns(spec.output, (scaled(heads, spec.value_dim),)),
        )

    def _delta_rule(self, spec: DeltaRuleSpec) -> DeltaRuleSpec:
        values, keys, _ = heads_of(spec.num_value_heads, spec.num_key_heads, self._size, _STATES)[self._rank]
        of_keys = spec.num_key_heads * spec.key_dim, scaled(keys, spec.key_dim)
        of_values = spec.num_value_heads * spec.value_dim, scaled(values, spec.value_dim)
        self._convolved(spec.convolutions, [of_keys, of_keys, of_values])
        self._cut((f"{spec.name}.A_log", f"{spec.name}.dt_bias"), (values,))
        return replace(
            spec,
            num_key_heads=keys[1] - keys[0],
            num_value_heads=values[1] - values[0],
            inputs=self._rows(spec.inputs, self._parts_of([of_keys, of_keys, of_values, of_values])),
            rates=self._rows(spec.rates, self._parts_of([(spec.num_value_heads, values)] * 2)),
            output=self._columns(spec.output, (of_values[1],)),
        )

    def _channel_delta_rule(self, spec: ChannelDeltaRuleSpec) -> ChannelDeltaRuleSpec:
        count = spec.num_value_heads
        heads = heads_of(count, count, self._size, _STATES)[self._rank].queries
        keys, values = scaled(heads, spec.key_dim), scaled(heads, spec.value_dim)
        mixed = [(count * spec.key_dim, keys)] * 2 + [(count * spec.value_dim, values)]
        self._convolved(spec.convolutions, mixed)
        self._cut((f"{spec.decay_name}.dt_bias",), (keys,))
        self.slices[f"{spec.decay_name}.A_log"] = TensorSlice(2, (heads,))
        return replace(
            spec,
            num_value_heads=heads[1] - heads[0],
            inputs=self._rows(spec.inputs, self._parts_of(mixed)),
            rates=self._rows(spec.rates, (heads,)),
            decay_up=self._rows(spec.decay_up, (keys,)),
            gate_up=self._rows(spec.gate_up, (values,)),
            output=self._columns(spec.output, (values,)),
        )

    def _state_space(self, spec: StateSpaceSpec) -> StateSpaceSpec:
        count = spec.num_value_heads
        heads, groups, _ = heads_of(count, spec.num_groups, self._size, _STATES)[self._rank]
        values = count * spec.head_dim, scaled(heads, spec.head_dim)
        read = spec.num_groups * spec.state_size, scaled(groups, spec.state_size)
        convolved = self._parts_of([values, read, read])
        self._cut(tuple(f"{spec.name}.{part}" for part in ("A_log", "D", "dt_bias")), (heads,))
        self._cut((f"{spec.name}.conv1d.weight", *((f"{spec.name}.conv1d.bias",) if spec.bias else ())), convolved)
        if spec.norm is not None:
            self._cut((f"{spec.norm.name}.weight",), (values[1],))
        size, num_groups = values[1][1] - values[1][0], groups[1] - groups[0]
        has_whole_parts = spec.norm_parts == spec.num_groups >= self._size
        return replace(
            spec,
            num_groups=num_groups,
            num_value_heads=heads[1] - heads[0],
            inputs=self._rows(spec.inputs, self._parts_of([values, values, read, read, (count, heads)])),
            norm=None if spec.norm is None else replace(spec.norm, size=size),
            norm_parts=num_groups if has_whole_parts else spec.norm_parts,
            norm_heads=None if spec.norm is None or has_whole_parts else (heads[0], count),
            output=self._columns(spec.output, (values[1],)),
        )

    def _short_convolution(self, spec: ShortConvolutionSpec) -> ShortConvolutionSpec:
        channels = units_of(spec.channels, self._size)[self._rank]
        self._cut((f"{spec.name}.weight", *((f"{spec.name}.bias",) if spec.bias else ())), (channels,))
        return replace(
            spec,
            channels=channels[1] - channels[0],
            inputs=self._rows(spec.inputs, self._parts_of([(spec.channels, channels)] * 3)),
            output=self._columns(spec.output, (channels,)),
        )

    def _convolved(self, stored: dict[str, int], parts: list[tuple[int, Range]]) -> None:
        """Cut the kernels of the channels of `parts`, which are in one tensor or in one each."""
        if len(stored) == 1:
            self._cut((f"{next(iter(stored))}.weight",), self._parts_of(parts))
            return
        for name, (_, own) in zip(stored, parts, strict=True):
            self._cut((f"{name}.weight",), (own,))

    def _cut(self, names: tuple[str, ...], rows: Ranges) -> None:
        for name in names:
            self.slices[name] = TensorSlice(0, rows)

    @staticmethod
    def _parts_of(parts: list[tuple[int, Range]]) -> Ranges:
        """Return what a rank has of consecutive parts: each its size, and a range within it."""
        first, found = 0, []
        for size, own in parts:
            found.append((first + own[0], first + own[1]))
            first += size
        return merged(found)

    def _mlp(self, spec: MLPSpec) -> MLPSpec:
        units, inner = units_of(spec.intermediate_size, self._size)[self._rank], spec.intermediate_size
        rows = self._parts_of([(inner, units)] * (1 + spec.gated))
        first = None if spec.layer_input is None else spec.layer_input + units[0]
        return replace(spec, up=self._rows(spec.up, rows), down=self._columns(spec.down, (units,)), layer_input=first)

    def _experts(self, spec: MoESpec) -> MoESpec:
        """Divide each expert. Its rank's part of the sum is multiplied by what is behind, so that one rank adds its
        bias."""
        shared, behind = spec.shared, spec.behind
        if behind is not None:
            parts = tuple(replace(part, bias=part.bias and self._rank == 0) for part in behind.parts)
            behind = LinearSpec(behind.in_features, parts)
        return replace(
            spec,
            behind=behind,
            experts=tuple(map(self._mlp, spec.experts)),
            shared=None if shared is None else replace(shared, mlp=self._mlp(shared.mlp)),
        )

    def _norm(self, spec: NormSpec | None, head_dim: int, heads: Range, adds: bool) -> NormSpec | None:
        """Return the norm of some heads; one that serves each head alone stays as it is."""
        if spec is not None and spec.heads is not None:
            if "{head}" not in (spec.stored or ""):
                self.slices[f"{spec.name}.{spec.stored}"] = TensorSlice(0, (heads,))
            return replace(spec, heads=heads)
        if spec is None or spec.size == head_dim:
            return spec
        if spec.kind != "rms":
            raise ShardError(f"The layer norm `{spec.name}` over all heads cannot be divided among ranks.")
        values = scaled(heads, head_dim)
        self.slices[f"{spec.name}.weight"] = TensorSlice(0, (values,))
        return replace(spec, size=values[1] - values[0], part=NormPart(spec.size, adds))

    def _rows(self, spec: LinearSpec, rows: Ranges) -> LinearSpec:
        return self._kept(with_rows(spec, rows))

    def _columns(self, spec: LinearSpec, columns: Ranges) -> LinearSpec:
        return self._kept(with_columns(spec, columns, keeps_bias=self._rank == 0))

    def _kept(self, made: tuple[LinearSpec, Slices]) -> LinearSpec:
        spec, slices = made
        self.slices |= slices
        return spec


def _some(value: LinearSpec | None) -> LinearSpec:
    assert value is not None
    return value
