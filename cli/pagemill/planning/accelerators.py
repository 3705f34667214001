"""Accelerators by their makers' data sheets, and the best step times that these allow.

A step reads all weights once (of experts those that some token is sent to) and does two operations for each token and
each weight that it passes. A decode reads its context's keys and
values; a prompt does four operations for each of its tokens, each token of context and each channel of attention. The
longer of memory and arithmetic is the step time (the roofline of Williams, Waterman and Patterson, CACM 2009). Kernels
reach neither peak: `MEMORY_SHARE` and `COMPUTE_SHARE` are assumptions, and measured step times replace all of this.
"""

from __future__ import annotations

from typing import NamedTuple

from pagemill_engine.runner.budget import Sizes
from pagemill_protocol.model_spec import ModelSpec
from pagemill_protocol.state import StepTimeParams

MEMORY_SHARE = 0.7
"""Share of the peak bandwidth that kernels reach."""
COMPUTE_SHARE = 0.5
"""Share of the dense bfloat16 peak that kernels reach."""
STEP_OVERHEAD_MS = 1.0
"""Fixed time of a step: launches, sampling, scheduling."""
EXPERT_KNOTS = (2, 4, 8, 16, 32, 64)
"""Tokens of a step between which the experts that it reads grow from those of one token to all."""
GIB = 1024**3


class Accelerator(NamedTuple):
    name: str
    products: tuple[str, ...]
    """As in the node label `nvidia.com/gpu.product` and in `resources.gpuProduct`."""
    memory_bytes: int
    bytes_per_s: float
    operations_per_s: float
    """Dense, in bfloat16."""
    source: str


ACCELERATORS = (
    Accelerator(
        "a100-80gb",
        ("NVIDIA-A100-SXM4-80GB",),
        80 * GIB,
        2.039e12,
        312e12,
        "NVIDIA A100 Tensor Core GPU data sheet, A100 80GB SXM: 2,039 GB/s, 312 TFLOPS bfloat16",
    ),
    Accelerator(
        "h100-80gb",
        ("NVIDIA-H100-80GB-HBM3",),
        80 * GIB,
        3.35e12,
        989.5e12,
        "NVIDIA H100 Tensor Core GPU data sheet, H100 SXM: 3.35 TB/s, 1,979 TFLOPS bfloat16 with sparsity, "
        "half of it without",
    ),
    Accelerator(
        "h200",
        ("NVIDIA-H200",),
        141 * GIB,
        4.8e12,
        989.5e12,
        "NVIDIA H200 Tensor Core GPU data sheet, H200 SXM: 141 GB, 4.8 TB/s, 1,979 TFLOPS bfloat16 with sparsity, "
        "half of it without",
    ),
    Accelerator(
        "l4",
        ("NVIDIA-L4",),
        24 * GIB,
        300e9,
        121e12,
        "NVIDIA L4 Tensor Core GPU data sheet: 24 GB, 300 GB/s, 242 TFLOPS bfloat16 with sparsity, half without",
    ),
    Accelerator(
        "l40s",
        ("NVIDIA-L40S",),
        48 * GIB,
        864e9,
        362e12,
        "NVIDIA L40S GPU data sheet: 48 GB, 864 GB/s, 362 TFLOPS bfloat16 without sparsity",
    ),
)


def find_accelerator(name: str) -> Accelerator | None:
    """The accelerator with that name, or with that product in the node label."""
    return next((each for each in ACCELERATORS if name == each.name or name in each.products), None)


def step_time(accelerator: Accelerator, spec: ModelSpec, sizes: Sizes, max_step_tokens: int) -> StepTimeParams:
    """Step times that the data sheet allows for this model."""
    bytes_per_ms = accelerator.bytes_per_s * MEMORY_SHARE / 1000
    operations_per_ms = accelerator.operations_per_s * COMPUTE_SHARE / 1000
    token_ms = 2 * _multiplied(spec) / operations_per_ms

    def read_ms(num_tokens: int) -> float:
        share = spec.num_read_parameters(num_tokens) / max(1, spec.num_parameters)
        return share * sizes.weight_bytes / bytes_per_ms

    # Up to this many tokens reading the weights takes longer than multiplying with them.
    even = max(2, round(read_ms(max_step_tokens) / token_ms))
    between = EXPERT_KNOTS if any(spec.decoder.mixtures()) else ()
    knots = sorted({1, *between, even, max(max_step_tokens, even + 1)})
    return StepTimeParams(
        knots_tokens=knots,
        knot_ms=[STEP_OVERHEAD_MS + max(read_ms(tokens), token_ms * tokens) for tokens in knots],
        decode_context_ms=sizes.kv_bytes_per_token / bytes_per_ms,
        chunk_context_ms=4 * spec.num_layers * spec.num_heads * spec.head_dim / operations_per_ms,
    )


def _multiplied(spec: ModelSpec) -> int:
    """Weights that every token is multiplied with: without the embedding, and without the head, which few tokens
    need."""
    tables = 1 if spec.tie_word_embeddings else 2
    return max(1, spec.num_read_parameters() - tables * spec.vocab_size * spec.hidden_size)
