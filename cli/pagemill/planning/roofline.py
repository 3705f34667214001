"""Derives step times from an accelerator's data sheet.

A step reads all weights once (of experts, those that some token is routed to) and does two operations for each token
and each weight. A decode reads the keys and values of its context; a prompt does four operations for each of its
tokens, each token of context and each channel of attention. The step takes the longer of memory and arithmetic time
(the roofline of Williams, Waterman and Patterson, CACM 2009). Kernels reach neither peak: `MEMORY_SHARE` and
`COMPUTE_SHARE` are assumptions. Measured step times are more accurate.
"""

from __future__ import annotations

from pagemill.planning.accelerators import Accelerator
from pagemill_engine.runner.budget import Sizes
from pagemill_protocol.model_spec import ModelSpec
from pagemill_protocol.state import StepTimeParams

MEMORY_SHARE = 0.7
"""Share of the peak bandwidth that kernels reach."""
COMPUTE_SHARE = 0.5
"""Share of the dense peak performance that kernels reach."""
STEP_OVERHEAD_MS = 1.0
"""Fixed time of a step: launches, sampling, scheduling."""
EXPERT_KNOTS = (2, 4, 8, 16, 32, 64)
"""Numbers of tokens at which the step time of a mixture of experts is computed: more tokens read more experts."""


def step_time(
    accelerator: Accelerator, spec: ModelSpec, sizes: Sizes, max_step_tokens: int, *, in_8_bits: bool = False
) -> StepTimeParams:
    """Return the model's step times; `in_8_bits`: weights and activations are multiplied as 8-bit values."""
    peak = accelerator.operations8_per_s if in_8_bits else accelerator.operations_per_s
    bytes_per_ms = accelerator.bytes_per_s * MEMORY_SHARE / 1000
    token_ms = 2 * _multiplied(spec) / (peak * COMPUTE_SHARE / 1000)

    def read_ms(num_tokens: int) -> float:
        share = spec.num_read_parameters(num_tokens) / max(1, spec.num_parameters)
        return share * sizes.weight_bytes / bytes_per_ms

    # Up to this number of tokens a step is bound by reading the weights, above it by arithmetic.
    even = max(2, round(read_ms(max_step_tokens) / token_ms))
    between = EXPERT_KNOTS if any(spec.decoder.mixtures()) else ()
    knots = sorted({1, *between, even, max(max_step_tokens, even + 1)})
    attention_per_ms = accelerator.operations_per_s * COMPUTE_SHARE / 1000
    return StepTimeParams(
        knots_tokens=knots,
        knot_ms=[STEP_OVERHEAD_MS + max(read_ms(tokens), token_ms * tokens) for tokens in knots],
        decode_context_ms=sizes.kv_bytes_per_token / bytes_per_ms,
        chunk_context_ms=4 * spec.num_layers * spec.num_heads * spec.head_dim / attention_per_ms,
    )


def _multiplied(spec: ModelSpec) -> int:
    """Return the number of weights that each token is multiplied with: all but the embedding and the output head."""
    tables = 1 if spec.tie_word_embeddings else 2
    return max(1, spec.num_read_parameters() - tables * spec.vocab_size * spec.hidden_size)
