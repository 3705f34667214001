"""Chooses device, data types and kernels before anything loads. Imports torch only where torch will compute."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

from pagemill_execution.config import ExecutionConfig
from pagemill_execution.decoders.native.layers import can_fuse
from pagemill_execution.sizing.unused_settings import unused_settings
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.arrays import FloatType
from pagemill_kernels.cpu import library
from pagemill_kernels.gpu.driver import find_driver
from pagemill_kernels.kv_store.kinds import KVType
from pagemill_kernels.linear.native import rounding_rows
from pagemill_kernels.registry import (
    NATIVE_BACKENDS,
    Backend,
    Feature,
    MatmulType,
    Ops,
    bfloat16_unit,
    cpu_backend,
    fp8_problem,
    gpu_problem,
    has_native_layers,
    has_torch,
    lacking,
    ops_for,
    weight_forms,
)
from pagemill_models.declaration.declaration import LatentAttentionSpec
from pagemill_models.spec.model_spec import ModelSpec

if TYPE_CHECKING:
    from pagemill_kernels.native_ops import NativeOps
    from pagemill_kernels.registry import WeightForms

_MATMUL_TYPES: dict[str, MatmulType] = {"w8a8": "w8a8", "fp8": "fp8"}
_MATMUL_NAMES: dict[MatmulType, str] = {"w8a8": "int8", "fp8": "fp8"}
GPU_STATE_BLOCK = 16
"""Tokens between the states that kernels for GPUs keep."""
_GPU_ALONE = ("w8a8", "fp8")
_FEATURE_NAMES: dict[Feature, str] = {
    "alibi": "ALiBi",
    "latent": "latent attention",
    "sinks": "attention sinks",
    "soft_cap": "soft caps of scores",
}
_WRITING_SCORES: frozenset[Feature] = frozenset({"alibi", "sinks", "soft_cap"})
"""Features that torch's fused attention does not have."""


class Compute(NamedTuple):
    backend: Backend
    dtype: FloatType
    """The effective type of float weights and, unless set otherwise, of keys and values.

    bfloat16 is kept where it loses nothing.
    """
    activation_dtype: FloatType
    """Type of the values between matmuls: float32 wherever the native kernels run."""
    kv_dtype: KVType
    how: str
    """Description of the kernels and the reason for them, for people."""
    attention_gathers: bool
    """Whether attention copies keys and values together. The native kernels read them in place."""
    attention_writes_scores: bool = False
    """Whether it also writes its scores out, for features that torch's fused attention does not have."""
    batch_invariant: bool = False
    rounds_activations: bool = False
    matmul_type: MatmulType = "float"
    torch_attention: bool = False
    """Argument of `registry.ops_for`."""
    is_native: bool = False
    """Whether the native decoder runs, without torch."""
    rounding_rows: tuple[int, ...] = ()
    """Numbers of rows from which on products round otherwise, in order."""

    @property
    def weight_forms(self) -> WeightForms:
        return weight_forms(self.backend)

    @property
    def ops(self) -> Ops:
        """Operations for a model that torch runs."""
        from pagemill_kernels.torch_arrays import TORCH_TYPES

        weight_dtype = None if self.dtype == self.activation_dtype else TORCH_TYPES[self.dtype]
        return ops_for(
            self.backend,
            batch_invariant=self.batch_invariant,
            weight_dtype=weight_dtype,
            rounds_activations=self.rounds_activations,
            matmul_type=self.matmul_type,
            torch_attention=self.torch_attention,
        )

    @property
    def native_ops(self) -> NativeOps:
        from pagemill_kernels.native_ops import native_ops

        return native_ops(
            self.backend,
            self.dtype,
            batch_invariant=self.batch_invariant,
            rounds_activations=self.rounds_activations,
        )


def choose_compute(config: ExecutionConfig, spec: ModelSpec) -> Compute:
    """Return the compute settings; settings that are left open get the fastest choice on this machine.

    Raises `LoadError` if settings ask for what the device, its kernels or this model's shape cannot do.
    """
    check_recurrent(config, spec)
    if spec.pooling is not None:
        return _pooled(config, spec)
    if not spec.decoder.by_transformers:
        return _on_gpu(config, spec) if _wants_gpu(config) else _on_cpu(config, spec)
    check_by_transformers(config, spec)
    compute = _on_cpu(config, spec)
    how = f"the classes of transformers {version('transformers')}, slower than a family of our own"
    how = f"{how}, attention by {compute.how}"
    return compute._replace(dtype=compute.activation_dtype, how=how, is_native=False)


