"""Qwen2 (arXiv 2407.10671): Llama with biases on query, key and value, which the attention block takes from the
spec."""

from __future__ import annotations

from pagemill_engine.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    pass
