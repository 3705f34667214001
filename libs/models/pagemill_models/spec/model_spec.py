"""ModelSpec: the facts in a model's files, read from their headers in milliseconds, before any weight is loaded.

The plan sizes pods with it; the engine builds the model and the KV cache from it. The computation is its `decoder`,
declared by its family (`families`); sizes here follow from the declaration. `spec_from_config` fills it from a Hugging
Face folder, `spec_from_gguf` from a GGUF file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec

from pagemill_models.declaration.caches import LayerCacheSpec, StateSpec, VectorsSpec
from pagemill_models.declaration.declaration import (
    AnyAttentionSpec,
    AttentionSpec,
    DecoderSpec,
)
from pagemill_models.declaration.errors import UnsupportedModelArchitecture as UnsupportedModelArchitecture
from pagemill_protocol.report.cache_kinds import CacheKind
from pagemill_protocol.request.pooling import PoolingSpec
from pagemill_protocol.source_errors import UnreadableModelError

STATE_VALUE_BYTES = 4


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    decoder: DecoderSpec
    dtype: str | None = None
    """Type of the stored weights, such as `bfloat16`; None where the files declare none."""
    quantization: str | None = None
    """Quantization method or main GGUF storage type; `None`: floats."""
    quantization_bits: int | None = None
    """Bits per quantized weight in a Hugging Face folder, where all weights have the same number."""
    weights_format: Literal["safetensors", "gguf"] = "safetensors"
    weight_bytes: int = 0
    """Stored size of all tensors that the decoder uses."""
    num_parameters: int = 0
    """Number of parameters; tied embeddings count once."""
    pooling: PoolingSpec | None = None
    """`None`: the model generates text."""

    @property
    def architecture(self) -> str:
        return self.decoder.architecture

    @property
    def num_layers(self) -> int:
        return len(self.decoder.layers)

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def intermediate_size(self) -> int:
        """Size of the widest layer; for mixtures of experts, the sum of the experts that compute one token."""
        return max((mlp.intermediate_size for mlp in self.decoder.mlps()), default=0)

    @property
    def num_heads(self) -> int:
        return self._attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self._attention.num_kv_heads

    @property
    def cache_shapes(self) -> list[tuple[int, int]]:
        """For each layer, the vectors that its cache stores for each token, and their values; none of a layer that
        keeps a state. Behind a head's layer come the hidden states that it reads."""
        vectors = {number: each for number, each in self.decoder.caches() if isinstance(each, VectorsSpec)}
        found = (vectors.get(number) for number in range(len(self.decoder.layers)))
        shapes = [(0, 0) if each is None else (each.heads, each.size) for each in found]
        return shapes if self.decoder.reads is None else [*shapes, (1, self.hidden_size)]

    @property
    def head_shapes(self) -> list[tuple[int, int]]:
        """The sizes of heads, each with the query heads that share a key/value head, in the order of the layers."""
        found = ((each.head_dim, each.num_heads // each.num_kv_heads) for each in self.decoder.attentions())
        return list(dict.fromkeys(found))

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state in place of keys and values."""
        return any(self.decoder.recurrent())

    @property
    def head_dim(self) -> int:
        return self._attention.head_dim

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        return self.decoder.max_position_embeddings

    @property
    def tie_word_embeddings(self) -> bool:
        return self.decoder.head is not None and self.decoder.head.tied

    def num_read_parameters(self, num_tokens: int = 1) -> int:
        """Return the expected number of parameters that a step of `num_tokens` tokens reads.

        Experts to which no token is routed are not read. With 1 token: the active parameters.
        """
        unread = sum(each.num_unread_parameters(num_tokens) for each in self.decoder.mixtures())
        return self.num_parameters - round(unread)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the bytes of keys and values, or latents, that one token takes over all layers."""
        return sum(each.cache_heads * each.head_dim * dtype_bytes for each in self.decoder.attentions())

    @property
    def _attention(self) -> AnyAttentionSpec:
        """Attention of the first layer that has some. Layers may differ in the number and size of their heads."""
        return next(self.decoder.attentions())


def kinds_of(
    decoder: DecoderSpec,
    block_size: int,
    token_bytes: Callable[[int], int],
    longest: int,
    most_proposed: int = 0,
) -> list[CacheKind]:
    """Return the kinds of the decoder's layers (`kinds_of_caches`)."""
    return kinds_of_caches(decoder.caches(), block_size, token_bytes, longest, most_proposed)


def kinds_of_caches(
    caches: Iterable[tuple[int, LayerCacheSpec]],
    block_size: int,
    token_bytes: Callable[[int], int],
    longest: int,
    most_proposed: int = 0,
) -> list[CacheKind]:
    """Return the kinds of layers, those that keep everything first, those that keep states last.

    `caches`: what the layers keep, with their numbers. `token_bytes`: bytes of a cached vector of so many values.
    `longest`: the most tokens of a sequence; a window of as many tokens frees nothing and is none. `most_proposed`:
    tokens that may be proposed for a sequence in one step.
    """
    kinds: dict[str, CacheKind] = {}
    for number, cache in caches:
        if isinstance(cache, StateSpec):
            row_bytes = cache.num_row_values(block_size, most_proposed) * STATE_VALUE_BYTES
            of_layer = CacheKind(
                "state", None, (number,), cache.num_values * STATE_VALUE_BYTES, state=True, row_bytes=row_bytes
            )
        else:
            window = cache.window if cache.window is not None and cache.window < longest else None
            name = "full" if window is None else f"window-{window}"
            of_layer = CacheKind(name, window, (number,), block_size * cache.heads * token_bytes(cache.size))
        before = kinds.get(of_layer.name)
        kinds[of_layer.name] = of_layer if before is None else _joined(before, of_layer)
    return sorted(kinds.values(), key=lambda kind: (kind.state, -longest if kind.window is None else -kind.window))


def _joined(one: CacheKind, other: CacheKind) -> CacheKind:
    return msgspec.structs.replace(
        one,
        layers=one.layers + other.layers,
        block_bytes=one.block_bytes + other.block_bytes,
        row_bytes=one.row_bytes + other.row_bytes,
    )


def checked(spec: ModelSpec, path: Path) -> ModelSpec:
    """Return `spec`. Raises an error that names the numbers that do not fit together."""
    attentions = list(spec.decoder.attentions())
    if not attentions:
        raise UnsupportedModelArchitecture(f"`{path}` has no attention layer; such models are not supported.")
    for attention in {(each.num_heads, each.num_kv_heads, each.head_dim): each for each in attentions}.values():
        if isinstance(attention, AttentionSpec):
            _check_heads(attention, path)
        _check_rotation(attention, path)
    positions = spec.decoder.embedding.positions
    if positions is not None and positions.num_rows - positions.offset < spec.max_position_embeddings:
        raise UnreadableModelError(
            f"`{path}` declares {spec.max_position_embeddings} tokens of context, but its table of positions has "
            f"{positions.num_rows} rows."
        )
    return spec


def _check_heads(attention: AttentionSpec, path: Path) -> None:
    if attention.num_heads % attention.num_kv_heads:
        raise UnreadableModelError(
            f"`{path}` declares {attention.num_heads} attention heads, not a multiple of its "
            f"{attention.num_kv_heads} KV heads."
        )
    query_heads = attention.num_heads * (1 + attention.gated)
    num_rows = (query_heads + attention.key_parts * attention.num_kv_heads) * attention.head_dim
    if (attention.qkv.out_features, attention.output.in_features) != (
        num_rows,
        attention.num_heads * attention.head_dim,
    ):
        raise UnreadableModelError(
            f"`{path}` declares {attention.num_heads} attention heads, which do not divide its hidden_size."
        )


def _check_rotation(attention: AnyAttentionSpec, path: Path) -> None:
    rope, size = attention.rope, attention.rotary_table_dim
    if rope is None:
        return
    if size % 2:
        raise UnreadableModelError(f"`{path}` declares head_dim = {size}; rotary embedding needs an even one.")
    if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= size:
        raise UnreadableModelError(
            f"`{path}` rotates {rope.rotary_dim} of {size} values of a head; an even number of them is rotated."
        )
