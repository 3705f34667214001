"""Heads that read hidden states: what they draft is what a plain reference in float32 computes, and answers are those
without them. What holds for blocks of draft models (`test_draft_models`) is tested here for the hidden states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from byte_bundle import byte_tokenizer
from eagle_heads import EPS, OWN, SIZE, VOCAB, write_eagle3
from family_gguf import write_family_gguf
from recorded_drafts import Found, record_drafts
from safetensors.torch import load_file, save_file
from tiny_llama import write_tiny_llama
from torch import Tensor

from pagemill import LLM, BeamSearchParams, LoRARequest, SamplingParams, StructuredOutputsParams
from pagemill_engine.config import EngineConfig
from pagemill_engine.proposing.draft import Rounds
from pagemill_execution.config import SpeculationConfig
from pagemill_execution.decoders.head_states import HeadStates
from pagemill_execution.decoders.native.head import NativeHead
from pagemill_execution.decoders.on_torch.heads import HeadLayers
from pagemill_execution.runners.drafter import Drafter
from pagemill_execution.sizing.draft import find_draft
from pagemill_execution.sizing.sizing import sizes_here
from pagemill_execution.weights.errors import LoadError
from pagemill_models.spec.heads import stored_mtp_heads
from pagemill_models.spec.model_files import load_model_spec
from pagemill_protocol.request.generate import ChoiceResume, GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams as EngineSampling
from pagemill_protocol.source_errors import SourceError

LAYERS = 8
TWO = "deepseek, two layers"
PUBLISHED = "deepseek, published latents"
MOE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": SIZE, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "n_shared_experts": 1, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "max_position_embeddings": 256, "initializer_range": 0.3,
    "num_nextn_predict_layers": 1, "dtype": "float32",
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 160,
    "num_kv_blocks": 14,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "num_threads": 1,
}
PROMPTS = [f"one two three four five six seven {n % 3}" for n in range(6)]


def _moe(folder: Path, kind: str) -> Path:
    """Write a model of two layers, whose third one drafts; of "deepseek, two layers" the fourth, too. vLLM for CPUs
    computes latents of the published sizes only: "deepseek, published latents" has those."""
    torch.manual_seed(1)
    heads = 2 if kind == TWO else 1
    if kind in ("deepseek", TWO, PUBLISHED):
        latent, rope = (512, 64) if kind == PUBLISHED else (16, 16)
        sizes = {"kv_lora_rank": latent, "q_lora_rank": 24, "qk_rope_head_dim": rope, "qk_nope_head_dim": 16}
        numbers = MOE | {"num_hidden_layers": 2 + heads, "num_nextn_predict_layers": heads}
        yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
                "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
        turns = {"rope_parameters": yarn} if kind == PUBLISHED else {}
        config = transformers.DeepseekV3Config(**numbers, **sizes, **turns, v_head_dim=16, n_group=2, topk_group=1)
        transformers.DeepseekV3ForCausalLM(config).save_pretrained(folder)
    elif kind == "minimax":
        own = {name: value for name, value in MOE.items() if name not in ("n_routed_experts", "moe_intermediate_size")}
        config = transformers.MiniMaxM2Config(
            **{**own, "intermediate_size": 32, "num_local_experts": 8}, num_key_value_heads=2, head_dim=32,
            num_mtp_layers=1, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        transformers.MiniMaxM2ForCausalLM(config).save_pretrained(folder)
    else:
        config = transformers.Glm4MoeConfig(**MOE, num_key_value_heads=2, head_dim=32, n_group=1, topk_group=1)
        transformers.Glm4MoeForCausalLM(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [f"model.layers.{2 + number}" for number in range(heads)]:
        for each in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{name}.{each}.weight"] = torch.rand(SIZE) + 0.5
        tensors[f"{name}.eh_proj.weight"] = torch.randn(SIZE, 2 * SIZE) * 0.2
        tensors[f"{name}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{name}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 2}
    if kind == PUBLISHED:  # what the published files say and transformers takes for granted
        values |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def write_folders(root: Path) -> dict[str, Path]:
    """Write each kind of model with its head; `bench/heads_beside_vllm.py` compares them with vLLM's classes."""
    found = {"llama": root / "llama", "deepseek": root / "deepseek", "glm": root / "glm", "minimax": root / "minimax"}
    write_tiny_llama(
        found["llama"], vocab_size=VOCAB, hidden_size=SIZE, num_attention_heads=2, num_key_value_heads=1,
        num_hidden_layers=LAYERS, initializer_range=0.15,
    )  # fmt: skip
    found |= {TWO: root / "two", PUBLISHED: root / "published"}
    for kind in ("deepseek", TWO, PUBLISHED, "glm", "minimax"):
        _moe(found[kind], kind)
    for folder in list(found.values()):
        (folder / "tokenizer.json").write_text(byte_tokenizer([("t", "h")]).to_str())
        (folder / "tokenizer_config.json").write_text("{}")
    found["eagle3"] = write_eagle3(root / "eagle3")
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_folders(tmp_path_factory.mktemp("heads"))


