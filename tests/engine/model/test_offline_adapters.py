"""`LLM` with adapters: one for all prompts or one each, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from byte_bundle import byte_tokenizer
from declared_families import declared
from msgspec.structs import replace
from peft_adapters import Adapted, Base, write_adapter, write_base
from safetensors.numpy import load_file, save_file

from pagemill import LLM, LoRARequest, SamplingParams
from pagemill_engine.config import EngineConfig
from pagemill_execution.adapters.starting import check_serves
from pagemill_execution.runners.row_adapters import RowAdapters
from pagemill_execution.starting.factory import LoadError, create_runner
from pagemill_models.spec.model_spec import ModelSpec
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.pooling import PoolingSpec

PROMPTS = [[3, 14, 15, 92, 65], [35, 89, 79, 32], [38, 46, 26, 43, 38, 32]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
TARGETS = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    made = write_base("llama", tmp_path_factory.mktemp("base"))
    byte_tokenizer([]).save(str(made.folder / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def adapters(base: Base, tmp_path_factory: pytest.TempPathFactory) -> list[Adapted]:
    return [write_adapter(base, tmp_path_factory.mktemp("adapter"), seed, **TARGETS) for seed in (1, 2)]


def llm_of(base: Base, **settings: Any) -> LLM:
    return LLM(base.folder, dtype="float32", num_kv_blocks=64, enable_lora=True, max_loras=2, **settings)


def tokens_of(llm: LLM, lora_request: Any) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=lora_request)
    return [output.outputs[0].token_ids for output in outputs]


def test_each_prompt_has_its_adapter(base: Base, adapters: list[Adapted]) -> None:
    requests = [LoRARequest(str(number), number, str(each.folder)) for number, each in enumerate(adapters, 1)]
    models = [*adapters, Adapted(base.folder, base.model)]
    expected = [[model.greedy(prompt, 5)[0] for prompt in PROMPTS] for model in models]
    with llm_of(base) as llm:
        mixed = tokens_of(llm, [*requests, None])
        assert mixed == [expected[index][index] for index in range(3)]
        assert tokens_of(llm, requests[0]) == expected[0]
        assert tokens_of(llm, None) == expected[2]
        with pytest.raises(PagemillError, match="3 prompts came with 2 adapters"):
            tokens_of(llm, requests)
        with pytest.raises(PagemillError, match="is not a folder"):
            tokens_of(llm, LoRARequest("none", 7, "/nowhere"))
        assert tokens_of(llm, requests[1]) == expected[1]


def test_an_llm_without_adapters_says_so(base: Base, adapters: list[Adapted]) -> None:
    request = LoRARequest("one", 1, str(adapters[0].folder))
    missing = pytest.raises(PagemillError, match="Make it with enable_lora=True")
    with LLM(base.folder, dtype="float32", num_kv_blocks=64) as llm, missing:
        tokens_of(llm, request)


def test_a_trained_copy_of_a_matrix_is_refused_by_its_name(base: Base, tmp_path: Path) -> None:
    write_adapter(base, tmp_path, target_modules=["embed_tokens"])
    tensors = load_file(tmp_path / WEIGHTS)
    (name,) = [name for name in tensors if name.endswith("base_layer.weight")]
    with llm_of(base) as llm:
        tokens_of(llm, LoRARequest("equal", 1, str(tmp_path)))
        tensors[name][5, 5] += 0.5
        save_file(tensors, tmp_path / WEIGHTS)
        with pytest.raises(PagemillError, match="save_embedding_layers=False") as refused:
            tokens_of(llm, LoRARequest("trained", 2, str(tmp_path)))
    assert name in refused.value.message


@pytest.mark.parametrize("fault", ["rows shifted by one", "scale forgotten", "slots swapped"])
def test_a_planted_fault_is_found(
    fault: str, base: Base, adapters: list[Adapted], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [LoRARequest(str(number), number, str(each.folder)) for number, each in enumerate(adapters, 1)]
    expected = [adapters[0].greedy(PROMPTS[0], 5)[0], adapters[1].greedy(PROMPTS[1], 5)[0]]
    if fault == "scale forgotten":
        monkeypatch.setattr("pagemill_models.adapters.settings.PeftSettings.of", lambda self, *names: (self.rank, 1.0))
    elif fault == "slots swapped":
        place = RowAdapters._slot_of
        monkeypatch.setattr(RowAdapters, "_slot_of", lambda self, digest: 1 - place(self, digest))
    else:
        plain = RowAdapters.of
        monkeypatch.setattr(RowAdapters, "of", lambda self, rows: plain(self, rows[[*range(1, len(rows)), 0]]))
    with llm_of(base) as llm:
        found = tokens_of(llm, [*requests, None])[:2]
    assert found != expected


@pytest.mark.parametrize("fault", ["", "stale slot"])
def test_a_row_that_is_used_again_has_no_adapter_of_the_request_before(
    fault: str, base: Base, adapters: list[Adapted], monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault:
        admit = RowAdapters.admit
        monkeypatch.setattr(RowAdapters, "release", lambda self, rows: None)
        monkeypatch.setattr(
            RowAdapters, "admit", lambda self, row, digest: admit(self, row, digest) if digest else None
        )
    with llm_of(base) as llm:
        before = tokens_of(llm, None)
        tokens_of(llm, LoRARequest("one", 1, str(adapters[0].folder)))
        assert (tokens_of(llm, None) == before) == (not fault)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"pooling": PoolingSpec(task="embed", method="cls", size=8)},
            "embedding and reranking models serve no adapters. Merge one into the weights.",
        ),
        ({"decoder": replace(declared("llama"), by_transformers=True)}, "by classes of transformers serve no adapters"),
    ],
    ids=["pooled", "a class of transformers"],
)
def test_models_without_adapters_are_named_with_a_remedy(changed: dict[str, Any], why: str) -> None:
    config, spec = EngineConfig(model="m", enable_lora=True), replace(ModelSpec(decoder=declared("llama")), **changed)
    with pytest.raises(LoadError, match=f"enable_lora: .*{why}"):
        check_serves(config, spec)
    check_serves(EngineConfig(model="m"), spec)


def test_adapters_that_do_not_fit_into_memory_are_refused_at_the_start(base: Base) -> None:
    config = EngineConfig(model=str(base.folder), enable_lora=True, max_lora_rank=512, max_cpu_loras=2_000_000)
    with pytest.raises(LoadError, match="max_cpu_loras") as refused:
        create_runner(config, lambda phase, detail: None)
    assert refused.value.reason == "ModelTooLarge"
