"""DeepSeek-V2 (arXiv 2405.04434): latent attention, and experts with shared ones, chosen by groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import (
    DecoderSpec,
    GatingSpec,
    LatentAttentionSpec,
    LayerSpec,
    LinearSpec,
    MatrixSpec,
    NormSpec,
    RopeSpec,
)
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.parts import linear, sequential
from pagemill_models.declaration.rope_scaling import YarnScaling
from pagemill_models.families.llama_like import Numbers, decoder, numbers_from_config
from pagemill_models.families.moe import (
    Mixture,
    mixture_from_config,
    num_drafting,
    with_drafting,
    with_shared_experts,
)

SPLIT_UP = "kv_b_proj_by_head"
"""Not a key of config.json: a GGUF file stores `kv_b_proj` as two tensors with a matrix per head."""
COMPRESSED_EPS = 1e-6
"""Epsilon of the norms of latents and compressed queries, regardless of `rms_norm_eps`."""


def read_config(config: ConfigValues) -> DecoderSpec:
    # transformers' class does not read `norm_topk_prob`.
    experts = mixture_from_config(config, size_key="moe_intermediate_size", renormalized=False)
    by_groups = config.choice("topk_method", ("greedy", "group_limited_greedy")) == "group_limited_greedy"
    groups = read_groups(config, experts, default=(1, 1)) if by_groups else (1, 1)
    gating = GatingSpec(scores="softmax", num_groups=groups[0], top_groups=groups[1], scale=read_scale(config, 1.0))
    return latent_decoder(config, experts, lambda _: gating, interleaved=True, context=2048, dense=0, shared=2)


def read_groups(config: ConfigValues, experts: Mixture, default: tuple[int, int]) -> tuple[int, int]:
    """Return the number of expert groups, and of groups to which a token may be routed."""
    num_experts, top_k = experts.num_experts, experts.top_k
    num_groups = config.size("n_group", default=default[0])
    top_groups = config.size("topk_group", default=default[1])
    if num_experts % num_groups:
        raise config.wrong("n_group", num_groups, f"a divisor of the {num_experts} experts of a layer")
    if top_groups > num_groups or top_groups * (num_experts // num_groups) < top_k:
        raise config.wrong(
            "topk_group", top_groups, f"at most the {num_groups} groups, with {top_k} experts or more in so many"
        )
    return num_groups, top_groups


def read_scale(config: ConfigValues, default: float) -> float:
    return config.number("routed_scaling_factor", default=default)


def latent_decoder(
    config: ConfigValues,
    experts: Mixture,
    gating_of: Callable[[str], GatingSpec],
    *,
    interleaved: bool,
    context: int,
    dense: int,
    shared: int,
    of_whole_head: bool = False,
) -> DecoderSpec:
    """Declare the decoder.

    `gating_of`: returns the routing of the mixture of that name. `context`, `dense`, `shared`: defaults of the class.
    `of_whole_head`: whether the rotated share of a head is declared, as one of its rotated and plain values together.
    """
    if config.flag("mlp_bias", False):
        raise config.unsupported("biases of MLPs (`mlp_bias`)")
    if config.integer("moe_layer_freq", default=1) != 1:
        raise config.unsupported("dense layers between mixtures of experts (`moe_layer_freq`)")
    partial = ("partial_rotary_factor", 1.0) if of_whole_head else None
    numbers = numbers_from_config(config, default_context=context, partial_rotary=partial)
    drafting = num_drafting(config, default=0)
    longer = msgspec.structs.replace(numbers, num_layers=numbers.num_layers + drafting)
    plain, rope = decoder(longer), _rope(config, numbers, interleaved, of_whole_head)
    num_dense = config.integer("first_k_dense_replace", default=dense)
    num_shared = config.size("n_shared_experts", default=shared)
    biased = config.flag("attention_bias", False)

    def layer(index: int, spec: LayerSpec) -> LayerSpec:
        _, mlp = spec.blocks()
        first, second = spec.norms()
        if index >= num_dense:
            mlp = with_shared_experts(experts, f"{spec.name}.mlp", num_shared, gating_of)
        attention = latent_attention(config, numbers, rope, f"{spec.name}.self_attn", biased)
        return sequential(spec.name, (first, attention), (second, mlp))

    layers = tuple(layer(index, spec) for index, spec in enumerate(plain.layers))
    return with_drafting(msgspec.structs.replace(plain, layers=layers), numbers.num_layers, drafting)


def _rope(config: ConfigValues, numbers: Numbers, interleaved: bool, of_whole_head: bool) -> RopeSpec:
    size, context = config.size("qk_rope_head_dim", default=64), numbers.max_position_embeddings
    if of_whole_head:
        whole = size + config.size("qk_nope_head_dim", default=128)
        rope = config.rope(whole, context, partial=("partial_rotary_factor", size / whole))
    else:
        rope = config.rope(size, context)
    return msgspec.structs.replace(rope, interleaved=interleaved)


def latent_attention(
    config: ConfigValues, numbers: Numbers, rope: RopeSpec | None, name: str, biased: bool
) -> LatentAttentionSpec:
    """Declare attention. `rope`: None where the shared key and its queries are not rotated."""
    size, num_heads = numbers.hidden_size, numbers.num_heads
    turning = config.size("qk_rope_head_dim", default=64) if rope is None else rope.rotary_dim
    latent_size = config.size("kv_lora_rank", default=512)
    key_dim, value_dim = config.size("qk_nope_head_dim", default=128), config.size("v_head_dim", default=128)
    up = [MatrixSpec(name=f"{name}.kv_b_proj", rows=num_heads * (key_dim + value_dim))]
    if config.flag(SPLIT_UP, False):
        config.check_parts("attention heads", num_heads)
        up = [part for head in range(num_heads) for part in _parts_of_head(name, head, key_dim, value_dim)]
    query_rows = num_heads * (key_dim + turning)
    scaling = None if rope is None else rope.scaling
    magnitude = scaling.magnitude if isinstance(scaling, YarnScaling) else 1.0
    queries = dict[str, Any](query=linear(size, (f"{name}.q_proj", query_rows)))
    if config.optional_integer("q_lora_rank", 1536) is not None:
        rank = config.size("q_lora_rank", default=1536)
        queries = {
            "query_down": linear(size, (f"{name}.q_a_proj", rank), bias=biased),
            "query_norm": _norm(f"{name}.q_a_layernorm", rank),
            "query": linear(rank, (f"{name}.q_b_proj", query_rows)),
        }
    return LatentAttentionSpec(
        num_heads=num_heads,
        latent_size=latent_size,
        key_dim=key_dim,
        value_dim=value_dim,
        rope=rope,
        down=linear(size, (f"{name}.kv_a_proj_with_mqa", latent_size + turning), bias=biased),
        latent_norm=_norm(f"{name}.kv_a_layernorm", latent_size),
        up=LinearSpec(latent_size, tuple(up)),
        output=linear(num_heads * value_dim, (f"{name}.o_proj", size), bias=biased),
        scale=(key_dim + turning) ** -0.5 * magnitude**2,
        plain_shared=turning if rope is None else 0,
        **queries,
    )


def _parts_of_head(name: str, head: int, key_dim: int, value_dim: int) -> tuple[MatrixSpec, MatrixSpec]:
    """Return a head's key and value matrices as GGUF files store them.

    They are multiplied into queries and outputs, so that the keys' matrix is transposed.
    """
    key = MatrixSpec(name=f"{name}.k_b_proj.{head}", rows=key_dim, transposed=True)
    return key, MatrixSpec(name=f"{name}.v_b_proj.{head}", rows=value_dim)


def _norm(name: str, size: int) -> NormSpec:
    return NormSpec(name=name, size=size, eps=COMPRESSED_EPS)


FAMILY = Family(read_config)
