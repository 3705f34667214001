"""Vectors and scores equal transformers on tiny random encoders, pooled decoders and classifiers.

The tests run prompts alone, in batches, in chunks, after preemption and with a prefix cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from encoder_models import BIDIRECTIONAL, CLASSIFIERS, DECODERS, ENCODERS, VOCAB_SIZE, write_encoder, write_modules
from safetensors.torch import load_file, save_file

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_execution.sizing.compute import check_pooled
from pagemill_execution.sizing.unused_settings import unused_settings, without
from pagemill_execution.starting.factory import create_runner
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.cpu import library
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.spec.spec_from_config import check_config
from pagemill_models.tokenizer_files.generation_defaults import GenerationDefaults
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.pooling import PoolingParams
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_protocol.source_errors import SourceError

needs_kernels = pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}")
ALL = {**ENCODERS, **BIDIRECTIONAL}
LENGTHS = (1, 5, 16, 17, 33, 64, 100, 129, 130, 40, 41)
"""Lengths around the tile sizes, the windows of ModernBERT, and the models' maximum."""
TOLERANCE = 3e-6


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = prompts_of(LENGTHS)


def core_of(folder: Path, **settings: Any) -> EngineCore:
    config = EngineConfig(model=str(folder), **{"dtype": "float32", "num_threads": 1, "num_kv_blocks": 256, **settings})
    return EngineCore(config, create_runner(config, lambda phase, detail: None))


def pooled(core: EngineCore, prompts: list[list[int]], **params: Any) -> torch.Tensor:
    """Run all prompts at once; return the vectors in the order of the prompts."""
    spec = core.runner.info.pooling
    assert spec is not None
    for index, prompt in enumerate(prompts):
        core.add(request_of(prompt, str(index), PoolingParams(spec.task, **params)))
    vectors: dict[str, torch.Tensor] = {}
    while core.has_work:
        for output in core.step().outputs:
            assert output.error is None
            vectors[output.request_id] = torch.frombuffer(bytearray(output.pooled), dtype=torch.float32)
    core.check_integrity()
    assert core.load().num_kv_bytes_active == 0
    return torch.stack([vectors[str(index)] for index in range(len(prompts))])


def request_of(prompt: list[int], name: str, pooling: PoolingParams | None) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    return GenerateRequest(request_id=name, model="", prompt_token_ids=prompt, sampling=sampling, pooling=pooling)


def weighted(hidden: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1.0, len(hidden) + 1)
    return weights @ hidden / weights.sum()


POOLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls": lambda hidden: hidden[0],
    "last": lambda hidden: hidden[-1],
    "mean": lambda hidden: hidden.mean(0),
    "max": lambda hidden: hidden.max(0).values,
    "mean_sqrt_len": lambda hidden: hidden.sum(0) / len(hidden) ** 0.5,
    "weighted_mean": weighted,
}


