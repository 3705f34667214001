"""Reports registers, spills and shared memory of every Triton kernel, compiled ahead of time without a GPU.

The launchers run on tensors without memory, as the models below would call them; what they would launch is compiled for
each architecture instead, and the compiler's figures are read from the binary. Fails if a hot kernel spills, or if a
kernel needs more shared memory than the architecture allows a program.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import report
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from pagemill_kernels.activation import triton_body as activation_body
from pagemill_kernels.activation import triton_launch as activation
from pagemill_kernels.adapters import triton_body as adapters_body
from pagemill_kernels.adapters.triton_launch import AdapterStack, TritonAdapterRows
from pagemill_kernels.experts import triton_body as experts_body
from pagemill_kernels.experts import triton_launch as experts
from pagemill_kernels.experts.parts import ExpertParts, Gate
from pagemill_kernels.gather import triton_body as gather_body
from pagemill_kernels.gather import triton_launch as gather
from pagemill_kernels.gpu import launch
from pagemill_kernels.kv_store.storage import token_width
from pagemill_kernels.linear import triton_body as linear_body
from pagemill_kernels.linear import triton_launch as linear
from pagemill_kernels.linear.groups import GroupCodes
from pagemill_kernels.linear.triton_launch import CodesLinear
from pagemill_kernels.norm import triton_body as norm_body
from pagemill_kernels.norm import triton_launch as norm
from pagemill_kernels.paged_attention import triton_body as attention_body
from pagemill_kernels.paged_attention import triton_launch as attention
from pagemill_kernels.paged_attention.batch import AttentionBatch
from pagemill_kernels.recurrent import triton_body as recurrent_body
from pagemill_kernels.recurrent import triton_launch as recurrent
from pagemill_kernels.recurrent.chunks import triton_body as recurrent_chunks
from pagemill_kernels.recurrent.device_batch import StepStates
from pagemill_kernels.recurrent.reference import Convolution, DeltaHeads
from pagemill_kernels.recurrent.state_space import StateSpaceHeads
from pagemill_kernels.request_rows import triton_body as rows_body
from pagemill_kernels.request_rows import triton_launch as request_rows
from pagemill_kernels.request_rows.layout import DeviceStepInputs, RowLayout, RowState, RowWrites, StepRows
from pagemill_kernels.rope import triton_body as rope_body
from pagemill_kernels.rope import triton_launch as rope
from pagemill_kernels.rope.reference import HeadNorms
from pagemill_kernels.sampling import triton_body as sampling_body
from pagemill_kernels.sampling import triton_launch as sampling
from pagemill_kernels.sampling.batch import Draws, Edits, Penalties, Reports, TokenMasks
from pagemill_kernels.sampling.filters import DRAWS
from pagemill_kernels.sampling.penalties import PENALTIES
from pagemill_kernels.scaled_linear import triton_body as scaled_body
from pagemill_kernels.scaled_linear import triton_launch as scaled
from pagemill_kernels.scaled_linear.channels import ChannelCodes

ARCHITECTURES = (80, 90, 100)
META = torch.device("meta")
NUM_MULTIPROCESSORS = 132
BODIES = (
    *(activation_body, attention_body, experts_body, gather_body, linear_body, norm_body, rope_body),
    *(adapters_body, recurrent_body, recurrent_chunks, rows_body, sampling_body, scaled_body),
)
SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""KiB that one program may use (CUDA C++ Programming Guide, technical specifications per compute capability)."""
FP8 = torch.float8_e4m3fn
FP8_ARCHITECTURE = 89
"""The first architecture with e4m3; launchers refuse the type before it."""
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


CODES = {"int8": torch.int8, "fp8": FP8}


class Case(NamedTuple):
    name: str
    run: Callable[[], object]
    is_hot: bool


class Launched(NamedTuple):
    kernel: JITFunction[Any]
    arguments: dict[str, Any]


class Usage(NamedTuple):
    registers: int
    spilled_bytes: int
    shared_bytes: int
    products: list[str]
    """Instructions of the tensor cores; their suffixes name the types of the factors."""