def _pooled(config: ExecutionConfig, spec: ModelSpec) -> Compute:
    """Return the compute settings of a model that pools; it runs on the CPU."""
    check_pooled(config, spec)
    compute = _on_cpu(config, spec)
    if spec.decoder.is_causal or compute.is_native:
        return compute
    return compute._replace(how=f"{compute.how}, attention over whole prompts by torch")


def check_pooled(config: ExecutionConfig, spec: ModelSpec) -> None:
    """Raise `LoadError` for settings that pooling does not support."""
    if config.device == "cuda":
        raise LoadError(
            "SettingsUnsupported",
            f"`device` cuda cannot run `{spec.architecture}`: embeddings and scores are computed on the CPU. Set "
            "device to cpu.",
        )
    for unused in unused_settings(config, spec):
        raise LoadError("SettingsUnsupported", unused.message)


def check_recurrent(config: ExecutionConfig, spec: ModelSpec) -> None:
    """Raise `LoadError` for what models with recurrent layers do not support."""
    if not spec.has_states:
        return
    if spec.pooling is not None:
        raise LoadError(
            "SettingsUnsupported",
            f"`{spec.architecture}` keeps recurrent states, with which prompts are not pooled yet. Use a model of "
            "another family for embeddings and scores.",
        )
    if config.pipeline_parallel_size != 1:
        raise LoadError(
            "SettingsUnsupported",
            f"`pipeline_parallel_size` {config.pipeline_parallel_size} is not supported for `{spec.architecture}`, "
            "which keeps recurrent states. Set pipeline_parallel_size to 1.",
        )
    if config.block_size != GPU_STATE_BLOCK and _wants_gpu(config):
        raise LoadError(
            "SettingsUnsupported",
            f"`block_size` {config.block_size} is not supported for `{spec.architecture}` on a GPU, whose kernels keep "
            f"recurrent states every {GPU_STATE_BLOCK} tokens. Set block_size to {GPU_STATE_BLOCK} or device to cpu.",
        )


def check_by_transformers(config: ExecutionConfig, spec: ModelSpec) -> None:
    """Raise `LoadError` for settings that a class of transformers does not support."""
    for field, value, wanted in (
        ("device", config.device, "cpu"),
        ("quantization", config.quantization, "none"),
        ("deterministic", config.deterministic, False),
    ):
        if value != wanted and not (value == "auto" and not _has_gpu()):
            raise LoadError(
                "SettingsUnsupported",
                f"`{field}` {value} is not supported for `{spec.architecture}`, which is no family of Pagemill's and "
                f"runs by its class in transformers, on the CPU and in floats. Set {field} to {str(wanted).lower()}.",
            )


def _wants_gpu(config: ExecutionConfig) -> bool:
    if config.device != "auto":
        return config.device == "cuda"
    if not _has_gpu():
        return False
    from pagemill_kernels.gpu import launch

    return launch.unavailable_reason() is None


def _has_gpu() -> bool:
    """Whether there is a GPU that torch can use.

    Without a driver or without torch, nothing is imported to find out.
    """
    if find_driver() is None or not has_torch():
        return False
    import torch

    return torch.cuda.is_available()


