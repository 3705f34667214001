"""ModelSpec: the dimensions of a checkpoint, equal to those of transformers, read from headers only."""

from __future__ import annotations

import json
import math
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_models.declaration.known import BUILT_IN, known_architectures
from pagemill_models.declaration.registry import find_family
from pagemill_models.declaration.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling
from pagemill_models.files.safetensors_header import read_header
from pagemill_models.sources import SourceError, UnreadableModelError
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.spec.model_spec import UnsupportedModelArchitecture

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_weights(tmp_path / "model.safetensors", {"model.embed_tokens.weight": (96, 32), "lm_head.weight": (96, 32)})
    return tmp_path


def write_weights(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + int(np.prod(shape)) * 2
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))


def configure(folder: Path, **changes: Any) -> Path:
    config = {name: value for name, value in (LLAMA | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("model_class", "options"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 16}),
        ("Mistral", {"sliding_window": 8, "head_dim": 16}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("Qwen3", {"head_dim": 16}),
        (
            "Qwen3",
            {"attention_bias": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        ),
    ],
)
def test_the_dimensions_equal_those_of_the_model_that_transformers_builds(tmp_path, model_class, options):
    transformers = pytest.importorskip("transformers")
    if "layer_types" in options:
        options = options | {"use_sliding_window": True, "sliding_window": 8}
    config = getattr(transformers, f"{model_class}Config")(**TINY, **options)
    model = getattr(transformers, f"{model_class}ForCausalLM")(config)
    model.save_pretrained(tmp_path)
    spec = load_model_spec(tmp_path)
    assert spec.architecture == f"{model_class}ForCausalLM"
    assert spec.num_parameters == model.num_parameters()
    assert spec.weight_bytes == 4 * model.num_parameters()
    assert spec.tie_word_embeddings is bool(config.tie_word_embeddings)
    (rope,) = spec.decoder.ropes()
    assert (rope.theta, rope.scaling) == (config.rope_parameters["rope_theta"], None)
    assert {norm.eps for layer in spec.decoder.layers for norm in layer.norms()} == {config.rms_norm_eps}
    assert spec.max_position_embeddings == 256
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        assert spec.head_dim == attention.head_dim
        assert attention.q_proj.out_features == spec.num_heads * spec.head_dim
        assert attention.k_proj.out_features == spec.num_kv_heads * spec.head_dim
        declared, mlp = spec.decoder.layers[index].blocks()
        assert has_biases(declared.qkv) == [attention.q_proj.bias is not None] * 3
        assert has_biases(declared.output) == [attention.o_proj.bias is not None]
        assert has_biases(mlp.up) == [layer.mlp.up_proj.bias is not None] * 2
        assert (declared.query_norm is not None) is (declared.key_norm is not None) is hasattr(attention, "q_norm")
        window = config.sliding_window if model_class == "Mistral" else getattr(attention, "sliding_window", None)
        assert declared.window == window


def has_biases(linear: Any) -> list[bool]:
    return [part.bias for part in linear.parts]


def test_the_declared_tensors_equal_those_of_the_model_that_transformers_builds(tmp_path):
    transformers = pytest.importorskip("transformers")
    for name, options in (("Llama", {"attention_bias": True, "mlp_bias": True}), ("Qwen2", {}), ("Qwen3", {})):
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**TINY, **options))
        model.save_pretrained(tmp_path)
        stored = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        assert load_model_spec(tmp_path).decoder.shapes() == stored