def pooled_by(model: Any, method: str, prompts: list[list[int]] = PROMPTS) -> torch.Tensor:
    """Return what transformers' class computes for one prompt at a time, pooled."""
    base = getattr(model, "model", model)
    with torch.no_grad():
        states = [base(input_ids=torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
    return torch.stack([POOLS[method](hidden) for hidden in states])


def vectors_of(model: Any, method: str, prompts: list[list[int]] = PROMPTS) -> torch.Tensor:
    return torch.nn.functional.normalize(pooled_by(model, method, prompts), dim=1)


@pytest.mark.parametrize("name", ALL)
def test_encoders_equal_transformers_alone_and_in_a_batch(name: str, tmp_path: Path) -> None:
    model = write_encoder(*ALL[name], tmp_path)
    write_modules(tmp_path, "mean")
    core = core_of(tmp_path)
    together = pooled(core, PROMPTS)
    torch.testing.assert_close(together, vectors_of(model, "mean"), atol=TOLERANCE, rtol=0)
    alone = torch.cat([pooled(core, [prompt]) for prompt in PROMPTS])
    assert torch.equal(together, alone), "a vector must not depend on other prompts of its step"


def test_bfloat16_weights_give_one_vector_alone_and_in_a_batch(tmp_path: Path) -> None:
    """The processor determines the type in which they are multiplied."""
    model = write_encoder(*ENCODERS["bert"], tmp_path)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    write_modules(tmp_path, "mean")
    core = core_of(tmp_path, dtype="auto")
    together = pooled(core, PROMPTS)
    assert torch.equal(together, torch.cat([pooled(core, [prompt]) for prompt in PROMPTS]))
    assert (together * vectors_of(model.float(), "mean")).sum(1).min() > 0.9995


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from pagemill_engine.config import EngineConfig
from pagemill_execution.starting.factory import create_runner
config = EngineConfig(model=sys.argv[1], num_threads=1)
runner = create_runner(config, lambda phase, detail: None)
print(runner.info.weight_bytes > 0 and "torch" not in runner.info.compute)
"""


@needs_kernels
def test_an_encoder_is_loaded_without_torch(tmp_path: Path) -> None:
    write_encoder(*ENCODERS["bert"], tmp_path)
    write_modules(tmp_path)
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


@needs_kernels
@pytest.mark.parametrize("fault", ["only back", "no norm behind the sum", "no token types"])
def test_a_fault_in_a_native_encoder_changes_its_vectors(fault: str, tmp_path: Path) -> None:
    model = write_encoder(*ENCODERS["bert"], tmp_path)
    write_modules(tmp_path, "mean")
    core = core_of(tmp_path)
    runner: Any = core.runner
    decoder = runner.model._decoder
    for _, layers in decoder._runs:
        for weights in layers._kept[1]:
            if fault == "only back":
                weights.layer.ahead = 0
            elif fault == "no norm behind the sum":
                weights.layer.attention_residual_norm.weight = None
    if fault == "no token types":
        decoder.embedding._token_types[:] = 0
    expected = vectors_of(model, "mean")
    assert (pooled(core, PROMPTS) - expected).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", ALL)
def test_the_torch_backend_equals_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_encoder(*ALL[name], tmp_path)
    write_modules(tmp_path, "cls")
    monkeypatch.setattr("pagemill_execution.sizing.compute.cpu_backend", lambda *shape, **targets: ("cpu", "cpu"))
    torch.testing.assert_close(pooled(core_of(tmp_path), PROMPTS), vectors_of(model, "cls"), atol=TOLERANCE, rtol=0)


@pytest.mark.sample("qwen3-*", "*-mean")
@pytest.mark.parametrize("method", POOLS)
@pytest.mark.parametrize("name", DECODERS)
def test_pooled_decoders_equal_transformers_in_any_chunks(name: str, method: str, tmp_path: Path) -> None:
    model = write_encoder(*DECODERS[name], tmp_path)
    write_modules(tmp_path, method)
    expected = vectors_of(model, method)
    for settings in ({}, {"max_num_batched_tokens": 7, "max_num_seqs": 4}, {"num_kv_blocks": 16}, {"overlap": True}):
        core = core_of(tmp_path, **settings)
        prompts = [prompt for prompt in PROMPTS if len(prompt) <= core.runner.info.max_model_len]
        for _ in range(2):  # the second time with a prefix cache
            vectors = pooled(core, prompts)
            torch.testing.assert_close(vectors, expected[: len(prompts)], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_dense_layers_and_a_default_size_are_those_of_sentence_transformers(kind: str, tmp_path: Path) -> None:
    """It cuts vectors after it normalized them. A request's size is cut before, as in vLLM."""
    model = write_encoder(*(ENCODERS["bert"] if kind == "encoder" else DECODERS["qwen3"]), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_matryoshka": True}))
    names = ("torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh")
    layers = write_modules(tmp_path, "max", dense=names, truncate_dim=12, similarity_fn_name="dot")
    full = torch.tanh(layers[1](layers[0](pooled_by(model, "max"))))
    core = core_of(tmp_path)
    spec = core.runner.info.pooling
    assert spec is not None
    assert (spec.size, spec.default_dimensions, spec.similarity) == (16, 12, "dot")
    cut = torch.nn.functional.normalize(full, dim=1)[:, :12]
    torch.testing.assert_close(pooled(core, PROMPTS), cut, atol=TOLERANCE, rtol=0)
    asked = torch.nn.functional.normalize(full[:, :8], dim=1)
    torch.testing.assert_close(pooled(core, PROMPTS, dimensions=8), asked, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("form", ["names", "doubles"])
def test_files_with_old_names_of_norms_or_in_float64_give_the_same_vectors(form: str, tmp_path: Path) -> None:
    model = write_encoder(*ENCODERS["bert"], tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    if form == "doubles":
        weights = {name: value.double() for name, value in weights.items()}
    else:
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        weights = {
            next((name.replace(new, was) for new, was in old.items() if name.endswith(new)), name): value
            for name, value in weights.items()
        }
        assert sum(name.endswith(("gamma", "beta")) for name in weights) == 14
    save_file(weights, path)
    write_modules(tmp_path)
    torch.testing.assert_close(pooled(core_of(tmp_path), PROMPTS), vectors_of(model, "mean"), atol=TOLERANCE, rtol=0)


def test_the_files_of_embedding_gemma_give_the_vectors_of_their_modules(tmp_path: Path) -> None:
    """They have two dense layers without activations, and a size that requests may cut."""
    model = write_encoder(*BIDIRECTIONAL["embedding gemma"], tmp_path)
    layers = write_modules(tmp_path, "mean", dense=("torch.nn.modules.linear.Identity",) * 2)
    expected = torch.nn.functional.normalize(layers[1](layers[0](pooled_by(model, "mean"))), dim=1)
    torch.testing.assert_close(pooled(core_of(tmp_path), PROMPTS), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("Gemma3ForCausalLM", "use_bidirectional_attention", True),
        ("Gemma2ForCausalLM", "use_bidirectional_attention", True),
        ("GemmaForCausalLM", "use_bidirectional_attention", True),
        ("LlamaForCausalLM", "is_causal", False),
    ],
)
def test_what_makes_a_decoder_attend_to_later_tokens_is_refused_by_its_key(
    architecture: str, key: str, value: bool, tmp_path: Path
) -> None:
    kind: Any = getattr(transformers, architecture)
    config = kind.config_class(**DECODERS["llama"][1], **{key: value}, architectures=[architecture])
    config.save_pretrained(tmp_path)
    with pytest.raises(SourceError, match=f"`{key}`"):
        check_config(tmp_path)


def test_a_dense_layer_of_another_model_is_refused(tmp_path: Path) -> None:
    write_encoder(*ENCODERS["bert"], tmp_path)
    write_modules(tmp_path, dense=("torch.nn.modules.activation.Tanh",))
    path = tmp_path / "2_Dense" / "config.json"
    values = json.loads(path.read_text())
    for key, value, message in (
        ("in_features", 65, "`in_features` is '65'"),
        ("use_residual", True, "`use_residual` is 'True'"),
        ("activation_function", "x.Swish", "`activation_function` 'x.Swish'"),
        ("out_features", 33, "`2_Dense.linear.weight`"),
    ):
        path.write_text(json.dumps(values | {key: value}))
        with pytest.raises(LoadError, match=message):
            core_of(tmp_path)
    path.write_text(json.dumps(values))
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=r"2_Dense\.linear"):
        core_of(tmp_path)


def test_a_preempted_prompt_is_pooled_from_its_start(tmp_path: Path) -> None:
    model = write_encoder(*DECODERS["qwen3"], tmp_path)
    write_modules(tmp_path, "mean")
    core = core_of(tmp_path, num_kv_blocks=9, max_num_batched_tokens=48, max_num_seqs=4, max_model_len=130)
    for index in range(4):
        core.add(request_of(PROMPTS[6], str(index), PoolingParams()))
    core.step()
    for seq in list(core.scheduler._running):
        core.scheduler._preempt(seq)
    vectors = [output.pooled for _ in range(40) for output in core.step().outputs]
    ours = torch.stack([torch.frombuffer(bytearray(vector), dtype=torch.float32) for vector in vectors])
    assert core.scheduler.num_preemptions > 0
    torch.testing.assert_close(ours, vectors_of(model, "mean", [PROMPTS[6]] * 4), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_equal_transformers(name: str, tmp_path: Path) -> None:
    model = write_encoder(*CLASSIFIERS[name], tmp_path)
    with torch.no_grad():
        logits = torch.cat([model(input_ids=torch.tensor([prompt])).logits for prompt in PROMPTS])
    torch.testing.assert_close(pooled(core_of(tmp_path), PROMPTS), logits.sigmoid(), atol=TOLERANCE, rtol=0)
    config = json.loads((tmp_path / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(pooled(core_of(tmp_path), PROMPTS), logits, atol=2e-5, rtol=1e-5)


def test_the_second_text_of_a_pair_has_its_own_token_type(tmp_path: Path) -> None:
    model = write_encoder(*CLASSIFIERS["bert"], tmp_path)
    core, prompt = core_of(tmp_path), PROMPTS[5]
    types = torch.tensor([[0] * 20 + [1] * (len(prompt) - 20)])
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([prompt]), token_type_ids=types).logits.sigmoid()
    found = pooled(core, [prompt], second_segment=20)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    assert not torch.allclose(found, pooled(core, [prompt]), atol=1e-4)


def test_vectors_can_be_shortened_for_models_trained_for_it(tmp_path: Path) -> None:
    write_encoder(*ENCODERS["bert"], tmp_path)
    write_modules(tmp_path)
    whole = pooled(core_of(tmp_path), PROMPTS)
    with pytest.raises(PagemillError, match="`dimensions` 16 is not supported"):
        core_of(tmp_path).add(request_of(PROMPTS[1], "cut", PoolingParams(dimensions=16)))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [16, 32]}))
    core = core_of(tmp_path)
    expected = torch.nn.functional.normalize(whole[:, :16], dim=1)
    torch.testing.assert_close(pooled(core, PROMPTS, dimensions=16), expected, atol=TOLERANCE, rtol=0)
    with pytest.raises(PagemillError, match="one of 16, 32 for this model, got 17"):
        core.add(request_of(PROMPTS[1], "cut", PoolingParams(dimensions=17)))


def test_requests_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    write_encoder(*ENCODERS["bert"], tmp_path / "embeds")
    write_encoder(*CLASSIFIERS["bert"], tmp_path / "scores")
    write_encoder(*DECODERS["llama"], tmp_path / "generates")
    for folder, pooling, message in (
        ("embeds", None, "computes embeddings and generates no text"),
        ("embeds", PoolingParams("score"), "computes embeddings. Send texts to /v1/embeddings"),
        ("scores", PoolingParams("embed"), "scores pairs of texts. Send texts to /v1/score"),
        ("generates", PoolingParams("embed"), "generates text and computes no embeddings"),
    ):
        with pytest.raises(PagemillError, match=message):
            core_of(tmp_path / folder).add(request_of(PROMPTS[1], "wrong", pooling))


def test_an_encoder_accepts_prompts_up_to_its_positions_and_keeps_no_kv(tmp_path: Path) -> None:
    write_encoder(*ENCODERS["roberta"], tmp_path)
    core = core_of(tmp_path)
    assert core.runner.info.max_model_len == 130
    assert core.runner.info.kv_bytes_per_token == 0
    assert core.runner.info.memory is not None
    assert core.runner.info.memory.kv_bytes == 0
    with pytest.raises(PagemillError, match="131 tokens"):
        core.add(request_of(prompts_of((131,))[0], "long", PoolingParams()))


def test_a_step_of_whole_prompts_never_exceeds_the_token_budget(tmp_path: Path) -> None:
    model = write_encoder(*ENCODERS["bert"], tmp_path)
    write_modules(tmp_path)
    core = core_of(tmp_path, max_num_batched_tokens=150)
    steps: list[int] = []
    launch = core.runner.launch
    core.runner.launch = lambda plan: (steps.append(plan.num_tokens), launch(plan))[1]  # type: ignore[method-assign]
    torch.testing.assert_close(pooled(core, PROMPTS), vectors_of(model, "mean"), atol=TOLERANCE, rtol=0)
    assert max(steps) <= 150
    assert sum(steps) == sum(LENGTHS)


@pytest.mark.skipif(library.load() is None, reason="no native kernels")
def test_int8_weights_and_determinism_stay_close(tmp_path: Path) -> None:
    model = write_encoder(*ENCODERS["bert"], tmp_path)
    write_modules(tmp_path)
    expected = vectors_of(model, "mean")
    for settings in ({"quantization": "int8"}, {"deterministic": True}):
        ours = pooled(core_of(tmp_path, **settings), PROMPTS)
        assert (ours * expected).sum(1).min() > 0.995


@pytest.mark.skipif(library.load() is None, reason="no native kernels")
@pytest.mark.parametrize("name", ALL)
def test_a_deterministic_encoder_gives_the_same_bits_alone_and_in_any_batch(name: str, tmp_path: Path) -> None:
    write_encoder(*ALL[name], tmp_path)
    write_modules(tmp_path)
    core = core_of(tmp_path, deterministic=True)
    alone = torch.cat([pooled(core, [prompt]) for prompt in PROMPTS])
    assert torch.equal(pooled(core, PROMPTS), alone)
    assert torch.equal(pooled(core, PROMPTS[::-1]).flip(0), alone)


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("generation_defaults", GenerationDefaults(temperature=0.5), "Remove generation_defaults"),
        ("tool_call_parser", "hermes", "Set tool_call_parser to auto"),
        ("reasoning_parser", "think", "Set reasoning_parser to auto"),
        ("chat_template", "{{ messages }}", "Remove chat_template"),
        ("kv_cache_dtype", "float32", "Set kv_cache_dtype to auto"),
        ("kv_cache_memory_bytes", 2**20, "Remove kv_cache_memory_bytes"),
    ],
)
def test_settings_without_effect_on_an_encoder_are_refused(
    setting: str, value: Any, remedy: str, tmp_path: Path
) -> None:
    write_encoder(*ENCODERS["bert"], tmp_path)
    write_modules(tmp_path)
    with pytest.raises(LoadError, match=rf"`{setting}` has no effect with `Bert\w+`.*{remedy}") as refused:
        core_of(tmp_path, **{setting: value})
    assert refused.value.reason == "SettingsUnsupported"