def make(folders: dict[str, Path], kind: str, *, drafts: bool = True, **settings: Any) -> LLM:
    config: dict[str, Any] = {"method": "off"}
    if drafts:
        config = {"method": "eagle3", "model": str(folders["eagle3"])} if kind == "llama" else {"method": "mtp"}
        config["num_speculative_tokens"] = 3
    llm = LLM(str(folders[kind]), speculative_config=config, **{**SETTINGS, **settings})
    if llm._core._proposals is not None:
        llm._core._proposals._ms_of = None
    return llm


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> Found:
    """What was drafted, behind which known tokens."""
    return record_drafts(monkeypatch)


def answers(llm: LLM, **params: Any) -> list[Any]:
    given = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **params}
    params_of = [SamplingParams(**given, n=1 + index % 2, seed=index) for index in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, params_of, use_tqdm=False)
    return [[choice.token_ids for choice in out.outputs] for out in outputs]


class Reference:
    """A target and its head, computed as a whole for each prefix."""

    def __init__(self, folders: dict[str, Path], kind: str) -> None:
        self.kind = kind
        self.target = transformers.AutoModelForCausalLM.from_pretrained(folders[kind], dtype="float32").eval()
        if kind == "llama":
            self.own = load_file(folders["eagle3"] / "model.safetensors")
        else:
            self.mtp = transformers.modeling_layers.MtpModel.from_pretrained(self.target).eval()

    @torch.no_grad()
    def drafts(self, known: tuple[int, ...], number: int) -> list[int]:
        out = self.target(torch.tensor([known[:-1]]), output_hidden_states=True)
        before = out.hidden_states[-1][0]
        if self.kind == "llama":
            layers = (2, LAYERS // 2, LAYERS - 3)
            before = torch.cat([out.hidden_states[each][0] for each in layers], -1) @ self.own["fc.weight"].T
        found: list[int] = []
        for place in range(number):
            layer = min(place, 1 if self.kind == TWO else 0)
            tokens = torch.tensor([*known[1 + layer :], *found])
            hidden, logits = self._eagle3(tokens, before) if self.kind == "llama" else self._mtp(layer, tokens, before)
            best = int(logits.argmax())
            found.append(best + int(self.own["d2t"][best]) if self.kind == "llama" else best)
            # The next layer reads what this one has computed of the same tokens; behind the last one it goes on itself.
            goes_on = self.kind == TWO and place == 0
            before = hidden if goes_on else torch.cat([before, hidden[-1:]])
        return found

    def _mtp(self, layer: int, tokens: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(len(tokens))[None]
        hidden = self.mtp.forward_layer(layer, before[None], positions, None, input_ids=tokens[None])[0]
        return hidden, self.target.lm_head(hidden[-1])

    def _eagle3(self, tokens: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        own, count, dim = self.own, len(tokens), SIZE // 2

        def norm(x: Tensor, name: str) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * own[f"{name}.weight"]

        def linear(x: Tensor, name: str) -> Tensor:
            return x @ own[f"midlayer.{name}.weight"].T

        embedded = self.target.model.embed_tokens(tokens)
        x = torch.cat([norm(embedded, "midlayer.input_layernorm"), norm(before, "midlayer.hidden_norm")], -1)
        turns = torch.arange(count)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = (torch.cat([each, each], -1)[:, None] for each in (turns.cos(), turns.sin()))

        def rotated(heads: Tensor) -> Tensor:
            one, two = heads.chunk(2, -1)
            return heads * cos + torch.cat([-two, one], -1) * sin

        query, key = (rotated(linear(x, f"self_attn.{each}_proj").view(count, -1, dim)) for each in "qk")
        scores = torch.einsum("qhd,kd->hqk", query, key[:, 0]) / dim**0.5
        weights = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,kd->qhd", weights, linear(x, "self_attn.v_proj")).flatten(1)
        hidden = before + linear(attended, "self_attn.o_proj")
        inner = norm(hidden, "midlayer.post_attention_layernorm")
        gated = torch.nn.functional.silu(linear(inner, "mlp.gate_proj")) * linear(inner, "mlp.up_proj")
        hidden = hidden + linear(gated, "mlp.down_proj")
        return hidden, norm(hidden[-1], "norm") @ own["lm_head.weight"].T


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Reference]:
    """Where transformers finds layers that draft is a pattern of the class, which has the published depths."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (
            transformers.DeepseekV3ForCausalLM,
            transformers.Glm4MoeForCausalLM,
            transformers.MiniMaxM2ForCausalLM,
        ):
            base = kind.__mro__[1]
            patch.setattr(base, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[23].*"])
            patch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[23].*"])
        yield Reference(folders, request.param)


FULL = pytest.mark.full
KINDS = ["llama", "deepseek", TWO, *(pytest.param(kind, marks=FULL) for kind in (PUBLISHED, "glm", "minimax"))]
HARDEST = ["llama", *(pytest.param(kind, marks=FULL) for kind in ("deepseek", "glm"))]


def wrong(reference: Reference, drafted: Found) -> int:
    """Return how many of the drafts differ from the reference's, of up to 20."""
    assert len(drafted) > 20
    picked = drafted[:: len(drafted) // 20]
    return sum(reference.drafts(known, len(tokens)) != tokens for known, tokens in picked)


@pytest.mark.slow
@pytest.mark.parametrize("on_torch", [(True, False), (False, True)], ids=["the-model", "the-head"])
@pytest.mark.parametrize("reference", ["llama"], indirect=True)
def test_either_may_run_on_torch(
    folders: dict[str, Path],
    reference: Reference,
    drafted: Found,
    monkeypatch: pytest.MonkeyPatch,
    on_torch: tuple[bool, bool],
) -> None:
    left = list(on_torch)
    monkeypatch.setattr("pagemill_execution.sizing.compute.can_fuse", lambda decoder: not left.pop(0))
    with make(folders, "llama") as llm:
        head = llm._core.runner._drafter._heads[0].model
        assert isinstance(head, NativeHead) is not on_torch[1]
        answers(llm)
    assert wrong(reference, drafted) == 0


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=FULL)], ids=["plain-loop", "overlapped"])
@pytest.mark.parametrize("reference", KINDS, indirect=True)
def test_drafts_are_those_of_the_reference(
    folders: dict[str, Path], reference: Reference, drafted: Found, overlap: bool
) -> None:
    """In parts of prompts, behind prefix hits, forks and preemptions; and the answers are those without a head."""
    exact = {"deterministic": not reference.kind.startswith("deepseek"), "overlap": overlap}
    with make(folders, reference.kind, drafts=False, **exact) as llm:
        plain = answers(llm)
    with make(folders, reference.kind, **exact) as llm:
        assert answers(llm) == plain
        assert llm._core.scheduler.num_preemptions > 0
        del drafted[:]
        assert answers(llm) == plain
    assert max(len(tokens) for _, tokens in drafted) == 3
    assert wrong(reference, drafted) == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "mtp", "draft_model"])
