"""Qwen3.5's and Qwen3-Next's own layers for multi-token prediction, which transformers ignores: what they draft is what
a plain reference in float32 computes, and answers are those without them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byte_bundle import byte_tokenizer
from eagle_heads import write_eagle3
from family_gguf import write_family_gguf
from hybrid_models import EXPERTS, MODELS, write_hybrid
from packages import install_package
from recorded_drafts import Found, record_device_drafts, record_drafts
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagemill import LLM, SamplingParams
from pagemill_engine import offline_prompts
from pagemill_engine.scheduler.proposals import Proposals
from pagemill_execution.decoders.head_states import HeadStates
from pagemill_execution.decoders.native.head import NativeHead
from pagemill_execution.runners.device.device_runner import DeviceRunner
from pagemill_execution.runners.drafter import Drafter
from pagemill_execution.step import StepPlan
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.opening import open_weights
from pagemill_models.spec.heads import stored_mtp_heads
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.tokenizer_files.load_bundle import load_bundle

VOCAB = 257
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 160,
    "num_kv_blocks": 64,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "num_threads": 1,
}
PROMPTS = [f"one two three four five six seven {n % 3}" for n in range(6)]
KINDS = ["qwen3.5", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("qwen3.5-moe", "qwen3-next"))]


class Reference:
    """A target and its head, computed as a whole for each prefix. The head's layer and norm are a model of one."""

    def __init__(self, kind: str, folder: Path) -> None:
        """Write the model, with a head of random weights."""
        self.folder = folder
        name, overrides = MODELS[kind]
        self.target = write_hybrid(name, overrides, folder, VOCAB)
        config = copy.deepcopy(self.target.config)
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        torch.manual_seed(5)
        self.layer = type(self.target.model)(config).float().eval()
        size = config.hidden_size
        with torch.no_grad():
            for parameter_name, parameter in self.layer.named_parameters():
                parameter.normal_(0, 0.05 if "norm" in parameter_name else 0.2)
        self.fc = torch.randn(size, 2 * size) * 0.2
        self.norms = {each: torch.randn(size) * 0.3 for each in ("pre_fc_norm_embedding", "pre_fc_norm_hidden")}
        path = folder / "model.safetensors"
        scratch = type(self.target)(config)
        scratch.model.load_state_dict(self.layer.state_dict())
        scratch.save_pretrained(folder / "head")
        stored = load_file(folder / "head" / "model.safetensors")
        of_head = {
            f"mtp.{name.removeprefix('model.')}": tensor
            for name, tensor in stored.items()
            if name.startswith("model.") and "embed_tokens" not in name
        }
        of_head |= {f"mtp.{each}.weight": tensor for each, tensor in self.norms.items()}
        of_head["mtp.fc.weight"] = self.fc
        save_file(load_file(path) | {name: tensor.contiguous() for name, tensor in of_head.items()}, path)
        (folder / "tokenizer.json").write_text(byte_tokenizer([("t", "h")]).to_str())
        (folder / "tokenizer_config.json").write_text("{}")

    def normed(self, x: Tensor, name: str) -> Tensor:
        eps = self.target.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + self.norms[name])

    @torch.no_grad()
    def drafts(self, known: tuple[int, ...], number: int) -> list[int]:
        before = self.target.model(torch.tensor([known[:-1]]), use_cache=False).last_hidden_state[0]
        found: list[int] = []
        for _ in range(number):
            embedded = self.target.model.embed_tokens(torch.tensor([*known[1:], *found]))
            pair = [self.normed(embedded, "pre_fc_norm_embedding"), self.normed(before, "pre_fc_norm_hidden")]
            x = torch.cat(pair, -1) @ self.fc.T
            hidden = self.layer(inputs_embeds=x[None], use_cache=False).last_hidden_state[0, -1]
            found.append(int(self.target.lm_head(hidden).argmax()))
            before = torch.cat([before, hidden[None]])
        return found


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    made: dict[str, Reference] = {}

    def get(kind: str) -> Reference:
        if kind not in made:
            made[kind] = Reference(kind, tmp_path_factory.mktemp("model"))
        return made[kind]

    return get


References = Callable[[str], Reference]


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> Found:
    """What was drafted, behind which known tokens."""
    return record_drafts(monkeypatch)


def make(folder: Path, method: str = "mtp", **settings: Any) -> LLM:
    config = {"method": method, **({} if method == "off" else {"num_speculative_tokens": 3})}
    llm = LLM(str(folder), speculative_config=config, **{**SETTINGS, **settings})
    if llm._core._proposals is not None:
        llm._core._proposals._ms_of = None
    return llm


