"""Loads the compiled CPU kernels and declares their C functions. Mirrors cpu/src/abi.h.

`load()` returns the library of the highest level that `processor` allows, or None with the cause in
`unavailable_reason()`; callers then use the torch implementation. The library has threads of its own
(cpu/src/threads.cpp).
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from pathlib import Path

from pagemill_kernels.cpu import processor
from pagemill_kernels.cpu.state_structures import ConvolutionArgs, RecurrenceArgs, RecurrentRows

logger = logging.getLogger(__name__)

ABI_VERSION = 34
PANEL = 16
"""Outputs of one panel of a packed weight."""
ADAPTER_PANEL, ADAPTER_RANKS = 64, 8
"""Outputs of one panel of an adapter's B; its rank is padded to a multiple of the second number."""
FORMAT_FLOAT32, FORMAT_BFLOAT16, FORMAT_CODES8, FORMAT_CODES4 = range(4)
FORMAT_DOTS4, FORMAT_DOTS8, FORMAT_PAIRS, FORMAT_FLOATS8, FORMAT_FLOATS4 = range(4, 9)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2")
"""Activations by the kernels' numbers."""

_LIBRARY_DIR = Path(__file__).parent / "lib"


class PackedWeight(ctypes.Structure):
    _fields_ = (
        ("format", c_int32),
        ("group", c_int32),
        ("has_offsets", c_int32),
        ("bfloat16_rows", c_int32),
        ("float32_rows", c_int32),
        ("out_features", c_int64),
        ("in_features", c_int64),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("input_order", c_void_p),
        ("table", c_void_p),
    )


class AdapterPart(ctypes.Structure):
    _fields_ = (
        ("first_output", c_int64),
        ("outputs", c_int64),
        ("first_rank", c_int64),
        ("rank", c_int64),
        ("b", c_void_p),
    )


class AdapterWeights(ctypes.Structure):
    _fields_ = (
        ("rank", c_int64),
        ("a", c_void_p),
        ("num_parts", c_int64),
        ("parts", c_void_p),
    )


class StepAdapters(ctypes.Structure):
    _fields_ = (
        ("slots", c_void_p),
        ("num_slots", c_int64),
        ("num_linears", c_int64),
        ("matrices", c_void_p),
    )


class AdaptedRows(ctypes.Structure):
    _fields_ = (
        ("slots", c_void_p),
        ("divisor", c_int64),
        ("first", c_int64),
    )


class StepHooks(ctypes.Structure):
    _fields_ = (
        ("adapters", c_void_p),
        ("first_linear", c_void_p),
        ("reduce", c_void_p),
        ("context", c_void_p),
        ("layer_inputs", c_void_p),
        ("input_stride", c_int64),
    )


class NormWeights(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("size", c_int64),
        ("eps", c_float),
        ("centered", c_int32),
        ("whole_size", c_int64),
        ("adds", c_int32),
        ("heads", c_int32),
    )


class GroupChoice(ctypes.Structure):
    _fields_ = (
        ("bias", c_void_p),
        ("num_groups", c_int64),
        ("top_groups", c_int64),
        ("best_of_group", c_int64),
        ("scale", c_float),
        ("sigmoid", c_int32),
    )


class ExpertsWeights(ctypes.Structure):
    _fields_ = (
        ("router", c_void_p),
        ("router_bias", c_void_p),
        ("ups", c_void_p),
        ("up_biases", c_void_p),
        ("downs", c_void_p),
        ("down_biases", c_void_p),
        ("num_experts", c_int64),
        ("top_k", c_int64),
        ("renormalized", c_int32),
        ("activation", c_int32),
        ("limit", c_float),
        ("gated", c_int32),
        ("padding", c_int32),
        ("gating", c_void_p),
        ("scales", c_void_p),
        ("norm", NormWeights),
        ("router_norm", NormWeights),
        ("before", c_void_p),
        ("behind", c_void_p),
        ("before_bias", c_void_p),
        ("behind_bias", c_void_p),
    )


