"""Gemma 4, text: windows and full attention with heads of different sizes, inputs of layers, keys that layers share.

Layers behind the last `num_kv_shared_layers` read the keys and values of the last earlier layer of their kind. With
experts, an MLP and a mixture read the same residual, whose router has a norm of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from pagemill_models.declaration.changes import changed_head, replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    AttentionSpec,
    BranchSpec,
    DecoderSpec,
    LayerInputsSpec,
    LayerSpec,
    LinearSpec,
    MLPSpec,
    NormSpec,
    ResidualSpec,
    RopeSpec,
)
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.parts import linear
from pagemill_models.declaration.rope_scaling import ProportionalScaling
from pagemill_models.families.gemma2 import WINDOWED
from pagemill_models.families.gemma3 import DEFAULT_PATTERN, FULL, local_rope
from pagemill_models.families.llama_like import Numbers, decoder, gguf_names, numbers_from_config
from pagemill_models.families.moe import Mixture, gated_mlp, mixture, stored_together

_PARTS = ("gate_proj", "up_proj", "down_proj")


class _Text(NamedTuple):
    """What the layers of a model have in common."""

    numbers: Numbers
    kinds: list[str]
    window: int | None
    heads: dict[str, tuple[int, int]]
    """Key and value heads, and the size of a head, by kind of layer."""
    ropes: dict[str, RopeSpec]
    num_own: int
    """Number of the first layers, which have keys and values of their own."""
    shares_keys: bool
    """Whether values are keys in full attention."""
    wide: bool
    """Whether MLPs of layers that share keys and values are twice as wide."""
    input_size: int
    experts: Mixture | None

    def norm(self, name: str, size: int | None = None, stored: str | None = "weight", factor: float = 1.0) -> NormSpec:
        size = size or self.numbers.hidden_size
        return NormSpec(name=name, size=size, eps=self.numbers.rms_norm_eps, stored=stored, factor=factor)


def read_config(config: ConfigValues) -> DecoderSpec:
    # Text is causal where only vision tokens attend to later ones.
    if config.text("use_bidirectional_attention", "vision") != "vision":
        raise config.unsupported("attention to later tokens (`use_bidirectional_attention`)")
    text = _read(config)
    numbers = text.numbers
    plain = decoder(numbers)
    layers = tuple(_layer(text, index) for index in range(numbers.num_layers))
    unused = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
    shared = range(text.num_own, numbers.num_layers)
    return replace(
        plain,
        embedding=replace(plain.embedding, scale=numbers.hidden_size**0.5, layer_inputs=_layer_inputs(config, text)),
        layers=layers,
        head=changed_head(plain, soft_cap=config.optional_number("final_logit_softcapping")),
        ignored=(*plain.ignored, *(f"layers.{index}.self_attn.{name}" for index in shared for name in unused)),
    )


def _read(config: ConfigValues) -> _Text:
    num_layers = config.size("num_layers", "num_hidden_layers")
    kinds = config.layer_types(num_layers) or [
        WINDOWED if (layer + 1) % DEFAULT_PATTERN else FULL for layer in range(num_layers)
    ]
    unknown = sorted(set(kinds) - {WINDOWED, FULL})
    if unknown:
        raise config.unsupported(f"layers of the kind `{unknown[0]}`")
    # transformers computes full attention in the last layer whatever the file says.
    kinds = [*kinds[:-1], FULL]
    numbers = numbers_from_config(
        config, default_context=131_072, default_head_dim=256, default_tied=True, rope_kind=WINDOWED
    )
    biased = config.flag("attention_bias", False)
    numbers = replace(
        numbers,
        activation=config.activation("hidden_activation", default="gelu_pytorch_tanh"),
        attention_bias=biased,
        attention_output_bias=biased,
    )
    num_shared = config.integer("num_kv_shared_layers", default=0)
    if not 0 <= num_shared < num_layers or set(kinds[: num_layers - num_shared]) != set(kinds):
        raise config.wrong("num_kv_shared_layers", num_shared, "a number that leaves a layer of each kind before")
    heads = {WINDOWED: (numbers.num_kv_heads, numbers.head_dim), FULL: _full_heads(config, numbers, kinds)}
    context = numbers.max_position_embeddings
    return _Text(
        numbers=numbers,
        kinds=kinds,
        window=config.window(default=512),
        heads=heads,
        ropes={
            WINDOWED: local_rope(config, numbers.head_dim, context),
            FULL: _full_rope(config, heads[FULL][1], context),
        },
        num_own=num_layers - num_shared,
        shares_keys=config.flag("attention_k_eq_v", False),
        wide=config.flag("use_double_wide_mlp", False),
        input_size=config.integer("hidden_size_per_layer_input", default=0),
        experts=_experts(config, numbers) if config.flag("enable_moe_block", False) else None,
    )


def _full_heads(config: ConfigValues, numbers: Numbers, kinds: list[str]) -> tuple[int, int]:
    """Return the key and value heads of full attention, and their size. transformers 5 writes them by layer."""
    by_layer = config.object("per_layer_config")
    if not by_layer:
        own = config.size("num_global_key_value_heads", default=numbers.num_kv_heads)
        num_heads = own if config.flag("attention_k_eq_v", False) else numbers.num_kv_heads
        return num_heads, config.size("global_head_dim", default=512)
    found = {str(layer): by_layer.get(str(layer)) for layer, kind in enumerate(kinds) if kind == FULL}
    first = next(iter(found.values()))
    known = isinstance(first, dict) and set(first) <= {"head_dim", "num_key_value_heads"}
    if not isinstance(first, dict) or not known or found != by_layer or any(each != first for each in found.values()):
        raise config.wrong(
            "per_layer_config",
            by_layer,
            "head_dim and num_key_value_heads, the same for every layer with full attention, and for no other",
        )
    own_values = ConfigValues(config.path, first, config.architecture, config.held)
    return (
        own_values.size("num_key_value_heads", default=numbers.num_kv_heads),
        own_values.size("head_dim", default=numbers.head_dim),
    )


def _full_rope(config: ConfigValues, head_dim: int, context: int) -> RopeSpec:
    if FULL not in config.object("rope_parameters"):
        theta = config.number("rope_theta", default=1e6)
        return RopeSpec(theta=theta, rotary_dim=head_dim, scaling=ProportionalScaling(share=0.25, factor=1.0))
    return config.rope(head_dim, context, partial=("partial_rotary_factor", 1.0), kind=FULL)


def _experts(config: ConfigValues, numbers: Numbers) -> Mixture:
    num_experts, top_k = config.size("num_experts"), config.size("top_k_experts")
    config.check_parts("experts", num_experts)
    if top_k > num_experts:
        raise config.wrong("top_k_experts", top_k, f"at most the {num_experts} experts of a layer")
    return Mixture(
        hidden_size=numbers.hidden_size,
        intermediate_size=config.size("moe_intermediate_size"),
        num_experts=num_experts,
        top_k=top_k,
        renormalized=True,
        activation=numbers.activation,
    )


def _layer_inputs(config: ConfigValues, text: _Text) -> LayerInputsSpec | None:
    size, hidden_size = text.input_size, text.numbers.hidden_size
    if not size:
        return None
    rows = config.size("vocab_size_per_layer_input", default=text.numbers.vocab_size)
    # The norm behind the projection leaves nothing of a factor on it but its effect on epsilon.
    norm = replace(text.norm("model.per_layer_projection_norm", size), eps=text.numbers.rms_norm_eps * hidden_size)
    return LayerInputsSpec(
        name="model.embed_tokens_per_layer",
        num_rows=rows,
        scale=size**0.5,
        projection=linear(hidden_size, ("model.per_layer_model_projection", text.numbers.num_layers * size)),
        norm=norm,
    )


def _layer(text: _Text, index: int) -> LayerSpec:
    name = f"model.layers.{index}"
    attention = BranchSpec(
        norm=text.norm(f"{name}.input_layernorm"),
        block=_attention(text, f"{name}.self_attn", index),
        output_norm=text.norm(f"{name}.post_attention_layernorm"),
    )
    residuals = [ResidualSpec((attention,)), _feed_forward(text, name, index)]
    if text.input_size:
        gate = linear(text.numbers.hidden_size, (f"{name}.per_layer_input_gate", text.input_size))
        behind = linear(text.input_size, (f"{name}.per_layer_projection", text.numbers.hidden_size))
        first, activation = index * text.input_size, text.numbers.activation
        block = MLPSpec(up=gate, down=behind, activation=activation, gated=False, layer_input=first)
        branch = BranchSpec(block=block, output_norm=text.norm(f"{name}.post_per_layer_input_norm"))
        residuals.append(ResidualSpec((branch,)))
    residuals[-1] = replace(residuals[-1], factor=f"{name}.layer_scalar")
    return LayerSpec(name, tuple(residuals))


def _attention(text: _Text, name: str, index: int) -> AttentionSpec:
    numbers, kind = text.numbers, text.kinds[index]
    num_kv_heads, head_dim = text.heads[kind]
    own = index < text.num_own
    same = own and text.shares_keys and kind == FULL
    key_rows = num_kv_heads * head_dim
    rows = {"q_proj": numbers.num_heads * head_dim}
    rows |= {"k_proj": key_rows} if own else {}
    rows |= {"v_proj": key_rows} if own and not same else {}
    inputs = linear(
        numbers.hidden_size,
        *((f"{name}.{part}", count) for part, count in rows.items()),
        bias=numbers.attention_bias,
    )
    last_own = text.num_own - 1 - text.kinds[: text.num_own][::-1].index(kind)
    return AttentionSpec(
        num_heads=numbers.num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        qkv=inputs,
        output=_output(numbers, name, head_dim),
        scale=1.0,
        rope=text.ropes[kind],
        query_norm=text.norm(f"{name}.q_norm", head_dim),
        key_norm=text.norm(f"{name}.k_norm", head_dim) if own else None,
        value_norm=text.norm(f"{name}.v_norm", head_dim, stored=None) if own else None,
        window=text.window if kind == WINDOWED else None,
        values_are_keys=same,
        cache_layer=None if own else last_own,
    )


def _output(numbers: Numbers, name: str, head_dim: int) -> LinearSpec:
    part = (f"{name}.o_proj", numbers.hidden_size)
    return linear(numbers.num_heads * head_dim, part, bias=numbers.attention_output_bias)


def _feed_forward(text: _Text, name: str, index: int) -> ResidualSpec:
    numbers = text.numbers
    inner = numbers.intermediate_size * (2 if text.wide and index >= text.num_own else 1)
    mlp = gated_mlp(f"{name}.mlp", numbers.hidden_size, inner, numbers.activation, _PARTS)
    before, behind = (text.norm(f"{name}.{which}_feedforward_layernorm") for which in ("pre", "post"))
    if text.experts is None:
        return ResidualSpec((BranchSpec(norm=before, block=mlp, output_norm=behind),))
    experts = stored_together(mixture(text.experts, name, _PARTS))
    router = linear(numbers.hidden_size, (f"{name}.router.proj", text.experts.num_experts))
    experts = replace(
        experts,
        router=router,
        norm=text.norm(f"{before.name}_2"),
        router_norm=text.norm(f"{name}.router", stored="scale", factor=numbers.hidden_size**-0.5),
        expert_scales=f"{name}.router.per_expert_scale",
    )
    branches = (
        BranchSpec(norm=before, block=mlp, output_norm=text.norm(f"{behind.name}_1")),
        BranchSpec(block=experts, output_norm=text.norm(f"{behind.name}_2")),
    )
    return ResidualSpec(branches, sum_norm=behind)


def read_gguf(values: GGUFValues) -> DecoderSpec:
    num_layers = values.size("num_layers", "block_count")
    kinds = values.layer_types() or []
    if len(kinds) != num_layers or {*kinds} != {WINDOWED, FULL}:
        raise values.wrong(
            "attention.sliding_window_pattern", kinds, f"a list of {num_layers}, of both kinds of layers"
        )
    first = {kind: kinds.index(kind) for kind in (WINDOWED, FULL)}
    widths = values.by_layer("feed_forward_length", num_layers)
    num_kv_heads = values.by_layer("attention.head_count_kv", num_layers)
    num_experts = values.integer("expert_count", 0)
    config = GGUFConfig(
        values,
        attention_k_eq_v=not values.has(f"blk.{first[FULL]}.attn_v.weight"),
        enable_moe_block=num_experts > 0,
        final_logit_softcapping=values.number("final_logit_softcapping", 0.0) or None,
        global_head_dim=values.size("head_dim", "attention.key_length"),
        head_dim=values.size("head_dim", "attention.key_length_swa"),
        hidden_size_per_layer_input=values.integer("embedding_length_per_layer_input", 0),
        intermediate_size=widths[0],
        layer_types=kinds,
        moe_intermediate_size=values.integer("expert_feed_forward_length", 0),
        num_experts=num_experts,
        num_global_key_value_heads=num_kv_heads[first[FULL]],
        num_key_value_heads=num_kv_heads[first[WINDOWED]],
        num_kv_shared_layers=values.integer("attention.shared_kv_layers", 0),
        rope_local_base_freq=values.number("rope.freq_base_swa", 10_000.0),
        rope_parameters={FULL: {}},
        top_k_experts=values.integer("expert_used_count", 0),
        use_double_wide_mlp=widths[-1] != widths[0],
        vocab_size_per_layer_input=values.rows(
            "vocab_size", "per_layer_token_embd.weight", default=values.vocab_size()
        ),
    )
    return read_config(config)


_IN_LAYER = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    **{f"post_ffw_norm{which}": f"post_feedforward_layernorm{which}" for which in ("", "_1", "_2")},
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps": "experts.*.gate_up_proj",
    "ffn_down_exps": "experts.*.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_OUTSIDE = {
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_NAMES = gguf_names(interleaved=False)
GGUF_NAMES = _NAMES._replace(in_layer=_NAMES.in_layer | _IN_LAYER, outside_layers=_NAMES.outside_layers | _OUTSIDE)
FAMILY = Family(read_config, read_gguf, GGUF_NAMES)