def answers(llm: LLM, temperature: float = 0.0) -> list[Any]:
    given: dict[str, Any] = {"temperature": temperature, "max_tokens": 30, "ignore_eos": True}
    params = [SamplingParams(**given, n=1 + seed % 2, seed=seed) for seed in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [[choice.token_ids for choice in out.outputs] for out in outputs]


def wrong(reference: Reference, drafted: Found) -> int:
    """Return how many of the drafts differ from the reference's, of up to 20."""
    assert len(drafted) > 20
    picked = drafted[:: len(drafted) // 20]
    return sum(reference.drafts(known, len(tokens)) != tokens for known, tokens in picked)


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.full)], ids=["plain", "overlapped"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_reference(kind: str, references: References, drafted: Found, overlap: bool) -> None:
    """In parts of prompts, behind prefix hits and forks; and the answers are those without a head."""
    reference = references(kind)
    with make(reference.folder, "off", deterministic=True, overlap=overlap) as llm:
        plain = [answers(llm), answers(llm, 0.8)]
        assert llm._core.runner.info.most_proposed == 0
    with make(reference.folder, deterministic=True, overlap=overlap) as llm:
        assert answers(llm) == plain[0]
        del drafted[:]
        assert answers(llm) == plain[0]
        assert max(len(tokens) for _, tokens in drafted) == 3
        assert wrong(reference, drafted) == 0
        assert answers(llm, 0.8) == plain[1]


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the norms of embedding and hidden states swapped": lambda patch: patch.setattr(
        NativeHead, "__init__", _swapping(NativeHead.__init__)
    ),
    "hidden states of the token itself": lambda patch: patch.setattr(
        HeadStates, "states_of", lambda self, slots, states_of=HeadStates.states_of: states_of(self, slots + 1)
    ),
}


