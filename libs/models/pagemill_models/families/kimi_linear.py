"""Kimi Linear (arXiv 2510.26692): delta rules with decays by channel in three of four layers, latent attention without
a rotation in the others, and DeepSeek-V3's experts."""

from __future__ import annotations

from collections.abc import Callable

from pagemill_models.declaration.caches import ChannelDeltaRuleSpec
from pagemill_models.declaration.changes import replace
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import BlockSpec, DecoderSpec, LayerSpec, NormSpec
from pagemill_models.declaration.family import Family
from pagemill_models.declaration.gguf_config import GGUFConfig
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.parts import linear, sequential
from pagemill_models.families.deepseek_v2 import latent_attention
from pagemill_models.families.deepseek_v3 import GGUF_NAMES, SIGMOID, latent_keys, sigmoid_gating
from pagemill_models.families.llama_like import Numbers, decoder, numbers_from_config
from pagemill_models.families.mamba2 import FULL, RECURRENT, gguf_kinds, kinds_of_layers
from pagemill_models.families.moe import mixture_from_config, with_shared_experts

DENSE, SPARSE = "dense", "sparse"
PARTS = ("w1", "w3", "w2")
"""Names of an expert's gate, up and down projection."""
_OF_DECAY = ("f_a_proj.", "f_b_proj.", "dt_bias", "A_log")
RENAMED = {
    ".block_sparse_moe.": ".mlp.",
    **{f".self_attn.{part}": f".self_attn.forget_gate.{part}" for part in _OF_DECAY},
}
STACKED = {
    ".experts.gate_up_proj": (".experts.*.w1.weight", ".experts.*.w3.weight"),
    ".experts.down_proj": (".experts.*.w2.weight",),
}


NAMES = {
    "model_max_length": "max_position_embeddings",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "num_shared_experts": "n_shared_experts",
}
"""Keys of published files, and what the files of related families call them."""
LISTS = {"full_attn_layers": FULL, "kda_layers": RECURRENT}
"""Keys of `linear_attn_config` with the numbers of layers, from 1 on."""


def read_config(config: ConfigValues) -> DecoderSpec:
    config = config.renamed(NAMES)
    numbers = numbers_from_config(config, default_context=1_048_576, epsilon=("rms_norm_eps", 1e-5))
    if numbers.activation != "silu":
        raise config.unsupported(f"the activation `{numbers.activation}` beside a delta rule")
    kinds = kinds_of_layers(config, numbers.num_layers, "layer_types") or _kinds(config, numbers.num_layers)
    forward, biased = _forward(config, numbers), config.flag("attention_bias", False)

    def layer(index: int, plain: LayerSpec) -> LayerSpec:
        first, second = plain.norms()
        name = f"{plain.name}.self_attn"
        mixer: BlockSpec = _delta_rule(config, name, numbers)
        if kinds[index] == FULL:
            mixer = latent_attention(config, numbers, None, name, biased)
        return sequential(plain.name, (first, mixer), (second, forward(index, plain)))

    plain = decoder(numbers)
    layers = tuple(layer(index, each) for index, each in enumerate(plain.layers))
    return replace(plain, layers=layers, renamed=RENAMED, stacked=STACKED)


def _kinds(config: ConfigValues, num_layers: int) -> list[str]:
    settings = config.object("linear_attn_config")
    if not settings.keys() >= LISTS.keys():
        return [FULL if index and index % 4 == 0 else RECURRENT for index in range(num_layers)]
    kinds: dict[int, str] = {}
    for key, kind in LISTS.items():
        for number in settings[key] if isinstance(settings[key], list) else [None]:
            if type(number) is not int or not 1 <= number <= num_layers or kinds.get(number, kind) != kind:
                wanted = f"numbers from 1 to {num_layers}, each in one of {' and '.join(LISTS)}"
                raise config.wrong(f"linear_attn_config.{key}", settings[key], wanted)
            kinds[number] = kind
    absent = next((number for number in range(1, num_layers + 1) if number not in kinds), None)
    if absent is not None:
        wanted = f"with {next(iter(LISTS))} the numbers from 1 to {num_layers}; {absent} is missing"
        raise config.wrong("linear_attn_config.kda_layers", settings["kda_layers"], wanted)
    return [kinds[number] for number in range(1, num_layers + 1)]


