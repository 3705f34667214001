"""The default limits of requests and tokens per step, which depend on the device's memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_engine.config import EngineConfig
from pagemill_engine.limits import SchedulerLimits
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.loop.limits import scheduler_limits
from pagemill_execution.config import CPU_STEP, StepLimits
from pagemill_execution.runners.null import NullRunner
from pagemill_execution.sizing.budget import Sizes, activation_bytes, plan_memory
from pagemill_execution.sizing.memory import MemoryState
from pagemill_execution.sizing.step_limits import GPU_STEPS, choose_step_limits
from pagemill_models.spec.decoders import decoder_from_config
from pagemill_models.spec.model_spec import ModelSpec

GIB = 1024**3
ROOT = Path(__file__).resolve().parents[2]
EIGHT_B = ModelSpec(
    decoder=decoder_from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 131_072,
        },
        Path("config.json"),
    ),
    num_parameters=8_030_000_000,
)
SIZES = Sizes(weight_bytes=16 * GIB, kv_bytes_per_token=131_072, item_bytes=2, gathers=False)
SMALL_SIZES = SIZES._replace(weight_bytes=2 * GIB)


def gpu(gib: float) -> MemoryState:
    return MemoryState(int(gib * GIB), int(gib * GIB), process_bytes=0, is_gpu=True)


def chosen(gib: float, sizes: Sizes = SMALL_SIZES, **settings: Any) -> StepLimits:
    return choose_step_limits(EngineConfig(model="m", **settings), EIGHT_B, sizes, gpu(gib)).step


@pytest.mark.parametrize(
    ("card", "gib", "limits"),
    [
        ("H200", 139.8, (256, 8192)),
        ("H100 80 GB", 79.2, (256, 8192)),
        ("L40S", 44.4, (256, 8192)),
        ("A100 40 GB", 39.4, (256, 8192)),
        ("L4", 22.0, (128, 2048)),
        ("RTX 5090", 31.4, (128, 2048)),
        ("A2", 14.6, (128, 2048)),
        ("RTX 4070", 11.6, (64, 1024)),
    ],
)
def test_a_gpus_defaults_depend_on_its_memory(card: str, gib: float, limits: StepLimits) -> None:
    assert chosen(gib) == limits


def test_a_cpu_and_a_simulated_device_have_their_own_defaults() -> None:
    config = EngineConfig(model="m")
    host = MemoryState(512 * GIB, 512 * GIB, process_bytes=0)
    assert choose_step_limits(config, EIGHT_B, SIZES, host).step == CPU_STEP == (64, 512)
    core = EngineCore(config, NullRunner.from_config(config))
    assert (core.config.max_num_seqs, core.config.max_num_batched_tokens) == CPU_STEP
    limits = SchedulerLimits(num_blocks=1, block_size=1, max_model_len=2, vocab_size=1)
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == CPU_STEP


def test_configured_limits_are_kept_and_a_step_has_a_token_for_every_request() -> None:
    assert chosen(80, max_num_seqs=4) == (4, 8192)
    assert chosen(80, max_num_batched_tokens=512) == (256, 512)
    assert chosen(80, max_num_batched_tokens=32) == (32, 32)
    assert chosen(12, max_num_seqs=3000) == (3000, 3000)
    assert chosen(80, max_num_seqs=7, max_num_batched_tokens=9) == (7, 9)
    assert EngineConfig(model="m", max_num_seqs=1000).step == (1000, 1000)
    assert EngineConfig(model="m", max_num_batched_tokens=16).step == (16, 16)


def test_a_step_has_no_more_tokens_than_the_contexts_of_its_requests() -> None:
    assert chosen(80, max_model_len=16) == (256, 4096)
    assert chosen(80, max_model_len=16, max_num_batched_tokens=9000) == (256, 9000)


def test_a_model_that_fills_its_device_gets_smaller_steps() -> None:
    assert chosen(80, SIZES) == (256, 8192)
    tight = SIZES._replace(weight_bytes=68 * GIB)
    limits = chosen(80, tight)
    assert limits < (256, 8192)
    config = choose_step_limits(EngineConfig(model="m"), EIGHT_B, tight, gpu(80))
    plan = plan_memory(config, EIGHT_B, tight, gpu(80))
    assert plan.budget.kv_bytes > 2 * plan.budget.activation_bytes
    with_cache = chosen(80, tight, kv_cache_memory_bytes=int(3.5 * GIB))
    assert with_cache <= limits


@given(
    gib=st.floats(1, 200), weights=st.floats(0, 1), seqs=st.none() | st.integers(1, 4096),
    tokens=st.none() | st.integers(1, 100_000), context=st.none() | st.integers(2, 131_072),
    kv_gib=st.none() | st.floats(0.1, 100),
)  # fmt: skip
def test_the_limits_are_consistent_and_within_the_devices_capacity(
    gib: float, weights: float, seqs: int | None, tokens: int | None, context: int | None, kv_gib: float | None
) -> None:
    sizes = SIZES._replace(weight_bytes=int(gib * weights * GIB))
    kv_bytes = None if kv_gib is None else int(kv_gib * GIB)
    settings = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "max_model_len": context}
    given_config = EngineConfig(model="m", kv_cache_memory_bytes=kv_bytes, **settings)
    config = choose_step_limits(given_config, EIGHT_B, sizes, gpu(gib))
    step = config.step
    assert step.max_num_seqs in (seqs, *range(1, 257))
    assert seqs in (None, step.max_num_seqs)
    assert tokens in (None, step.max_num_batched_tokens)
    assert tokens is not None or step.max_num_batched_tokens >= step.max_num_seqs
    assert choose_step_limits(config, EIGHT_B, sizes, gpu(gib)) == config
    if (seqs, tokens, kv_bytes) == (None, None, None) and step > (64, 512):
        assert activation_bytes(config, EIGHT_B, sizes, 131_072) <= 0.25 * 0.9 * gib * GIB


def test_the_scheduler_uses_the_limits_of_the_runner() -> None:
    config = EngineConfig(model="m")
    runner = NullRunner.from_config(config)
    runner = NullRunner(runner.info._replace(step=StepLimits(256, 8192)))
    limits = scheduler_limits(config, runner.info)
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (256, 8192)
    core = EngineCore(config, runner)
    assert core.config.step == (256, 8192)
    assert core.step_time.params().knots_tokens[-1] == 8192


def test_the_reference_page_states_the_actual_numbers() -> None:
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    seqs, tokens = (re.search(rf"^\| `{name}` .*$", page, re.M) for name in StepLimits._fields)
    assert seqs is not None
    assert tokens is not None
    words = [int(number) for number in re.findall(r"\d+", seqs[0])]
    by_memory = [(step.max_num_seqs, memory_bytes // GIB) for memory_bytes, step in GPU_STEPS]
    (large, large_gib), (medium, medium_gib), (small, _) = by_memory
    assert words == [CPU_STEP.max_num_seqs, large, large_gib, medium, medium_gib, small]
    words = [int(number) for number in re.findall(r"\d+", tokens[0])]
    assert words == [CPU_STEP.max_num_batched_tokens, *(step.max_num_batched_tokens for _, step in GPU_STEPS)]
    resource = (ROOT / "docs" / "reference" / "llmdeployment.md").read_text()
    assert f"{CPU_STEP.max_num_seqs} on a CPU, up to {large} on a GPU" in resource
