"""The declaration of a model, as data: its layers, their parts, and names and storage of their tensors.

A family (`llama.py`, `gpt2.py`) declares; the engine's `decoders` run the declaration. Nothing here
computes or reads files. Matrices are [outputs, inputs]; tensors have the names of Hugging Face checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import ClassVar, Literal

import msgspec

from pagemill_models.declaration.caches import (
    ChannelDeltaRuleSpec,
    DeltaRuleSpec,
    LayerCacheSpec,
    RecurrentSpec,
    VectorsSpec,
)
from pagemill_models.declaration.matrices import Activation as Activation
from pagemill_models.declaration.matrices import GatingSpec as GatingSpec
from pagemill_models.declaration.matrices import LinearSpec as LinearSpec
from pagemill_models.declaration.matrices import MatrixSpec as MatrixSpec
from pagemill_models.declaration.matrices import NormPart as NormPart
from pagemill_models.declaration.matrices import NormSpec as NormSpec
from pagemill_models.declaration.matrices import PositionsSpec as PositionsSpec
from pagemill_models.declaration.matrices import QueryGrowth as QueryGrowth
from pagemill_models.declaration.matrices import RopeSpec as RopeSpec
from pagemill_models.declaration.matrices import RowGroups as RowGroups
from pagemill_models.declaration.matrices import Shapes as Shapes
from pagemill_models.declaration.matrices import TokenTypesSpec as TokenTypesSpec
from pagemill_models.declaration.matrices import merged
from pagemill_protocol.request.pooling import PoolingMethod


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True, tag="attention"):
    """Attention over the paged cache; query head h reads key/value head h // (num_heads / num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: LinearSpec
    """Rows: all query heads, the gates of all query heads if it is gated, all key heads, all value heads; without the
    last ones where `values_are_keys`, and only the first where `cache_layer` is set."""
    output: LinearSpec
    scale: float
    """Factor on the scores."""
    rope: RopeSpec | None = None
    query_norm: NormSpec | None = None
    """Applied before the rotation: per head where its size is `head_dim`, over all heads where it is their total
    size."""
    key_norm: NormSpec | None = None
    window: int | None = None
    """Number of tokens that a token attends to, including itself; `None`: all previous ones."""
    causal: bool = True
    """If false, a token attends as far ahead as back, and keys and values are not cached: prompts are computed as a
    whole."""
    soft_cap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    alibi_slopes: tuple[float, ...] | None = None
    """Slope of each query head (arXiv 2108.12409): the score of a key n tokens back is reduced by slope * n."""
    sinks: str | None = None
    """Name of a stored tensor [num_heads]: scores of keys without values, which take part in the softmax."""
    norms_behind_rotation: bool = False
    """Whether queries and keys are rotated before they are normalized."""
    query_growth: QueryGrowth | None = None
    gated: bool = False
    """Whether attended values are multiplied by the sigmoid of a gate, whose rows follow the queries in `qkv`."""
    value_norm: NormSpec | None = None
    """Of each value head."""
    values_are_keys: bool = False
    """Whether values are the keys before these are normalized and rotated."""
    cache_layer: int | None = None
    """The earlier layer whose keys and values it reads; None: it has its own."""
    clip: float | None = None
    """Bound of the amounts of normalised queries and keys, before the rotation, and of values."""
    head_gates: LinearSpec | None = None
    """One row for each query head, whose attended values are multiplied by the sigmoid of the product."""

    @property
    def cache_heads(self) -> int:
        """Vectors of `head_dim` values that the cache stores per token: keys, then values."""
        return 2 * self.num_kv_heads if self.causal and self.cache_layer is None else 0

    @property
    def cache(self) -> VectorsSpec | None:
        return VectorsSpec(self.cache_heads, self.head_dim, self.window) if self.cache_layer is None else None

    @property
    def key_parts(self) -> int:
        """Number of times that all key heads have rows in `qkv`: for keys and for values."""
        return 0 if self.cache_layer is not None else 2 - self.values_are_keys

    @property
    def rotary_table_dim(self) -> int:
        """Number of values in a rotary table; a partial rotary embedding leaves the last of them unrotated."""
        return self.head_dim

    def linears(self) -> Iterator[LinearSpec]:
        yield from (each for each in (self.qkv, self.head_gates, self.output) if each is not None)

    def shapes(self) -> Shapes:
        sinks: Shapes = {} if self.sinks is None else {self.sinks: (self.num_heads,)}
        return merged(*self.linears(), self.query_norm, self.key_norm, self.value_norm) | sinks


