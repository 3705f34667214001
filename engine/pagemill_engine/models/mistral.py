"""Mistral (arXiv 2310.06825): Llama with a sliding window, which the attention block takes from the spec."""

from __future__ import annotations

from pagemill_engine.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    pass
