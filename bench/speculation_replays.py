"""Measures decoding with predictions beside decoding without, for shapes of Qwen3 (0.6B) and Qwen3.5 (0.8B, a hybrid).

The models have random weights, so nothing but a replay can be predicted: clients send the answers that the engine gave
without proposals, whole, or with wrong tokens at regular places. Both take turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers
from report import emit, progress

from pagemill_engine.config import EngineConfig
from pagemill_engine.loop.core import EngineCore
from pagemill_engine.loop.warmup import Calibration
from pagemill_execution.config import SpeculationConfig
from pagemill_execution.starting.factory import create_runner
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

COMMON = {
    "vocab_size": 32_000, "hidden_size": 1024, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "dtype": "bfloat16",
}  # fmt: skip
SHAPES = {
    "qwen3_5_text": {
        "num_hidden_layers": 24, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    },
    "qwen3": {
        "num_hidden_layers": 28, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128,
    },
}  # fmt: skip
"""Of 0.8B and 0.6B, but for the vocabulary."""
METHODS = {"off": SpeculationConfig(method="off"), "auto": SpeculationConfig(num_tokens=16)}
WORK = {"nothing predicted": 0, "every 9th token wrong": 9, "all right": 10**9}
PROMPT_TOKENS = 64


class Served(NamedTuple):
    tokens_per_s: float
    tokens_per_step: float
    answers: list[list[int]]


def write_model(folder: Path, model_type: str) -> None:
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(model_type, **COMMON, **SHAPES[model_type])
    models: Any = transformers.AutoModelForCausalLM
    model = models.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


class Engine:
    def __init__(self, folder: Path, settings: SpeculationConfig, threads: int | None) -> None:
        config = EngineConfig(
            model=str(folder), max_num_seqs=16, max_model_len=1024, num_threads=threads, speculative=settings,
            enable_prefix_caching=False,
        )  # fmt: skip
        self.core = EngineCore(config, create_runner(config, lambda phase, detail: None))
        Calibration(self.core).begin(1.0)
        self._num_requests = 0

    def serve(self, size: int, num_tokens: int, predicted: list[list[int]]) -> Served:
        """Answer `size` prompts; the time is that behind their first tokens."""
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        answers: dict[str, list[int]] = {}
        for index in range(size):
            self._num_requests += 1
            name, prompt = (
                f"r{self._num_requests}",
                [(17 * index + 7 * place) % 31_000 for place in range(PROMPT_TOKENS)],
            )
            answers[name] = []
            self.core.add(
                GenerateRequest(
                    request_id=name, model="m", prompt_token_ids=prompt, sampling=sampling,
                    predicted_token_ids=predicted[index] if predicted else [],
                )
            )  # fmt: skip
        while not all(answers.values()):
            self._step(answers)
        began_s, num_before, num_steps = time.perf_counter(), sum(map(len, answers.values())), 0
        while self.core.has_work:
            self._step(answers)
            num_steps += 1
        num_made = sum(map(len, answers.values())) - num_before
        return Served(num_made / (time.perf_counter() - began_s), num_made / num_steps / size, [*answers.values()])

    def _step(self, answers: dict[str, list[int]]) -> None:
        for output in self.core.step().outputs:
            answers[output.request_id] += output.token_ids


def with_errors(answer: list[int], every: int) -> list[int]:
    return [token if place % every != every - 1 else (token + 1) % 31_000 for place, token in enumerate(answer)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3_5_text")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    rows, result = [], {}
    with tempfile.TemporaryDirectory() as root:
        write_model(Path(root), arguments.shape)
        progress("the model is written")
        engines = {name: Engine(Path(root), each, arguments.threads) for name, each in METHODS.items()}
        for size in arguments.batches:
            right = engines["off"].serve(size, arguments.tokens, []).answers
            for name, every in WORK.items():
                predicted = [with_errors(answer, every) for answer in right] if every else []
                ratios, speeds, per_step, equal = [], dict[str, list[float]](off=[], auto=[]), 0.0, True
                for number in range(arguments.rounds):
                    served = {
                        method: engines[method].serve(size, arguments.tokens, predicted)
                        for method in list(engines)[:: 1 if number % 2 else -1]
                    }
                    for method, each in served.items():
                        speeds[method].append(each.tokens_per_s)
                    ratios.append(served["auto"].tokens_per_s / served["off"].tokens_per_s)
                    per_step = served["auto"].tokens_per_step
                    equal = equal and served["auto"].answers == served["off"].answers
                progress(f"batch {size}, {name}: {median(ratios):.2f}, {per_step:.2f} tokens a step")
                found = {method: median(each) for method, each in speeds.items()}
                work = f"batch {size}, {name}"
                result[work] = {
                    **found, "ratio": median(ratios), "lowest": min(ratios), "highest": max(ratios),
                    "tokens_per_step": per_step, "equal_answers": equal,
                }  # fmt: skip
                numbers = [f"{each:.2f}" for each in (median(ratios), min(ratios), max(ratios), per_step)]
                rows.append([work, f"{found['off']:.1f}", f"{found['auto']:.1f}", *numbers, "yes" if equal else "no"])
        for engine in engines.values():
            engine.core.runner.close()
    header = ["work", "off tokens/s", "auto tokens/s", "ratio", "lowest", "highest", "tokens a step", "equal answers"]
    emit("speculation_replays", header, rows, result)


if __name__ == "__main__":
    main()
