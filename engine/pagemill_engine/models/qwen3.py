"""Qwen3 (arXiv 2505.09388): Llama with normalised queries and keys, which the attention block takes from the spec."""

from __future__ import annotations

from pagemill_engine.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    pass
