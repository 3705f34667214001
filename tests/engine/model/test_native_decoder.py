"""The native decoder gives the bits of torch's executor with the same kernels, in few calls per step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pagemill_execution.decoders.native.decoder import NativeDecoder
from pagemill_execution.runners.torch_model import TorchModel
from pagemill_kernels.cpu import launch, library
from pagemill_kernels.decoder_layer.native import CacheAddresses, NativeLayers
from pagemill_kernels.decoder_layer.parts import LayerParts, MLPParts, NormParts, RecurrentParts, StatePlaces
from pagemill_kernels.linear import native
from pagemill_models.declaration.declaration import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, MoESpec

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")

Loader = Callable[..., Any]
Drivers = Callable[[Any], Any]
NUM_LAYERS = 3
BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "dtype": "float32",
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral with a window": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen3 with wide heads": ("Qwen3", {"head_dim": 32}),
    "learned positions, layer norms, gelu_new": ("GPT2", {"n_embd": 64, "n_layer": NUM_LAYERS, "n_head": 4}),
    "parallel with two norms, gelu, odd inner size": ("GPTNeoX", {"rotary_pct": 0.5, "intermediate_size": 91}),
    "parallel with one norm, partial rotation": ("Phi", {"partial_rotary_factor": 0.5}),
    "gelu_tanh behind layer norms": ("Starcoder2", {}),
    "relu": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "scaled residuals": ("Granite", {"residual_multiplier": 0.3, "attention_multiplier": 0.2}),
    "two rotations, norms before and behind": ("Gemma3Text", {"head_dim": 16, "sliding_window": 24}),
    "norms behind only, over all heads": ("Olmo2", {}),
    "experts": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "experts beside a shared one with a gate": (
        "Qwen2Moe", {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
                     "shared_expert_intermediate_size": 56, "decoder_sparse_step": 1}
    ),
    "experts of groups, by biased sigmoids, beside shared ones": (
        "Glm4Moe", {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_group": 4,
                    "topk_group": 2, "first_k_dense_replace": 1, "head_dim": 16, "n_shared_experts": 2,
                    "routed_scaling_factor": 1.7, "use_qk_norm": True}
    ),
    "experts by sigmoids, norms over all heads": (
        "MiniMaxM2", {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8}
    ),
    "norms behind the rotation": ("HunYuanDenseV1", {"head_dim": 16}),
    "queries that grow": (
        "Ministral3", {"head_dim": 16, "sliding_window": None, "rope_parameters": {
            "type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}}
    ),
    "norms behind sums, projections": (
        "OPT", {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False}
    ),
    "inputs of layers, keys that layers share, heads of two sizes": (
        "Gemma4Text", {"head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 5, "num_kv_shared_layers": 2,
                       "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 128, "sliding_window": 24,
                       "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 2],
                       "use_double_wide_mlp": True}
    ),
    "experts beside an MLP, values that are keys": (
        "Gemma4Text", {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "num_experts": 6,
                       "attention_k_eq_v": True, "top_k_experts": 2, "moe_intermediate_size": 32,
                       "enable_moe_block": True, "sliding_window": 24, "num_kv_shared_layers": 0,
                       "hidden_size_per_layer_input": 0,
                       "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    ),
    "experts, shares of all": (
        "Qwen3Moe", {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": False}
    ),
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16, int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int4, deterministic": {"quantization": "int4", "deterministic": True},
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, overrides = MODELS[request.param]
    torch.manual_seed(2)
    name = (
        f"{kind.removesuffix('Text')}ForCausalLM"
        if kind.endswith("Text")
        else f"{kind}LMHeadModel"
        if kind == "GPT2"
        else f"{kind}ForCausalLM"
    )
    model = getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**BASE | overrides))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.normal_(1, 0.2)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randint(0, 128, (length,), generator=generator).tolist() for length in (1, 5, 16, 33, 61)]


@pytest.mark.sample("*-float32", "llama*", "*wide heads*")
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_native_decoder_gives_the_bits_of_single_operations(
    folder: Path, prompts: list[list[int]], settings: str, runner_loader: Loader, make_driver: Drivers
) -> None:
    asked = {"backend": "cpu_native", **SETTINGS[settings]}
    native, single = runner_loader(folder, **asked), runner_loader(folder, by_torch=True, **asked)
    assert (type(native.model), type(single.model)) == (NativeDecoder, TorchModel)
    assert native.info.weight_bytes == single.info.weight_bytes
    for chunk in (512, 7):
        driven = [make_driver(runner).greedy(prompts, 12, max_num_batched_tokens=chunk) for runner in (native, single)]
        assert [result.token_ids for result in driven[0]] == [result.token_ids for result in driven[1]]
        assert [result.logprobs for result in driven[0]] == [result.logprobs for result in driven[1]]


class Counting:
    """The library, with a counter for each function."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._library = library.load()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._library, name)

        def counted(*arguments: Any) -> Any:
            self.calls[name] += 1
            return function(*arguments)

        return counted


