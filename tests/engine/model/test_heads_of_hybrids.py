"""Qwen3.5's and Qwen3-Next's own layers for multi-token prediction, which transformers ignores: what they draft is what
a plain reference in float32 computes, and answers are those without them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_bundle import byte_tokenizer
from hybrid_models import EXPERTS, MODELS, write_hybrid
from recorded_drafts import Found, record_drafts
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagemill import LLM, SamplingParams
from pagemill_engine.decoders.head_states import HeadStates
from pagemill_engine.decoders.native.head import NativeHead
from pagemill_engine.weights.errors import LoadError

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


def test_only_the_setting_loads_a_head(references: References, tmp_path: Path) -> None:
    """By default it takes no memory, and memory goes on moving between cache kinds; what a head lacks is named."""
    folder = references("qwen3.5").folder
    for settings, drafts in (({}, False), ({"speculative_config": {"method": "mtp"}}, True)):
        with LLM(str(folder), **SETTINGS, **settings) as llm:
            info = llm._core.runner.info
            assert (info.drafts, info.shares_memory) == (drafts, not drafts)
    whole = load_file(folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    save_file({name: each for name, each in whole.items() if name != "mtp.fc.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"mtp\.fc\.weight"):
        make(tmp_path)


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