def floats(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


class Mask(NamedTuple):
    """Changes of attention scores besides the causal mask."""

    window: int | None = None
    soft_cap: float | None = None
    slopes: bool = False
    sinks: bool = False


CAUSAL = Mask()


def attend(
    requests: int,
    tokens: int,
    head_dim: int,
    heads: tuple[int, int],
    *,
    cached: torch.dtype | None = None,
    mask: Mask = CAUSAL,
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[], object]:
    """Return a run of attention with `requests` of `tokens` each. `cached`: the cache's type; None: the computed
    one.
    """
    num_heads, num_kv_heads = heads
    batch = AttentionBatch(
        query_start_loc=np.arange(requests + 1) * tokens,
        seq_lens=np.full(requests, 4096),
        block_tables=np.zeros((requests, 256), dtype=np.int32),
        block_size=16,
        padding_block=0,
    )
    cache = _cache(cached or dtype, num_kv_heads, head_dim)
    slopes = torch.empty(num_heads, device=META) if mask.slopes else None
    sinks = torch.empty(num_heads, device=META) if mask.sinks else None

    def run() -> None:
        plan = attention.plan_attention(batch, mask.window, dtype, META)
        query = floats(requests * tokens, num_heads, head_dim, dtype=dtype)
        attention.paged_attention(query, cache, plan, head_dim**-0.5, mask.soft_cap, slopes, sinks)

    return run


def _cache(dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> Tensor:
    return torch.empty(64, 2 * num_kv_heads, 16, token_width(dtype, head_dim), dtype=dtype, device=META)


def in_groups(bits: Any, group_size: int = 32) -> CodesLinear:
    shape = (14336, 4096)
    codes = np.empty(shape, dtype=np.uint8 if bits == 4 else np.int8)
    scales = np.empty((shape[0], shape[1] // group_size), dtype=np.float32)
    return linear.pack_codes(GroupCodes(bits, codes, scales, scales if bits == 4 else None), None)


def multiply(rows: int, bits: Any, group_size: int = 32) -> Callable[[], object]:
    return lambda: in_groups(bits, group_size)(floats(rows, 4096))


def pass_experts(rows: int, bits: Any) -> Callable[[], object]:
    """Return a run of 8 of 128 experts per row, as in Qwen3-30B-A3B. `bits`: of quantized weights; 0: bfloat16."""

    def packed(out: int, size: int) -> Any:
        if bits == 0:
            return linear.pack_linear(floats(out, size), None)
        codes = np.empty((out, size), dtype=np.uint8 if bits == 4 else np.int8)
        scales = np.empty((out, size // 32), dtype=np.float32)
        return linear.pack_codes(GroupCodes(bits, codes, scales, scales if bits == 4 else None), None)

    def run() -> None:
        parts = ExpertParts(packed(2 * 768, 2048), packed(2048, 768))
        chosen = torch.empty(rows, 8, dtype=torch.int64, device=META)
        weights = torch.empty(rows, 8, device=META)
        experts.pack_experts([parts] * 128, Gate("silu")).add_to(
            floats(rows, 2048), floats(rows, 2048), chosen, weights
        )

    return run


class States(NamedTuple):
    """A recurrent layer's heads."""

    keys: int
    values: int
    key_dim: int
    value_dim: int


def recur(rule: str, heads: States, requests: int, tokens: int) -> Callable[[], object]:
    """Return a run of a recurrent layer with `requests` of `tokens` each: convolution, rule, gate and norm."""
    of_keys, of_values = heads.keys * heads.key_dim, heads.values * heads.value_dim
    channels, count, by_channel = 2 * of_keys + of_values, requests * tokens, rule == "channel_delta_rule"

    def vector(*shape: int) -> Tensor:
        return floats(*shape, dtype=torch.float32)

    def run() -> None:
        limits, decays = (0.0, float("inf")), heads.values * (heads.key_dim if by_channel else 1)
        of_heads: Any = DeltaHeads(vector(heads.values), vector(decays), vector(heads.value_dim), 1e-6)
        given = [floats(count, 2 * heads.values), floats(count, of_values)]
        if by_channel:
            given = [floats(count, heads.values), floats(count, decays), floats(count, of_values)]
        if rule == "state_space":
            one = vector(heads.values)
            of_heads = StateSpaceHeads(one, one, one, vector(of_values), of_values, 1e-5, True, limits)
            given[0] = floats(count, heads.values)
        caches = (
            vector(8, heads.values, heads.key_dim, heads.value_dim),
            vector(8, 3, channels),
            vector(requests, 17, of_keys + of_values + decays),
            vector(requests, 4, channels),
        )
        plan = recurrent.TritonStates(
            torch.empty(requests + 1, dtype=torch.int32, device=META), StepStates.empty(requests, requests, META),
            torch.empty(count, dtype=torch.int32, device=META), tokens == 1,
        )  # fmt: skip
        kernel = Convolution(vector(4, channels))
        recurrent.convolved_rule(rule, floats(count, channels), kernel, (*given, of_heads), caches, plan)

    return run


RECURRENT = {
    "delta rule": ("delta_rule", States(16, 32, 128, 128)),
    "delta rule, decays by channel": ("channel_delta_rule", States(32, 32, 128, 128)),
    "state space": ("state_space", States(8, 64, 128, 64)),
    "state space of 256": ("state_space", States(1, 32, 256, 64)),
}


def multiply_scaled(rows: int, dtype: torch.dtype) -> Callable[[], object]:
    """Return a run of two kernels: the quantization of x, and the matmul."""
    return lambda: in_channels(dtype)(floats(rows, 4096))


def in_channels(dtype: torch.dtype, *, bias: bool = False) -> scaled.ScaledLinear:
    shape = (14336, 4096)
    codes = torch.empty(shape, dtype=dtype, device=META)
    weight = ChannelCodes(codes, torch.empty(shape[0], device=META))
    return scaled.ScaledLinear(weight, floats(shape[0]) if bias else None)


def rotate(head_dim: int, cached: torch.dtype = torch.bfloat16) -> Callable[[], object]:
    heads, table = floats(64, 48, head_dim), floats(64, 1, head_dim // 2)
    slots = torch.empty(64, dtype=torch.int64, device=META)
    return lambda: rope.rope_and_store(heads, 32, table, table, _cache(cached, 8, head_dim), slots)


def normalize_and_rotate(head_dim: int) -> Callable[[], object]:
    heads, table = floats(64, 48, head_dim), floats(64, 1, head_dim // 2)
    slots = torch.empty(64, dtype=torch.int64, device=META)
    norms = HeadNorms(floats(head_dim), floats(head_dim), 1e-6)
    cache = _cache(torch.bfloat16, 8, head_dim)
    return lambda: rope.norm_rope_and_store(heads, 32, norms, table, table, cache, slots)


def sample() -> list[Case]:
    """Return the cases of 64 rows of Qwen3's vocabulary."""
    num_rows, vocab_size = 64, 151_936
    logits, raw = (torch.empty(num_rows, vocab_size, device=META) for _ in range(2))
    tokens = torch.empty(num_rows, dtype=torch.int64, device=META)
    rows, ones = np.arange(num_rows), np.ones(num_rows, dtype=np.float32)
    draws = Draws(DRAWS.filled(num_rows, {"top_p": 0.9}), rows.astype(np.uint64))
    tables = (logits.bool(), logits.int())
    penalties = Penalties(rows, PENALTIES.filled(num_rows, {}), rows, *tables)
    masks = TokenMasks(rows, np.zeros((num_rows, vocab_size // 32), dtype=np.int32))
    return [
        Case("masks", lambda: sampling.apply_masks(logits, masks), False),
        Case("draw", lambda: sampling.draw(logits, logits, draws), True),
        Case("draw after changes", lambda: sampling.draw(logits, raw, draws), True),
        Case("penalties", lambda: sampling.apply_penalties(logits, penalties), True),
        Case("counts of sampled tokens", lambda: sampling.count(penalties, tokens), False),
        Case("logit bias", lambda: sampling.add_edits(logits, Edits(rows, rows, ones)), False),
        Case("log probabilities", lambda: sampling.report(logits, tokens, Reports(rows, rows)), False),
    ]


def add_adapters() -> None:
    """Add four adapters' products to a linear layer's."""
    stack = AdapterStack(floats(4, 16, 2048), floats(4, 4096, 16))
    slots = torch.empty(64, dtype=torch.int64, device=META)
    TritonAdapterRows(slots, {0: stack}).add_to(0, floats(64, 4096), floats(64, 2048))


def keep_rows() -> list[Case]:
    """Return the cases of 256 requests of up to 40,960 tokens: the decodes of a step, whose rows have grown a
    little.
    """
    layout, num_requests = RowLayout.of(256, 40_960, 16), 256
    state, of_kinds = RowState(layout, [0], META), RowState(layout._replace(num_kinds=2), [0, 0], META)
    numbers = torch.empty(num_requests + 1, dtype=torch.int32, device=META)
    step = StepRows(numbers[:-1], numbers, numbers)

    def inputs(state: RowState) -> None:
        empty = DeviceStepInputs.empty(num_requests, num_requests, num_requests, state.layout, META)
        request_rows.build_inputs(state, step, 1, num_requests, 16, empty)

    writes = RowWrites(torch.empty(3, 16, dtype=torch.int64, device=META), numbers)
    tokens = torch.empty(num_requests, dtype=torch.int64, device=META)
    return [
        Case("changes of rows", lambda: request_rows.write_rows(state, writes), True),
        Case("inputs of a step", lambda: inputs(state), True),
        Case("inputs of a step with two cache kinds", lambda: inputs(of_kinds), True),
        Case("end of a step", lambda: request_rows.advance_rows(state, step, tokens), True),
    ]


MASKS = {"window": Mask(window=1024), "soft cap": Mask(soft_cap=50.0), "ALiBi": Mask(slopes=True)} | {
    "sinks": Mask(sinks=True)
}


def cases() -> list[Case]:
    """Return the shapes of Llama-3.2-1B (heads of 64), Llama-3.1-8B and Qwen3-0.6B (128), of Gemma's kind (256) and of
    Gemma 4's layers with full attention (512)."""
    heads = {64: (32, 8), 128: (32, 8), 256: (16, 8), 512: (32, 4)}
    attention_cases = [
        Case(f"attention {kind}, heads of {head_dim}", attend(requests, tokens, head_dim, heads[head_dim]), True)
        for head_dim in heads
        for kind, requests, tokens in (("decode", 128, 1), ("decode in parts", 1, 1), ("prefill", 4, 512))
    ]
    ids = torch.empty(64, dtype=torch.int64, device=META)
    return [
        *attention_cases,
        Case("attention decode in 4 parts, heads of 128", attend(8, 1, 128, heads[128]), True),
        *(
            Case(f"attention {kind}, heads of 128, float16", attend(*shape, 128, heads[128], dtype=torch.float16), True)
            for kind, shape in (("decode", (128, 1)), ("prefill", (4, 512)))
        ),
        *(
            Case(f"attention {kind}, heads of {d}, float32", attend(*shape, d, heads[d], dtype=torch.float32), False)
            for d in heads
            for kind, shape in (("decode", (128, 1)), ("prefill", (4, 512)))
        ),
        Case("attention decode, group of 2", attend(128, 1, 128, (16, 8)), True),
        *(
            Case(f"attention {kind}, {name}", attend(*shape, 128, heads[128], mask=mask), True)
            for name, mask in MASKS.items()
            for kind, shape in (("decode", (128, 1)), ("prefill", (4, 512)))
        ),
        *(
            Case(f"attention {kind}, heads of {d}, {name} cache", attend(*shape, d, heads[d], cached=dtype), True)
            for name, dtype in CODES.items()
            for d in heads
            for kind, shape in (("decode", (128, 1)), ("decode in parts", (1, 1)), ("prefill", (4, 512)))
        ),
        *(
            Case(f"linear {bits} bits, {rows} rows", multiply(rows, bits), True)
            for bits in (4, 8)
            for rows in (1, 64, 512)
        ),
        *(
            Case(f"experts {bits or 16} bits, {rows} rows", pass_experts(rows, bits), True)
            for bits in (0, 4, 8)
            for rows in (1, 512)
        ),
        Case("linear 8 bits in groups of 16, 64 rows", multiply(64, 8, 16), True),
        *(Case(f"linear {bits} bits, added to 64 rows", partial(_add, in_groups, bits), True) for bits in (4, 8)),
        *(Case(f"rows of {bits}-bit codes", partial(_rows_of, in_groups, bits, ids), False) for bits in (4, 8)),
        *(
            Case(f"linear {name} by {name}, added to 64 rows", partial(_add, in_channels, dtype), True)
            for name, dtype in CODES.items()
        ),
        *(
            Case(f"rows of {name} codes", partial(_rows_of, in_channels, dtype, ids), False)
            for name, dtype in CODES.items()
        ),
        Case(
            "linear int8 by int8 and a bias, 64 rows",
            lambda: in_channels(torch.int8, bias=True)(floats(64, 4096)),
            True,
        ),
        Case("adapters of rank 16, 64 rows", add_adapters, False),
        *(
            Case(f"linear {name} by {name}, {rows} rows", multiply_scaled(rows, dtype), True)
            for name, dtype in CODES.items()
            for rows in (1, 64, 512)
        ),
        Case("codes of a row of 53248", lambda: scaled.encode_rows(floats(64, 53248), torch.int8), True),
        *(
            Case(f"{name}, {requests} requests of {tokens}", recur(*of_rule, requests, tokens), tokens == 1)
            for name, of_rule in RECURRENT.items()
            for requests, tokens in ((64, 1), (2, 512))
        ),
        *(Case(f"rotation and cache write, heads of {size}", rotate(size), True) for size in heads),
        Case("norms of heads, rotation and cache write, heads of 128", normalize_and_rotate(128), True),
        *(Case(f"rotation and cache write, {name} cache", rotate(128, dtype), True) for name, dtype in CODES.items()),
        Case("RMS norm of 4096", lambda: norm.rms_norm(floats(64, 4096), floats(4096), 1e-5), True),
        Case("RMS norm of 4096, residual", lambda: norm.rms_norm(*_norm_inputs(4096)), True),
        Case("RMS norm of heads of 128", lambda: norm.rms_norm(floats(64, 48, 128)[:, :32], floats(128), 1e-5), True),
        Case("layer norm of 4096", lambda: norm.layer_norm(floats(64, 4096), floats(4096), floats(4096), 1e-5), False),
        Case("layer norm of 4096, residual", lambda: norm.layer_norm(*_centred_inputs(4096)), False),
        Case("SiLU and product", lambda: activation.silu_and_mul(floats(64, 2 * 14336)), True),
        Case("GELU and product", lambda: activation.gelu_and_mul(floats(64, 2 * 14336)), False),
        Case("rows of an embedding", lambda: gather.gather_rows(floats(128256, 4096), ids), True),
        *keep_rows(),
        *sample(),
    ]


def _add(make: Callable[[Any], Any], codes: Any) -> None:
    make(codes).add_to(floats(64, 14336), floats(64, 4096))


def _rows_of(make: Callable[[Any], Any], codes: Any, ids: Tensor) -> None:
    make(codes).gather(ids)


def _norm_inputs(size: int) -> tuple[Tensor, Tensor, float, Tensor]:
    return floats(64, size), floats(size), 1e-5, floats(64, size)


def _centred_inputs(size: int) -> tuple[Tensor, Tensor, Tensor, float, Tensor]:
    return floats(64, size), floats(size), floats(size), 1e-5, floats(64, size)


class _Recorder:
    """Replaces a kernel and records its launches."""

    def __init__(self, kernel: JITFunction[Any], launched: list[Launched]) -> None:
        self._kernel, self._launched = kernel, launched

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda **arguments: self._launched.append(Launched(self._kernel, arguments))


@contextmanager
def recording(architecture: int = 90) -> Iterator[list[Launched]]:
    """Make the launchers called in the block launch nothing, as if they were on a device; yield what they would
    launch.
    """
    launched: list[Launched] = []
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(launch, "device", return_value=META))
        stack.enter_context(mock.patch.object(launch, "upload", _upload))
        stack.enter_context(mock.patch.object(launch, "num_multiprocessors", return_value=NUM_MULTIPROCESSORS))
        size = SHARED_KIB[architecture] * 1024
        stack.enter_context(mock.patch.object(launch, "shared_bytes", return_value=size))
        capability = divmod(architecture, 10)
        stack.enter_context(mock.patch.object(launch, "capability", return_value=capability))
        for module in BODIES:
            for name, kernel in _kernels(module).items():
                stack.enter_context(mock.patch.object(module, name, _Recorder(kernel, launched)))
        yield launched


def _upload(array: Any, to: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(array.shape, dtype=dtype or torch.from_numpy(array).dtype, device=META)


def _kernels(module: ModuleType) -> dict[str, JITFunction[Any]]:
    return {name: value for name, value in vars(module).items() if isinstance(value, JITFunction)}


def compile_for(launched: Launched, architecture: int) -> Usage:
    kernel, arguments = launched
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = _type_of(value)
        if not parameter.do_not_specialize and (isinstance(value, Tensor) or value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {name: arguments[name] for name in ("num_warps", "num_stages", "enable_fp_fusion") if name in arguments}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    return _usage(compiled.asm["cubin"], compiled.metadata.shared, _products(compiled.asm["ptx"]))


def _type_of(value: object) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _products(assembly: str) -> list[str]:
    found = re.findall(r"(wgmma\.mma_async|tcgen05\.mma|mma\.sync)[\w.:]*?((?:\.(?:kind::)?[a-z]+\d+\w*)*)\s", assembly)
    return sorted({name + types for name, types in found})


def _usage(binary: bytes, shared_bytes: int, products: list[str]) -> Usage:
    """Read the usage from a binary; a Triton kernel has no stack of its own, so what is there was spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        argv = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {text}")
    return Usage(int(found[1]), int(found[2]), shared_bytes, products)


def _launched_on(case: Case, architecture: int) -> list[Launched]:
    """Return what a case launches on an architecture, whose properties launchers read."""
    with recording(architecture) as launched:
        case.run()
    return launched


def _warps(kernels: tuple[Launched, ...]) -> str:
    """Return the warps of each architecture, or one number if they are equal."""
    numbers = [str(kernel.arguments["num_warps"]) for kernel in kernels]
    return numbers[0] if len(set(numbers)) == 1 else " / ".join(numbers)


def _usage_on(launched: Launched, architecture: int) -> Usage | None:
    """Return the usage, or None if the launcher refuses the type on the architecture."""
    tensors = [value for value in launched.arguments.values() if isinstance(value, Tensor)]
    # Attention gets its cache as numbers of another type, and a flag for the real one.
    has_fp8 = any(tensor.dtype == FP8 for tensor in tensors) or launched.arguments.get("IS_FP8", False)
    return None if has_fp8 and architecture < FP8_ARCHITECTURE else compile_for(launched, architecture)


def _cell(use: Usage | None) -> str:
    return "refused" if use is None else f"{use.registers} / {use.spilled_bytes} / {use.shared_bytes / 1024:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architectures", type=int, nargs="+", choices=SHARED_KIB, default=ARCHITECTURES, metavar="SM")
    parser.add_argument("--only", nargs="+", default=[""], help="compile the cases whose name contains one of these")
    options = parser.parse_args()
    rows: list[list[Any]] = []
    products: list[list[list[str]]] = []
    spilling: list[str] = []
    oversized: list[str] = []
    for case in cases():
        if not any(part in case.name for part in options.only):
            continue
        on_each = [_launched_on(case, architecture) for architecture in options.architectures]
        for kernels in zip(*on_each, strict=True):
            usages = [_usage_on(*each) for each in zip(kernels, options.architectures, strict=True)]
            cells = [_cell(use) for use in usages]
            rows.append([case.name, kernels[0].kernel.__name__, _warps(kernels), *cells])
            products.append([use.products if use else [] for use in usages])
            if case.is_hot and any(use is not None and use.spilled_bytes for use in usages):
                spilling.append(f"{case.name}: {kernels[0].kernel.__name__}")
            given = [1024 * SHARED_KIB[architecture] for architecture in options.architectures]
            if any(use is not None and use.shared_bytes > size for use, size in zip(usages, given, strict=True)):
                oversized.append(f"{case.name}: {kernels[0].kernel.__name__}")
    columns = ["case", "kernel", "warps", *(f"sm_{architecture}" for architecture in options.architectures)]
    payload = {"rows": rows, "products": products, "spilling": spilling, "oversized": oversized}
    report.emit("registers / spilled bytes / KiB of shared memory", columns, rows, payload)
    return 1 if spilling or oversized else 0


if __name__ == "__main__":
    sys.exit(main())