def _on_gpu(config: ExecutionConfig, spec: ModelSpec) -> Compute:
    if not has_torch():
        raise LoadError(
            "DeviceUnavailable",
            f"`device` {config.device} needs torch, which is not installed here. Use the engine's image for GPUs, or "
            "install `pagemill[torch]`, or set device to cpu.",
        )
    import torch

    from pagemill_kernels.gpu import launch

    absent = launch.unavailable_reason()
    if absent is not None:
        raise LoadError(
            "DeviceUnavailable",
            f"`device` {config.device} needs an NVIDIA GPU of compute capability 8.0 or later: {absent}, or set device "
            "to cpu.",
        )
    check_gpu_features(config, spec)
    problems = [gpu_problem(size, config.block_size, group) for size, group in spec.head_shapes]
    problem = next((each for each in problems if each is not None), None)
    if problem is not None:
        raise LoadError("SettingsUnsupported", f"`device` {config.device} cannot run this model: {problem}.")
    if config.deterministic:
        raise LoadError(
            "SettingsUnsupported",
            f"`deterministic` true needs the CPU's kernels, but `device` is {config.device}. "
            "Turn deterministic off or set device to cpu.",
        )
    if "fp8" in (config.quantization, config.kv_cache_dtype):
        _check_fp8(config)
    matmul_type = _MATMUL_TYPES.get(config.quantization, "float")
    device = launch.device()
    emulated = device.type == "cpu"
    dtype: FloatType = "float32" if emulated else "bfloat16"
    if config.dtype != "auto":
        dtype = config.dtype
    how = "Triton's interpreter" if emulated else f"Triton kernels on {torch.cuda.get_device_name(device)}"
    how += "" if matmul_type == "float" else f", {_MATMUL_NAMES[matmul_type]} weights and activations"
    how += " where the file has floats" if matmul_type != "float" and spec.quantization is not None else ""
    kv_dtype = _kv_dtype(config, dtype)
    return Compute("triton", dtype, dtype, kv_dtype, how, attention_gathers=False, matmul_type=matmul_type)


def check_gpu_features(config: ExecutionConfig, spec: ModelSpec) -> None:
    """Raise `LoadError` for a model whose attention the Triton kernels do not compute; needs no device."""
    if config.quantization in _GPU_ALONE and any(spec.decoder.mixtures()):
        raise LoadError(
            "SettingsUnsupported",
            f"`quantization` {config.quantization} has no kernel for mixtures of experts, which `{spec.architecture}` "
            "has. Set quantization to int8, int4 or none.",
        )
    lacks = lacking("triton", _features(spec))
    if lacks:
        raise LoadError(
            "SettingsUnsupported",
            f"`device` {config.device} cannot run this model: the Triton kernels have no {_feature_list(lacks)}. "
            "Set device to cpu.",
        )


def _features(spec: ModelSpec) -> frozenset[Feature]:
    """Return the unusual features of this model's attention."""
    found: set[Feature] = set()
    for attention in spec.decoder.attentions():
        if isinstance(attention, LatentAttentionSpec):
            found.add("latent")
            continue
        if attention.alibi_slopes is not None:
            found.add("alibi")
        if attention.sinks is not None:
            found.add("sinks")
        if attention.soft_cap is not None:
            found.add("soft_cap")
    return frozenset(found)


def _feature_list(features: frozenset[Feature]) -> str:
    return " and no ".join(_FEATURE_NAMES[feature] for feature in sorted(features))


def _check_fp8(config: ExecutionConfig) -> None:
    problem = fp8_problem()
    if problem is None:
        return
    field, remedy = ("quantization", "w8a8 or int8") if config.quantization == "fp8" else ("kv_cache_dtype", "int8")
    raise LoadError("SettingsUnsupported", f"`{field}` fp8 cannot be computed here: {problem}. Set it to {remedy}.")