class LatentAttentionSpec(msgspec.Struct, frozen=True, kw_only=True, tag="latent_attention"):
    """Multi-head latent attention (MLA, arXiv 2405.04434): the cache stores one vector per token.

    Keys and values of all heads are products of its first `latent_size` values; the rest is a rotated key that all
    heads share. An executor multiplies `up` into queries and outputs instead, and attends to the vectors themselves.
    """

    num_heads: int
    latent_size: int
    key_dim: int
    """Values of a head's key that come from the latent."""
    value_dim: int
    rope: RopeSpec | None
    """Rotation of the last `rotary_dim` values of queries, and of the whole shared key; None: nothing is rotated."""
    query: LinearSpec
    """Rows: for each head `key_dim` values, then those for the shared key."""
    down: LinearSpec
    """Rows: the latent, then the shared key."""
    latent_norm: NormSpec
    up: LinearSpec
    """Applied to the latent; rows: for each head its key, then its value."""
    output: LinearSpec
    scale: float
    query_down: LinearSpec | None = None
    """Applied before `query_norm` and `query`, where queries are compressed as well."""
    query_norm: NormSpec | None = None
    query_growth: QueryGrowth | None = None
    plain_shared: int = 0
    """Values of a shared key that is not rotated."""

    window: ClassVar[None] = None
    causal: ClassVar[bool] = True
    num_kv_heads: ClassVar[int] = 1
    cache_heads: ClassVar[int] = 1

    @property
    def head_dim(self) -> int:
        """Size of cached vectors, and of queries once `up` is multiplied into them."""
        return self.latent_size + self.shared_size

    @property
    def cache(self) -> VectorsSpec:
        return VectorsSpec(self.cache_heads, self.head_dim)

    @property
    def shared_size(self) -> int:
        """Values of the key that all heads share."""
        return self.plain_shared if self.rope is None else self.rope.rotary_dim

    @property
    def rotary_table_dim(self) -> int:
        return self.shared_size

    def linears(self) -> Iterator[LinearSpec]:
        every = (self.query_down, self.query, self.down, self.up, self.output)
        yield from (each for each in every if each is not None)

    def shapes(self) -> Shapes:
        return merged(*self.linears(), self.query_norm, self.latent_norm)


class MLPSpec(msgspec.Struct, frozen=True, kw_only=True, tag="mlp"):
    """down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x))."""

    up: LinearSpec
    """With a gate, its rows are the gate's, then the up projection's."""
    down: LinearSpec
    activation: Activation
    gated: bool
    limit: float | None = None
    """gpt-oss: upper bound of the gate; the up projection is clamped to its negative and positive, then increased
    by 1."""
    layer_input: int | None = None
    """Index of the token's first value of `LayerInputsSpec` by which inner values are multiplied; None: they are
    not."""

    @property
    def intermediate_size(self) -> int:
        return self.down.in_features

    def linears(self) -> Iterator[LinearSpec]:
        yield from (self.up, self.down)

    def shapes(self) -> Shapes:
        return merged(self.up, self.down)


class SharedExpertSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An MLP that computes every token, times sigmoid(gate(x)) where there is a gate."""

    mlp: MLPSpec
    gate: LinearSpec | None = None

    def shapes(self) -> Shapes:
        return merged(self.mlp, self.gate)


class MoESpec(msgspec.Struct, frozen=True, kw_only=True, tag="experts"):
    """A mixture of experts: each token is computed by the `top_k` experts with the largest router logits.

    Their outputs are summed, weighted by the softmax of the logits.
    """

    router: LinearSpec
    """One row per expert."""
    experts: tuple[MLPSpec, ...]
    """All experts have the same shape."""
    top_k: int
    renormalized: bool
    """Whether the softmax is over the chosen logits, so that the weights sum to 1, instead of over all."""
    shared: SharedExpertSpec | None = None
    gating: GatingSpec | None = None
    """Routing in place of the softmax; `renormalized` weights are then divided by their sum."""
    norm: NormSpec | None = None
    """Of the experts' inputs, where these are not the router's."""
    router_norm: NormSpec | None = None
    expert_scales: str | None = None
    """Name of a stored tensor [experts] of factors on the weights."""
    before: LinearSpec | None = None
    """What the experts, not the router and the shared one, read a product with."""
    behind: LinearSpec | None = None
    """What their sum is multiplied by; set with `before`."""

    @property
    def intermediate_size(self) -> int:
        """Total size of the experts that compute one token."""
        shared = 0 if self.shared is None else self.shared.mlp.intermediate_size
        return self.top_k * self.experts[0].intermediate_size + shared

    def num_unread_parameters(self, num_tokens: int) -> float:
        """Return the expected parameters of experts that compute none of `num_tokens` tokens, if all are equally
        likely."""
        of_one = sum(math.prod(shape) for shape in self.experts[0].shapes().values())
        num_experts = len(self.experts)
        return num_experts * of_one * (1 - self.top_k / num_experts) ** num_tokens

    def linears(self) -> Iterator[LinearSpec]:
        yield self.router
        mlps = self.experts if self.shared is None else (*self.experts, self.shared.mlp)
        for mlp in mlps:
            yield from (mlp.up, mlp.down)
        gate = None if self.shared is None else self.shared.gate
        yield from (each for each in (gate, self.before, self.behind) if each is not None)

    def gate_names(self) -> set[str]:
        """Return the names of the matrices that choose and weight experts."""
        gate = None if self.shared is None else self.shared.gate
        return {name for each in (self.router, gate) if each is not None for name in each.weight_shapes()}

    def shapes(self) -> Shapes:
        vectors = (None if self.gating is None else self.gating.bias, self.expert_scales)
        of_experts: Shapes = {name: (len(self.experts),) for name in vectors if name is not None}
        return merged(*self.linears(), self.norm, self.router_norm) | of_experts


AnyAttentionSpec = AttentionSpec | LatentAttentionSpec
MixerSpec = AnyAttentionSpec | RecurrentSpec
"""The parts of a layer that read the tokens before."""
BlockSpec = MixerSpec | MLPSpec | MoESpec
"""The parts of a layer that compute."""


class BranchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """scale * output_norm(block(norm(x)))."""

    block: BlockSpec
    norm: NormSpec | None = None
    output_norm: NormSpec | None = None
    scale: float = 1.0


class ResidualSpec(msgspec.Struct, frozen=True):
    """x becomes factor * norm(x + sum_norm(the sum of its branches)); all branches read the same x."""

    branches: tuple[BranchSpec, ...]
    norm: NormSpec | None = None
    sum_norm: NormSpec | None = None
    factor: str | None = None
    """Name of a stored tensor [1]."""


class LayerSpec(msgspec.Struct, frozen=True):
    """A sequence of residuals: attention, then MLP, with one branch each; or both as two branches of one residual."""

    name: str
    """Prefix of the names of its tensors, such as `model.layers.7`."""
    residuals: tuple[ResidualSpec, ...]

    def blocks(self) -> Iterator[BlockSpec]:
        for residual in self.residuals:
            for branch in residual.branches:
                yield branch.block

    def with_branches(self, change: Callable[[BranchSpec], BranchSpec]) -> LayerSpec:
        """Return the layer with each of its branches changed."""
        residuals = [
            msgspec.structs.replace(residual, branches=tuple(map(change, residual.branches)))
            for residual in self.residuals
        ]
        return LayerSpec(self.name, tuple(residuals))

    def norms(self) -> Iterator[NormSpec]:
        """Yield all norms except those of blocks; a norm that branches share is yielded once for each."""
        for residual in self.residuals:
            for branch in residual.branches:
                yield from (norm for norm in (branch.norm, branch.output_norm) if norm is not None)
            yield from (norm for norm in (residual.sum_norm, residual.norm) if norm is not None)

    def shapes(self) -> Shapes:
        factors: Shapes = {each.factor: (1,) for each in self.residuals if each.factor is not None}
        return merged(*self.blocks(), *self.norms()) | factors


class LayerInputsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What layers read of a token beside its hidden state: (scale * row of the token + norm(projection(x))) / sqrt(2).

    x is the token's embedding, and the norm is over the values of one layer each.
    """

    name: str
    """Of the table of rows, with the values of all layers."""
    num_rows: int
    scale: float
    projection: LinearSpec
    norm: NormSpec

    @property
    def table(self) -> LinearSpec:
        return LinearSpec(self.projection.out_features, (MatrixSpec(name=self.name, rows=self.num_rows),))

    def shapes(self) -> Shapes:
        return merged(self.table, self.projection, self.norm)


class EmbeddingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """norm(projection(scale * row of the token) + positions + token types)."""

    name: str
    num_rows: int
    size: int
    scale: float = 1.0
    projection: LinearSpec | None = None
    """Projection from the embedding's size to the model's, as in OPT-350m."""
    positions: PositionsSpec | None = None
    token_types: TokenTypesSpec | None = None
    norm: NormSpec | None = None
    layer_inputs: LayerInputsSpec | None = None

    def shapes(self, hidden_size: int) -> Shapes:
        shapes: Shapes = {f"{self.name}.weight": (self.num_rows, self.size)}
        for table in (self.positions, self.token_types):
            if table is not None:
                shapes[f"{table.name}.weight"] = (table.num_rows, hidden_size)
        return shapes | merged(self.projection, self.norm, self.layer_inputs)


class HeadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Logits: soft_cap * tanh(scale * (W projection(x) + b) / soft_cap)."""

    name: str
    tied: bool
    """W is the embedding's matrix, of which a file may have a copy under this name."""
    normalized: bool = False
    """Each row of W is divided by its length; only for a head that is not tied."""
    bias: bool = False
    scale: float = 1.0
    soft_cap: float | None = None
    projection: LinearSpec | None = None
    """Projection from the model's size to the embedding's."""


class DenseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """norm(activation(linear(x)))."""

    linear: LinearSpec
    activation: Activation | Literal["tanh"] | None = None
    norm: NormSpec | None = None

    def shapes(self) -> Shapes:
        return merged(self.linear, self.norm)


class ClassifierSpec(msgspec.Struct, frozen=True):
    """What is computed of the pooled hidden state of a prompt: one number per label, or a vector of another size."""

    layers: tuple[DenseSpec, ...]
    pooling: PoolingMethod | None
    """`None`: these are dense layers behind the pooling of a model that returns vectors."""

    @property
    def num_labels(self) -> int:
        return self.layers[-1].linear.out_features

    def shapes(self) -> Shapes:
        return merged(*self.layers)


class ReadsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a head computes its layer's input from: the pair of a token's embedding and the target's hidden states of
    the token before. `x` = [embedding_norm(embedding), hidden_norm(h)]."""

    embedding_norm: NormSpec
    hidden_norm: NormSpec
    projection: LinearSpec | None = None
    """MTP: the layer's input is projection(x). None, EAGLE-3: its attention reads x, and h is the residual."""
    states: LinearSpec | None = None
    """EAGLE-3: h = states(hidden states before `layers`). None: h is the target's normalised last hidden state."""
    layers: tuple[int, ...] | None = None
    """Layers of the target; None: the third, the middle one and the third last."""
    normed_residual: bool = False
    """Whether the residual is hidden_norm(h), where there is no projection."""
    prefix: str = ""
    """Of all of its tensors; files may contain others."""

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers of a target of so many layers, before which hidden states are read."""
        if self.states is None:
            return ()
        return (2, num_layers // 2, num_layers - 3) if self.layers is None else self.layers

    def linears(self) -> Iterator[LinearSpec]:
        yield from (each for each in (self.projection, self.states) if each is not None)

    def shapes(self) -> Shapes:
        return merged(self.embedding_norm, self.hidden_norm, *self.linears())


class DrafterSpec(msgspec.Struct, frozen=True):
    """A layer behind the last one that drafts tokens (multi-token prediction), with the target's embedding and head."""

    reads: ReadsSpec
    layer: LayerSpec
    norm: NormSpec


class DecoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A whole decoder, or an encoder, which has neither a head nor a cache."""

    architecture: str
    """Hugging Face class name, for example `LlamaForCausalLM`."""
    hidden_size: int
    vocab_size: int
    """Number of rows of the embedding and of the logits."""
    max_position_embeddings: int
    """Context length in tokens that the model was made for."""
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    norm: NormSpec | None
    """Norm before the head."""
    head: HeadSpec | None
    """`None`: the model's hidden states are pooled."""
    classifier: ClassifierSpec | None = None
    """What is computed of the pooled hidden states."""
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    """Suffixes of unused tensors that files may contain: constants that old checkpoints store."""
    ignored_layers: tuple[str, ...] = ()
    """Prefixes of unused layers that files may contain: layers that draft further tokens."""
    optional_prefix: str = ""
    """Prefix of names, such as `transformer.`, that some files leave out."""
    renamed: dict[str, str] = {}
    """Parts of names that files may have in place of those declared."""
    stacked: dict[str, tuple[str, ...]] = {}
    """Suffixes of tensors that files store for all experts at once, with the suffixes of each expert's own, where `*`
    is its number: `.experts.gate_up_proj` and `.experts.*.gate_up_proj.weight`. Several divide its rows equally."""

    vocabulary: tuple[int, int] | None = None
    """First row of embedding and head that this rank holds, and the one behind the last; None: all rows."""
    embeds: bool = True
    """Whether it computes hidden states from token ids; later stages of a pipeline receive them."""
    mtp: tuple[DrafterSpec, ...] = ()
    """The first layer that drafts, if the configuration has some; the files may lack it."""
    reads: ReadsSpec | None = None
    """Set if it is a head that drafts for another model, whose embedding it uses unless it has one (`embeds`)."""
    text_only: bool = False
    """Whether the files also hold encoders of images or sound, which are not read (`stored_names`)."""
    by_transformers: bool = False
    """The declaration has only sizes: a class of `transformers` computes the model and knows its tensors."""
    folded: bool = False
    """Whether matrices contain factors that adapters lack."""

    def attentions(self) -> Iterator[AnyAttentionSpec]:
        for layer in self.layers:
            yield from (block for block in layer.blocks() if isinstance(block, AnyAttentionSpec))

    def recurrent(self) -> Iterator[RecurrentSpec]:
        for layer in self.layers:
            yield from (block for block in layer.blocks() if isinstance(block, RecurrentSpec))

    def caches(self) -> Iterator[tuple[int, LayerCacheSpec]]:
        """Yield what each layer caches, with the layer's number."""
        for number, layer in enumerate(self.layers):
            mixers = (block for block in layer.blocks() if isinstance(block, MixerSpec))
            yield from ((number, each.cache) for each in mixers if each.cache is not None)

    def mlps(self) -> Iterator[MLPSpec | MoESpec]:
        for layer in self.layers:
            yield from (block for block in layer.blocks() if not isinstance(block, MixerSpec))

    def mixtures(self) -> Iterator[MoESpec]:
        yield from (block for block in self.mlps() if isinstance(block, MoESpec))

    def ropes(self) -> list[RopeSpec]:
        """Return the distinct rotary embeddings, in the order of their first layers."""
        found: list[RopeSpec] = []
        for attention in self.attentions():
            if attention.rope is not None and attention.rope not in found:
                found.append(attention.rope)
        return found

    def rotations(self) -> list[tuple[RopeSpec, int]]:
        """Return the distinct rotary embeddings, each with the values of a head in its tables."""
        found: list[tuple[RopeSpec, int]] = []
        for attention in self.attentions():
            if attention.rope is not None and (own := (attention.rope, attention.rotary_table_dim)) not in found:
                found.append(own)
        return found

    def windows(self) -> set[int | None]:
        return {attention.window for attention in self.attentions()}

    @property
    def is_causal(self) -> bool:
        """Whether no token attends to later ones, so that its keys and values can be cached."""
        return all(attention.causal for attention in self.attentions())

    def head_linear(self) -> LinearSpec | None:
        """Return the head's matmul, with the embedding's matrix if it is tied, or None without a head."""
        head = self.head
        if head is None:
            return None
        name = self.embedding.name if head.tied else head.name
        matrix = MatrixSpec(name=name, rows=self.num_head_rows, bias=head.bias, bias_name=f"{head.name}.bias")
        return LinearSpec(self.embedding.size, (matrix,))

    @property
    def num_head_rows(self) -> int:
        """Number of the logits that are computed here."""
        return self.vocab_size if self.vocabulary is None else self.vocabulary[1] - self.vocabulary[0]

    def untied_head(self) -> LinearSpec | None:
        """Return the head's matmul if the head has its own matrix, else None."""
        return None if self.head is None or self.head.tied else self.head_linear()

    def float_matrices(self) -> set[str]:
        """Return the names of matrices that are never quantized.

        These are small ones, which choose and weight experts, give the rates of states or belong to a classifier, and
        those that are multiplied into others.
        """
        names = {name for mixture in self.mixtures() for name in mixture.gate_names()}
        rules = (each for each in self.recurrent() if isinstance(each, DeltaRuleSpec | ChannelDeltaRuleSpec))
        names |= {name for each in rules for name in each.rates.weight_shapes()}
        dense = () if self.classifier is None else self.classifier.layers
        names |= {name for layer in dense for name in layer.linear.weight_shapes()}
        latent = (each for each in self.attentions() if isinstance(each, LatentAttentionSpec))
        return names | {name for attention in latent for name in attention.up.weight_shapes()}

    def linears(self) -> Iterator[LinearSpec]:
        """Yield all matmuls except that of a tied head."""
        for block in (block for layer in self.layers for block in layer.blocks()):
            yield from block.linears()
        projection = None if self.head is None else self.head.projection
        entry = self.embedding.projection if self.embeds else None
        of_layers = self.embedding.layer_inputs if self.embeds else None
        head = self.untied_head() if self.embeds else self.head_linear()
        beside = None if of_layers is None else of_layers.projection
        yield from (each for each in (entry, beside, projection, head) if each is not None)
        yield from (layer.linear for layer in (() if self.classifier is None else self.classifier.layers))
        yield from () if self.reads is None else self.reads.linears()

    def shapes(self) -> Shapes:
        """Return the required shape of every tensor; a transposed matrix is stored the other way round."""
        projection = None if self.head is None else self.head.projection
        entry: Shapes = self.embedding.shapes(self.hidden_size) if self.embeds else {}
        around = (self.norm, projection, self.head_linear(), self.classifier, self.reads)
        return entry | merged(*self.layers, *self.ropes(), *around)

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor may be stored and is not used."""
        if name.endswith(self.ignored) or name.startswith(self.ignored_layers):
            return True
        if self.reads is not None and not name.startswith(self.reads.prefix):
            return True
        return self.head is not None and self.head.tied and name == f"{self.head.name}.weight"
