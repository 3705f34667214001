"""What an engine that serves adapters has from its start: their store, and the memory that the plan keeps for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pagemill_execution.adapters.packing import Pack, pack_for_torch, pack_natively
from pagemill_execution.adapters.reading import BaseMatrix
from pagemill_execution.adapters.store import AdapterLimits, AdapterStore
from pagemill_execution.config import ExecutionConfig
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.quantized import QuantizedWeights
from pagemill_execution.weights.source import WeightSource
from pagemill_kernels.adapters.native import PANEL, RANKS
from pagemill_kernels.arrays import Array
from pagemill_models.declaration.declaration import DecoderSpec
from pagemill_models.sharding.linears import linears
from pagemill_models.sources import default_name
from pagemill_models.spec.model_spec import ModelSpec


def limits_of(config: ExecutionConfig) -> AdapterLimits:
    return AdapterLimits(
        config.max_loras, config.max_lora_rank, max(config.max_loras, config.max_cpu_loras or config.max_loras)
    )


def adapter_bytes(config: ExecutionConfig, decoder: DecoderSpec, *, packed: bool) -> int:
    """Return the memory of all adapters that are kept on the host, each of the largest rank on all linear layers, and
    of one more while it is read: its float32 values beside what becomes of them."""
    if not config.enable_lora:
        return 0
    limits, kept, read = limits_of(config), 0, 0
    for use in linears(decoder):
        rows = [part.rows for part in use.spec.parts]
        ins = use.spec.in_features * len(rows)
        kept += ins + (sum(-(-each // PANEL) * PANEL for each in rows) if packed else sum(rows) * len(rows))
        read += ins + sum(rows)
    ranks = -(-limits.max_lora_rank // RANKS) * RANKS
    return ranks * (kept * (2 if packed else 4) * (limits.max_cpu_loras + 1) + read * 4)


def check_serves(config: ExecutionConfig, spec: ModelSpec) -> None:
    """Raise `LoadError` if adapters are asked for where none can be served."""
    if not config.enable_lora:
        return
    why = ""
    if spec.pooling is not None:
        why = "embedding and reranking models serve no adapters. Merge one into the weights"
    elif spec.decoder.by_transformers:
        why = "models that run by classes of transformers serve no adapters. Merge one into the weights"
    if why:
        raise LoadError("SettingsUnsupported", f"enable_lora: {why}.")


def _steps(weights: WeightSource, name: str) -> Array | None:
    """Return the largest step of each row of a quantized matrix; None if it has none.

    Types with scales of scales round the smaller ones of a row by parts of the largest.
    """
    kind = weights.code_kind(name)
    if kind is None or kind.is_float or (found := weights.read_codes(name)) is None:
        return None
    used = np.unique(found.codes).astype(np.int32)  # types with tables use some integers only
    largest = np.diff(used).max(initial=1)
    steps: Array = np.abs(found.scales).max(axis=1) * np.float32(largest)
    return steps


def make_store(
    config: ExecutionConfig,
    decoder: DecoderSpec,
    weights: WeightSource,
    *,
    natively: bool,
    of_rank: Callable[[Pack], Pack] | None = None,
) -> AdapterStore:
    """Return a store without adapters. `of_rank`: makes a function that packs a rank's part; None: all is packed."""

    stored = weights.source if isinstance(weights, QuantizedWeights) else weights

    def base(name: str) -> BaseMatrix:
        values = np.empty(stored.shapes[name], dtype=np.float32)
        stored.read_into(name, values)
        return BaseMatrix(values, _steps(stored, name))

    pack: Pack = pack_natively if natively else pack_for_torch
    packs = pack if of_rank is None else of_rank(pack)
    return AdapterStore(decoder, default_name(config.model), limits_of(config), packs, base)