@pytest.mark.model
def test_the_embedded_models_dimensions(smollm2_path):
    spec = load_model_spec(smollm2_path)
    assert spec.architecture == "LlamaForCausalLM"
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (rope_of(spec).theta, spec.decoder.norm.eps) == (100_000.0, 1e-5)
    assert spec.num_parameters == 134_515_008
    assert spec.tie_word_embeddings
    assert spec.quantization == "Q4_1"
    assert spec.kv_bytes_per_token(2) == 2 * 30 * 3 * 64 * 2
    assert 0 < smollm2_path.stat().st_size - spec.weight_bytes < 2_000_000


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, None),
        ({"rope_type": "default"}, None),
        ({"type": "linear", "factor": 2.0}, LinearScaling(factor=2.0)),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4},
            Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=256),
        ),
        (
            {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 64},
            YarnScaling(factor=0.5, original_max_position_embeddings=64, attention_factor=1.0),
        ),
    ],
)
def test_rope_scaling_is_recorded_under_both_generations_of_keys(folder, scaling, expected):
    old = load_model_spec(configure(folder, rope_theta=5000.0, rope_scaling=scaling))
    new = load_model_spec(configure(folder, rope_parameters={"rope_theta": 5000.0, **(scaling or {})}))
    assert rope_of(old) == rope_of(new)
    assert (rope_of(old).theta, rope_of(old).scaling) == (5000.0, expected)


def rope_of(spec: Any) -> Any:
    (rope,) = spec.decoder.ropes()
    return rope


def test_the_type_and_quantization_of_the_weights_are_recorded(folder):
    assert load_model_spec(configure(folder, torch_dtype="bfloat16")).dtype == "bfloat16"
    spec = load_model_spec(configure(folder, dtype="float16", quantization_config={"quant_method": "awq"}))
    assert (spec.dtype, spec.quantization) == ("float16", "awq")


def test_an_old_name_of_an_architecture_is_the_same_model(folder):
    assert load_model_spec(configure(folder, architectures=["LLaMAForCausalLM"])) == load_model_spec(configure(folder))
    for names in BUILT_IN.values():
        for name in (*names.architectures, names.model_type):
            assert find_family([name], folder).architecture == names.architectures[0]


def test_a_configuration_without_architectures_is_identified_by_its_type(folder):
    spec = load_model_spec(configure(folder, architectures=..., model_type="qwen2"))
    (attention, *_) = spec.decoder.attentions()
    assert (spec.architecture, has_biases(attention.qkv)) == ("Qwen2ForCausalLM", [True] * 3)


def test_shards_are_found_through_their_index(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    write_weights(folder / "model-00002-of-00002.safetensors", {"model.norm.weight": (32,)})
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert load_model_spec(configure(folder)).num_parameters == 2 * 96 * 32 + 32
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UnreadableModelError, match="lacks the weight file `model-00002-of-00002"):
        load_model_spec(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    with pytest.raises(UnreadableModelError, match="outside the folder"):
        load_model_spec(folder)


def test_code_in_a_model_is_never_run_and_the_refusal_says_so(folder):
    (folder / "modeling_own.py").write_text("raise SystemExit")
    changes = {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    with pytest.raises(UnsupportedModelArchitecture) as refused:
        load_model_spec(configure(folder, **changes))
    for part in ("`OwnForCausalLM`", "LlamaForCausalLM", "`auto_map`", "never run", "`pagemill.models`"):
        assert part in refused.value.message
    del changes["auto_map"]
    with pytest.raises(UnsupportedModelArchitecture) as refused:
        load_model_spec(configure(folder, **changes, auto_map=...))
    assert "auto_map" not in refused.value.message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "`MambaForCausalLM`"),
        ({"architectures": ..., "model_type": "mamba2"}, "`mamba2`"),
        ({"hidden_act": "mish"}, "the activation `mish`"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial rotary"),
    ],
)
def test_an_unsupported_architecture_is_refused_with_the_supported_ones(folder, changes, named):
    with pytest.raises(UnsupportedModelArchitecture) as refused:
        load_model_spec(configure(folder, **changes))
    assert named in refused.value.message
    supported = refused.value.message.partition("Supported: ")[2].rstrip(".").split(", ")
    assert supported == known_architectures()
    assert {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"} <= set(supported)
    assert refused.value.reason == "UnsupportedArchitecture"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["AquilaForCausalLM"], "hidden_size": ...}, "`hidden_size` is missing; it must be"),
        ({"hidden_size": "32"}, "`hidden_size` is '32'"),
        ({"hidden_size": True}, "`hidden_size` is 'True'"),
        ({"num_hidden_layers": -1}, "num_layers = -1"),
        ({"num_hidden_layers": 10**9}, "num_layers = 1000000000"),
        ({"num_attention_heads": 0}, "num_heads = 0"),
        ({"num_key_value_heads": 3}, "4 attention heads, not a multiple of its 3 KV heads"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"vocab_size": 2**60}, "vocab_size"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0.0"),
        ({"rms_norm_eps": "tiny"}, "`rms_norm_eps` is 'tiny'"),
        ({"rope_theta": -1.0}, "`rope_theta` is -1.0; it must be a number from"),
        ({"rope_scaling": "linear"}, "`rope_scaling` is 'linear'; it must be an object"),
        ({"tie_word_embeddings": "yes"}, "`tie_word_embeddings` is 'yes'; it must be true or false"),
        ({"architectures": ...}, "neither `architectures` nor `model_type`"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -5}, "sliding_window = -5"),
    ],
)
def test_impossible_dimensions_are_reported(folder, changes, message):
    with pytest.raises(UnreadableModelError) as refused:
        load_model_spec(configure(folder, **changes))
    assert message in refused.value.message


