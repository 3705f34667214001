"""Rope settings of both header formats are used as they are or refused with the field's name and value."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from mutated_models import gguf_bytes, gguf_metadata

from pagemill_models.declaration.config_values import ConfigValues
from pagemill_models.declaration.declaration import DecoderSpec, RopeSpec
from pagemill_models.declaration.rope_scaling import LinearScaling, Llama3Scaling, RopeError, YarnScaling
from pagemill_models.declaration.rope_settings import read_gguf_scaling
from pagemill_models.sources import SourceError, UnreadableModelError
from pagemill_models.spec.decoders import decoder_from_config
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.spec.model_spec import UnsupportedModelArchitecture

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 2.0}
BY_ATTENTION_TYPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def without(settings: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != name}


def read_rope(config: dict[str, Any]) -> RopeSpec:
    return ConfigValues(Path("model"), config, "LlamaForCausalLM").rope(2, 256)


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(UnreadableModelError) as refused:
        read_rope(config)
    place, _, message = str(refused.value).partition("`model`: ")
    assert place == "model.source: "
    return message


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("settings", [LINEAR, LLAMA3, YARN])
def test_a_missing_factor_is_refused_by_name(key, settings):
    message = refusal({key: without(settings, "factor")})
    assert message == f"`{key}.factor` is missing; it must be a number from 1e-06 to 1e+12."


@pytest.mark.parametrize("settings", [LINEAR, LLAMA3, YARN])
@pytest.mark.parametrize(
    ("factor", "shown"),
    [
        (None, "null"),
        ("8", "'8'"),
        (True, "True"),
        ([8.0], "[8.0]"),
        (0, "0"),
        (-4.0, "-4.0"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (10**400, "1000000"),
        (1e-79, "1e-79"),
    ],
)
def test_a_factor_that_is_not_a_positive_number_is_refused_by_name_and_value(settings, factor, shown):
    message = refusal({"rope_scaling": settings | {"factor": factor}})
    assert message.startswith(f"`rope_scaling.factor` is {shown}")
    assert message.endswith("; it must be a number from 1e-06 to 1e+12.")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (without(LLAMA3, "low_freq_factor"), "`rope_parameters.low_freq_factor` is missing"),
        (without(LLAMA3, "high_freq_factor"), "`rope_parameters.high_freq_factor` is missing"),
        (
            LLAMA3 | {"low_freq_factor": 0},
            "`rope_parameters.low_freq_factor` is 0; it must be a number from 1e-06 to 1e+12",
        ),
        (LLAMA3 | {"high_freq_factor": 1.0}, "`rope_parameters.high_freq_factor` is 1.0; it must be greater than the "),
        (LLAMA3 | {"original_max_position_embeddings": 0}, "`rope_parameters.original_max_position_embeddings` is 0"),
        (
            YARN | {"original_max_position_embeddings": None},
            "`rope_parameters.original_max_position_embeddings` is nul",
        ),
        (YARN | {"original_max_position_embeddings": 64.5}, "it must be a whole number from 1 to 1e+12"),
        (YARN | {"beta_fast": "32"}, "`rope_parameters.beta_fast` is '32'"),
        (
            YARN | {"beta_fast": 1, "beta_slow": 2},
            "`rope_parameters.beta_fast` is 1.0; it must be at least the beta_slow",
        ),
        (YARN | {"beta_slow": -1}, "`rope_parameters.beta_slow` is -1"),
        (YARN | {"attention_factor": 0.0}, "`rope_parameters.attention_factor` is 0.0"),
        (YARN | {"attention_factor": "1"}, "`rope_parameters.attention_factor` is '1'"),
        (YARN | {"mscale": [1], "mscale_all_dim": 1}, "`rope_parameters.mscale` is [1]"),
        (YARN | {"mscale": 1, "mscale_all_dim": -9.0}, "`rope_parameters.mscale_all_dim` is -9.0"),
        (YARN | {"truncate": 0}, "`rope_parameters.truncate` is 0; it must be true or false"),
        (YARN | {"rope_theta": 1.0}, "`rope_theta` is 1.0; it must be greater than 1 with the rope scaling `yarn`"),
        (LINEAR | {"rope_theta": None}, "`rope_parameters.rope_theta` is null"),
        ({"rope_type": None, "factor": 2.0}, "`rope_parameters.rope_type` is null; it must be one of default, linear"),
        ({"type": 7, "factor": 2.0}, "`rope_parameters.type` is 7"),
        ({"factor": 2.0}, "`rope_parameters.rope_type` is missing beside `rope_parameters.factor`"),
    ],
)
def test_every_field_of_a_kind_is_checked(settings, message):
    assert message in refusal({"rope_parameters": settings})


@pytest.mark.parametrize("kind", ["mrope", "axial", "YaRN", ""])
def test_an_unsupported_kind_is_refused_with_the_supported_ones(kind):
    with pytest.raises(UnsupportedModelArchitecture) as refused:
        read_rope({"rope_scaling": {"type": kind, "factor": 2.0}})
    supported = "supported are default, linear, dynamic, llama3, yarn, longrope, proportional"
    assert f"rope scaling `{kind}` ({supported})" in str(refused.value)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_settings_per_attention_type_are_refused(key):
    with pytest.raises(UnsupportedModelArchitecture, match=f"per attention type .`{key}.full_attention`"):
        read_rope({key: BY_ATTENTION_TYPE | {"rope_theta": 1e4}})
    with pytest.raises(UnsupportedModelArchitecture, match="per attention type"):
        read_rope({key: {"sliding_attention": None}})


def test_a_partial_rotary_embedding_is_also_found_outside_the_rope_settings():
    with pytest.raises(UnsupportedModelArchitecture, match="partial rotary embedding"):
        read_rope({"partial_rotary_factor": 0.5})
    assert read_rope({"partial_rotary_factor": 1.0}).scaling is None


def test_optional_fields_have_the_defaults_of_transformers():
    assert read_rope({}) == RopeSpec(theta=10_000.0, rotary_dim=2, scaling=None)
    linear = read_rope({"rope_theta": 5e5, "rope_parameters": LINEAR})
    assert (linear.theta, linear.scaling) == (5e5, LinearScaling(factor=2.0))
    llama3 = read_rope({"rope_scaling": without(LLAMA3, "original_max_position_embeddings")}).scaling
    assert isinstance(llama3, Llama3Scaling)
    assert llama3.original_max_position_embeddings == 256
    yarn = read_rope({"rope_scaling": {"type": "yarn", "factor": 1.0, "beta_fast": None}}).scaling
    assert yarn == YarnScaling(factor=1.0, original_max_position_embeddings=256, attention_factor=1.0)
    assert (yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (32.0, 1.0, True)


def test_the_old_key_takes_precedence_unless_it_is_empty():
    both = {"rope_scaling": LINEAR, "rope_parameters": YARN}
    assert read_rope(both).scaling == LinearScaling(factor=2.0)
    assert isinstance(read_rope(both | {"rope_scaling": {}}).scaling, YarnScaling)


@pytest.mark.parametrize("settings", [LINEAR, LLAMA3, YARN])
def test_a_spec_with_scaling_survives_its_encoding(settings):
    scaling = read_rope({"rope_scaling": settings}).scaling
    assert msgspec.to_builtins(scaling)["rope_type"] == settings["rope_type"]
    spec = RopeSpec(theta=10_000.0, rotary_dim=2, scaling=scaling)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=RopeSpec) == spec


# The settings are in the header of a model, which is read before any weight.


def folder_with(folder: Path, **settings: Any) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    (folder / "config.json").write_text(json.dumps(config | settings))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return folder


def test_unsupported_rope_settings_of_a_folder_are_an_unsupported_architecture(tmp_path):
    for settings in ({"type": "axial", "factor": 2.0}, BY_ATTENTION_TYPE):
        with pytest.raises(UnsupportedModelArchitecture) as refused:
            load_model_spec(folder_with(tmp_path, rope_scaling=settings))
        assert refused.value.reason == "UnsupportedArchitecture"
        assert "`LlamaForCausalLM` with " in refused.value.message


def test_a_wrong_factor_in_the_header_of_a_folder_is_unreadable(tmp_path):
    with pytest.raises(UnreadableModelError, match=r"config.json`: `rope_scaling.factor` is 0; it must be a number"):
        load_model_spec(folder_with(tmp_path, rope_scaling={"type": "linear", "factor": 0}))


GGUF_LLAMA = {
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
EMBEDDING = {"token_embd.weight": np.zeros((96, 32))}
DIVISORS = "rope_freqs.weight"


def gguf_scaling(**keys: Any) -> Any:
    """Return the scaling of GGUF metadata; `scaling__factor` stands for `llama.rope.scaling.factor`."""
    metadata = {f"llama.rope.{name.replace('__', '.')}": value for name, value in keys.items()}
    return read_gguf_scaling(metadata, "llama", 10_000.0, 128)


def test_a_gguf_factor_without_a_type_is_linear_like_in_llama_cpp():
    assert gguf_scaling(scaling__factor=4.0) == LinearScaling(factor=4.0)
    assert gguf_scaling(scale_linear=4) == LinearScaling(factor=4.0)
    assert gguf_scaling(scaling__factor=2.0, scale_linear=4.0) == LinearScaling(factor=2.0)
    assert gguf_scaling() is None
    assert gguf_scaling(scaling__type="none", scaling__factor=0.0) is None


def test_all_gguf_settings_of_yarn_are_read():
    scaling = gguf_scaling(
        scaling__type="yarn",
        scaling__factor=float(np.float32(1.1)),
        scaling__original_context_length=32,
        scaling__yarn_beta_fast=16.0,
        scaling__yarn_beta_slow=2.0,
        scaling__yarn_ext_factor=1.0,
        scaling__finetuned=True,
    )
    assert isinstance(scaling, YarnScaling)
    assert (scaling.factor, scaling.original_max_position_embeddings) == (1.1, 32)
    assert (scaling.beta_fast, scaling.beta_slow) == (16.0, 2.0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"scaling__type": "linear"}, "`llama.rope.scaling.factor` is missing"),
        ({"scaling__factor": 0.0}, "`llama.rope.scaling.factor` is 0.0"),
        ({"scaling__type": "yarn", "scaling__factor": "4"}, "`llama.rope.scaling.factor` is '4'"),
        ({"scale_linear": -1.0}, "`llama.rope.scale_linear` is -1.0"),
        ({"scaling__type": "longrope", "scaling__factor": 4.0}, "the rope scaling `longrope`"),
        ({"scaling__type": 3}, "`llama.rope.scaling.type` is 3"),
        (
            {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 0},
            "`llama.rope.scaling.original_context_length` is 0",
        ),
        ({"scaling__attn_factor": 1.2}, "`llama.rope.scaling.attn_factor` = 1.2"),
        ({"scaling__factor": 2.0, "scaling__yarn_ext_factor": 1.0}, "`llama.rope.scaling.yarn_ext_factor` = 1.0"),
        ({"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
    ],
)
def test_unusable_gguf_settings_are_refused_by_their_key(keys, message):
    with pytest.raises(RopeError) as refused:
        gguf_scaling(**keys)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "tensors", "error", "message"),
    [
        ({"llama.rope.scaling.factor": -2.0}, {}, UnreadableModelError, "`llama.rope.scaling.factor` is -2.0"),
        (
            {"llama.rope.scaling.type": "longrope"},
            {},
            UnsupportedModelArchitecture,
            "`llama` with the rope scaling `lon",
        ),
        ({}, {"rope_factors_long.weight": np.ones(4)}, UnsupportedModelArchitecture, "rope_factors_long.weight"),
        ({"llama.rope.scaling.factor": 2.0}, {DIVISORS: np.ones(4)}, UnsupportedModelArchitecture, "beside the tensor"),
        ({}, {DIVISORS: np.ones(3)}, UnreadableModelError, "`rope_freqs.weight` is 3 F32; it must be 4 F32"),
        ({}, {DIVISORS: np.array([1, 1, 0, 8])}, UnreadableModelError, "`rope_freqs.weight` holds 0.0"),
        ({}, {DIVISORS: np.array([1, 1, np.nan, 8])}, UnreadableModelError, "`rope_freqs.weight` holds nan"),
    ],
)
def test_unusable_rope_settings_in_the_header_of_a_gguf_file_are_refused(write_gguf, keys, tensors, error, message):
    with pytest.raises(error) as refused:
        load_model_spec(write_gguf(GGUF_LLAMA | keys, EMBEDDING | tensors))
    assert message in refused.value.message


def test_a_gguf_file_with_frequency_divisors_is_read(write_gguf):
    spec = load_model_spec(write_gguf(GGUF_LLAMA, EMBEDDING | {DIVISORS: np.full(4, 8)}))
    (rope,) = spec.decoder.ropes()
    assert rope.scaling is None
    assert rope.divisors is not None


@pytest.mark.parametrize(
    ("declared", "scaling", "context"),
    [
        (32768, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (40960, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (32768, {"rope_type": "yarn", "factor": 2.0}, 65536),
        (163840, {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}, 163840),
        (4096, {"type": "linear", "factor": 4.0}, 16384),
        (16384, {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        (32768, {"type": "dynamic", "factor": 2.0}, 65536),
        (4096, {"type": "linear", "factor": 0.5}, 4096),
        (131072, LLAMA3 | {"original_max_position_embeddings": 8192}, 131072),
        (4096, None, 4096),
    ],
)
def test_the_context_is_the_scaled_one_whichever_length_the_file_declares(
    declared: int, scaling: dict[str, Any] | None, context: int
) -> None:
    assert decoder_of(max_position_embeddings=declared, rope_scaling=scaling).max_position_embeddings == context


def test_a_file_whose_kinds_of_layers_scale_differently_declares_the_scaled_context() -> None:
    values = {
        "architectures": ["Gemma3ForCausalLM"],
        "max_position_embeddings": 131072,
        "rope_parameters": BY_ATTENTION_TYPE,
        "num_hidden_layers": 6,
        "head_dim": 16,
    }
    assert decoder_of(**values).max_position_embeddings == 131072


def test_a_scaled_context_beyond_all_bounds_is_refused() -> None:
    with pytest.raises(UnreadableModelError, match="max_position_embeddings"):
        decoder_of(rope_scaling={"type": "linear", "factor": 1e9})


def decoder_of(**values: Any) -> DecoderSpec:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 4, "vocab_size": 64, "max_position_embeddings": 256, "rms_norm_eps": 1e-6}
    return decoder_from_config({"architectures": ["LlamaForCausalLM"], **sizes, **heads, **values}, Path("config.json"))


@pytest.mark.parametrize("num", [1, 3, 5])
def test_a_longrope_list_of_another_length_is_refused_in_both_formats(num, tmp_path):
    """A list of one number would be broadcast to all frequencies."""
    settings = {"rope_type": "longrope", "short_factor": [1.0] * num, "long_factor": [1.0] * num}
    values = ConfigValues(Path("model"), {"rope_scaling": settings}, "LlamaForCausalLM")
    with pytest.raises(UnreadableModelError, match=r"`rope_scaling.short_factor` is .*a list of 4 numbers"):
        values.rope(8, 256)
    metadata = {key: value for key, value in gguf_metadata("phi3").items() if ".rope.scaling." not in key}
    factors = {f"rope_factors_{kind}.weight": (num,) for kind in ("long", "short")}
    raw = gguf_bytes(metadata, {"token_embd.weight": (64, 64), **factors})
    ones = struct.pack("<f", 1.0) * num
    end = len(raw) - 2 * 32
    path = tmp_path / "model.gguf"
    path.write_bytes(raw[:end] + 2 * (ones + bytes(32 - len(ones))))
    with pytest.raises(SourceError, match=r"`rope_factors_short.weight` is .*a list of 8 numbers"):
        load_model_spec(path)
