"""Trains an EAGLE-3 head for SmolLM2 on its own answers, and measures how many of its proposals are accepted in chats.

The questions are of daily life and of the docstrings of Python's standard library; the answers are the model's, whose
hidden states are kept while it generates. One layer learns the model's own distributions until the time is over, and
is written in the layout of published heads, with a vocabulary of the most frequent tokens. The chats of the measurement
are those of `speculation.py`, of which none is trained on. Times are CPU time: a loaded machine trains as much.
"""

from __future__ import annotations

import argparse
import ast
import json
import sysconfig
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from report import emit
from safetensors.torch import load_file, save_file
from speculation import MODEL, QUESTIONS, chat_text
from torch import Tensor, nn

from pagemill import LLM, SamplingParams
from pagemill_execution.weights.declared import DeclaredWeights
from pagemill_execution.weights.opening import open_weights
from pagemill_models.sources import resolve_source
from pagemill_models.spec.model_files import load_model_spec

DAILY = (
    "What should I know about {}?",
    "Explain {} to a child.",
    "Write a short letter to a friend about {}.",
    "Tell me a story about {}.",
    "Give me three tips for {}.",
    "Why do people care about {}?",
    "Plan a weekend around {}.",
    "Compare {} and {}.",
    "How do I begin with {}?",
    "Write a list of questions about {} and answer two of them.",
    "What are the advantages and disadvantages of {}?",
    "I have a problem with {}. What can I do?",
    "How does one make or get {}, step by step?",
    "Why is {} the way it is?",
    "What happens to {} in a year?",
    "Write a polite email to a company about {}.",
    "Describe {} in three sentences.",
    "What is the history of {}?",
    "Which mistakes do beginners make with {}?",
    "Make a plan for five days with {}.",
    "Summarize what is known about {}.",
    "Write a dialogue of two people about {}.",
    "Is it better to choose {} or {}?",
    "What does {} cost, and how can one save money there?",
    "How does {} work inside?",
    "Give an example in Python that has to do with {}.",
    "Write a poem about {}.",
    "Name ten words that belong to {} and explain each.",
    "What should a visitor know about {}?",
    "Who uses {}, and for what?",
    "How do {} and {} go together?",
    "Explain the science behind {}.",
    "Write a complaint about {} and ask for a repair.",
    "Which should I use, {} or {}, and when?",
    "How can I keep {} healthy or in good order?",
    "Plan an evening with friends around {}.",
    "Tell me about a person whose work is {}.",
    "Write the first chapter of a book about {}.",
    "How do I choose {} for a small flat?",
    "What is needed for {}? Make a list.",
    "Explain in simple words why {} matters for {}.",
    "Write a thank-you letter that mentions {}.",
    "Give a schedule, hour by hour, for a day with {}.",
    "Describe how {} changed over a hundred years.",
    "What would happen without {}?",
    "Write a short speech about {}.",
    "Teach me {} in five lessons.",
    "Which questions should I ask before I pay for {}?",
    "Write an advertisement for {}.",
    "Is it true that {} can be dangerous? Explain.",
    "How do people in other countries treat {}?",
    "Write a function that counts {} in a list.",
    "Translate into plain English what an expert says about {}.",
    "What are the parts of {}, and what does each do?",
    "Tell a fairy tale in which {} helps a child.",
    "What can be learned from {}?",
)
TOPICS = (
    "a bakery, bicycles, the moon, cooking rice, old maps, a garden in winter, trains, the sea, learning Spanish, "
    "bees, a small dog, paper planes, tea, renting a flat, job interviews, chess, the heart, volcanoes, Rome, "
    "Japan, knitting, running in the rain, a lost key, databases, electric cars, cheese, birds, public libraries, "
    "radio, a wedding, glass, sleep, the water cycle, stamps, painting a room, a broken window, exams, moving to "
    "another city, mushrooms, rivers, a school trip, clocks, Brazil, saving money, honey, a noisy neighbour, fish, "
    "magnets, spring, photography, bread, Java, spreadsheets, a camping tent, taxes, wood, a late train, the "
    "desert, dinosaurs, headaches, guitars, ice cream, Norway, a farm, writing emails, robots, shadows, coffee, a "
    "museum, mountains, recycling, strawberries, an island, passwords, roses, a football team, thunder, the "
    "stomach, markets, cats, a bridge, Egypt, poems, solar panels, wind, a birthday cake, swimming, a doctor's "
    "visit, linear equations, cold weather, the Internet, ants, apples, New York, a new computer, soap, gravity, an "
    "old house, theatre, potatoes, rainbows, web pages, a picnic, horses, fever, Paris, compilers, a choir, the opera, "
    "a weekend by the lake, herbs, telephones, washing machines, light, sound, planets, tides, winter sports, a "
    "harbour, fishermen, a castle, sailing, a neighbour's tree, insurance, a contract, a teacher, homework, a garden "
    "pond, stars, airports, hotels, Vienna, China, medicine, vaccines, probability, fractions, democracy, an election, "
    "newspapers, a lost child, friendship, courage, a grandmother, carpets, a carpenter, dentists, elevators, ovens, "
    "an orchestra, spelling, statistics, SQL, a text editor, the alphabet, oil, steel, the Romans, a parrot, rice "
    "fields, India, Kenya, Canada, a canoe, tents, a spy, a wizard, an inventor, two brothers, a deadline"
)
DOCSTRINGS = (
    "Explain this to a beginner: {}",
    "What is this about? {}",
    "Answer in one paragraph, why does it matter? {}",
)
OWN_TOKENS, ANSWER_TOKENS, HIDDEN_LAYERS, ROWS = 16384, 128, 3, 64
SHARE_OF_ANSWERS = 0.35
"""Share of the time in which answers are generated."""
TEXTS_A_STEP, RATE = 12, 0.0012


