"""Rotary tables of a config.json equal those of transformers for usual and unusual settings, and are never NaN."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from examples import num_examples
from pagemill_execution.decoders.rope import rope_tables
from pagemill_kernels.torch_arrays import to_torch
from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import RopeSpec
from pagemill_models.spec.model_spec import UnsupportedModelArchitecture
from pagemill_protocol.source_errors import UnreadableModelError

HEAD_DIM, CONTEXT = 32, 512
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * index for index in range(HEAD_DIM // 2)],
    "long_factor": [2.0 + 0.5 * index for index in range(HEAD_DIM // 2)],
}
ORIGINAL = "original_max_position_embeddings"
CONFIGS: list[dict[str, Any]] = [
    {},
    {"rope_theta": 500_000},
    {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0}},
    {"rope_scaling": None, "rope_parameters": None},
    {"rope_scaling": {}, "rope_theta": 100.0},
    {"rope_scaling": {"rope_type": "default", "factor": 8.0}},
    {"rope_scaling": {"type": "default"}, "partial_rotary_factor": 1.0},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"type": "linear", "factor": 3}},
    {"rope_scaling": {"type": "linear", "factor": 0.25}},
    {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": YARN},
    {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "attention_factor": 3.0}},
    {"rope_scaling": LLAMA3},
    {"rope_scaling": LLAMA3 | {ORIGINAL: 64}, "rope_theta": 500_000.0},
    {"rope_scaling": LLAMA3 | {ORIGINAL: 8, "factor": 32}},
    {"rope_scaling": LLAMA3 | {ORIGINAL: 64, "high_freq_factor": 1.5, "low_freq_factor": 0.5}},
    {"rope_scaling": YARN},
    {"rope_scaling": YARN | {ORIGINAL: 64}},
    {"rope_scaling": YARN | {ORIGINAL: 64.0, "finetuned": True}},
    {"rope_scaling": YARN | {ORIGINAL: 2}},
    {"rope_scaling": YARN | {ORIGINAL: 1_000_000}},
    {"rope_scaling": YARN | {ORIGINAL: 64, "attention_factor": 0.75}},
    {"rope_scaling": YARN | {ORIGINAL: 64, "attention_factor": None, "mscale": None}},
    {"rope_scaling": YARN | {ORIGINAL: 64, "beta_fast": 8, "beta_slow": 8}},
    {"rope_scaling": YARN | {ORIGINAL: 64, "beta_fast": 0, "beta_slow": None}},
    {"rope_scaling": YARN | {ORIGINAL: 64, "truncate": False}},
    {"rope_scaling": YARN | {ORIGINAL: 64, "mscale": 0.707, "mscale_all_dim": 1.0}},
    {"rope_scaling": YARN | {ORIGINAL: 64, "mscale": 0.707}},
    {"rope_scaling": YARN | {ORIGINAL: 64, "mscale": 0.0, "mscale_all_dim": 1.0}},
    {"rope_scaling": YARN | {ORIGINAL: 64, "factor": 0.5}},
    {"rope_scaling": YARN | {ORIGINAL: 64, "factor": 1.0}, "rope_theta": 1.5},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_scaling": LONG | {ORIGINAL: 64}},
    {"rope_scaling": LONG | {ORIGINAL: 64, "attention_factor": 1.25}},
    {"rope_scaling": LONG | {ORIGINAL: 64, "factor": 32.0}},
    {"rope_scaling": LONG | {ORIGINAL: CONTEXT}},
]


def read_rope(config: dict[str, Any]) -> RopeSpec:
    return ConfigValues(Path("model"), config, "LlamaForCausalLM").rope(HEAD_DIM, CONTEXT)


def our_tables(config: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    rope = read_rope(config)
    cos, sin = rope_tables(HEAD_DIM, CONTEXT, rope.theta, rope.scaling)
    return to_torch(cos), to_torch(sin)


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_tables_equal_those_of_transformers(config: dict[str, Any]) -> None:
    copies = {name: dict(value) if isinstance(value, dict) else value for name, value in config.items()}
    sizes = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "max_position_embeddings": CONTEXT}
    reference = LlamaRotaryEmbedding(transformers.LlamaConfig.from_dict(sizes | copies))
    cos, sin = reference(torch.zeros(1), torch.arange(CONTEXT)[None])
    # torch's powers may be wrong in the last bit of a period, unlike numpy's; an angle may differ by that.
    allowed = 1e-6 + 2**-22 * torch.arange(CONTEXT)[:, None] * reference.inv_freq
    for ours, theirs in zip(our_tables(config), (cos, sin), strict=True):
        assert bool(((ours - theirs[0, :, : HEAD_DIM // 2]).abs() <= allowed).all())


@pytest.mark.parametrize("factor", [2.0, 3.5])
def test_dynamic_tables_of_a_scaled_context_equal_those_of_transformers_for_its_length(factor: float) -> None:
    config = {"rope_scaling": {"rope_type": "dynamic", "factor": factor}}
    sizes = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "max_position_embeddings": CONTEXT}
    reference = LlamaRotaryEmbedding(transformers.LlamaConfig.from_dict(sizes | config))
    length = int(factor * CONTEXT)
    theirs = reference(torch.zeros(1), torch.arange(length)[None])
    rope = read_rope(config)
    for ours, expected in zip(rope_tables(HEAD_DIM, length, rope.theta, rope.scaling), theirs, strict=True):
        assert torch.allclose(to_torch(ours), expected[0, :, : HEAD_DIM // 2], atol=1e-3)


values = (
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 2, 64, 10**400, "2", [], {}])
    | st.floats()
    | st.floats(0.5, 64.0)
)
OPTIONAL = (
    *(ORIGINAL, "rope_theta", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "attention_factor", "truncate"),
)
some_settings = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["linear", "llama3", "yarn"]), "factor": values},
    optional=dict.fromkeys(OPTIONAL, values),
)


@settings(max_examples=num_examples(400), deadline=None)
@given(some_settings)
def test_any_settings_give_finite_tables_or_are_refused(scaling: dict[str, Any]) -> None:
    try:
        rope = read_rope({"rope_scaling": scaling})
    except (UnreadableModelError, UnsupportedModelArchitecture):
        return
    if not 0 < rope.theta < math.inf:
        return  # refused together with other values of the header
    for table in rope_tables(8, 4, rope.theta, rope.scaling):
        assert np.isfinite(table).all()
