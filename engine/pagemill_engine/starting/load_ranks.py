"""Loads a model among several processes of one machine: rank 0 here, followers as children (`rank_process`).

No setting asks for it yet; tests build it. Each rank runs the native decoder, or torch's where that does not apply.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pagemill_engine.config import EngineConfig
from pagemill_engine.decoders.native.decoder import NativeDecoder
from pagemill_engine.decoders.rope import Rotations, decoder_tables
from pagemill_engine.decoders.step_model import StepModel
from pagemill_engine.executing.base import RunnerInfo
from pagemill_engine.executing.eager import EagerRunner
from pagemill_engine.executing.kv_cache import KVCache
from pagemill_engine.executing.ranks.follower import FollowerRunner
from pagemill_engine.executing.ranks.processes import FollowerProcesses
from pagemill_engine.executing.ranks.ranked import RankedRunner
from pagemill_engine.executing.ranks.staged_model import RankPlace, StagedModel, place_of
from pagemill_engine.sizing.compute import Compute
from pagemill_engine.sizing.kv_sizes import cache_kinds, max_model_len_for
from pagemill_engine.sizing.memory import measure_memory
from pagemill_engine.starting.preparing import ModelFiles, PreparedModel, prepare, refusals, runner_info
from pagemill_engine.weights.errors import LoadError
from pagemill_engine.weights.sliced import SlicedTensors
from pagemill_kernels.cpu import launch
from pagemill_kernels.ranks.memory import SharedMemory
from pagemill_kernels.ranks.ring import RingWriter, ring_bytes
from pagemill_kernels.ranks.shared_memory import STUCK_SECONDS, SharedMemoryGroup, group_bytes
from pagemill_models.sharding.shard import shard, stage
from pagemill_models.sharding.slices import Range, ShardError, Slices
from pagemill_models.spec.model_spec import ModelSpec

RANK_PROCESS = "pagemill_engine.starting.rank_process"
SLOTS, SLOT_BYTES = 16, 64 * 1024


class RankSettings(msgspec.Struct):
    """What a follower's process is given."""

    config: EngineConfig
    path: str
    rank: int
    size: int
    num_stages: int
    num_threads: int
    group_file: int
    ring_file: int
    capacity: int
    stuck_seconds: float
    num_blocks: int


def load_on_ranks(
    files: ModelFiles,
    compute: Compute,
    size: int,
    num_threads: int,
    stuck_seconds: float = STUCK_SECONDS,
    num_stages: int = 1,
) -> RankedRunner:
    """Return a runner whose model `size` processes compute. Raises `LoadError`.

    `num_threads`: of each rank. `stuck_seconds`: after how long a rank that others wait for is lost. `num_stages`: the
    parts of the model's layers; equally many ranks divide each.
    """
    _check(files.spec, compute, size, num_stages)
    launch.set_num_threads(num_threads)
    with refusals(files.path):
        prepared = prepare(files, compute, measure_memory())
        part = part_of(files.spec, 0, size, num_stages)
    capacity = prepared.config.step.max_num_batched_tokens * files.spec.hidden_size
    members = size // num_stages
    group_memory = SharedMemory.create(group_bytes(size, capacity, members))
    ring_memory = SharedMemory.create(ring_bytes(SLOTS, SLOT_BYTES))
    settings = [
        RankSettings(
            prepared.config, str(files.path), rank, size, num_stages, num_threads, group_memory.file, ring_memory.file,
            capacity, stuck_seconds, prepared.num_blocks,
        )
        for rank in range(1, size)
    ]  # fmt: skip
    followers = FollowerProcesses(
        RANK_PROCESS, [_as_json(each) for each in settings], (group_memory.file, ring_memory.file)
    )
    group = SharedMemoryGroup(group_memory, 0, size, capacity, stuck_seconds, members)
    ring = RingWriter(ring_memory, SLOTS, SLOT_BYTES, [f"rank {rank}" for rank in range(1, size)])
    try:
        with refusals(files.path):
            inner = EagerRunner(*_parts(files.spec, part, prepared, group))
        followers.wait_until_ready()
    except BaseException:
        followers.kill()
        raise
    followers.watch(group)
    return RankedRunner(inner, ring, group, followers, num_stages)


def follower_of(
    settings: RankSettings, files: ModelFiles, prepared: PreparedModel, group: SharedMemoryGroup
) -> FollowerRunner:
    """Return the runner of a rank that follows. Raises `LoadError`."""
    with refusals(files.path):
        part = part_of(files.spec, settings.rank, settings.size, settings.num_stages)
        return FollowerRunner(*_parts(files.spec, part, prepared._replace(num_blocks=settings.num_blocks), group))


