"""A whole decoder or encoder on the CPU without torch, over numpy arrays; all layers are one native call.

It is built from its declaration and filled from named tensors; a `models.step_model.StepModel`. Arithmetic is float32
and bitwise equal to that of `decoders.on_torch.decoder` over the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pagemill_execution.decoders.fitting import check_tensors
from pagemill_execution.decoders.native.layers import layer_bytes, layer_parts, query_growths
from pagemill_execution.decoders.native.parts import Ids, Parts, Rows, norm_bytes, normalized
from pagemill_execution.decoders.rope import Rotations, query_factors
from pagemill_execution.decoders.step_model import CachedTokens, LayerCache, StateArrays, StepTokens
from pagemill_execution.decoders.tensors import TensorSource, read_tensor
from pagemill_kernels import arrays
from pagemill_kernels.activation import native as activation
from pagemill_kernels.adapters.native import NativeAdapterRows
from pagemill_kernels.arrays import Array
from pagemill_kernels.decoder_layer.native import CacheAddresses, NativeLayers
from pagemill_kernels.linear.native import NativeLinear
from pagemill_kernels.native_ops import NativeOps
from pagemill_kernels.paged_attention.batch import AttentionBatch
from pagemill_kernels.ranks.group import RankGroup
from pagemill_kernels.ranks.reduce import CalledReduce, NativeReduce
from pagemill_kernels.ranks.shared_logits import SharedLogits
from pagemill_kernels.recurrent.native import NativeStates
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    ClassifierSpec,
    DecoderSpec,
    DenseSpec,
    HeadSpec,
    LayerInputsSpec,
    LayerSpec,
    LinearSpec,
)
from pagemill_models.sharding.linears import Role, linears
from pagemill_models.spec.model_spec import ModelSpec

_ENCODER_BLOCK = 16
"""Tokens of a block of an encoder's keys and values."""