def test_rank_0_drafts_what_one_process_does(folders: dict[str, Path], drafted: Found, method: str) -> None:
    """Between the steps of all ranks, with the embedding and the head of the model where it has none of its own."""
    kind, found = "deepseek" if method == "mtp" else "llama", []
    config = {"method": method, "num_speculative_tokens": 3}
    if method != "mtp":
        config["model"] = str(folders["eagle3" if method == "eagle3" else "llama"])
    for ranks in (1, 2):
        parallel = {"tensor_parallel_size": ranks, "num_threads": ranks, "speculative_config": config}
        with LLM(str(folders[kind]), **{**SETTINGS, **parallel}) as llm:
            assert llm._core._proposals is not None
            llm._core._proposals._ms_of = None
            found.append((answers(llm), dict(drafted)))
        del drafted[:]
    assert found[0][0] == found[1][0]
    known = found[0][1].keys() & found[1][1].keys()
    assert len(known) > 20
    assert all(found[0][1][each] == found[1][1][each] for each in known)


def test_on_several_gpus_the_models_own_layer_drafts_only_where_a_setting_says_so(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    spec = load_model_spec(folders["glm"])
    for method, ranks, drafts in (("auto", 1, True), ("auto", 2, False), ("mtp", 2, True)):
        settings = {"device": "cuda", "tensor_parallel_size": ranks, "speculative": SpeculationConfig(method=method)}
        found = find_draft(EngineConfig(model=str(folders["glm"]), **settings), folders["glm"], spec)
        assert (found is not None) is drafts
    assert "one of several GPUs would hold it whole" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["deepseek", pytest.param("glm", marks=FULL)], indirect=True)