def test_pickled_weights_are_refused_with_a_remedy(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UnreadableModelError, match="may run code"):
        load_model_spec(configure(tmp_path))


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(UnreadableModelError, match="holds no weights"):
        load_model_spec(configure(tmp_path))


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


JSON = json.dumps(entry()).encode()


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        (b"", 0, "not JSON"),
        (b"[]", 0, "not an object"),
        (b"{", 0, "not JSON"),
        ({"w": 1}, 8, "no valid dtype"),
        ({"w": entry(dtype="F1024")}, 8, "no valid dtype"),
        ({"w": entry(shape=[-1])}, 8, "no valid dtype"),
        ({"w": entry(data_offsets=[0])}, 8, "no valid dtype"),
        ({"w": entry()}, 4, "ends at byte 8 of 4"),
        ({"w": entry(shape=[3])}, 8, "does not have 8 bytes"),
        ({"w": entry(shape=[2**62, 2**62])}, 8, "no valid dtype"),
        ({"w": entry(shape=[2**40, 0, 0])}, 8, "which 8 bytes of data cannot hold"),
        ({"w": entry(shape=[1] * 9)}, 8, "of at most 8 sizes"),
        ({"w": entry(dtype=[])}, 8, "no valid dtype"),
        ({"w": entry(), "v": entry()}, 8, "tensor `v` overlaps with `w`"),
        ({"w": entry(data_offsets=[8, 16])}, 16, "tensor `w` leaves a hole after the header"),
        ({"w": entry()}, 9, "its tensors end 1 bytes before the file"),
        (b'{"w": %b, "w": %b}' % (JSON, JSON), 8, "its header has two tensors `w`"),
        (b'{"\\u0077": %b, "w": %b}' % (JSON, JSON), 8, "its header has two tensors `w`"),
    ],
)
def test_damaged_weight_files_are_refused_in_under_50_ms(folder, header, data_bytes, message):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(data_bytes))
    configure(folder)
    best_s = float("inf")
    for _ in range(3):
        started = time.thread_time()
        with pytest.raises(UnreadableModelError) as refused:
            load_model_spec(folder)
        best_s = min(best_s, time.thread_time() - started)
        assert message in refused.value.message
    assert best_s < 0.05


@pytest.mark.parametrize("content", [b"", b"\x01", struct.pack("<Q", 2**63), struct.pack("<Q", 9) + b"{}"])
def test_a_truncated_weight_file_is_refused(tmp_path, content):
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(UnreadableModelError, match="its header claims"):
        read_header(tmp_path / "w.safetensors")