class Text(NamedTuple):
    token_ids: Tensor
    """[tokens]."""
    states: Tensor
    """[tokens, hidden states of three layers], float16."""
    last: Tensor
    """[tokens, normalised hidden state], float16: the model's logits are its products with the embedding."""
    num_prompt_tokens: int

    def most_likely(self, embedding: Tensor) -> Tensor:
        """The model's most likely tokens behind those of the answer."""
        behind = self.last[max(1, self.num_prompt_tokens - 1) :]
        return (behind.bfloat16() @ embedding.bfloat16().T).argmax(-1)


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
        value = heads[2].to(query.dtype)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
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

    def take(self, stored: dict[str, Tensor]) -> None:
        """Take over what another head has learned; the logits' matrix is the model's embedding in each."""
        for name, own in self.tensors().items():
            if name != "lm_head.weight":
                own.copy_(stored[name])


class Muon(torch.optim.Optimizer):
    """Steps of matrices along their orthogonalised momentum: they learn from fewer texts than with AdamW."""

    def __init__(self, matrices: list[nn.Parameter]) -> None:
        super().__init__(matrices, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 0.05)
                turned = orthogonal(matrix.grad.lerp(momentum, 0.95))
                matrix.mul_(1 - 0.02 * group["lr"])
                matrix.add_(turned, alpha=-group["lr"] * max(1.0, len(matrix) / matrix.shape[1]) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return about the nearest matrix whose singular values are 1, by Newton and Schulz's iteration."""
    x: Tensor = matrix if len(matrix) <= matrix.shape[1] else matrix.T
    x = (x / (x.norm() + 1e-7)).bfloat16()
    for _ in range(4):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    x = x.float()
    return x if len(matrix) <= matrix.shape[1] else x.T


def rms(x: Tensor, weight: Tensor) -> Tensor:
    x = x.float()
    normed: Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    return normed


def questions() -> list[str]:
    """Return questions in an order of their own: two of daily life, then one about a docstring's first sentence."""
    sentences = set()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
                first = " ".join(text.split("\n\n")[0].split())
                if 24 < len(first) < 240:
                    sentences.add(first)
    about = [DOCSTRINGS[n % 3].format(each) for n, each in enumerate(sorted(sentences))]
    topics = TOPICS.split(", ")
    daily = [each.format(topic, topics[n - 1]) for each in DAILY for n, topic in enumerate(topics)]
    mixed = zip(shuffled(daily)[::2], shuffled(daily)[1::2], shuffled(about), strict=False)
    return [each for group in mixed for each in group if each not in QUESTIONS]


def shuffled(texts: list[str]) -> list[str]:
    return [texts[int(n)] for n in np.random.default_rng(0).permutation(len(texts))]


class Recorder:
    """Stands in the place of a runner's drafter, and keeps what a head would read, and what it has to predict."""

    def __init__(self, runner: Any) -> None:
        self._rows, self._model = runner._rows, runner.model
        self._model.use_caches(())
        self._model.keep_before(layers_of(self._model.spec.num_layers))
        self._model.use_caches(runner.kv_cache.layers)
        self.kept: dict[str, list[tuple[np.ndarray[Any, Any], ...]]] = defaultdict(list)
        self.num_prompt_tokens: dict[str, int] = {}

    def begin(self, row: int, num_computed_tokens: int) -> None:
        pass

    @property
    def blocks(self) -> list[Any]:
        return []

    def close(self) -> None:
        pass

    def run(self, inputs: Any, drafts: object, last: Any) -> tuple[dict[str, list[int]], float]:
        states = np.concatenate(self._model.kept, axis=1).astype(np.float16)
        ends = inputs.query_start_loc
        for index, (name, row) in enumerate(zip(inputs.request_ids, inputs.rows.tolist(), strict=True)):
            own = slice(ends[index], ends[index + 1])
            self.kept[name].append((inputs.token_ids[own], states[own], last[own].astype(np.float16)))
            self.num_prompt_tokens[name] = int(self._rows.num_prompt_tokens[row])
        return {}, 0.0

    def texts(self) -> list[Text]:
        found = []
        for name, parts in self.kept.items():
            arrays = [torch.from_numpy(np.concatenate(each)) for each in zip(*parts, strict=True)]
            found.append(Text(arrays[0], arrays[1], arrays[2], self.num_prompt_tokens[name]))
        return found


def answer(seconds: float, kept: Path, earlier: Path | None = None) -> list[Text]:
    """Return texts with the model's answers, as many as this CPU time allows, or those that were `kept`; behind those
    of an `earlier` training, whose questions are not asked again."""
    if kept.exists():
        return [Text(*each) for each in torch.load(kept)]
    before = [] if earlier is None else answer(0.0, earlier)
    config = {"enable_prefix_caching": False, "overlap": False, "speculative_config": {"method": "off"}}
    asked, num_asked, began_s = questions(), len(before), time.process_time()
    with LLM(MODEL, max_model_len=512, max_num_seqs=ROWS, num_threads=torch.get_num_threads(), **config) as llm:
        runner: Any = llm._core.runner
        recorder = runner._drafter = Recorder(runner)
        while time.process_time() - began_s < seconds and num_asked < len(asked):
            batch = [chat_text(each) for each in asked[num_asked : num_asked + 4 * ROWS]]
            params = [
                SamplingParams(temperature=0.0 if n % 2 else 0.6, seed=n, max_tokens=ANSWER_TOKENS)
                for n in range(len(batch))
            ]
            for each in llm.generate(batch, params, use_tqdm=False):
                assert each.outputs[0].token_ids, f"no answer to {each.prompt}"
            num_asked += len(batch)
            count = sum(len(part[0]) for parts in recorder.kept.values() for part in parts)
            print(f"{num_asked} questions, {count} tokens, {time.process_time() - began_s:.0f} s of CPU", flush=True)
        texts = before + recorder.texts()
    kept.parent.mkdir(parents=True, exist_ok=True)
    torch.save([tuple(each) for each in texts], kept)
    return texts


def layers_of(num_layers: int) -> tuple[int, int, int]:
    return 2, num_layers // 2, num_layers - 3


class Trained(NamedTuple):
    num_tokens: int
    num_steps: int
    right: float
    """Share of held-out answers' tokens that the head's most likely one equals the model's."""
    cpu_s: float


def answers_of(head: Path) -> Path:
    return head.with_name(f"{head.name}-answers.pt")


def train(seconds: float, out: Path, seed: int, earlier: Path | None) -> Trained:
    """Train a head and write it to `out`. `earlier`: the folder of one that is trained on."""
    torch.manual_seed(seed)
    texts = answer(seconds * SHARE_OF_ANSWERS, answers_of(out), None if earlier is None else answers_of(earlier))
    path = resolve_source(MODEL)
    spec = load_model_spec(path)
    weights = DeclaredWeights(open_weights(path), spec.decoder)

    def stored(name: str) -> Tensor:
        tensor = np.empty(weights.shapes[name], dtype=np.float32)
        weights.read_into(name, tensor)
        return torch.from_numpy(tensor)

    embedding = stored("model.embed_tokens.weight")
    counts = torch.bincount(
        torch.cat([each.token_ids[each.num_prompt_tokens :] for each in texts]), minlength=len(embedding)
    )
    own_ids = counts.topk(OWN_TOKENS).indices.sort().values
    num_held_out = min(96, len(texts) // 32 + 1)
    held_out = [(text, text.most_likely(embedding)) for text in texts[:num_held_out]]
    trained = texts[num_held_out:]
    rope = next(spec.decoder.attentions()).rope
    assert rope is not None
    head = Head(spec.hidden_size, spec.intermediate_size, spec.num_heads, spec.num_kv_heads, len(own_ids), rope.theta)
    with torch.no_grad():
        head.lm_head.weight.copy_(embedding[own_ids])
        head.lm_head.weight.requires_grad_(False)
        head.norm.copy_(stored("model.norm.weight"))
        head.fc.weight.copy_(_fitted(trained[:200], head.norm))
        for part in (head.attention["o_proj"], head.mlp["down_proj"]):
            part.get_parameter("weight").zero_()
        if earlier is not None:
            head.take(load_file(earlier / "model.safetensors"))
    rate = RATE if earlier is None else RATE / 2
    num_steps = _fit(head, trained, embedding, own_ids, seconds * (1 - SHARE_OF_ANSWERS), held_out, rate)
    _write(head, out, own_ids, spec, rope.theta)
    return Trained(
        sum(len(each.token_ids) for each in texts),
        num_steps,
        _right(head, held_out, embedding, own_ids),
        time.process_time(),
    )


def _fitted(texts: list[Text], norm: Tensor) -> Tensor:
    """Return the matrix that makes about the model's next hidden states of those that a head reads."""
    read = torch.cat([each.states[:-1].float() for each in texts])
    wanted = torch.cat([each.last[1:].float() for each in texts]) / norm
    gram = read.T @ read
    gram += 1e-3 * gram.diagonal().mean() * torch.eye(len(gram))
    solved: Tensor = torch.linalg.solve(gram, read.T @ wanted).T
    return solved


def _right(head: Head, texts: list[tuple[Text, Tensor]], embedding: Tensor, own_ids: Tensor) -> float:
    """Return the share of the answers' places in which the head's most likely token is the model's."""
    right = total = 0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for text, most_likely in texts:
            hidden, _ = next(_passes(head, [text], embedding, 1))
            drafted = head.logits(hidden[0, -len(most_likely) :]).argmax(-1)
            right += int((own_ids[drafted] == most_likely).sum())
            total += len(most_likely)
    return right / max(1, total)


def _fit(
    head: Head,
    texts: list[Text],
    embedding: Tensor,
    own_ids: Tensor,
    seconds: float,
    held_out: list[tuple[Text, Tensor]],
    rate: float,
) -> int:
    matrices = [each for each in head.parameters() if each.ndim == 2 and each.requires_grad]
    vectors = [each for each in head.parameters() if each.ndim == 1]
    rates = ((Muon(matrices), rate), (torch.optim.AdamW(vectors, weight_decay=0.0), 2e-3))
    own, began_s, step, order = embedding[own_ids].bfloat16(), time.process_time(), 0, torch.empty(0)
    while (left := 1 - (time.process_time() - began_s) / seconds) > 0:
        for optimizer, highest in rates:
            optimizer.param_groups[0]["lr"] = highest * min(1.0, (step + 1) / 20) * min(1.0, max(left, 0.01) / 0.6)
        if len(order) < TEXTS_A_STEP:
            order = torch.randperm(len(texts))
        picked, order = [texts[int(n)] for n in order[:TEXTS_A_STEP]], order[TEXTS_A_STEP:]
        losses = []
        with torch.autocast("cpu", torch.bfloat16):
            # The second pass reads what the first has computed, as drafts behind the first one do.
            for hidden, last in _passes(head, picked, embedding, 2 if left < 0.25 else 1):
                is_text = last.any(-1)
                target = nn.functional.softmax((last[is_text].bfloat16() @ own.T).float(), -1)
                losses.append(nn.functional.cross_entropy(head.logits(hidden[is_text]).float(), target))
        for optimizer, _ in rates:
            optimizer.zero_grad()
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        for optimizer, _ in rates:
            optimizer.step()
        step += 1
        if step % 50 == 1:
            right = _right(head, held_out[:12], embedding, own_ids)
            print(f"step {step}: loss {losses[0].item():.3f}, held out {right:.3f}, {left:.0%} left", flush=True)
    return step


def _passes(head: Head, texts: list[Text], embedding: Tensor, depth: int) -> Any:
    """Yield the head's residuals of the texts' pairs, and the model's last hidden states there, for each depth."""
    longest = max(len(text.token_ids) for text in texts)
    tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
    states = torch.zeros(len(texts), longest, texts[0].states.shape[1])
    last = torch.zeros(len(texts), longest, texts[0].last.shape[1])
    for row, text in enumerate(texts):
        count = len(text.token_ids)
        tokens[row, :count], states[row, :count], last[row, :count] = text.token_ids, text.states, text.last
    embedded, before = embedding[tokens[:, 1:]], head.fc(states[:, :-1])
    for _ in range(depth):
        hidden = head(embedded, before)
        yield hidden, last[:, 1:]
        before = torch.cat([before[:, :1], hidden[:, :-1]], 1)


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
    parser.add_argument("--minutes", type=float, default=50.0, help="CPU time for answers and training")
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--earlier", type=Path, help="folder of a head that is trained on, its answers beside it")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only-measure", action="store_true", help="measure the head in the folder")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result: dict[str, Any] = {}
    if not arguments.only_measure:
        result |= train(arguments.minutes * 60, arguments.out, arguments.seed, arguments.earlier)._asdict()
    measured = {most: measure(arguments.out, most) for most in (1, 2, 4)}
    columns = ("tokens at most", *measured[1])
    emit("train_eagle3", columns, [(most, *row.values()) for most, row in measured.items()], result | {"of": measured})


if __name__ == "__main__":
    main()
