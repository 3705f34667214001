"""The metadata of a GGUF file under the keys of `config.json`, so that a family reads both headers by one function.

The keys that families share are translated; a family's file adds its own (`logit_scale`, `use_parallel_residual`). The
family interprets the keys; `GGUFValues` reads and checks the metadata.
"""

from __future__ import annotations

from typing import Any

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import QueryGrowth, RopeSpec
from pagemill_models.declaration.gguf_values import HEAD, GGUFValues
from pagemill_models.declaration.rope_settings import DEFAULT_THETA

_SIZES = {
    "num_hidden_layers": ("num_layers", "block_count"),
    "hidden_size": ("hidden_size", "embedding_length"),
    "intermediate_size": ("intermediate_size", "feed_forward_length"),
    "num_attention_heads": ("num_heads", "attention.head_count"),
    "max_position_embeddings": ("max_position_embeddings", "context_length"),
}
"""Name of the limit, and metadata key, of sizes that every file has."""
_WINDOWED = "sliding_attention"
_LAYER_NORM_EPS = ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")


class GGUFConfig(ConfigValues):
    """The translated values. `own`: keys of `config.json` that override the translated ones; `None`: absent."""

    def __init__(self, values: GGUFValues, **own: Any) -> None:
        translated = _sizes(values, own) | _epsilons(values) | _flags(values)
        translated["sliding_window"] = values.window()
        super().__init__(values.file.path / "metadata", translated | own, values.architecture, values.held)
        self._gguf, self._own = values, own

    def replaced(self, **values: Any) -> GGUFConfig:
        return GGUFConfig(self._gguf, **(self._own | values))

    def query_growth(self) -> QueryGrowth | None:
        beta = self._gguf.number("attention.temperature_scale", 0.0)
        return QueryGrowth(beta, self._gguf.integer("rope.scaling.original_context_length")) if beta else None

    def rope(
        self, head_dim: int, context: int, *, partial: tuple[str, float] | None = None, kind: str | None = None
    ) -> RopeSpec:
        if kind == _WINDOWED:
            return RopeSpec(theta=self._gguf.number("rope.freq_base_swa", DEFAULT_THETA), rotary_dim=head_dim)
        return self._gguf.rope(head_dim, context, partial=partial is not None)


def _sizes(values: GGUFValues, own: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes. `own`: those that the family has read.

    Layers that draft are behind the model's own, and counted with them.
    """
    sizes = {name: values.size(*where) for name, where in _SIZES.items() if own.get(name) is None}
    drafting = values.drafting()
    if "num_hidden_layers" in sizes:
        sizes["num_hidden_layers"] -= drafting
    heads = sizes["num_attention_heads"]
    kv_heads, head_dim = own.get("num_key_value_heads"), own.get("head_dim")
    return {
        **sizes,
        "num_nextn_predict_layers": drafting,
        "num_key_value_heads": kv_heads or values.size("num_kv_heads", "attention.head_count_kv", heads),
        "head_dim": head_dim or values.head_dim(sizes["hidden_size"], heads),
        "vocab_size": values.vocab_size(),
    }


def _epsilons(values: GGUFValues) -> dict[str, Any]:
    """Return the epsilons of both kinds of norms; files have that of their kind."""
    keys = {"attention.layer_norm_rms_epsilon": 1e-6, "attention.layer_norm_epsilon": 1e-5}
    known = any(map(values.has_key, keys))
    rms, layer = (
        default if known and not values.has_key(key) else values.epsilon(key, default) for key, default in keys.items()
    )
    return {"rms_norm_eps": rms} | dict.fromkeys(_LAYER_NORM_EPS, layer)


def _flags(values: GGUFValues) -> dict[str, Any]:
    return {
        "tie_word_embeddings": not values.has(HEAD),
        "attention_bias": values.has("blk.0.attn_q.bias") or values.has("blk.0.attn_qkv.bias"),
        "mlp_bias": values.has("blk.0.ffn_up.bias"),
    }