def _swapping(init: Any) -> Any:
    def swapped(self: Any, *args: Any) -> None:
        init(self, *args)
        self._norms = self._norms[::-1]

    return swapped


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(
    fault: str, references: References, drafted: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = references("qwen3.5")
    FAULTS[fault](monkeypatch)
    with make(reference.folder) as llm:
        answers(llm)
    assert wrong(reference, drafted) > 3


def test_a_head_is_loaded_unless_the_settings_say_otherwise(references: References, tmp_path: Path) -> None:
    """By default too, and memory moves between cache kinds beside it; what a head lacks is named."""
    folder = references("qwen3.5").folder
    for settings, drafts in (({}, True), ({"speculative_config": {"method": "off"}}, False)):
        with LLM(str(folder), **SETTINGS, **settings) as llm:
            info = llm._core.runner.info
            assert (info.drafts, info.shares_memory) == (drafts, True)
    whole = load_file(folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    save_file({name: each for name, each in whole.items() if name != "mtp.fc.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"mtp\.fc\.weight"):
        make(tmp_path)


def spoil(runner: Any) -> None:
    """Make all memory that kinds share not a number, but for padding blocks."""
    cache = runner.kv_cache
    first, last = cache.of_kinds
    first._pool[: first.padding_block] = np.nan
    cache.beside.view(np.float32)[: first.padding_block] = np.nan
    last._pool[: last.padding_block], last._pool[last.padding_block] = np.nan, 0


def drafts_while_memory_moves(llm: LLM, found: Found) -> tuple[list[Any], dict[tuple[int, ...], list[int]], int]:
    """Return the answers to long and short prompts, what was drafted behind which tokens, and the number of copies."""
    draw, runner = random.Random(4), llm._core.runner
    shared, launch, num_copies = [draw.randrange(97, 122) for _ in range(64)], runner.launch, 0
    texts = [
        [*shared[: draw.choice([0, 20, 64])], *(draw.randrange(97, 122) for _ in range(draw.choice([4, 10, 30, 66])))]
        for _ in range(30)
    ]

    def counting(plan: StepPlan) -> Any:
        nonlocal num_copies
        num_copies += sum(len(changes.copies) for changes in plan.tables[:1])
        return launch(plan)

    spoil(runner)
    runner.launch = counting  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    llm._core.check_integrity()
    return [out.outputs[0].token_ids for out in outputs], dict(found), num_copies


MOVING: dict[str, Any] = {"overlap": False, "max_num_seqs": 4}


@pytest.mark.parametrize("fault", ["", pytest.param("head", marks=pytest.mark.slow)])
def test_drafts_are_the_same_while_memory_moves(
    fault: str, references: References, drafted: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's part of a block is in the memory that moves between kinds, and goes with it. `fault`: a block is moved
    without that part."""
    folder = references("qwen3.5").folder
    with make(folder, num_kv_blocks=200, **MOVING) as llm:
        answers, expected, num_copies = drafts_while_memory_moves(llm, drafted)
        assert num_copies == 0
    del drafted[:]
    if fault:
        monkeypatch.setattr(Drafter, "blocks", ())
    with make(folder, num_kv_blocks=33, **MOVING) as llm:
        others, drafts, num_copies = drafts_while_memory_moves(llm, drafted)
    assert num_copies > 0
    assert others == answers
    both = drafts.keys() & expected.keys()
    assert len(both) > 40
    shortest = {known: min(len(drafts[known]), len(expected[known])) for known in both}
    differ = [known for known in both if drafts[known][: shortest[known]] != expected[known][: shortest[known]]]
    missing = expected.keys() - drafts.keys()  # of what is not a number nothing is drafted
    assert bool(differ or missing) is bool(fault)


@pytest.mark.slow
def test_a_device_drafts_what_the_reference_does(references: References, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device or in Triton's interpreter, if `method` says so: beside the layer no memory moves there."""
    reference, found = references("qwen3.5"), record_device_drafts(monkeypatch)
    with make(reference.folder, device="cuda") as llm:
        assert isinstance(llm._core.runner, DeviceRunner)
        assert not llm._core.runner.info.shares_memory
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert len(found) > 8
    assert all(reference.drafts(known, len(tokens)) == tokens for known, tokens in found[:12])
    with LLM(str(reference.folder), device="cuda", **SETTINGS) as llm:
        info = llm._core.runner.info
        assert (info.drafts, info.shares_memory) == (False, True)


@pytest.mark.full
def test_experts_of_a_head_that_are_stored_together_are_those_stored_one_by_one(
    references: References, drafted: Found, tmp_path: Path
) -> None:
    reference = references("qwen3.5-moe")
    tensors, name = load_file(reference.folder / "model.safetensors"), "mtp.layers.0.mlp.experts"
    gate, up, down = (
        torch.stack([tensors.pop(f"{name}.{expert}.{part}_proj.weight") for expert in range(EXPERTS["num_experts"])])
        for part in ("gate", "up", "down")
    )
    tensors |= {f"{name}.gate_up_proj": torch.cat([gate, up], 1), f"{name}.down_proj": down}
    save_file(tensors, tmp_path / "model.safetensors")
    for each in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / each).write_bytes((reference.folder / each).read_bytes())
    with make(tmp_path) as llm:
        answers(llm)
    assert wrong(reference, drafted) == 0


def test_the_head_of_a_gguf_file_is_that_of_the_folder(references: References, tmp_path: Path) -> None:
    """Converters count it as a further layer."""
    folder, path = references("qwen3.5").folder, tmp_path / "model.gguf"
    layers = {"block_count": 5, "nextn_predict_layers": 1}
    write_family_gguf(path, folder, "qwen35", **layers)
    stored, spec = load_model_spec(folder), load_model_spec(path)
    head, of_folder = (stored_mtp_heads(each, at, whole=True)[0] for each, at in ((spec, path), (stored, folder)))
    assert head is not None
    assert of_folder is not None
    assert (spec.num_layers, head.num_parameters) == (4, of_folder.num_parameters)
    weights, expected = open_weights(path), open_weights(folder)
    names = dict(zip(head.decoder.shapes(), of_folder.decoder.shapes(), strict=True))
    for name, other in names.items():
        values, wanted = (np.empty(weights.shapes[name], dtype=np.float32) for _ in range(2))
        weights.read_into(name, values)
        expected.read_into(other, wanted)
        np.testing.assert_allclose(values, wanted + (1 if "norm" in other else 0), rtol=0, atol=1e-6)


@pytest.mark.full
def test_the_head_of_a_gguf_file_drafts_what_the_one_of_the_folder_does(
    references: References, tmp_path: Path, drafted: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, path, drafts = references("qwen3.5").folder, tmp_path / "model.gguf", []
    write_family_gguf(path, folder, "qwen35", block_count=5, nextn_predict_layers=1)
    monkeypatch.setattr(offline_prompts, "load_bundle", lambda _: load_bundle(folder))  # the file has no tokenizer
    for each in (folder, path):
        with make(each) as llm:
            assert llm._core.runner.info.drafts
            drafts.append((answers(llm), list(drafted)))
        del drafted[:]
    assert drafts[0] == drafts[1]


CODE = """
class Method:
    def begin(self, sequence):
        return Repeats(sequence.token_ids)

    def end(self, sequence):
        pass


class Repeats:
    agreement = 0

    def __init__(self, token_ids):
        self.token_ids = token_ids

    def propose(self, most):
        return [self.token_ids[-1]] * most
"""


@pytest.mark.full
@pytest.mark.parametrize("method", ["eagle3", "countdown"])
def test_other_methods_leave_answers_of_a_hybrid_as_they_are(
    method: str, references: References, drafted: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that was trained for the model, whose drafts are mostly rejected, and a method of another package."""
    folder = references("qwen3.5").folder
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "eagle3":
        config["model"] = str(write_eagle3(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[1, 2, 3]))
    else:
        install_package(tmp_path, monkeypatch, method, CODE, "pagemill.proposers", f"{method} = {method}:Method")
    counted: list[int] = []
    count = Proposals.count
    monkeypatch.setattr(Proposals, "count", lambda *args: (counted.append(args[2]), count(*args)))
    with make(folder, "off", deterministic=True) as llm:
        plain = answers(llm)
    with LLM(str(folder), speculative_config=config, deterministic=True, **SETTINGS) as llm:
        llm._core._proposals._ms_of = None
        assert answers(llm) == plain
        assert answers(llm) == plain
    assert len(counted) > 50
    assert method != "eagle3" or max(len(tokens) for _, tokens in drafted) == 3