class SharedExpert(ctypes.Structure):
    _fields_ = (
        ("up", c_void_p),
        ("down", c_void_p),
        ("gate", c_void_p),
        ("up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("gate_bias", c_void_p),
        ("activation", c_int32),
        ("gated", c_int32),
        ("limit", c_float),
        ("padding", c_int32),
    )


class RecurrentWeights(ctypes.Structure):
    _fields_ = (
        ("inputs", c_void_p),
        ("rates", c_void_p),
        ("steps_down", c_void_p),
        ("steps_up", c_void_p),
        ("gates_down", c_void_p),
        ("gates_up", c_void_p),
        ("output", c_void_p),
        ("inputs_bias", c_void_p),
        ("rates_bias", c_void_p),
        ("steps_down_bias", c_void_p),
        ("steps_up_bias", c_void_p),
        ("gates_down_bias", c_void_p),
        ("gates_up_bias", c_void_p),
        ("output_bias", c_void_p),
        ("scales", c_void_p),
        ("taps", c_void_p),
        ("tap_bias", c_void_p),
        ("decays", c_void_p),
        ("biases", c_void_p),
        ("skips", c_void_p),
        ("gate_norm", c_void_p),
        ("norm", NormWeights),
        ("output_norm", NormWeights),
        ("channels", c_int64),
        ("width", c_int64),
        ("log_values", c_int64),
        ("num_keys", c_int64),
        ("num_values", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("norm_size", c_int64),
        ("norm_stride", c_int64),
        ("mixed_at", c_int64),
        ("gates_at", c_int64),
        ("steps_at", c_int64),
        ("queries_at", c_int64),
        ("keys_at", c_int64),
        ("values_at", c_int64),
        ("norm_parts", c_int64),
        ("first_head", c_int64),
        ("whole_heads", c_int64),
        ("eps", c_float),
        ("least_step", c_float),
        ("most_step", c_float),
        ("rate_scale", c_float),
        ("residual_scale", c_float),
        ("gates_first", c_int32),
    )


class InputMLP(ctypes.Structure):
    _fields_ = (
        ("up", c_void_p),
        ("down", c_void_p),
        ("up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("output_norm", NormWeights),
        ("first_input", c_int64),
        ("activation", c_int32),
        ("padding", c_int32),
    )


class LatentWeights(ctypes.Structure):
    _fields_ = (
        ("query_down", c_void_p),
        ("query", c_void_p),
        ("down", c_void_p),
        ("query_down_bias", c_void_p),
        ("query_bias", c_void_p),
        ("down_bias", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("query_norm", NormWeights),
        ("latent_norm", NormWeights),
        ("latent_size", c_int64),
        ("shared_size", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
    )


class LayerWeights(ctypes.Structure):
    _fields_ = (
        ("qkv", c_void_p),
        ("output", c_void_p),
        ("up", c_void_p),
        ("down", c_void_p),
        ("qkv_bias", c_void_p),
        ("output_bias", c_void_p),
        ("up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("sinks", c_void_p),
        ("alibi_slopes", c_void_p),
        ("experts", c_void_p),
        ("shared", c_void_p),
        ("recurrent", c_void_p),
        ("head_gates", c_void_p),
        ("head_gates_bias", c_void_p),
        ("attention_norm", NormWeights),
        ("query_norm", NormWeights),
        ("key_norm", NormWeights),
        ("attention_output_norm", NormWeights),
        ("mlp_norm", NormWeights),
        ("mlp_output_norm", NormWeights),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("scale", c_float),
        ("residual_scale", c_float),
        ("mlp_scale", c_float),
        ("limit", c_float),
        ("clip", c_float),
        ("soft_cap", c_float),
        ("activation", c_int32),
        ("gated", c_int32),
        ("parallel", c_int32),
        ("norms_behind", c_int32),
        ("grows", c_int32),
        ("gated_heads", c_int32),
        ("first_attention", c_int32),
        ("first_mlp", c_int32),
        ("latent", c_void_p),
        ("input_mlp", c_void_p),
        ("value_norm", NormWeights),
        ("attention_residual_norm", NormWeights),
        ("mlp_residual_norm", NormWeights),
        ("experts_output_norm", NormWeights),
        ("sum_norm", NormWeights),
        ("factor", c_float),
        ("key_source", c_int32),
        ("ahead", c_int32),
    )


class SamplingArgs(ctypes.Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("num_rows", c_int64),
        ("vocab_size", c_int64),
        ("draws", c_void_p),
        ("keys", c_void_p),
        ("mask_of", c_void_p),
        ("masks", c_void_p),
        ("mask_words", c_int64),
        ("edit_starts", c_void_p),
        ("edit_tokens", c_void_p),
        ("edit_biases", c_void_p),
        ("penalty_of", c_void_p),
        ("penalties", c_void_p),
        ("count_rows", c_void_p),
        ("in_prompt", c_void_p),
        ("in_output", c_void_p),
        ("report_of", c_void_p),
        ("top_width", c_int64),
        ("token_ids", c_void_p),
        ("finite", c_void_p),
        ("chosen", c_void_p),
        ("best", c_void_p),
        ("log_totals", c_void_p),
        ("ranks", c_void_p),
        ("top", c_void_p),
        ("top_ids", c_void_p),
        ("num_threads", c_int32),
    )


class PartArgs(ctypes.Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("num_rows", c_int64),
        ("num_tokens", c_int64),
        ("first", c_int64),
        ("vocab_size", c_int64),
        ("draws", c_void_p),
        ("keys", c_void_p),
        ("best", c_void_p),
        ("sums", c_void_p),
        ("token_ids", c_void_p),
        ("masses", c_void_p),
        ("counts", c_void_p),
        ("width", c_int64),
        ("candidates", c_void_p),
        ("num_threads", c_int32),
    )


class AttentionArgs(ctypes.Structure):
    _fields_ = (
        ("query", c_void_p),
        ("cache", c_void_p),
        ("block_tables", c_void_p),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("out", c_void_p),
        ("sinks", c_void_p),
        ("alibi_slopes", c_void_p),
        ("query_stride", c_int64),
        ("block_table_stride", c_int64),
        ("num_requests", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("block_stride", c_int64),
        ("sliding_window", c_int64),
        ("first_key", c_int64),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("num_threads", c_int32),
        ("cache_type", c_int32),
        ("batch_invariant", c_int32),
        ("bfloat16", c_int32),
        ("ahead", c_int32),
        ("padding", c_int32),
        ("value_size", c_int64),
    )


class Ranks(ctypes.Structure):
    _fields_ = (
        ("shared", c_void_p),
        ("capacity", c_int64),
        ("step", c_int64),
        ("waited_ns", c_int64),
        ("size", c_int32),
        ("rank", c_int32),
        ("first", c_int32),
        ("members", c_int32),
        ("stuck_ms", c_int32),
        ("failed", c_int32),
        ("missing", c_int32),
        ("barriers", c_uint32),
    )


class Ring(ctypes.Structure):
    _fields_ = (
        ("shared", c_void_p),
        ("slots", c_int64),
        ("slot_bytes", c_int64),
        ("readers", c_int32),
        ("reader", c_int32),
    )


_SIGNATURES = {
    "pagemill_linear": (
        POINTER(PackedWeight), c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int32, c_int32,
    ),
    "pagemill_pack_plain": (c_void_p, c_int64, c_int64, c_int32, c_void_p, c_int32),
    "pagemill_pack_pairs": (c_void_p, c_int64, c_int64, c_void_p, c_int32),
    "pagemill_pack_codes": (
        c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int32, c_void_p, c_void_p, c_int32,
    ),
    "pagemill_pack_blocks": (c_void_p, c_int64, c_int64, c_int32, c_int32, c_void_p, c_void_p, c_int32),
    "pagemill_gather_rows": (POINTER(PackedWeight), c_void_p, c_int64, c_void_p),
    "pagemill_paged_attention": (POINTER(AttentionArgs),),
    "pagemill_sample": (POINTER(SamplingArgs),),
    "pagemill_report": (POINTER(SamplingArgs),),
    "pagemill_sample_part": (POINTER(PartArgs),),
    "pagemill_rms_norm": (
        c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_float, c_void_p, c_int64, c_int32, c_int32,
    ),
    "pagemill_layer_norm": (
        c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_float, c_void_p, c_int64, c_int32,
    ),
    "pagemill_activate": (c_void_p, c_int64, c_int64, c_int32, c_int32, c_float, c_void_p, c_int32),
    "pagemill_route": (c_void_p, c_int64, c_int64, c_int64, c_int32, c_void_p, c_void_p),
    "pagemill_route_by_groups": (
        c_void_p, c_int64, c_int64, c_int64, c_int32, POINTER(GroupChoice), c_void_p, c_void_p,
    ),
    "pagemill_rotate": (c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int32),
    "pagemill_add_gated": (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int32),
    "pagemill_gate_heads": (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int32, c_int32),
    "pagemill_rope_and_store": (
        c_void_p, c_int64, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_int64,
        c_int64, c_int32,
    ),
    "pagemill_causal_convolution": (POINTER(ConvolutionArgs),),
    "pagemill_recurrence": (POINTER(RecurrenceArgs),),
    "pagemill_silu_and_mul": (c_void_p, c_int64, c_int64, c_void_p, c_int32, c_int32),
    "pagemill_experts": (
        c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64,
        c_int32, c_int32, c_float, c_void_p, c_int64, c_void_p, c_int32,
    ),
    "pagemill_add_adapters": (
        c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, POINTER(AdaptedRows), c_void_p, c_int64, c_int32,
    ),
    "pagemill_decoder_layers": (
        c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p,
        c_void_p, c_int32, c_void_p, c_void_p, POINTER(RecurrentRows), POINTER(StepHooks), c_void_p, c_int32,
    ),
    "pagemill_ranks_bytes": (c_int64, c_int64, c_int64),
    "pagemill_ranks_step": (POINTER(Ranks), c_int64),
    "pagemill_ranks_at": (POINTER(Ranks), c_int32, c_int32),
    "pagemill_ranks_meet": (POINTER(Ranks), c_int32),
    "pagemill_ranks_status": (POINTER(Ranks), c_int32, POINTER(c_int64)),
    "pagemill_ranks_abort": (POINTER(Ranks), c_char_p, c_int32),
    "pagemill_ranks_lost": (POINTER(Ranks),),
    "pagemill_ranks_recover": (POINTER(Ranks),),
    "pagemill_ranks_reset": (POINTER(Ranks),),
    "pagemill_ranks_reason": (POINTER(Ranks), c_char_p, c_int64),
    "pagemill_ranks_reduce": (POINTER(Ranks), c_void_p, c_int64, c_int32, c_int32),
    "pagemill_ranks_hook": (c_void_p, c_void_p, c_int64, c_int32, c_int32),
    "pagemill_ranks_counts": (POINTER(Ranks), c_int64, c_void_p),
    "pagemill_ranks_gather": (POINTER(Ranks), c_void_p, c_void_p, c_void_p),
    "pagemill_ranks_send": (POINTER(Ranks), c_void_p, c_int64, c_int32),
    "pagemill_ranks_receive": (POINTER(Ranks), c_void_p, c_int64, c_int32),
    "pagemill_ring_bytes": (c_int64, c_int64),
    "pagemill_ring_write": (POINTER(Ring), c_char_p, c_int64, c_int64),
    "pagemill_ring_next": (POINTER(Ring), c_int64, POINTER(c_void_p), POINTER(c_int64)),
    "pagemill_ring_done": (POINTER(Ring),),
    "pagemill_ring_close": (POINTER(Ring),),
}  # fmt: skip
_RESULTS: dict[str, type[ctypes._SimpleCData[int]]] = {
    "pagemill_ranks_bytes": c_int64,
    "pagemill_ring_bytes": c_int64,
    "pagemill_ranks_reason": c_int32,
    "pagemill_ranks_lost": c_int32,
    "pagemill_ranks_reset": c_int32,
    "pagemill_ranks_reduce": c_int32,
    "pagemill_ranks_meet": c_int32,
    "pagemill_ranks_counts": c_int32,
    "pagemill_ranks_gather": c_int32,
    "pagemill_ranks_send": c_int32,
    "pagemill_ranks_receive": c_int32,
    "pagemill_ring_write": c_int32,
    "pagemill_ring_next": c_int32,
}


@cache
def load() -> ctypes.CDLL | None:
    library, cause = _open()
    if library is None:
        logger.warning("Native CPU kernels are not used: %s. Without them torch computes, slower.", cause)
    return library


def has_dots() -> bool:
    """Whether kernels multiply 4-bit weights by rounded activations in integers; so far only on x86."""
    loaded = load()
    return loaded is not None and loaded.pagemill_has_dots() != 0


def has_bfloat16() -> bool:
    """Whether kernels multiply bfloat16, and 8-bit weights in integers: on x86 with AVX512_BF16 and VNNI."""
    loaded = load()
    return loaded is not None and loaded.pagemill_has_bfloat16() != 0


def unavailable_reason() -> str | None:
    """Return why torch runs instead of the native kernels; None if they are loaded."""
    return None if load() is not None else _open()[1]


def _open() -> tuple[ctypes.CDLL | None, str]:
    try:
        levels = processor.levels()
    except ValueError as error:
        return None, str(error)
    if not levels:
        return None, processor.no_level_reason()
    for level in levels:
        path = _LIBRARY_DIR / f"libpagemill_cpu.{level}.so"
        if not path.exists():
            continue
        try:
            return _declare(ctypes.CDLL(str(path))), ""
        except (OSError, AttributeError) as error:
            return None, f"{path.name} does not load: {error}"
    if present := sorted(path.stem.removeprefix("libpagemill_cpu.") for path in _LIBRARY_DIR.glob("*.so")):
        return None, _not_compiled(levels, present)
    return None, "they were not compiled; install a C++ compiler and reinstall pagemill-kernels"


def _not_compiled(levels: tuple[str, ...], present: list[str]) -> str:
    """Return the cause if the needed level was not compiled: an installation compiles only the levels of its
    machine."""
    return (
        f"{' or '.join(levels)} was not compiled, only {', '.join(present)}; "
        "reinstall pagemill-kernels with PAGEMILL_KERNEL_LEVELS=all (in a checkout: make install)"
    )


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    version = library.pagemill_abi_version
    version.restype = c_int32
    if version() != ABI_VERSION:
        raise OSError(f"its ABI version is {version()}, {ABI_VERSION} is needed; reinstall pagemill-kernels")
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = _RESULTS.get(name)
    library.pagemill_sampling_columns.restype = c_char_p
    return library
