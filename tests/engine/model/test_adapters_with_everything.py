"""Requests for adapters have every feature of requests for models: their answers are those of the merged model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from byte_bundle import byte_tokenizer
from peft_adapters import Adapted, Base, write_adapter, write_base

from pagemill import LLM, BeamSearchParams, LoRARequest, RequestOutput, SamplingParams, StructuredOutputsParams

PROMPTS = [[(7 * index + 11 * at * at) % 200 + 20 for at in range(10 + index)] for index in range(4)]
TARGETS = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}
NUM_BLOCKS = 48


class World(NamedTuple):
    base: Base
    adapted: list[Adapted]
    merged: list[Path]

    def requests(self) -> list[LoRARequest | None]:
        """Return an adapter, another one, the base, and the first adapter again."""
        one, two = (LoRARequest(str(number), number, str(self.adapted[number - 1].folder)) for number in (1, 2))
        return [one, two, None, one]

    def folders(self) -> list[Path]:
        return [self.merged[0], self.merged[1], self.base.folder, self.merged[0]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    base = write_base("llama", tmp_path_factory.mktemp("base"))
    adapted = [write_adapter(base, tmp_path_factory.mktemp("adapter"), seed, size=0.1, **TARGETS) for seed in (1, 2)]
    merged = []
    for each in adapted:
        folder = tmp_path_factory.mktemp("merged")
        each.model.merge_and_unload().save_pretrained(folder)
        merged.append(folder)
    for folder in (base.folder, *merged):
        byte_tokenizer([]).save(str(folder / "tokenizer.json"))
    return World(base, adapted, merged)


def llm_of(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **{"dtype": "float32", "num_kv_blocks": NUM_BLOCKS, "num_threads": 1, **settings})


@pytest.fixture(scope="module")
def serving(world: World) -> Iterator[LLM]:
    with llm_of(world.base.folder, enable_lora=True, max_loras=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(world: World) -> Iterator[Callable[[Path], LLM]]:
    made: dict[Path, LLM] = {}

    def one(folder: Path) -> LLM:
        if folder not in made:
            made[folder] = llm_of(folder)
        return made[folder]

    yield one
    for llm in made.values():
        llm.close()


FEATURES: dict[str, Any] = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    "n of 3": SamplingParams(n=3, temperature=0.8, seed=5, max_tokens=10, ignore_eos=True),
    "best of 4": SamplingParams(n=2, best_of=4, temperature=0.8, seed=6, max_tokens=10, ignore_eos=True),
    "log probabilities": SamplingParams(
        temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True
    ),
    "penalties": SamplingParams(
        temperature=0.7, seed=3, repetition_penalty=1.3, presence_penalty=0.4, max_tokens=12, ignore_eos=True
    ),
    "structured output": SamplingParams(
        temperature=0.9, seed=4, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[ab]{3,9}c")
    ),
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_answers_are_those_of_the_merged_model(
    feature: str, world: World, serving: LLM, plain: Callable[[Path], LLM]
) -> None:
    params = FEATURES[feature]
    together = serving.generate(PROMPTS, params, use_tqdm=False, lora_request=world.requests())
    for prompt, folder, output in zip(PROMPTS, world.folders(), together, strict=True):
        (expected,) = plain(folder).generate([prompt], params, use_tqdm=False)
        assert_same(output, expected)


def assert_same(output: RequestOutput, expected: RequestOutput) -> None:
    assert [each.token_ids for each in output.outputs] == [each.token_ids for each in expected.outputs]
    assert [each.finish_reason for each in output.outputs] == [each.finish_reason for each in expected.outputs]
    for one, other in zip(output.outputs, expected.outputs, strict=True):
        assert_near(one.logprobs, other.logprobs)
    assert_near(output.prompt_logprobs, expected.prompt_logprobs)


def assert_near(one: Any, other: Any) -> None:
    assert (one is None) == (other is None)
    for at, of in zip(one or [], other or [], strict=True):
        values = {token: entry.logprob for token, entry in (at or {}).items()}
        assert values == pytest.approx({token: entry.logprob for token, entry in (of or {}).items()}, abs=1e-3)


def test_beams_are_those_of_the_merged_model(world: World, serving: LLM, plain: Callable[[Path], LLM]) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    for prompt, request, folder in zip(prompts, world.requests(), world.folders(), strict=True):
        (output,) = serving.beam_search([prompt], params, lora_request=request)
        (expected,) = plain(folder).beam_search([prompt], params)
        assert [beam.tokens for beam in output.sequences] == [beam.tokens for beam in expected.sequences]


@pytest.mark.parametrize("settings", [{"num_kv_blocks": 8}, {}], ids=str)
def test_preempted_and_proposed_tokens_are_the_same(settings: dict[str, Any], world: World) -> None:
    prompts = [prompt * 2 for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with llm_of(world.base.folder, enable_lora=True, max_loras=2, speculative_config={"method": "off"}) as llm:
        expected = [
            llm.generate([prompt], params, use_tqdm=False, lora_request=request)[0].outputs[0].token_ids
            for prompt, request in zip(prompts, world.requests(), strict=True)
        ]
    with llm_of(world.base.folder, enable_lora=True, max_loras=2, **settings) as llm:
        proposals = llm._core._proposals
        assert proposals is not None
        proposals._ms_of = None  # as many as are found, whatever they gain
        for _ in range(2):  # the second time the first answers are proposed, to requests for the same adapter
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=world.requests())
            assert [output.outputs[0].token_ids for output in outputs] == expected
        num_proposed = sum(output.metrics.num_proposed_tokens for output in outputs if output.metrics is not None)
        assert num_proposed > 0
        load = llm._core.load()
        assert load.num_preemptions > 0 or not settings
        assert load.num_kv_bytes_active == 0


def test_the_base_has_equal_bits_whatever_is_loaded_and_in_its_batch(world: World, tmp_path: Path) -> None:
    adapters = [
        LoRARequest(str(seed), seed, str(write_adapter(world.base, tmp_path / str(seed), seed, **TARGETS).folder))
        for seed in range(1, 17)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, ignore_eos=True)
    prompts = [PROMPTS[index % 4] for index in range(20)]

    def bits(llm: LLM, others: list[LoRARequest | None] | None) -> list[Any]:
        given = {} if others is None else {"lora_request": [*others, *[None] * 4]}
        outputs = llm.generate(prompts, params, use_tqdm=False, **given)[16:]
        return [[(token, at[token].logprob) for at in output.outputs[0].logprobs for token in at] for output in outputs]

    with llm_of(world.base.folder, num_kv_blocks=256, enable_prefix_caching=False) as llm:
        alone = bits(llm, None)
    with llm_of(
        world.base.folder, num_kv_blocks=256, enable_prefix_caching=False, enable_lora=True, max_loras=16
    ) as llm:
        assert bits(llm, [None] * 16) == alone
        mixed = bits(llm, list(adapters))
        assert mixed == alone
        assert bits(llm, [None] * 16) == alone
