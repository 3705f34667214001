"""Trains an EAGLE-3 head for SmolLM2 on its own answers, and measures how many of its proposals are accepted in chats.

The questions are made of the docstrings of Python's standard library, the answers are the model's. One layer is trained
over the model's hidden states until the time is over, and written in the layout of published heads, with a vocabulary
of the most frequent tokens. The chats of the measurement are those of `speculation.py`, of which none is trained on.
"""

from __future__ import annotations

import argparse
import ast
import json
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from report import emit
from safetensors.torch import save_file
from speculation import MODEL, QUESTIONS, chat_text
from torch import Tensor, nn

from pagemill import LLM, SamplingParams
from pagemill_engine.weights.declared import DeclaredWeights
from pagemill_engine.weights.opening import open_weights
from pagemill_models.sources import resolve_source
from pagemill_models.spec.model_files import load_model_spec

TEMPLATES = (
    "Explain this to a beginner: {}",
    "Write a short story that begins with these words: {}",
    "What is this about? {}",
    "Give me three reasons why this matters: {}",
    "Write a letter to a friend about this: {}",
    "How would you plan a weekend around this idea? {}",
    "Compare this with something from daily life: {}",
    "Answer in one paragraph. Is this a good idea, and why? {}",
)
OWN_TOKENS, ANSWER_TOKENS, HIDDEN_LAYERS = 8192, 160, 3
SHARE_OF_ANSWERS = 0.3
"""Share of the time in which answers are generated."""


class Text(NamedTuple):
    token_ids: Tensor
    """[tokens]."""
    states: Tensor
    """[tokens, three layers' hidden states], float16."""
    num_prompt_tokens: int


