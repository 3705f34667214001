"""Mamba 2's state spaces as blocks of hybrids, and the kinds of their layers."""

from __future__ import annotations

import math
from typing import Any

from pagemill_models.declaration.caches import StateSpaceSpec
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import NormSpec
from pagemill_models.declaration.family import GGUFNames
from pagemill_models.declaration.gguf_values import GGUFValues
from pagemill_models.declaration.limits import check_size
from pagemill_models.declaration.parts import linear

FULL, RECURRENT = "full_attention", "linear_attention"
_KINDS = {"attention": FULL, "mamba": RECURRENT}
"""The names in files from before transformers 5."""


def kinds_of_layers(config: ConfigValues, num_layers: int, key: str, others: tuple[str, ...] = ()) -> list[str] | None:
    """Return the kind of each layer, or None where the file lists none. `others`: kinds besides those of the mixers."""
    kinds = config.layer_types(num_layers, key)
    if kinds is None:
        return None
    kinds = [_KINDS.get(kind, kind) for kind in kinds]
    unknown = next((kind for kind in kinds if kind not in (FULL, RECURRENT, *others)), None)
    if unknown is not None:
        raise config.unsupported(f"layers of the type `{unknown}` (`{key}`)")
    return kinds


def state_space(
    name: str,
    hidden_size: int,
    *,
    num_heads: int,
    head_dim: int,
    num_groups: int,
    state_size: int,
    width: int,
    bias: bool,
    biased: bool,
    eps: float,
    step_limits: tuple[float, ...],
) -> StateSpaceSpec:
    """Declare a block. `bias`: whether the convolution has one; `biased`: whether both products have."""
    inner, of_groups = num_heads * head_dim, 2 * num_groups * state_size
    least, most = step_limits
    return StateSpaceSpec(
        name=name,
        num_groups=num_groups,
        num_value_heads=num_heads,
        head_dim=head_dim,
        state_size=state_size,
        width=width,
        bias=bias,
        inputs=linear(hidden_size, (f"{name}.in_proj", 2 * inner + of_groups + num_heads), bias=biased),
        output=linear(inner, (f"{name}.out_proj", hidden_size), bias=biased),
        norm=NormSpec(name=f"{name}.norm", size=inner, eps=eps),
        norm_parts=num_groups,
        step_limits=(least, most),
    )


def state_space_from_config(config: ConfigValues, name: str, *, eps: float) -> StateSpaceSpec:
    """Declare a block by the keys that begin with `mamba_`: `mamba_d_ssm` or `mamba_expand` says how many values all
    heads have."""
    size, num_heads = config.size("hidden_size"), config.size("mamba_n_heads", default=128)
    expanded = config.size("mamba_expand", default=2) * size
    inner = config.size("mamba_d_ssm") if config.has("mamba_d_ssm") else expanded
    head_dim = inner // num_heads
    if config.text("mamba_d_head", "auto") != "auto":
        head_dim = config.size("mamba_d_head")
    if head_dim * num_heads != inner:
        raise config.wrong("mamba_n_heads", num_heads, f"a divisor of the {inner} values of all heads")
    num_groups = config.size("mamba_n_groups", default=1)
    if num_heads % num_groups:
        raise config.wrong("mamba_n_groups", num_groups, f"a divisor of the {num_heads} mamba_n_heads")
    if config.activation("hidden_act", default="silu") != "silu":
        raise config.unsupported("another activation than `silu` beside a state space (`hidden_act`)")
    return state_space(
        name,
        size,
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_size=config.size("mamba_d_state", default=256),
        width=config.size("mamba_d_conv", default=4),
        bias=config.flag("mamba_conv_bias", True),
        biased=config.flag("mamba_proj_bias", False),
        eps=eps,
        step_limits=config.numbers("time_step_limit", (0.0, math.inf)),
    )


def gguf_keys(values: GGUFValues) -> dict[str, Any]:
    """Return what a GGUF file says of its state spaces, as keys of `config.json`."""
    inner, num_heads = values.integer("ssm.inner_size"), values.integer("ssm.time_step_rank")
    if num_heads < 1 or inner % num_heads:
        raise values.wrong("ssm.time_step_rank", num_heads, f"a divisor of the {inner} values of all heads")
    return {
        "mamba_n_heads": num_heads,
        "mamba_d_head": inner // num_heads,
        "mamba_d_ssm": inner,
        "mamba_n_groups": values.integer("ssm.group_count"),
        "mamba_d_state": values.integer("ssm.state_size"),
        "mamba_d_conv": values.integer("ssm.conv_kernel"),
        "mamba_conv_bias": values.has_in_layers("ssm_conv1d.bias"),
        "mamba_proj_bias": values.has_in_layers("ssm_in.bias"),
    }


def gguf_kinds(values: GGUFValues) -> tuple[int, list[str]]:
    """Return the number of key heads, and the kind of each layer: recurrent ones have no key heads."""
    counts = values.by_layer("attention.head_count_kv", values.size("num_layers", "block_count"))
    found = {count for count in counts if count}
    if len(found) != 1:
        raise values.wrong("attention.head_count_kv", counts, "one number for the layers with attention, 0 for others")
    num_heads = check_size(values.file.path, "num_kv_heads", found.pop(), values.held)
    return num_heads, [FULL if count else RECURRENT for count in counts]


_PARTS = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}


def with_state_spaces(names: GGUFNames, name: str, others: dict[str, str]) -> GGUFNames:
    """Return the names with those of state spaces. `name`: of the block in its layer. `others`: further ones."""
    spaces = {short: f"{name}.{part}" for short, part in _PARTS.items()}
    flat = dict.fromkeys(("ssm_a", "ssm_d", "ssm_norm.weight"), (-1,))
    return names._replace(
        in_layer=names.in_layer | spaces | others,
        shapes={"ssm_conv1d.weight": (-1, 1, 0), **flat},
        logarithms=("ssm_a",),
    )