def test_a_decode_step_makes_one_native_call_for_all_layers(
    folder: Path, runner_loader: Loader, make_driver: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting()
    monkeypatch.setattr(launch, "native", lambda: counting)
    runner = runner_loader(folder, backend="cpu_native")
    decoder = runner.model.spec.decoder
    around = calls_around(decoder)
    assert calls_per_step(runner, counting, make_driver) == 1 + around
    in_layers = sum(map(calls_of, decoder.layers))
    assert (
        calls_per_step(runner_loader(folder, backend="cpu_native", by_torch=True), counting, make_driver)
        == in_layers + around
    )


def calls_around(decoder: DecoderSpec) -> int:
    """Return the number of operations before and behind the layers: the norm, the head, projections of both ends and of
    inputs of layers, and the sampler. An embedding that is tied to the head is read from its packed rows."""
    assert decoder.head is not None
    projections = (decoder.embedding.projection, decoder.head.projection)
    inputs = 2 * (decoder.embedding.layer_inputs is not None)
    return 2 + (decoder.norm is not None) + decoder.head.tied + sum(each is not None for each in projections) + inputs


def calls_of(layer: LayerSpec) -> int:
    """Return the number of operations of one layer: its norms, four or five of attention and three of each MLP.

    A shared expert has three more, and its gate two.
    """
    attention, *mlps = layer.blocks()
    assert isinstance(attention, AttentionSpec)
    norms = [*layer.norms(), attention.query_norm, attention.key_norm, attention.value_norm]
    in_mlps = 0
    for mlp in mlps:
        assert isinstance(mlp, MLPSpec | MoESpec)
        in_mlps += 3  # two matmuls and the activation between them; or router, choice and experts
        if isinstance(mlp, MoESpec):
            norms += [mlp.norm, mlp.router_norm]
            in_mlps += 0 if mlp.shared is None else 3 if mlp.shared.gate is None else 5
    return len({each.name for each in norms if each is not None}) + 4 + attention.norms_behind_rotation + in_mlps


def calls_per_step(runner: Any, counting: Counting, make_driver: Drivers) -> float:
    """Return the number of calls of one decode step, measured over five tokens."""
    driver, totals = make_driver(runner), []
    driver.greedy([[1, 2, 3]], 1)  # the process's first step also asks for the columns of the sampler
    for num_tokens in (2, 7):
        counting.calls.clear()
        driver.greedy([[1, 2, 3]], num_tokens)
        totals.append(counting.calls.total())
    return (totals[1] - totals[0]) / 5


def linear(rows: int, columns: int) -> native.NativeLinear:
    return native.pack_linear(np.ones((rows, columns), dtype=np.float32), None)


def parts() -> LayerParts:
    norm = NormParts(np.ones(32, dtype=np.float32), None, 1e-5, centered=False)
    return LayerParts(
        qkv=linear(64, 32),
        output=linear(32, 32),
        mlp=MLPParts(linear(96, 32), linear(32, 48), "silu", gated=True, limit=None),
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        scale=0.25,
        attention_norm=norm,
        mlp_norm=norm,
    )


NOTHING = np.zeros(1, dtype=np.float32)


@pytest.mark.parametrize(
    "hidden",
    [np.zeros((2, 31), np.float32), np.zeros((2, 32), np.uint16), np.zeros((32, 2), np.float32).T],
    ids=("narrow", "rounded", "strided"),
)
def test_hidden_states_that_the_kernel_cannot_read_are_refused(hidden: Any) -> None:
    with pytest.raises(ValueError, match=r"contiguous float32 \[tokens, 32\] is needed"):
        NativeLayers([parts()])(hidden, {}, [], CacheAddresses.of([NOTHING]), NOTHING)


def test_each_layer_has_a_cache_of_its_own() -> None:
    hidden = np.zeros((2, 32), np.float32)
    with pytest.raises(ValueError, match="1 caches for 2 layers"):
        NativeLayers([parts(), parts()])(hidden, {}, [], CacheAddresses.of([NOTHING]), NOTHING)


def test_a_cache_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match="no cache of float16"):
        CacheAddresses.of([np.zeros(1, np.float16)])


@pytest.mark.parametrize(
    "given", [None, np.zeros((2, 32), np.float32), np.zeros((2, 48), np.uint16)], ids=("none", "narrow", "rounded")
)
def test_an_attention_that_reads_other_values_needs_them(given: Any) -> None:
    hidden = np.zeros((2, 32), np.float32)
    wide = parts()._replace(qkv=linear(64, 48))
    with pytest.raises(ValueError, match=r"an input of its own, float32 \[2, 48\]"):
        NativeLayers([wide])(hidden, {}, [], CacheAddresses.of([NOTHING]), {}, first_input=given)


def test_layers_that_keep_states_need_the_rows_of_the_step() -> None:
    recurrent = RecurrentParts(
        linear(96, 32), linear(32, 32), np.ones((3, 32), np.float32), StatePlaces(mixed=0, gates=32, steps=64)
    )
    with pytest.raises(ValueError, match=r"the step's rows are needed for the layers \[1\]"):
        NativeLayers([parts(), LayerParts(recurrent=recurrent)])(
            np.zeros((2, 32), np.float32), {}, [], CacheAddresses.of([NOTHING, None]), {}
        )