def _forward(config: ConfigValues, numbers: Numbers) -> Callable[[int, LayerSpec], BlockSpec]:
    """Return a function from a layer's number and the plain layer to its second block."""
    kinds = config.layer_types(numbers.num_layers, "mlp_layer_types")
    if kinds is None:
        dense = config.integer("first_k_dense_replace", default=1)
        kinds = [DENSE if index < dense else SPARSE for index in range(numbers.num_layers)]
    unknown = next((kind for kind in kinds if kind not in (DENSE, SPARSE)), None)
    if unknown is not None:
        raise config.unsupported(f"layers of the type `{unknown}` (`mlp_layer_types`)")
    if config.integer("moe_layer_freq", default=1) != 1:
        raise config.unsupported("dense layers between mixtures of experts (`moe_layer_freq`)")
    if config.text("moe_router_activation_func", "sigmoid") != "sigmoid":
        raise config.unsupported("routing by another function than sigmoid (`moe_router_activation_func`)")
    renormalized = config.flag("norm_topk_prob", True)
    experts = mixture_from_config(config, size_key="moe_intermediate_size", renormalized=renormalized)
    gating = sigmoid_gating(config, experts, default=(1, 1), scale=2.446)
    num_shared = config.integer("n_shared_experts", default=1)

    def block(index: int, plain: LayerSpec) -> BlockSpec:
        _, mlp = plain.blocks()
        name = f"{plain.name}.mlp"
        return mlp if kinds[index] == DENSE else with_shared_experts(experts, name, num_shared, gating, PARTS)

    return block


def _delta_rule(config: ConfigValues, name: str, numbers: Numbers) -> ChannelDeltaRuleSpec:
    inside = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    inside["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    settings = config.object("linear_attn_config")
    config = config.replaced(**{key: settings[other] for other, key in inside.items() if other in settings})
    num_heads, head_dim = config.size("linear_num_heads", default=32), config.size("linear_head_dim", default=128)
    size, inner, decay = numbers.hidden_size, num_heads * head_dim, f"{name}.forget_gate"
    return ChannelDeltaRuleSpec(
        name=name,
        decay_name=decay,
        num_value_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        width=config.size("linear_conv_kernel_dim", default=4),
        inputs=linear(size, *((f"{name}.{part}_proj", inner) for part in "qkv")),
        rates=linear(size, (f"{name}.b_proj", num_heads)),
        decay_down=linear(size, (f"{decay}.f_a_proj", head_dim)),
        decay_up=linear(head_dim, (f"{decay}.f_b_proj", inner)),
        gate_down=linear(size, (f"{name}.g_a_proj", head_dim)),
        gate_up=linear(head_dim, (f"{name}.g_b_proj", inner)),
        norm=NormSpec(name=f"{name}.o_norm", size=head_dim, eps=numbers.rms_norm_eps),
        output=linear(inner, (f"{name}.o_proj", size)),
    )


def read_gguf(values: GGUFValues) -> DecoderSpec:
    num_kv_heads, kinds = gguf_kinds(values)
    head_dim = values.size("head_dim", "kda.head_dim")
    rank = next((f"blk.{index}.ssm_dt.bias" for index, kind in enumerate(kinds) if kind == RECURRENT), "")
    own = {
        **latent_keys(values, f"blk.{kinds.index(FULL)}"),
        "num_key_value_heads": num_kv_heads,
        "layer_types": kinds,
        "linear_conv_kernel_dim": values.integer("ssm.conv_kernel"),
        "linear_head_dim": head_dim,
        "linear_num_heads": values.rows("num_rows", rank, default=head_dim) // head_dim,
        "norm_topk_prob": values.flag("expert_weights_norm", True),
    }
    if values.integer("expert_gating_func", SIGMOID) != SIGMOID:
        raise values.unsupported("experts that are not chosen by sigmoids")
    return read_config(GGUFConfig(values, **own))


_OF_RULE = {
    **{f"ssm_conv1d_{part}": f"{part}_conv1d" for part in "qkv"},
    **{f"ssm_f_{part}": f"forget_gate.f_{part}_proj" for part in "ab"},
    **{f"ssm_g_{part}": f"g_{part}_proj" for part in "ab"},
    "ssm_a": "forget_gate.A_log",
    "ssm_dt.bias": "forget_gate.dt_bias",
    "ssm_beta": "b_proj",
    "ssm_norm": "o_norm",
}
_EXPERTS = dict(zip(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), PARTS, strict=True))
_NAMES = GGUF_NAMES._replace(
    in_layer=GGUF_NAMES.in_layer
    | {short: f"mlp.experts.*.{part}" for short, part in _EXPERTS.items()}
    | {short: f"self_attn.{name}" for short, name in _OF_RULE.items()},
    shapes={**{f"ssm_conv1d_{part}.weight": (-1, 1, 0) for part in "qkv"}, "ssm_a": (1, 1, -1, 1)},
    logarithms=("ssm_a",),
)
FAMILY = Family(read_config, read_gguf, _NAMES)
