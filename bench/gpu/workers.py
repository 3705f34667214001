"""An engine in a process of its own, behind the line protocol of `peers.wire`: Pagemill's `LLM`, or vLLM's.

Both read the same checkpoint and get the same prompts as token ids, each with its own defaults.
"""

from __future__ import annotations

import sys
from typing import Any

import paths as paths  # makes the packages importable
from peers.wire import Generate, Jobs, Tokens, serve

TEMPERATURE = 0.6


def pagemill(folder: str, max_model_len: int, device: str) -> tuple[Generate, dict[str, Any]]:
    from pagemill_engine.llm import LLM
    from pagemill_protocol.request.sampling import SamplingParams

    llm = LLM(folder, device=device, max_model_len=max_model_len)

    def generate(jobs: Jobs) -> Tokens:
        params = [SamplingParams(temperature=TEMPERATURE, max_tokens=num, ignore_eos=True) for _, num in jobs]
        prompts = [{"prompt_token_ids": ids} for ids, _ in jobs]
        return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]

    return generate, {}


def vllm(folder: str, max_model_len: int, device: str) -> tuple[Generate, dict[str, Any]]:
    import vllm as engine

    # Prompts are random here, so that keeping their prefixes gains nothing; both engines keep them by default.
    llm = engine.LLM(folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=max_model_len)

    def generate(jobs: Jobs) -> Tokens:
        params = [
            engine.SamplingParams(temperature=TEMPERATURE, max_tokens=num, ignore_eos=True, detokenize=False)
            for _, num in jobs
        ]
        prompts = [{"prompt_token_ids": ids} for ids, _ in jobs]
        return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]

    return generate, {"version": str(engine.__version__)}


ENGINES = {"pagemill": pagemill, "vLLM": vllm}

if __name__ == "__main__":
    who, folder, max_model_len, device = sys.argv[1:]
    serve(lambda: ENGINES[who](folder, int(max_model_len), device))