class RankPart(NamedTuple):
    spec: ModelSpec
    slices: Slices
    place: RankPlace


def part_of(spec: ModelSpec, rank: int, size: int, num_stages: int) -> RankPart:
    """Return a rank's spec and what it reads. Raises `LoadError` for a model that so many ranks cannot divide."""
    place = place_of(rank, size, num_stages, spec.num_layers)
    try:
        own = spec.decoder if num_stages == 1 else stage(spec.decoder, *place.layers)
        part = shard(own, place.part, place.num_parts)
    except ShardError as error:
        raise LoadError("SettingsUnsupported", str(error)) from error
    return RankPart(msgspec.structs.replace(spec, decoder=part.decoder), part.slices, place)


def settings_from(data: bytes) -> RankSettings:
    return msgspec.json.decode(data, type=RankSettings)


def _as_json(settings: RankSettings) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(settings)
    return built


def _parts(
    whole: ModelSpec, part: RankPart, prepared: PreparedModel, group: SharedMemoryGroup
) -> tuple[StepModel, KVCache, RunnerInfo, int]:
    """Return the arguments of a rank's runner."""
    spec, slices, place = part
    config = prepared.config
    weights = SlicedTensors(prepared.weights, whole.decoder, spec.decoder, slices)
    # The whole model's division among cache kinds: blocks have the same ids on all ranks.
    blocks = cache_kinds(config, whole, prepared.compute.kv_dtype, prepared.num_blocks)
    max_model_len = max_model_len_for(config, whole, blocks)
    if prepared.compute.is_native:
        model = _native(spec, prepared, weights, max_model_len, group)
    else:
        model = _on_torch(spec, prepared, weights, max_model_len, group)
    if group.members < group.size:
        model = StagedModel(model, group, place)
    kinds = [msgspec.structs.replace(kind, layers=_within(kind.layers, place.layers)) for kind in blocks.kinds]
    cache = KVCache(spec, blocks.counts, config.block_size, prepared.compute.kv_dtype, kinds)
    info = runner_info(prepared, whole, max_model_len, model.num_bytes, "cpu").with_cache(blocks)
    return model, cache, info, config.step.max_num_seqs


def files_of(settings: RankSettings, spec: ModelSpec) -> ModelFiles:
    return ModelFiles(settings.config, Path(settings.path), spec, lambda phase, detail: None)


def _native(
    spec: ModelSpec, prepared: PreparedModel, weights: SlicedTensors, max_model_len: int, group: SharedMemoryGroup
) -> StepModel:
    rotations = Rotations(decoder_tables(spec.decoder, max_model_len, weights))
    # The layers of a stage with one rank add nothing, but come to the same cuts.
    divided = group if group.members > 1 else None
    return NativeDecoder(spec, prepared.compute.native_ops, weights, rotations, divided, group)


def _on_torch(
    spec: ModelSpec, prepared: PreparedModel, weights: SlicedTensors, max_model_len: int, group: SharedMemoryGroup
) -> StepModel:
    import torch

    from pagemill_engine.executing.torch_model import TorchModel, load_decoder, rotations_of

    compute = prepared.compute
    torch.set_num_threads(launch.num_threads())
    rotations = rotations_of(spec, compute, weights, max_model_len)
    return TorchModel(load_decoder(spec, compute, weights), compute.ops, rotations, group)


def _within(layers: tuple[int, ...], stage: Range) -> tuple[int, ...]:
    """Return the numbers in a stage of those of a model's layers that are in it."""
    return tuple(layer - stage[0] for layer in layers if stage[0] <= layer < stage[1])


def _check(spec: ModelSpec, compute: Compute, size: int, num_stages: int) -> None:
    """Raise `LoadError` for models whose runners do not follow plans, and for stages that there cannot be."""
    if size % num_stages:
        raise LoadError("SettingsUnsupported", f"{size} ranks cannot be divided into {num_stages} equal stages.")
    if num_stages > spec.num_layers:
        raise LoadError("SettingsUnsupported", f"{spec.num_layers} layers cannot be divided into {num_stages} stages.")
    if num_stages > 1 and not compute.is_native and compute.activation_dtype != "float32":
        raise LoadError(
            "SettingsUnsupported", f"Stages pass float32 on; {compute.activation_dtype} models run in one stage."
        )
    if spec.pooling is not None:
        raise LoadError("SettingsUnsupported", "A model that pools runs on one rank: its requests sample nothing.")