def test_first_drafts_are_those_of_generate(
    folders: dict[str, Path], reference: Reference, drafted: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`generate(use_mtp=True)` of transformers, which drafts one token for each layer that drafts."""
    generator = transformers.generation.candidate_generator.MTPCandidateGenerator
    candidates: dict[tuple[int, ...], int] = {}
    get = generator.get_candidates

    def recorded(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = get(self, input_ids, *args, **kwargs)
        if len(found[0][0]) > len(input_ids[0]):
            candidates[tuple(input_ids[0].tolist())] = int(found[0][0, -1])
        return found

    monkeypatch.setattr(generator, "get_candidates", recorded)
    with make(folders, reference.kind) as llm:
        outputs = llm.generate(PROMPTS[1:3], SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    for out in outputs:
        ids = torch.tensor([out.prompt_token_ids])
        reference.target.generate(ids, max_new_tokens=16, min_new_tokens=16, do_sample=False, use_mtp=True)
    compared = [candidates[known] == tokens[0] for known, tokens in drafted if known in candidates]
    assert len(compared) > 15
    assert all(compared)


FAULTS = {
    "the norms of embedding and hidden states swapped": lambda patch: [
        patch.setattr(each, "__init__", _swapping(each.__init__)) for each in (NativeHead, HeadLayers)
    ],
    "hidden states of the token itself": lambda patch: patch.setattr(
        HeadStates, "states_of", lambda self, slots, states_of=HeadStates.states_of: states_of(self, slots + 1)
    ),
    "the first token's place is read": lambda patch: patch.setattr(
        Drafter, "__init__", _reading_the_first(Drafter.__init__)
    ),
}


def _swapping(init: Any) -> Any:
    def swapped(self: Any, *args: Any) -> None:
        init(self, *args)
        if isinstance(self, NativeHead):
            self._norms = self._norms[::-1]
        else:
            self.embedding_norm, self.hidden_norm = self.hidden_norm, self.embedding_norm

    return swapped


def _reading_the_first(init: Any) -> Any:
    def changed(self: Drafter, *args: Any) -> None:
        init(self, *args)
        self._heads = [each._replace(first=0) for each in self._heads]

    return changed


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("reference", HARDEST, indirect=True)
def test_planted_faults_change_what_is_drafted(
    folders: dict[str, Path], reference: Reference, drafted: Found, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    FAULTS[fault](monkeypatch)
    with make(folders, reference.kind) as llm:
        answers(llm)
    assert wrong(reference, drafted) > 0


def test_a_forgotten_map_of_tokens_changes_what_is_drafted(
    folders: dict[str, Path], drafted: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemill_execution.sizing.draft.D2T", "absent")
    with make(folders, "llama") as llm:
        answers(llm)
    assert wrong(Reference(folders, "llama"), drafted) > 0


EVERYTHING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "log probabilities": {"logprobs": 2, "prompt_logprobs": 1},
    "penalties": {"temperature": 1.2, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "stop tokens behind a minimum": {"temperature": 1.2, "min_tokens": 6, "stop_token_ids": list(range(0, 257, 9))},
    "stop strings": {"stop": list("abcdefghijkl"), "include_stop_str_in_output": True},
    "bad words": {"bad_words": [chr(letter) for letter in range(97, 110)]},
    "biases": {"logit_bias": {7: 3.0, 9: 4.0, 11: 3.5}},
    "choices": {"n": 3},
    "a form": {"structured_outputs": StructuredOutputsParams(regex="[ -~]{12,30}")},
    "an adapter": {},
}


@pytest.mark.slow
def test_every_combination_with_a_head_gives_the_answers_without(folders: dict[str, Path], tmp_path: Path) -> None:
    """Bit for bit, in parts of prompts, preempted, behind prefix hits, moved to another engine and behind a sleep; and
    tokens are proposed for each."""
    exact = {"deterministic": True, "overlap": False, "enable_lora": True}
    lora = [LoRARequest("own", 1, str(_adapter(tmp_path))) if name == "an adapter" else None for name in EVERYTHING]
    params = [
        SamplingParams(**{"temperature": 0.9, "seed": 4, "max_tokens": 40, "ignore_eos": True, **case})
        for case in EVERYTHING.values()
    ]
    found: list[list[Any]] = []
    for drafts in (False, True):
        with make(folders, "llama", drafts=drafts, **exact) as llm:
            if drafts:
                assert llm._core.runner.sleep() > 14 * 16 * llm._core.runner.info.kv_bytes_per_token
                assert not llm._core.runner._drafter._heads[0].states._states.size
                llm._core.runner.wake()
            together = list(zip([*PROMPTS, *PROMPTS], params, lora, strict=False))
            outputs = _generate(llm, together)
            assert llm._core.scheduler.num_preemptions > 0
            for each in together:  # in a crowded cache there is little room for proposals
                outputs += (alone := _generate(llm, [each]))
                assert alone[0].metrics is not None
                assert (alone[0].metrics.num_proposed_tokens > 0) is drafts, each
            if drafts:
                assert llm._core._proposals is not None
                assert llm._core._proposals.per_decode[2] > 0, "what drafting takes is published"
            (searched,) = llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=3, max_tokens=6))
            texts = [[(c.text, c.token_ids, c.logprobs, c.finish_reason) for c in out.outputs] for out in outputs]
            beams = [(beam.text, beam.tokens) for beam in searched.sequences]
            found.append([texts, [out.prompt_logprobs for out in outputs], beams, _moved(llm, texts[1][0][1])])
    assert found[0] == found[1]
    assert found[0][-1] == found[0][0][1][0][1][9:]


def _generate(llm: LLM, requests: list[tuple[str, SamplingParams, LoRARequest | None]]) -> list[Any]:
    prompts, params, lora = (list(each) for each in zip(*requests, strict=True))
    return llm.generate(prompts, params, use_tqdm=False, lora_request=lora)


def _moved(llm: LLM, token_ids: list[int]) -> Any:
    """Return the rest of a drawn answer that began on another engine."""
    prompt = llm.get_tokenizer().encode(PROMPTS[1])
    request = GenerateRequest(
        request_id="moved", model="m", prompt_token_ids=prompt, resume=[ChoiceResume(0, token_ids[:9], 0)],
        sampling=EngineSampling(temperature=0.9, seed=4, max_tokens=40, ignore_eos=True),
    )  # fmt: skip
    llm._core.add(request)
    found: list[int] = []
    while llm._core.has_work:
        found += [token_id for output in llm._core.step().outputs for token_id in output.token_ids]
    return found


def _adapter(folder: Path) -> Path:
    torch.manual_seed(3)
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (4, SIZE), "B": (SIZE, 4)}
    tensors = {name.format(layer, part): torch.randn(shapes[part]) * 0.3 for layer in range(LAYERS) for part in "AB"}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "deepseek"])
def test_no_prefix_hit_is_shorter_because_a_head_drafts(folders: dict[str, Path], kind: str) -> None:
    """Its states of the prompt and of the answer before are cached with the blocks."""
    params, cached = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), []
    for drafts in (False, True):
        with make(folders, kind, drafts=drafts, num_kv_blocks=40) as llm:
            (first,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
            text = [*first.prompt_token_ids, *first.outputs[0].token_ids]
            prompts = [{"prompt_token_ids": each} for each in (first.prompt_token_ids, text, [*text[:50], 1, 2, 3])]
            outputs = [llm.generate([each], params, use_tqdm=False)[0] for each in prompts]
            cached.append([each.num_cached_tokens for each in outputs])
            assert all(
                each.metrics is not None and (each.metrics.num_proposed_tokens > 0) is drafts for each in outputs
            )
    assert cached[0] == cached[1]
    assert min(cached[0]) >= 32


def test_auto_drafts_by_the_models_own_layer(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files without the layer, or with a part of it, run without."""
    monkeypatch.setattr(Rounds, "choose", lambda self, *_: 2)
    tensors = load_file(folders["glm"] / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folders["glm"] / name).read_text())
    del tensors["model.layers.2.enorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    proposed = []
    for folder in (folders["glm"], tmp_path):
        with LLM(str(folder), **SETTINGS) as llm:
            if llm._core._proposals is not None:
                llm._core._proposals._ms_of = None
            (out,) = llm.generate(PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        assert out.metrics is not None
        proposed.append(out.metrics.num_proposed_tokens)
    assert proposed[0] > proposed[1] == 0
    with pytest.raises(LoadError, match=r"cannot be used: .*missing: `model.layers.2.enorm.weight`"):
        LLM(str(tmp_path), speculative_config={"method": "deepseek_mtp"}, **SETTINGS)


def test_memory_of_heads_is_part_of_the_plan(folders: dict[str, Path]) -> None:
    for kind, num_bytes, heads in (("llama", 4, 1), ("glm", 4, 2)):
        spec = load_model_spec(folders[kind])
        source = str(folders["eagle3"]) if kind == "llama" else None
        drafting = SpeculationConfig(method="eagle3" if source else "mtp", source=source)
        alone, both = (
            sizes_here(
                EngineConfig(model=str(folders[kind]), dtype="float32", max_model_len=128, speculative=each),
                folders[kind],
                spec,
            )
            for each in (SpeculationConfig(method="off"), drafting)
        )
        assert both.kv_bytes_per_token - alone.kv_bytes_per_token == num_bytes * (2 * heads * 32 + SIZE)
        assert both.weight_bytes > alone.weight_bytes + num_bytes * 2 * SIZE * SIZE
        assert both.draft_step_bytes > 0


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"vocab_size": 300}, {}, "reads a vocabulary of 300, but the model has 257"),
        ({"fc.weight": torch.zeros(SIZE, 96), "target_hidden_size": 32}, {}, "reads hidden states of 32, but"),
        ({"fc.weight": torch.zeros(SIZE, 32)}, {}, r"`fc.weight` has the shape \[64, 32\]"),
        ({"midlayer.hidden_norm.weight": None}, {}, "missing: `midlayer.hidden_norm.weight`"),
        ({"d2t": None}, {}, "no tensor `d2t` that says which"),
        ({"d2t": torch.arange(OWN) * 2}, {}, "names tokens twice, or beyond the model's 257"),
        ({"d2t": torch.zeros(3, dtype=torch.int64)}, {}, r"`d2t` of .* is int64 \[3\], not int64 \[120\]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}, {}, "before the layers 2, 4, 8, but"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 1, 5]}, {}, "three growing layer numbers"),
        ({"max_position_embeddings": 128}, {}, "was made for 128 tokens, but requests may have 160"),
        ({"num_hidden_layers": 2}, {}, "EAGLE-3 heads of 2 layers"),
        ({"architectures": ["LlamaForCausalLM"]}, {}, "names no EAGLE-3 head"),
        ({}, {"max_num_batched_tokens": 3, "max_num_seqs": 3}, "num_tokens is 3, but a step has 3 tokens"),
        ({}, {"pipeline_parallel_size": 2, "num_threads": 2}, "computes in no stages, and method eagle3 drafts"),
    ],
    ids=str,
)
def test_a_head_that_does_not_fit_is_refused(
    folders: dict[str, Path], tmp_path: Path, changes: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((LoadError, SourceError), match=message):
        make({**folders, "eagle3": write_eagle3(tmp_path / "head", **changes)}, "llama", **settings)


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_heads_whose_layer_is_native_need_no_torch(
    name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemill_execution.sizing.draft.find_spec", lambda name: None)
    with make(folders, name) as llm:
        (out,) = llm.generate(PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert out.metrics is not None
    assert out.metrics.num_proposed_tokens > 20
    monkeypatch.setattr("pagemill_execution.sizing.compute.can_fuse", lambda decoder: False)
    with pytest.raises(LoadError, match="this head needs torch, which is not installed"):
        make(folders, name)


def test_a_model_without_a_layer_that_drafts_refuses_mtp(folders: dict[str, Path]) -> None:
    with pytest.raises(LoadError, match="declares no layer that drafts"):
        LLM(str(folders["llama"]), speculative_config={"method": "mtp"}, **SETTINGS)


def test_the_layer_of_a_gguf_file_drafts_by_default(
    folders: dict[str, Path], tmp_path: Path, runner_loader: Callable[..., Any]
) -> None:
    """GLM-4.5's converters write it behind the other layers, with all of its experts in one tensor."""
    path = tmp_path / "model.gguf"
    write_family_gguf(path, folders["glm"], "glm4moe", block_count=3, nextn_predict_layers=1)
    heads = [stored_mtp_heads(load_model_spec(each), each, whole=True)[0] for each in (folders["glm"], path)]
    sizes = [head.num_parameters for head in heads if head is not None]
    assert len(sizes) == 2
    assert sizes[0] == sizes[1]
    runner = runner_loader(path, num_kv_blocks=64)
    assert (runner.info.drafts, load_model_spec(path).num_layers) == (True, 2)
    runner.close()