def _on_cpu(config: ExecutionConfig, spec: ModelSpec) -> Compute:
    for field, value, remedy in (
        ("quantization", config.quantization, "int8 or int4"),
        ("kv_cache_dtype", config.kv_cache_dtype, "int8 or auto"),
    ):
        if value in _GPU_ALONE:
            raise LoadError(
                "SettingsUnsupported",
                f"`{field}` {value} needs an NVIDIA GPU, but `device` is {config.device} and this model would run on "
                f"the CPU. Set {field} to {remedy}, or device to cuda.",
            )
    dtype = _dtype(config, spec)
    backend, how = _backend(dtype, config, spec)
    native = backend in NATIVE_BACKENDS
    kv_dtype = _kv_dtype(config, dtype)
    if not native and kv_dtype != dtype:
        raise _needs_native("kv_cache_dtype", config.kv_cache_dtype, how, "Set kv_cache_dtype to auto")
    if not native and config.deterministic:
        raise _needs_native("deterministic", "true", how, "Turn deterministic off")
    is_native = has_native_layers(backend) and can_fuse(spec.decoder)
    lacks: frozenset[Feature] = frozenset() if is_native else lacking(backend, _features(spec))
    if lacks:
        _check_torch_attention(config, lacks)
        how += f", attention by torch (the native kernels have no {_feature_list(lacks)})"
    rounds = backend == "cpu_native" and config.dtype == "auto" and _has_4_bits(config, spec) and library.has_dots()
    how += ", 4-bit weights times 16-bit activations" if rounds else ""
    how += ", few rows of codes times 16-bit activations" if _rounds_few_rows(backend, config, spec) else ""
    gathers = not native or bool(lacks)
    return Compute(
        backend,
        dtype,
        "float32" if native else dtype,
        kv_dtype,
        how,
        attention_gathers=gathers,
        attention_writes_scores=gathers and bool(_features(spec) & _WRITING_SCORES),
        batch_invariant=config.deterministic,
        rounds_activations=rounds,
        torch_attention=bool(lacks),
        is_native=is_native,
        rounding_rows=rounding_rows(has_codes=_has_codes(config, spec)) if backend == "cpu_bfloat16" else (),
    )


def _kv_dtype(config: ExecutionConfig, dtype: FloatType) -> KVType:
    return dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


def _check_torch_attention(config: ExecutionConfig, lacks: frozenset[Feature]) -> None:
    """Raise `LoadError` for settings that only the native attention supports."""
    for field, wanted, value, remedy in (
        ("kv_cache_dtype", config.kv_cache_dtype == "int8", "int8", "Set kv_cache_dtype to auto"),
        ("deterministic", config.deterministic, "true", "Turn deterministic off"),
    ):
        if wanted:
            raise LoadError(
                "SettingsUnsupported",
                f"`{field}` {value} needs the native attention kernels, which have no {_feature_list(lacks)}; this "
                f"model's attention runs on torch. {remedy}.",
            )


def _dtype(config: ExecutionConfig, spec: ModelSpec) -> FloatType:
    if config.dtype != "auto":
        return config.dtype
    backend, _ = _backend("bfloat16", config, spec)
    multiplied = backend == "cpu_bfloat16" or (backend != "cpu_native" and bfloat16_unit() is not None)
    wants_codes = config.quantization != "none" and backend != "cpu_bfloat16"
    if (wants_codes or config.deterministic) and _backend("float32", config, spec)[0] in NATIVE_BACKENDS:
        return "float32"
    return "bfloat16" if multiplied else "float32"


def _has_4_bits(config: ExecutionConfig, spec: ModelSpec) -> bool:
    return config.quantization == "int4" or spec.quantization_bits == 4 or (spec.quantization or "").startswith("Q4")


def _rounds_few_rows(backend: Backend, config: ExecutionConfig, spec: ModelSpec) -> bool:
    return backend == "cpu_bfloat16" and _has_codes(config, spec)


def _has_codes(config: ExecutionConfig, spec: ModelSpec) -> bool:
    return spec.quantization is not None or config.quantization != "none"


def _backend(dtype: FloatType, config: ExecutionConfig, spec: ModelSpec) -> tuple[Backend, str]:
    has_latents = "latent" in _features(spec)
    torch_attention = (has_latents or not spec.decoder.is_causal) and not can_fuse(spec.decoder)
    found = [
        cpu_backend(
            dtype,
            size,
            config.block_size,
            1 if has_latents else group,  # of latents any number of heads
            batch_invariant=config.deterministic,
            torch_attention=torch_attention,
            prompts_alone=spec.pooling is not None,
        )
        for size, group in spec.head_shapes
    ]
    # One backend runs all layers: that of the heads which the native kernels do not support.
    return next((each for each in found if each[0] not in NATIVE_BACKENDS), found[0])


def _needs_native(field: str, value: str, how: str, remedy: str) -> LoadError:
    message = f"`{field}` {value} needs the native kernels, but this model would run on {how}. {remedy}"
    return LoadError(
        "SettingsUnsupported", f"{message}, or set dtype to float32, bfloat16 or auto where that is the cause."
    )