class NativeDecoder:
    def __init__(
        self,
        spec: ModelSpec,
        ops: NativeOps,
        source: TensorSource,
        rotations: Rotations,
        group: RankGroup[Array] | None = None,
        reduce: NativeReduce | None = None,
        logits: SharedLogits | None = None,
        *,
        gathers_logits: bool = True,
    ) -> None:
        """Build the decoder and load its weights. Raises `WeightsError` for tensors that do not fit.

        `group`: the ranks that compute the model together, each with a declaration of its own. `reduce`: the group's
        sums inside the layers; None: called back from there. `logits`: where the ranks write theirs; None: they
        exchange them, or, without `gathers_logits`, each has those of its columns.
        """
        declared = spec.decoder
        check_tensors(declared.shapes(), source.shapes)
        parts = Parts(source, ops)
        self.spec = spec
        self._rotations = rotations
        self._plan_attention = ops.plan_attention
        self._windows = declared.windows()
        self._growth = next(iter(query_growths(declared)), None)
        self._group = group
        self._head_group = group if gathers_logits else None
        self._reduce = reduce if reduce is not None or group is None else CalledReduce(group)
        uses = linears(declared)
        firsts = {use.layer: use.number for use in reversed(uses)}
        outside = {use.role: use.number for use in uses if use.layer is None}
        # In the order of the files, the last of which may still be being fetched; a tied head has the embedding's
        # matrix.
        product = declared.head_linear()
        tied = _Head(declared.head, product, outside, parts, logits) if declared.head and declared.head.tied else None
        lent = None if tied is None else tied.product
        self.embedding = _Embedding(declared, outside, parts, lent) if declared.embeds else None
        """None in a later stage of a pipeline."""
        found = declared.embedding.layer_inputs if declared.embeds else None
        self.layer_inputs = None if found is None else _LayerInputs(found, declared, outside, parts)
        self.layers = [
            layer_parts(layer, declared.rotations(), firsts[index], parts)
            for index, layer in enumerate(declared.layers)
        ]
        self.norm = parts.norm(declared.norm)
        self.head = tied or (None if declared.head is None else _Head(declared.head, product, outside, parts, logits))
        self.classifier = None if declared.classifier is None else NativeClassifier(declared.classifier, parts)
        self._runs = [(0, NativeLayers(self.layers))] if self.layers else []
        """The layers, divided where hidden states are kept, with the number of each first one."""
        # A layer without keys and values of its own reads those of an earlier one.
        self._cached_in = [_cache_of(layer, index) for index, layer in enumerate(declared.layers)]
        self._caches: list[CacheAddresses] = []
        self.kept: list[Array] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in memory; a matrix shared by head and embedding counts once."""
        held = sum(map(layer_bytes, self.layers)) + norm_bytes(self.norm)
        held += sum(each.num_bytes for each in (self.embedding, self.layer_inputs) if each is not None)
        held += 0 if self.head is None else self.head.num_bytes
        return held + (0 if self.classifier is None else self.classifier.num_bytes)

    def use_caches(self, caches: Sequence[LayerCache]) -> None:
        kept = [caches[layer] for layer in self._cached_in] if caches else []
        ends = [*(first for first, _ in self._runs[1:]), len(kept)]
        runs = zip(self._runs, ends, strict=True)
        self._caches = [addresses_of(kept[first:end]) for (first, _), end in runs] if kept else []

    def keep_before(self, layers: Sequence[int]) -> None:
        """Divide the layers before these, none of which is the first. Called before there are caches."""
        firsts = [0, *layers]
        ends = [*layers, len(self.layers)]
        self._runs = [(first, NativeLayers(self.layers[first:end])) for first, end in zip(firsts, ends, strict=True)]

    def embed(self, token_ids: Ids, positions: Ids) -> Array:
        assert self.embedding is not None
        return self.embedding(token_ids, positions)

    def hidden(self, step: StepTokens, adapters: NativeAdapterRows | None = None) -> Array:
        """Return normalised hidden states, float32 [tokens, hidden]. `adapters`: of the step's tokens."""
        assert self._caches, "an engine that sleeps runs no step"
        hidden = self._first_hidden(step, adapters)
        given = self.layer_inputs
        inputs = None if given is None else given(step.token_ids, hidden, adapters, self._group)
        plans = {window: self._plan_attention(step.caches[window].attention, window) for window in self._windows}
        slots = {window: step.caches[window].slots for window in self._windows}
        rotations = self._rotations.at(step.positions)
        states = None if step.states is None else NativeStates(step.states)
        factors = None if self._growth is None else query_factors(self._growth, step.positions)
        self.kept = []
        for (first, layers), caches in zip(self._runs, self._caches, strict=True):
            if first:
                self.kept.append(hidden.copy())
            of_step = plans, rotations, caches, slots, adapters, self._reduce
            layers(hidden, *of_step, query_factors=factors, states=states, layer_inputs=inputs)
        return normalized(hidden, self.norm)

    def _first_hidden(self, step: StepTokens, adapters: NativeAdapterRows | None) -> Array:
        if self.embedding is not None:
            return self.embedding(step.token_ids, step.positions, adapters, self._group, step.token_types)
        assert step.hidden is not None
        return step.hidden.copy()

    def logits(self, hidden: Array, adapters: NativeAdapterRows | None = None) -> Array:
        """Return the logits of hidden states, float32 [rows, vocab]. `adapters`: of these rows."""
        assert self.head is not None, "requests for tokens of a model without a head are refused"
        return self.head(hidden, adapters, self._head_group)


def addresses_of(caches: Sequence[LayerCache]) -> CacheAddresses:
    """Return the addresses of what layers keep."""
    vectors = [each.vectors if isinstance(each, StateArrays) else each for each in caches]
    return CacheAddresses.of(vectors, [each[:4] if isinstance(each, StateArrays) else None for each in caches])


