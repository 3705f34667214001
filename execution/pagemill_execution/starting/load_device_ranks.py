"""Loads a rank's part of a model on its device, and makes the groups through which devices exchange.

`load_ranks` and `nodes` start ranks and carry their signals; `load_device` loads a model on one device. With Triton's
interpreter the devices are processes of the CPU, which exchange by gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from pagemill_execution.config import ExecutionConfig
from pagemill_execution.decoders.on_torch.decoder import Decoder
from pagemill_execution.decoders.on_torch.device_rotations import DeviceRotations
from pagemill_execution.decoders.on_torch.filling import load_weights, weight_bytes
from pagemill_execution.decoders.rope import decoder_tables
from pagemill_execution.runners.base import RunnerInfo
from pagemill_execution.runners.device.device_adapters import DeviceAdapters, DeviceTables
from pagemill_execution.runners.device.device_drafter import DeviceDraft
from pagemill_execution.runners.device.device_forward import Neighbours
from pagemill_execution.runners.device.device_kv_cache import DeviceKVCache
from pagemill_execution.runners.device.device_ranks import (
    DeviceSignals,
    FollowingDeviceRunner,
    LeadingDeviceRunner,
)
from pagemill_execution.runners.device.device_runner import DeviceRunner
from pagemill_execution.runners.row_adapters import HeldAdapters
from pagemill_execution.runners.torch_model import load_decoder
from pagemill_execution.sizing.compute import Compute
from pagemill_execution.sizing.draft import DraftModel
from pagemill_execution.sizing.kv_sizes import cache_kinds, max_model_len_for
from pagemill_execution.sizing.rank_parts import RankPart, without_layers
from pagemill_execution.sizing.sizing import sizes_of, storage_forms
from pagemill_execution.starting.compiling import capture_graphs
from pagemill_execution.starting.load_device import ANY_NUMBER, compiles_ahead, kept_kernels, load_device_draft
from pagemill_execution.starting.memory_profiling import CudaMeter, measure_device, profile_memory
from pagemill_execution.starting.preparing import ModelFiles, PreparedModel
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.source import WeightSource
from pagemill_kernels.gpu.launch import interpreted
from pagemill_kernels.ranks.distributed import Meeting
from pagemill_kernels.ranks.group import GroupAborted
from pagemill_kernels.torch_arrays import TORCH_TYPES
from pagemill_models.spec.model_spec import ModelSpec
from pagemill_servers.process.malloc import trim_heap

if TYPE_CHECKING:
    from pagemill_execution.adapters.messages import AdapterMessage

MEETING_SECONDS = 300.0
Made = TypeVar("Made", bound=DeviceRunner)


def check_devices(config: ExecutionConfig, number: int | None = None) -> None:
    """Raise `LoadError` if this machine has fewer devices than ranks. `number`: of devices; None: they are counted."""
    if number is None:
        number = config.ranks_here if interpreted() else torch.cuda.device_count()
    if number < config.ranks_here:
        raise LoadError(
            "DeviceUnavailable",
            f"tensorParallel {config.tensor_parallel_size} x pipelineParallel {config.pipeline_parallel_size} need "
            f"{config.ranks_here} GPUs {'on each node' if config.nodes else 'on this machine'}, but it has {number}. "
            "Lower them, add GPUs (spec.resources.gpus), divide the model among more nodes, or set device to cpu.",
        )


def use_device(config: ExecutionConfig, rank: int) -> None:
    """Let this process compute on the device of its rank."""
    if not interpreted() and torch.cuda.is_available():
        torch.cuda.set_device(rank % config.ranks_here)


class DeviceGroups(NamedTuple):
    neighbours: Neighbours
    at_once: bool
    """Whether rank 0 sends sampled tokens to all at once, and not with plans."""


def make_groups(
    config: ExecutionConfig, part: RankPart, rank: int, meeting: Meeting, signals: DeviceSignals, device: torch.device
) -> DeviceGroups:
    """Meet the other ranks and return this one's groups. Raises `LoadError` if they do not come."""
    size, members = config.num_ranks, config.tensor_parallel_size
    try:
        meeting.join(rank, size, device, signals.look)
    except RuntimeError as error:
        if isinstance(error, GroupAborted):
            raise
        raise LoadError("RendezvousFailed", f"Rank {rank} did not meet the others on devices: {error}") from error
    one_shot_on = device if config.nodes is None else None
    stages = [meeting.group(range(first, first + members), signals, one_shot_on) for first in range(0, size, members)]
    pairs = {
        (other - members, other): meeting.group([other - members, other], signals) for other in range(members, size)
    }
    signals.end = meeting.abort
    place = part.place
    before = None if place.before is None else pairs[rank, place.before]
    behind = None if place.behind is None else pairs[place.behind, rank]
    own = stages[rank // members]
    return DeviceGroups(Neighbours(own if members > 1 else None, before, behind), members == size)


def meeting_at(address: str, port: int | None) -> Meeting:
    """Return where ranks meet. Raises `LoadError`. `port`: where rank 0 listens; None: this is rank 0."""
    try:
        return Meeting(address, port, MEETING_SECONDS)
    except (OSError, RuntimeError) as error:
        raise LoadError("RendezvousFailed", f"Ranks cannot meet at {address}: {error}") from error


def leading(
    files: ModelFiles,
    prepared: PreparedModel,
    part: RankPart,
    info: RunnerInfo,
    meeting: Meeting,
    signals: DeviceSignals,
    store: HeldAdapters | None,
) -> DeviceRunner:
    """Return the runner of rank 0. Raises `LoadError`, and `GroupAborted` if another rank is lost meanwhile."""
    compute, drafting = prepared.compute, None
    info = info._replace(device=compute.ops.device.type)
    if prepared.draft is not None:
        drafting = partial(_draft, prepared, prepared.draft, files.spec)
    files.progress("warming", "waiting for the other ranks")
    make = partial(LeadingDeviceRunner, signals=signals, leave=meeting.close)
    weights, spec = prepared.weights, files.spec
    try:
        return _load(
            prepared.config, compute, spec, part, 0, weights, info, meeting, signals, make, store,
            prepared.draft_block_bytes, drafting,
        )  # fmt: skip
    except BaseException:
        signals.close()
        meeting.close()
        raise


def following(
    config: ExecutionConfig,
    compute: Compute,
    spec: ModelSpec,
    part: RankPart,
    weights: WeightSource,
    info: RunnerInfo,
    meeting: Meeting,
    signals: DeviceSignals,
    store: HeldAdapters | None,
    read_adapter: Callable[[AdapterMessage], None] | None,
    draft_block_bytes: int,
) -> FollowingDeviceRunner:
    """Return the runner of another rank. Raises `LoadError`."""
    make = partial(FollowingDeviceRunner, read_adapter=read_adapter)
    return _load(
        config, compute, spec, part, signals.rank, weights, info, meeting, signals, make, store, draft_block_bytes
    )


def _draft(
    prepared: PreparedModel, draft: DraftModel, spec: ModelSpec, target: Decoder, max_model_len: int, num_blocks: int
) -> DeviceDraft:
    """Load what drafts, whole. A head also gets the model's embedding and head whole, unless it has its own."""
    whole = None
    if draft.asks_target:
        part = without_layers(spec)
        whole = load_decoder(part.spec, prepared.compute, part.weights(prepared.weights, spec.decoder))
    found = load_device_draft(draft, prepared, target, max_model_len, whole)
    found.resize(num_blocks, prepared.config.step.max_num_seqs)
    return found


def _load(
    config: ExecutionConfig,
    compute: Compute,
    spec: ModelSpec,
    part: RankPart,
    rank: int,
    weights: WeightSource,
    info: RunnerInfo,
    meeting: Meeting,
    signals: DeviceSignals,
    make: Callable[..., Made],
    store: HeldAdapters | None,
    draft_block_bytes: int,
    drafting: Callable[[Decoder, int, int], DeviceDraft] | None = None,
) -> Made:
    """Load a rank's part, and size its cache as that of all ranks. Raises `LoadError`, and `GroupAborted` if another
    rank is lost.

    `spec`, `weights`: of the whole model. `info`: with the number of blocks that is used where nothing is measured.
    `make`: the class of the rank's runner, with its last arguments. `drafting`: loads what drafts for a rank's part,
    texts of a length and a number of blocks; `draft_block_bytes`: of `cache_kinds`.
    """
    ops, dtype = compute.ops, TORCH_TYPES[compute.activation_dtype]
    before = measure_device(ops.device)
    compiles, own = compiles_ahead(ops.device), part.weights(weights, spec.decoder)
    groups = make_groups(config, part, rank, meeting, signals, ops.device)
    model = Decoder(part.spec, ops, dtype)
    load_weights(model, own)
    trim_heap()
    # The whole model's division among cache kinds: blocks have the same ids on all ranks.
    num_blocks = ANY_NUMBER if compiles else info.num_blocks
    cache = cache_kinds(config, spec, compute.kv_dtype, num_blocks, draft_block_bytes)
    max_model_len = max_model_len_for(config, spec, cache)
    info = info._replace(max_model_len=max_model_len, weight_bytes=weight_bytes(model)).with_cache(cache)
    counts = (0,) * len(cache.counts) if compiles else cache.counts
    kv_cache = DeviceKVCache(
        part.spec, counts, config.block_size, compute.kv_dtype, ops.device, cache.kinds, part.place.layers[0],
        config.step.max_num_seqs, cache.most_proposed,
    )  # fmt: skip
    rotations = DeviceRotations(decoder_tables(part.spec.decoder, max_model_len, own), dtype, ops.device)
    adapters = None
    if store is not None:
        slots = DeviceTables(part.spec.decoder, config.max_loras, config.max_lora_rank, dtype, ops.device)
        adapters = DeviceAdapters(store, slots, config.step.max_num_seqs)
    if drafting is not None:
        draft = drafting(model, max_model_len, counts[0])
        info = info._replace(drafts=True, weight_bytes=info.weight_bytes + weight_bytes(draft.model))
        make = partial(make, draft=draft)
    arguments = model, ops, kv_cache, rotations, info, config.step.max_num_seqs, adapters
    runner = make(*arguments, neighbours=groups.neighbours, at_once=groups.at_once)
    if compiles:
        kept_kernels(config.kernel_cache_dir)
        sizes = sizes_of(config, own, part.spec, storage_forms(compute))
        of_draft = 0 if drafting is None else draft_block_bytes // config.block_size
        sizes = sizes._replace(kv_bytes_per_token=sizes.kv_bytes_per_token + of_draft)
        least = partial(meeting.least, rank, config.num_ranks, look=signals.look)
        profile_memory(runner, config, spec, sizes, before, CudaMeter(), least, draft_block_bytes)
        if config.cuda_graphs:
            capture_graphs(runner, config, spec)
    return runner