def test_an_engine_that_the_operator_starts_runs_without_the_settings_that_have_no_effect(tmp_path: Path) -> None:
    write_encoder(*ENCODERS["bert"], tmp_path)
    write_modules(tmp_path)
    config = EngineConfig(model=str(tmp_path), chat_template="x", tool_call_parser="none", kv_cache_dtype="int8")
    spec = load_model_spec(tmp_path)
    unused = unused_settings(config, spec)
    assert [each.name for each in unused] == ["tool_call_parser", "chat_template", "kv_cache_dtype"]
    assert without(config, unused) == EngineConfig(model=str(tmp_path))
    check_pooled(without(config, unused), spec)


def test_a_pooled_decoder_has_a_kv_cache_and_refuses_only_settings_of_generated_text(tmp_path: Path) -> None:
    write_encoder(*DECODERS["llama"], tmp_path)
    write_modules(tmp_path)
    core_of(tmp_path, kv_cache_dtype="float32")
    with pytest.raises(LoadError, match="generates no text"):
        core_of(tmp_path, tool_call_parser="none")


def test_pooling_is_determined_by_the_models_files(tmp_path: Path) -> None:
    write_encoder(*ENCODERS["bert"], tmp_path)
    plain = load_model_spec(tmp_path).pooling
    assert plain is not None
    assert (plain.method, plain.normalized, plain.size) == ("mean", False, 64)
    write_modules(tmp_path, "cls", prompts={"query": "q: ", "document": ""}, default_prompt_name="query")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 77, "do_lower_case": true}')
    spec = load_model_spec(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken", "include_prompt": true}')
    newer = "sentence_transformers.base.modules.transformer.Transformer", "sentence_transformers.x.pooling.Pooling"
    modules = [{"type": kind, "path": path} for kind, path in zip(newer, ("", "1_Pooling"), strict=True)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    latest = load_model_spec(tmp_path).pooling
    assert latest is not None
    assert (latest.method, latest.normalized) == ("last", False)
    assert spec.pooling is not None
    assert (spec.pooling.method, spec.pooling.normalized, spec.pooling.default_prompt) == ("cls", True, "q: ")
    assert spec.pooling.lower_case
    assert spec.max_position_embeddings == 77


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("1_Pooling/config.json", '{"pooling_mode": ["max", "cls"]}', "pools by max, cls"),
        ("1_Pooling/config.json", '{"include_prompt": false}', "`include_prompt` is 'False'"),
        ("1_Pooling/config.json", '{"word_embedding_dimension": 65}', "`word_embedding_dimension` is '65'"),
        ("2_Normalize/config.json", '{"eps": 1}', "`eps` is '1'"),
        ("config_sentence_transformers.json", '{"model_type": "SparseEncoder"}', "`model_type` is 'SparseEncoder'"),
        ("config_sentence_transformers.json", '{"similarity_fn_name": "maxsim"}', "`similarity_fn_name` is 'maxsim'"),
        ("config_sentence_transformers.json", '{"truncate_dim": 0}', "`truncate_dim` is 0"),
        ("config_sentence_transformers.json", '{"default_prompt_name": "q"}', "`default_prompt_name` is 'q'"),
        ("config_sentence_transformers.json", '{"precision": "int8"}', "`precision` is 'int8'"),
        ("sentence_bert_config.json", '{"query_length": 32}', "`query_length` is '32'"),
        ("sentence_bert_config.json", '{"tokenizer_args": {"use_fast": false}}', "`use_fast` is 'False'"),
        ("modules.json", '[{"type": "a.Transformer"}, {"type": "b.Pooling"}, {"type": "LSTM"}]', "module `LSTM`"),
        (
            "modules.json",
            '[{"type": "Transformer"}, {"type": "Dense"}, {"type": "Pooling"}]',
            "Transformer, Dense",
        ),
        (
            "modules.json",
            '[{"type": "Transformer"}, {"type": "Pooling", "path": "9"}]',
            "is missing, which",
        ),
        ("modules.json", '[{"type": "Transformer", "kwargs": ["task"]}, {"type": "Pooling"}]', "`kwargs` is"),
        ("modules.json", '[{"type": "a.Transformer", "path": "0_Transformer"}]', "its weights in `0_Transformer`"),
        ("modules.json", '{"type": 1}', "not a list of modules"),
    ],
)
def test_an_unsupported_encoder_is_refused_by_name(file: str, content: str, message: str, tmp_path: Path) -> None:
    write_encoder(*ENCODERS["bert"], tmp_path)
    write_modules(tmp_path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(content)
    with pytest.raises(LoadError, match=message):
        core_of(tmp_path)


def test_a_classifier_of_several_labels_and_a_gpu_are_refused(tmp_path: Path) -> None:
    name, config = CLASSIFIERS["bert"]
    write_encoder(name, {**config, "num_labels": 3}, tmp_path / "labels")
    with pytest.raises(LoadError, match="classifier of 3 labels"):
        core_of(tmp_path / "labels")
    write_encoder(*ENCODERS["bert"], tmp_path / "bert")
    with pytest.raises(LoadError, match="computed on the CPU"):
        core_of(tmp_path / "bert", device="cuda")