class NativeEncoder:
    """An encoder: a decoder over keys and values that live for one step. Each layer writes its own where those of the
    layer before were, and tokens attend as far ahead as back. `runners.encoder_runner` runs it."""

    def __init__(self, decoder: NativeDecoder) -> None:
        declared = decoder.spec.decoder
        self._decoder = decoder
        self._windows = declared.windows()
        self._shapes = [(2 * each.num_kv_heads, _ENCODER_BLOCK, each.head_dim) for each in declared.attentions()]
        self.has_token_types = declared.embedding.token_types is not None

    @property
    def num_bytes(self) -> int:
        return self._decoder.num_bytes

    @property
    def classifier(self) -> Callable[[Array], Array] | None:
        return self._decoder.classifier

    def hidden(self, token_ids: Ids, lengths: Sequence[int], token_types: Ids | None) -> Array:
        """Return the hidden states of whole prompts one after another, float32 [tokens, hidden]."""
        sizes = np.array(lengths, dtype=np.int64)
        counts = -(-sizes // _ENCODER_BLOCK)
        first_blocks, starts = np.cumsum(counts) - counts, np.cumsum(sizes) - sizes
        positions = np.arange(len(token_ids)) - np.repeat(starts, sizes)
        slots = positions + np.repeat(first_blocks * _ENCODER_BLOCK, sizes)
        tables = (first_blocks[:, None] + np.arange(counts.max())).astype(np.int32)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        batch = AttentionBatch(ends, sizes, tables, _ENCODER_BLOCK, padding_block=0)
        widest = max(heads * _ENCODER_BLOCK * size for heads, _, size in self._shapes)
        memory, num_blocks = arrays.empty(int(counts.sum()) * widest), int(counts.sum())
        self._decoder.use_caches(
            [memory[: num_blocks * int(np.prod(shape))].reshape(num_blocks, *shape) for shape in self._shapes]
        )
        cached = CachedTokens(slots, batch)
        step = StepTokens(token_ids, positions, dict.fromkeys(self._windows, cached), token_types=token_types)
        return self._decoder.hidden(step)


def _cache_of(layer: LayerSpec, index: int) -> int:
    """Return the layer whose keys and values a layer reads."""
    found = (each.cache_layer for each in layer.blocks() if isinstance(each, AttentionSpec))
    return next((each for each in found if each is not None), index)


class _Table:
    """Rows by token ids, of which a rank may have some."""

    def __init__(self, number: int, rows: Rows, first_row: int | None, num_rows: int) -> None:
        """`number`: of the table among linear layers. `first_row`: the rank's first token; None: it has all."""
        self.rows = rows
        self._number, self._first_row, self._num_rows = number, first_row, num_rows

    def __call__(self, token_ids: Ids, adapters: NativeAdapterRows | None, group: RankGroup[Array] | None) -> Array:
        if self._first_row is None:
            found = self.rows.gather(token_ids)
            if adapters is not None:
                adapters.add_rows(self._number, found, token_ids)
            return found
        assert group is not None
        own = token_ids - self._first_row
        own = np.where((own >= 0) & (own < self._num_rows), own, -1)
        found = self.rows.gather(np.maximum(own, 0))
        found[own < 0] = 0.0
        if adapters is not None:
            adapters.add_rows(self._number, found, own)
        group.all_reduce(found)
        return found


class _LayerInputs:
    """Computes what layers read of tokens beside the hidden states."""

    def __init__(self, spec: LayerInputsSpec, decoder: DecoderSpec, numbers: Mapping[Role, int], parts: Parts) -> None:
        self._spec, self._number = spec, numbers["layer_projection"]
        first_row = None if decoder.vocabulary is None else decoder.vocabulary[0]
        rows = parts.rows(spec.table.weight_shapes())
        self._table = _Table(numbers["layer_inputs"], rows, first_row, spec.num_rows)
        self._projection, self._norm = parts.linear(spec.projection), parts.norm(spec.norm)

    @property
    def num_bytes(self) -> int:
        return self._table.rows.num_bytes + self._projection.num_bytes + norm_bytes(self._norm)

    def __call__(
        self, token_ids: Ids, hidden: Array, adapters: NativeAdapterRows | None, group: RankGroup[Array] | None
    ) -> Array:
        """Return the inputs of all layers, float32 [tokens, layers x size]. hidden: what the first layer reads."""
        projected = _product(self._projection, self._number, hidden, adapters)
        inputs = normalized(projected.reshape(-1, self._spec.norm.size), self._norm).reshape(projected.shape)
        inputs += self._table(token_ids, adapters, group) * np.float32(self._spec.scale)
        inputs *= np.float32(0.5**0.5)
        return np.ascontiguousarray(inputs)


class _Embedding:
    """Computes the first hidden states from token ids."""

    def __init__(self, decoder: DecoderSpec, numbers: Mapping[Role, int], parts: Parts, lent: Rows | None) -> None:
        """Build the embedding. `numbers`: of linear layers, by role. `lent`: the head's matrix, if it is shared."""
        self._spec = spec = decoder.embedding
        self._projection_number = numbers.get("embedding_projection", 0)
        self._is_shared = lent is not None
        rows = parts.rows({f"{spec.name}.weight": (spec.num_rows, spec.size)}) if lent is None else lent
        first_row = None if decoder.vocabulary is None else decoder.vocabulary[0]
        self.rows, self._table = rows, _Table(numbers["embedding"], rows, first_row, spec.num_rows)
        self._projection = None if spec.projection is None else parts.linear(spec.projection)
        self._positions, self._token_types = (
            None
            if each is None
            else read_tensor(parts.source, f"{each.name}.weight", (each.num_rows, decoder.hidden_size), "float32")
            for each in (spec.positions, spec.token_types)
        )
        self._norm = parts.norm(spec.norm)

    @property
    def num_bytes(self) -> int:
        held = 0 if self._is_shared else self.rows.num_bytes
        held += 0 if self._projection is None else self._projection.num_bytes
        held += sum(each.nbytes for each in (self._positions, self._token_types) if each is not None)
        return held + norm_bytes(self._norm)

    def __call__(
        self,
        token_ids: Ids,
        positions: Ids,
        adapters: NativeAdapterRows | None = None,
        group: RankGroup[Array] | None = None,
        token_types: Ids | None = None,
    ) -> Array:
        hidden = self._table(token_ids, adapters, group)
        if self._spec.scale != 1.0:
            hidden *= np.float32(self._spec.scale)
        if self._projection is not None:
            hidden = _product(self._projection, self._projection_number, hidden, adapters)
        if self._positions is not None:
            assert self._spec.positions is not None
            hidden += self._positions[positions + self._spec.positions.offset]
        if self._token_types is not None:
            assert token_types is not None
            hidden += self._token_types[token_types]
        return normalized(hidden, self._norm)


def _product(linear: NativeLinear, number: int, x: Array, adapters: NativeAdapterRows | None) -> Array:
    out = linear(x)
    if adapters is not None:
        adapters.add_to(number, out, x)
    return out


class _Head:
    """Computes logits from hidden states."""

    def __init__(
        self,
        spec: HeadSpec,
        linear: LinearSpec | None,
        numbers: Mapping[Role, int],
        parts: Parts,
        shared: SharedLogits | None,
    ) -> None:
        """Build the head. `numbers`: of linear layers, by role. `shared`: where all ranks write their columns."""
        assert linear is not None
        self.spec = spec
        self._shared = shared
        self._number, self._projection_number = numbers["head"], numbers.get("head_projection", 0)
        self.product: NativeLinear = parts.linear(linear)
        self._projection = None if spec.projection is None else parts.linear(spec.projection)

    @property
    def num_bytes(self) -> int:
        return self.product.num_bytes + (0 if self._projection is None else self._projection.num_bytes)

    def __call__(
        self, hidden: Array, adapters: NativeAdapterRows | None = None, group: RankGroup[Array] | None = None
    ) -> Array:
        if self._projection is not None:
            hidden = _product(self._projection, self._projection_number, hidden, adapters)
        if self._shared is not None and len(hidden) <= self._shared.num_rows:
            own = self._shared.own(len(hidden))
            self.product.write(hidden, own)
            if adapters is not None:
                adapters.add_to(self._number, own, hidden)
            self._scale(own)
            return self._shared.whole(len(hidden))
        logits = _product(self.product, self._number, hidden, adapters)
        if group is not None:
            logits = np.concatenate(group.gather(logits), axis=1)
        self._scale(logits)
        return logits

    def _scale(self, logits: Array) -> None:
        cap = self.spec.soft_cap
        if self.spec.scale != 1.0:
            logits *= np.float32(self.spec.scale)
        if cap is not None:
            logits /= np.float32(cap)
            np.tanh(logits, out=logits)
            logits *= np.float32(cap)


class NativeClassifier:
    """`models.decoder.Classifier` over packed matrices and arrays, without torch."""

    def __init__(self, spec: ClassifierSpec, parts: Parts) -> None:
        self._dense = [_Dense(layer, parts) for layer in spec.layers]

    @property
    def num_bytes(self) -> int:
        return sum(dense.num_bytes for dense in self._dense)

    def __call__(self, pooled: Array) -> Array:
        """Classify prompts. `pooled`: float32 [prompts, hidden]. Returns float32 [prompts, labels]."""
        for dense in self._dense:
            pooled = dense(pooled)
        return pooled


class _Dense:
    def __init__(self, spec: DenseSpec, parts: Parts) -> None:
        self._linear = parts.linear(spec.linear)
        self._norm = parts.norm(spec.norm)
        self._activation = spec.activation

    @property
    def num_bytes(self) -> int:
        return self._linear.num_bytes + norm_bytes(self._norm)

    def __call__(self, x: Array) -> Array:
        x = self._linear(x)
        if self._activation == "tanh":
            x = np.tanh(x)
        elif self._activation is not None:
            x = activation.activate(x, self._activation)
        return normalized(x, self._norm)