GGUF_LLAMA = {
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
EMBEDDING = {"token_embd.weight": np.zeros((96, 32))}


def of(architecture: str, **changes: Any) -> dict[str, Any]:
    """Return the metadata above for another architecture; `key__sub` stands for `architecture.key.sub`."""
    base = {key.replace("llama.", f"{architecture}."): value for key, value in GGUF_LLAMA.items()}
    return base | {f"{architecture}.{key.replace('__', '.')}": value for key, value in changes.items()}


def test_a_gguf_file_gives_the_same_dimensions_as_a_folder(write_gguf, folder):
    from_gguf = load_model_spec(write_gguf(GGUF_LLAMA, EMBEDDING | {"output.weight": np.zeros((96, 32))}))
    from_folder = load_model_spec(configure(folder, num_hidden_layers=2, max_position_embeddings=128))
    for name in from_folder.__struct_fields__:
        if name not in ("weights_format", "weight_bytes"):
            assert getattr(from_gguf, name) == getattr(from_folder, name), name


def test_features_of_a_gguf_model_are_derived_from_its_tensors(write_gguf):
    tensors = EMBEDDING | {
        f"blk.0.{name}": np.zeros(8)
        for name in ("attn_q.bias", "attn_q_norm.weight", "attn_output.bias", "ffn_gate.bias")
    }
    spec = load_model_spec(write_gguf(of("qwen3", attention__key_length=8), tensors, architecture="qwen3"))
    assert spec.architecture == "Qwen3ForCausalLM"
    assert spec.tie_word_embeddings
    attention, mlp = spec.decoder.layers[0].blocks()
    assert has_biases(attention.qkv) == [True] * 3
    assert has_biases(attention.output) == [True]
    assert has_biases(mlp.up) + has_biases(mlp.down) == [True] * 3
    assert (attention.query_norm.size, attention.key_norm.size) == (8, 8)


def test_a_gguf_llama_with_a_window_is_a_mistral(write_gguf):
    spec = load_model_spec(write_gguf(of("llama", attention__sliding_window=16), EMBEDDING))
    assert spec.architecture == "MistralForCausalLM"
    assert {each.window for each in spec.decoder.attentions()} == {16}


def test_gguf_rope_scaling_is_recorded_in_hugging_face_terms(write_gguf):
    keys = {"rope__freq_base": 5000.0, "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    spec = load_model_spec(write_gguf(of("llama", **keys, rope__scaling__original_context_length=64), EMBEDDING))
    assert rope_of(spec).theta == 5000.0
    assert rope_of(spec).scaling == YarnScaling(
        factor=4.0, original_max_position_embeddings=64, attention_factor=1 + 0.1 * math.log(4)
    )


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("mamba", {}, "the architecture `mamba`, which is not supported"),
        ("qwen2", {"expert_count": 8}, "with experts"),
        ("llama", {"expert_count": 8}, "`llama.expert_used_count`"),
        ("llama", {"expert_count": 2, "expert_used_count": 3}, "with 3 of 2 experts"),
        ("llama", {"rope__dimension_count": 4}, "partial rotary"),
        ("llama", {"attention__value_length": 16}, "different lengths"),
        ("llama", {"attention__head_count_kv": [1, 2]}, "layers of different `attention.head_count_kv`"),
        ("llama", {"block_count": "two"}, "`llama.block_count` has the wrong type str"),
        ("llama", {"attention__head_count": 0}, "num_heads = 0"),
    ],
)
def test_an_unusable_gguf_model_is_refused(write_gguf, architecture, changes, message):
    with pytest.raises(SourceError) as refused:
        load_model_spec(write_gguf(of(architecture, **changes), EMBEDDING, architecture=architecture))
    assert message in refused.value.message


def test_a_gguf_file_without_a_model_is_refused(write_gguf):
    with pytest.raises(UnreadableModelError, match=r"no tensor `token_embd.weight`"):
        load_model_spec(write_gguf(GGUF_LLAMA))
    with pytest.raises(UnreadableModelError, match=r"no usable `llama.attention.head_count`"):
        load_model_spec(write_gguf({}, EMBEDDING))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
extra_keys = ["rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "layer_types", "use_sliding_window"]


@settings(max_examples=num_examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from([*LLAMA, "hidden_act", *extra_keys]), json_values, max_size=3))
def test_any_configuration_gives_a_spec_or_a_source_error(folder, changes):
    try:
        spec = load_model_spec(configure(folder, **changes))
    except SourceError:
        return
    assert spec.kv_bytes_per_token(2) > 0