class Head(nn.Module):
    """The layer of `decoders.on_torch.heads`, over whole texts."""

    def __init__(self, size: int, inner: int, num_heads: int, num_kv_heads: int, num_tokens: int, theta: float) -> None:
        super().__init__()
        self.dim, self.theta, key = size // num_heads, theta, size // num_heads * num_kv_heads
        self.fc = nn.Linear(HIDDEN_LAYERS * size, size, bias=False)
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self.norms = nn.ParameterDict({name: nn.Parameter(torch.ones(size)) for name in norms})
        self.attention = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * size, size, bias=False),
                "k_proj": nn.Linear(2 * size, key, bias=False),
                "v_proj": nn.Linear(2 * size, key, bias=False),
                "o_proj": nn.Linear(size, size, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(size, inner, bias=False),
                "up_proj": nn.Linear(size, inner, bias=False),
                "down_proj": nn.Linear(inner, size, bias=False),
            }
        )
        self.norm = nn.Parameter(torch.ones(size))
        self.lm_head = nn.Linear(size, num_tokens, bias=False)

    def forward(self, embedded: Tensor, before: Tensor) -> Tensor:
        """Return the residual behind the layer, [texts, tokens, size]."""
        x = torch.cat([rms(embedded, self.norms["input_layernorm"]), rms(before, self.norms["hidden_norm"])], -1)
        count = x.shape[1]
        turns = torch.arange(count)[:, None] * self.theta ** (-torch.arange(0, self.dim, 2) / self.dim)
        cos, sin = (torch.cat([each, each], -1) for each in (turns.cos(), turns.sin()))
        heads = [self.attention[f"{name}_proj"](x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for name in "qkv"]
        query, key = (each * cos + torch.cat([-each[..., self.dim // 2 :], each[..., : self.dim // 2]], -1) * sin
                      for each in heads[:2])  # fmt: skip
        attended = nn.functional.scaled_dot_product_attention(query, key, heads[2], is_causal=True, enable_gqa=True)
        hidden: Tensor = before + self.attention["o_proj"](attended.transpose(1, 2).flatten(-2))
        inner = rms(hidden, self.norms["post_attention_layernorm"])
        gated = nn.functional.silu(self.mlp["gate_proj"](inner)) * self.mlp["up_proj"](inner)
        added: Tensor = self.mlp["down_proj"](gated)
        return hidden + added

    def logits(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.lm_head(rms(hidden, self.norm))
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors with the names of published heads."""
        named = {"fc.weight": self.fc.weight, "norm.weight": self.norm, "lm_head.weight": self.lm_head.weight}
        named |= {f"midlayer.{name}.weight": each for name, each in self.norms.items()}
        for group, part in (("self_attn", self.attention), ("mlp", self.mlp)):
            named |= {f"midlayer.{group}.{name}.weight": each.get_parameter("weight") for name, each in part.items()}
        return {name: each.detach().contiguous() for name, each in named.items()}


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def questions() -> list[str]:
    """Return questions about the first sentences of docstrings, in an order of their own."""
    sentences = set()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
                first = " ".join(text.split("\n\n")[0].split())
                if 24 < len(first) < 240:
                    sentences.add(first)
    ordered = sorted(sentences)
    return [TEMPLATES[n % len(TEMPLATES)].format(ordered[n * 7919 % len(ordered)]) for n in range(len(ordered))]


def answer(seconds: float) -> list[tuple[list[int], list[int]]]:
    """Return prompts and the model's answers, as many as can be generated in this time."""
    found: list[tuple[list[int], list[int]]] = []
    ends, asked = time.monotonic() + seconds, questions()
    with LLM(MODEL, max_model_len=512, max_num_seqs=64, speculative_config={"method": "off"}) as llm:
        while time.monotonic() < ends and len(found) < len(asked):
            batch = [chat_text(each) for each in asked[len(found) : len(found) + 64]]
            params = [
                SamplingParams(temperature=0.0 if n % 2 else 0.6, seed=n, max_tokens=ANSWER_TOKENS)
                for n in range(len(batch))
            ]
            outputs = llm.generate(batch, params, use_tqdm=False)
            found += [(list(out.prompt_token_ids), list(out.outputs[0].token_ids)) for out in outputs]
    return found


def texts_of(answers: list[tuple[list[int], list[int]]]) -> list[Text]:
    """Return the texts with the hidden states that a head reads of them."""
    found = []
    config = {"enable_prefix_caching": False, "overlap": False, "speculative_config": {"method": "off"}}
    with LLM(MODEL, max_model_len=512, max_num_seqs=1, max_num_batched_tokens=512, **config) as llm:
        runner: Any = llm._core.runner
        model, caches = runner.model, runner.kv_cache.layers
        model.use_caches(())
        model.keep_before(layers_of(model.spec.num_layers))
        model.use_caches(caches)
        hidden, kept = model.hidden, []

        def recording(step: Any, adapters: Any = None) -> Any:
            computed = hidden(step, adapters)
            kept.append(np.concatenate(model.kept, axis=1).astype(np.float16))
            return computed

        model.hidden = recording
        for prompt, answered in answers:
            del kept[:]
            token_ids = [*prompt, *answered]
            llm.generate([{"prompt_token_ids": token_ids}], SamplingParams(max_tokens=1), use_tqdm=False)
            states = torch.from_numpy(np.concatenate(kept)[: len(token_ids)])
            found.append(Text(torch.tensor(token_ids), states, len(prompt)))
    return found


def layers_of(num_layers: int) -> tuple[int, int, int]:
    return 2, num_layers // 2, num_layers - 3


class Trained(NamedTuple):
    num_tokens: int
    num_steps: int
    right: float
    """Share of held-out answers' tokens that the head's most likely one equals."""


def train(seconds: float, out: Path, seed: int) -> Trained:
    """Train a head and write it to `out`."""
    torch.manual_seed(seed)
    began_s = time.monotonic()
    answers = answer(seconds * SHARE_OF_ANSWERS)
    texts = texts_of(answers)
    path = resolve_source(MODEL)
    spec = load_model_spec(path)
    weights = DeclaredWeights(open_weights(path), spec.decoder)

    def stored(name: str) -> Tensor:
        tensor = np.empty(weights.shapes[name], dtype=np.float32)
        weights.read_into(name, tensor)
        return torch.from_numpy(tensor)

    embedding = stored("model.embed_tokens.weight")
    counts = Counter(token for _, answered in answers for token in answered)
    own = sorted(token for token, _ in counts.most_common(OWN_TOKENS))
    own = sorted({*own, *(token for token in range(spec.vocab_size) if len(own) < OWN_TOKENS and token < OWN_TOKENS)})
    own_ids = torch.tensor(own[: max(len(own), 1)])
    number_of = torch.full((spec.vocab_size,), -100)
    number_of[own_ids] = torch.arange(len(own_ids))
    rope = next(spec.decoder.attentions()).rope
    assert rope is not None
    head = Head(spec.hidden_size, spec.intermediate_size, spec.num_heads, spec.num_kv_heads, len(own_ids), rope.theta)
    last = f"model.layers.{spec.num_layers - 1}"
    with torch.no_grad():
        head.lm_head.weight.copy_(embedding[own_ids])
        head.norm.copy_(stored("model.norm.weight"))
        head.fc.weight.zero_()
        head.fc.weight[:, -spec.hidden_size :].copy_(torch.eye(spec.hidden_size))
        head.attention["o_proj"].get_parameter("weight").copy_(stored(f"{last}.self_attn.o_proj.weight"))
        for name, part in head.mlp.items():
            part.get_parameter("weight").copy_(stored(f"{last}.mlp.{name}.weight"))
    held_out, trained = texts[: len(texts) // 32 + 1], texts[len(texts) // 32 + 1 :]
    num_steps = _fit(head, trained, embedding, number_of, began_s + seconds)
    right, total = 0, 0
    with torch.no_grad():
        for text in held_out:
            hidden, labels = _pass(head, [text], embedding, number_of, 1)[0]
            right += int((head.logits(hidden).argmax(-1) == labels).sum())
            total += int((text.num_prompt_tokens < torch.arange(2, len(text.token_ids) + 1)).sum()) - 1
    _write(head, out, own_ids, spec, rope.theta)
    return Trained(sum(len(text.token_ids) for text in texts), num_steps, right / max(1, total))


def _fit(head: Head, texts: list[Text], embedding: Tensor, number_of: Tensor, ends_s: float) -> int:
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, weight_decay=0.01, betas=(0.9, 0.95))
    began_s, step = time.monotonic(), 0
    while (left := (ends_s - time.monotonic()) / (ends_s - began_s)) > 0:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 20) * max(left, 0.02)
        picked = [texts[int(n)] for n in torch.randint(len(texts), (8,))]
        # The second pass reads what the first has computed, as drafts behind the first one do.
        passes = _pass(head, picked, embedding, number_of, 2 if left < 0.35 else 1)
        losses = [
            nn.functional.cross_entropy(head.logits(hidden[labels >= 0]), labels[labels >= 0])
            for hidden, labels in passes
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 1:
            print(f"step {step}: loss {losses[0].item():.3f}, {left:.0%} of the time left", flush=True)
    return step


def _pass(
    head: Head, texts: list[Text], embedding: Tensor, number_of: Tensor, depth: int
) -> list[tuple[Tensor, Tensor]]:
    """Return the head's residuals of the pairs of the texts, and the tokens behind them, for each depth."""
    longest = max(len(text.token_ids) for text in texts)
    tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
    states = torch.zeros(len(texts), longest, texts[0].states.shape[1])
    labels = torch.full((len(texts), longest), -100)
    for row, text in enumerate(texts):
        count = len(text.token_ids)
        tokens[row, :count], states[row, :count] = text.token_ids, text.states.float()
        labels[row, text.num_prompt_tokens : count] = number_of[text.token_ids[text.num_prompt_tokens :]]
    embedded, before = embedding[tokens[:, 1:-1]], head.fc(states[:, :-2])
    found = []
    for _ in range(depth):
        hidden = head(embedded, before)
        found.append((hidden, labels[:, 2:]))
        before = torch.cat([before[:, :1], hidden[:, :-1]], 1)
    return found


def _write(head: Head, out: Path, own_ids: Tensor, spec: Any, theta: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = head.tensors() | {"d2t": own_ids - torch.arange(len(own_ids))}
    tensors["t2d"] = torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill_(0, own_ids, value=True)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": len(own_ids),
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2))


def measure(head: Path, most: int) -> dict[str, float]:
    """Return what of the head's proposals was accepted in chats, and the chats' time beside that without it."""
    prompts, rows = [chat_text(each) for each in QUESTIONS], {}
    params = SamplingParams(temperature=0.0, max_tokens=128)
    for name in ("off", "eagle3"):
        given: dict[str, Any] = {"method": "off"}
        if name == "eagle3":
            given = {"method": "eagle3", "model": str(head), "num_speculative_tokens": most}
        with LLM(MODEL, max_model_len=512, speculative_config=given) as llm:
            if name == "eagle3":
                assert llm._core._proposals is not None
                llm._core._proposals._ms_of = None  # as many as may be, whatever they gain
            began_s = time.monotonic()
            outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
            rows[f"{name}_seconds"] = time.monotonic() - began_s
        metrics = [out.metrics for out in outputs if out.metrics is not None]
    proposed = sum(each.num_proposed_tokens for each in metrics)
    accepted = sum(each.num_accepted_tokens for each in metrics)
    return {"proposed": proposed, "accepted": accepted, "acceptance": accepted / max(1, proposed), **rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=50.0, help="time for answers and training")
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only-measure", action="store_true", help="measure the head in the folder")
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    if not arguments.only_measure:
        result |= train(arguments.minutes * 60, arguments.out, arguments.seed)._asdict()
    measured = {most: measure(arguments.out, most) for most in (1, 2, 4)}
    columns = ("tokens at most", *measured[1])
    emit("train_eagle3", columns, [(most, *row.values()) for most, row in measured.items()], result | {"of": measured})


if __name__ == "__main__":
    main()
