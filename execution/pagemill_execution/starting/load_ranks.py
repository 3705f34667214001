"""Loads a model among several processes of one machine: rank 0 here, followers as children (`rank_process`).

Each rank runs the native decoder, or torch's where that does not apply, or computes on a GPU of its own
(`load_device_ranks`). `sizing.rank_parts` says what a rank holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from pagemill_execution.config import ExecutionConfig
from pagemill_execution.decoders.native.decoder import NativeDecoder
from pagemill_execution.decoders.rope import Rotations, decoder_tables
from pagemill_execution.decoders.step_model import DividedTarget, StepModel, StepTokens, TargetModel, WrappedModel
from pagemill_execution.runners.base import Runner, RunnerInfo
from pagemill_execution.runners.eager import EagerRunner, ThreadedRunner
from pagemill_execution.runners.kv_cache import KVCache
from pagemill_execution.runners.ranks.divided_logits import AnsweringModel, AskingModel, AskingRunner, DividedLogits
from pagemill_execution.runners.ranks.follower import FollowedGroup, Follower, FollowerRunner
from pagemill_execution.runners.ranks.identity import RankIdentity
from pagemill_execution.runners.ranks.processes import FollowerProcesses
from pagemill_execution.runners.ranks.ranked import RankedRunner
from pagemill_execution.runners.ranks.speeds import RankSpeeds, RankWork, TimedModel
from pagemill_execution.runners.row_adapters import HeldAdapters, RowAdapters, row_adapters
from pagemill_execution.sizing.compute import Compute, choose_compute
from pagemill_execution.sizing.draft import DraftModel
from pagemill_execution.sizing.kv_sizes import CacheBlocks, cache_kinds, max_model_len_for
from pagemill_execution.sizing.memory import MemoryState, measure_memory
from pagemill_execution.sizing.rank_parts import RankPart, RankPlace, part_of, without_layers
from pagemill_execution.sizing.sizing import weights_of
from pagemill_execution.starting.load_cpu import load_draft
from pagemill_execution.starting.preparing import (
    ModelFiles,
    PreparedModel,
    describe_cache,
    prepare,
    refusals,
    runner_info,
)
from pagemill_execution.starting.threads import threads_of_ranks, torch_threads
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.source import WeightSource
from pagemill_kernels.arrays import Array
from pagemill_kernels.cpu import launch
from pagemill_kernels.ranks.group import GroupAborted, RankGroup
from pagemill_kernels.ranks.memory import SharedMemory
from pagemill_kernels.ranks.places import STUCK_SECONDS
from pagemill_kernels.ranks.ring import RingWriter, ring_bytes
from pagemill_kernels.ranks.shared_logits import SharedLogits, logits_bytes
from pagemill_kernels.ranks.shared_memory import SharedMemoryGroup, group_bytes
from pagemill_kernels.ranks.tcp_group import TcpGroup
from pagemill_models.sharding.slices import Range
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.spec.model_spec import ModelSpec
from pagemill_servers.process.malloc import trim_heap

if TYPE_CHECKING:
    from pagemill_execution.adapters.packing import Pack
    from pagemill_execution.adapters.store import AdapterStore
    from pagemill_execution.runners.device.device_ranks import DeviceSignals
    from pagemill_execution.runners.device.device_runner import DeviceRunner
    from pagemill_kernels.ranks.distributed import Meeting

RANK_PROCESS = "pagemill_execution.starting.rank_process"
SLOTS, SLOT_BYTES = 16, 64 * 1024


ComputingGroup = SharedMemoryGroup | TcpGroup
ON_NODE = "127.0.0.1"
"""Where ranks of one machine find each other that exchange by torch.distributed."""


class RankSettings(msgspec.Struct):
    """What a follower's process is given."""

    config: ExecutionConfig
    path: str
    rank: int
    parent: int
    """Process id of rank 0."""
    num_threads: int
    group_file: int
    ring_file: int
    logits_file: int | None
    """Where the ranks of the last stage write logits; None: there is one such rank, or torch computes."""
    capacity: int
    stuck_seconds: float
    num_blocks: int
    stages: list[Range]
    """The layers of each."""
    draft_block_bytes: int = 0
    """What rank 0 keeps beside each block of the first kind, to draft tokens."""
    meeting: tuple[str, int] | None = None
    """Where ranks meet that compute on devices; None: they compute on CPUs."""

    @property
    def size(self) -> int:
        return self.config.num_ranks


def load_on_ranks(files: ModelFiles, compute: Compute, stuck_seconds: float = STUCK_SECONDS) -> Runner:
    """Return a runner whose model several processes compute. Raises `LoadError`."""
    return overlapped(load_ranks(files, compute, stuck_seconds), files, compute)


def overlapped(ranked: RankedRunner, files: ModelFiles, compute: Compute) -> Runner:
    """Return the runner of rank 0 with a thread for its steps, if the settings ask for it."""
    by_itself = compute.backend == "triton" or files.config.pipeline_parallel_size > 1  # devices and stages do
    if by_itself or not files.config.overlap:
        return ranked
    return ThreadedRunner(ranked, torch_threads(compute, launch.num_threads()))


def load_ranks(files: ModelFiles, compute: Compute, stuck_seconds: float = STUCK_SECONDS) -> RankedRunner:
    """Return the runner of rank 0, behind its followers. Raises `LoadError`.

    `stuck_seconds`: after how long a rank that others wait for is lost.
    """
    config, spec = files.config, files.spec
    size, members, num_stages = config.num_ranks, config.tensor_parallel_size, config.pipeline_parallel_size
    threads = threads_of_ranks(config)
    check_settings(config, compute)
    launch.set_num_threads(threads[0])
    prepare_thread = torch_threads(compute, threads[0])
    meeting = meet(config, compute, ON_NODE)
    with refusals(files.path):
        prepared = prepare(files, compute, measured(compute))
        part = part_of(spec, 0, size, prepared.stages)
    config = prepared.config
    capacity = config.step.max_num_batched_tokens * spec.hidden_size if meeting is None else 1
    group_memory = SharedMemory.create(group_bytes(size, capacity, members))
    ring_memory = SharedMemory.create(ring_bytes(SLOTS, SLOT_BYTES))
    logits_memory = None
    if members > 1 and compute.is_native:
        logits_memory = SharedMemory.create(logits_bytes(config.step.max_num_seqs, spec.vocab_size))
    files_of_all = [each.file for each in (group_memory, ring_memory, logits_memory) if each is not None]
    settings = [
        RankSettings(
            config, str(files.path), rank, os.getpid(), threads[rank], group_memory.file, ring_memory.file,
            None if logits_memory is None else logits_memory.file, capacity, stuck_seconds, prepared.num_blocks,
            prepared.stages, prepared.draft_block_bytes,
            None if meeting is None else (meeting.address, meeting.port),
        )
        for rank in range(1, size)
    ]  # fmt: skip
    followers = FollowerProcesses(RANK_PROCESS, [_as_json(each) for each in settings], files_of_all)
    group = SharedMemoryGroup(group_memory, 0, size, capacity, stuck_seconds, members)
    ring = RingWriter(ring_memory, SLOTS, SLOT_BYTES, [f"rank {rank}" for rank in range(1, size)])
    identity = RankIdentity.own(prepared.weights.digest())
    watched: Any = group
    try:
        if meeting is not None:
            watched = signals_of(group, compute, stuck_seconds)
            followers.watch(watched)  # one that ends would leave this one in an exchange
        try:
            with refusals(files.path):
                inner = first_rank(files, prepared, part, group, logits_memory, meeting, watched)
        except GroupAborted:
            followers.wait_until_ready(identity)  # raises what the one said that has ended
            raise
        with_bytes(inner, followers.wait_until_ready(identity))
    except BaseException:
        followers.kill()
        raise
    if meeting is None:
        followers.watch(group)
    speeds = speeds_of(config, spec, prepared.stages)
    runner = RankedRunner(
        inner, ring, watched, followers, speeds, num_stages, prepare_thread, on_device=meeting is not None
    )
    read_together(runner, followers.answers)
    return runner


def meet(config: ExecutionConfig, compute: Compute, address: str) -> Meeting | None:
    """Return where the devices of ranks meet; None where CPUs compute. Raises `LoadError` if there are too few."""
    if compute.backend != "triton":
        return None
    from pagemill_execution.starting.load_device_ranks import check_devices, meeting_at

    check_devices(config)
    return meeting_at(address, None)


def measured(compute: Compute) -> MemoryState:
    """Return the memory of what this process computes on."""
    if compute.backend != "triton":
        return measure_memory()
    from pagemill_execution.starting.memory_profiling import measure_device

    return measure_device(compute.ops.device)


def signals_of(group: ComputingGroup, compute: Compute, stuck_seconds: float) -> DeviceSignals:
    from pagemill_execution.runners.device.device_ranks import DeviceSignals

    return DeviceSignals(group, compute.ops.device, group.members, stuck_seconds)


def with_bytes(inner: Any, num_bytes: int) -> None:
    """Count the weights of further ranks."""
    total = inner.info.weight_bytes + num_bytes
    memory = inner.info.memory
    inner.info = inner.info._replace(
        weight_bytes=total, memory=None if memory is None else msgspec.structs.replace(memory, weight_bytes=total)
    )


def speeds_of(config: ExecutionConfig, spec: ModelSpec, stages: list[Range]) -> RankSpeeds:
    """Return what judges how fast the ranks of a whole model compute. `stages`: the layers of each."""
    parts = [part_of(spec, rank, config.num_ranks, stages) for rank in range(config.num_ranks)]
    return RankSpeeds([RankWork.of(part.spec.decoder) for part in parts], config.ranks_here)


def follower_of(
    settings: RankSettings, group: ComputingGroup, answer: Callable[[str], None]
) -> tuple[Follower, FollowedGroup]:
    """Return the runner of a rank that follows, and the group by which it does. Raises `LoadError`. `answer`: gives
    rank 0 a line."""
    config, path = settings.config, Path(settings.path)
    spec = load_model_spec(path)
    if settings.meeting is not None:
        from pagemill_execution.starting.load_device_ranks import use_device

        use_device(config, settings.rank)
    compute = choose_compute(config, spec)
    launch.set_num_threads(settings.num_threads)
    torch_threads(compute, settings.num_threads)
    with refusals(path):
        part = part_of(spec, settings.rank, settings.size, settings.stages)
        weights = weights_of(config, path, spec, compute.weight_forms.small_floats)
        info = RunnerInfo(
            num_blocks=settings.num_blocks,
            block_size=config.block_size,
            max_model_len=0,  # is known when the part is loaded
            vocab_size=spec.vocab_size,
            weights_digest=weights.digest(),
            kv_dtype=compute.kv_dtype,
            weight_bytes=0,
            kv_bytes_per_token=0,
            compute=compute.how,
        )
        followed = None
        if config.enable_lora:
            from pagemill_execution.adapters.ranks import FollowedAdapters

            followed = FollowedAdapters(_store(config, compute, spec, part, weights), answer)
        read_adapter = None if followed is None else followed.read
        if settings.meeting is not None:
            from pagemill_execution.starting.load_device_ranks import following, meeting_at

            meeting, signals = meeting_at(*settings.meeting), signals_of(group, compute, settings.stuck_seconds)
            return (
                following(
                    config, compute, spec, part, weights, info, meeting, signals, followed, read_adapter,
                    settings.draft_block_bytes,
                ),
                signals,
            )  # fmt: skip
        logits_memory = None
        if settings.logits_file is not None:
            num_bytes = logits_bytes(config.step.max_num_seqs, spec.vocab_size)
            logits_memory = SharedMemory(settings.logits_file, num_bytes)
        loaded = load_part(
            config, compute, spec, part, weights, settings.num_blocks, group, logits_memory, settings.draft_block_bytes
        )
    info = info._replace(max_model_len=loaded.max_model_len, weight_bytes=loaded.model.num_bytes)
    rows = None if followed is None else _rows(config, compute, part, followed)
    runner = FollowerRunner(
        loaded.model, loaded.cache, info.with_cache(loaded.blocks), config.step.max_num_seqs, rows,
        read_adapter=read_adapter,
    )  # fmt: skip
    return runner, group


def _store(
    config: ExecutionConfig, compute: Compute, spec: ModelSpec, part: RankPart, weights: WeightSource
) -> AdapterStore:
    from pagemill_execution.adapters.ranks import pack_part
    from pagemill_execution.adapters.starting import make_store

    def packs(pack: Pack) -> Pack:
        return pack_part(pack, part.spec.decoder, part.slices, part.place.layers[0])

    return make_store(config, spec.decoder, weights, natively=compute.is_native, of_rank=packs)


def first_rank(
    files: ModelFiles,
    prepared: PreparedModel,
    part: RankPart,
    group: ComputingGroup,
    logits_memory: SharedMemory | None,
    meeting: Meeting | None,
    signals: DeviceSignals,
) -> EagerRunner | DeviceRunner:
    """Return the runner of rank 0's part. Raises `LoadError`, and `GroupAborted` if another rank is lost meanwhile.

    `meeting`, `signals`: of ranks that compute on devices.
    """
    config, compute, spec, weights = prepared.config, prepared.compute, files.spec, prepared.weights
    info, store = runner_info(prepared, spec, 0, 0, "cpu"), None
    if config.enable_lora:
        store = _store(config, compute, spec, part, weights)
        info = info._replace(serves_adapters=True, adapters=store)
    if meeting is not None:
        from pagemill_execution.starting.load_device_ranks import leading

        return leading(files, prepared, part, info, meeting, signals, store)
    loaded = load_part(
        config, compute, spec, part, weights, prepared.num_blocks, group, logits_memory, prepared.draft_block_bytes
    )
    trim_heap()
    files.progress("allocating", describe_cache(loaded.blocks, config.block_size, compute.kv_dtype))
    info = info._replace(max_model_len=loaded.max_model_len, weight_bytes=loaded.model.num_bytes)
    rows = None if store is None else _rows(config, compute, part, store)
    runner = AskingRunner if isinstance(loaded.model, AskingModel) else EagerRunner
    drafting: list[tuple[StepModel, KVCache]] = []
    if prepared.draft is not None:
        drafting = _draft(files, prepared, prepared.draft, loaded)
        draft_bytes = sum(each.num_bytes for each, _ in drafting)
        info = info._replace(drafts=True, weight_bytes=info.weight_bytes + draft_bytes)
    return runner(loaded.model, loaded.cache, info.with_cache(loaded.blocks), config.step.max_num_seqs, rows, drafting)


def _draft(
    files: ModelFiles, prepared: PreparedModel, draft: DraftModel, loaded: LoadedPart
) -> list[tuple[StepModel, KVCache]]:
    """Load what drafts, whole: rank 0 runs it between steps. A head also gets the model's embedding and head whole,
    unless it has its own."""
    target = loaded.plain
    if draft.asks_target:
        target = DividedTarget(loaded.plain, _bare(prepared, files.spec, loaded.max_model_len))
    return load_draft(files, prepared, draft, loaded.cache, loaded.max_model_len, target)


def _bare(prepared: PreparedModel, spec: ModelSpec, max_model_len: int) -> TargetModel:
    """Return a model's embedding and head, without its layers."""
    part, compute = without_layers(spec), prepared.compute
    bare, weights = part.spec, part.weights(prepared.weights, spec.decoder)
    if compute.is_native:
        rotations = Rotations(decoder_tables(bare.decoder, max_model_len, weights))
        return NativeDecoder(bare, compute.native_ops, weights, rotations)
    from pagemill_execution.runners.torch_model import TorchModel, load_decoder, rotations_of

    rotations_on_torch = rotations_of(bare, compute, weights, max_model_len)
    return TorchModel(load_decoder(bare, compute, weights), compute.ops, rotations_on_torch)


def read_together(runner: RankedRunner, answers: Callable[[], list[str]], *, sends_files: bool = False) -> None:
    """Let all ranks read the adapters that rank 0 reads, if any are served. Arguments: of `AdaptersOfFollowers`."""
    if runner.info.adapters is None:
        return
    from pagemill_execution.adapters.ranks import AdaptersOfFollowers

    runner.info.adapters.read_elsewhere = AdaptersOfFollowers(
        runner.read_adapter, answers, sends_files=sends_files
    ).read


def _rows(config: ExecutionConfig, compute: Compute, part: RankPart, store: HeldAdapters) -> RowAdapters:
    return row_adapters(store, part.spec.decoder, config.step.max_num_seqs, natively=compute.is_native)


def settings_from(data: bytes) -> RankSettings:
    return msgspec.json.decode(data, type=RankSettings)


def _as_json(settings: RankSettings) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(settings)
    return built


class StagedModel(WrappedModel):
    """One stage of a pipeline: it gets hidden states from the stage before and passes its own on."""

    def __init__(self, model: StepModel, group: RankGroup[Array], place: RankPlace) -> None:
        super().__init__(model)
        self._group, self._place = group, place

    def hidden(self, step: StepTokens, adapters: Any = None) -> Array:
        if self._place.before is not None:
            given = np.empty((len(step.token_ids), self.spec.hidden_size), dtype=np.float32)
            self._group.receive(given, self._place.before)
            step = step._replace(hidden=given)
        found = self._model.hidden(step, adapters)
        if self._place.behind is not None:
            self._group.send(found, self._place.behind)
        return found


class LoadedPart(NamedTuple):
    model: StepModel
    plain: TargetModel
    """What computes it, without what is done around it."""
    cache: KVCache
    blocks: CacheBlocks
    max_model_len: int


def load_part(
    config: ExecutionConfig,
    compute: Compute,
    spec: ModelSpec,
    part: RankPart,
    whole: WeightSource,
    num_blocks: int,
    group: ComputingGroup,
    logits_memory: SharedMemory | None,
    draft_block_bytes: int = 0,
) -> LoadedPart:
    """Load a rank's part. `spec`, `whole`: of the whole model; `draft_block_bytes`: of `cache_kinds`."""
    weights, place = part.weights(whole, spec.decoder), part.place
    # The whole model's division among cache kinds: blocks have the same ids on all ranks.
    blocks = cache_kinds(config, spec, compute.kv_dtype, num_blocks, draft_block_bytes)
    max_model_len = max_model_len_for(config, spec, blocks)
    logits = None
    columns = part.spec.decoder.vocabulary
    if logits_memory is not None and columns is not None and part.spec.decoder.head is not None:
        assert isinstance(group, SharedMemoryGroup)
        logits = SharedLogits(logits_memory, group, spec.vocab_size, columns)
    is_divided = isinstance(group, TcpGroup) and columns is not None
    if compute.is_native:
        plain = _native(part.spec, compute, weights, max_model_len, group, logits, gathers=not is_divided)
    else:
        plain = _on_torch(part.spec, compute, weights, max_model_len, group, gathers=not is_divided)
    model: StepModel = plain
    if group.members < group.size:
        model = StagedModel(model, group, place)
    model = TimedModel(model, group)
    if is_divided and part.spec.decoder.head is not None:
        assert isinstance(group, TcpGroup)
        divided = DividedLogits(group, spec.vocab_size)
        model = AskingModel(model, divided) if group.rank == 0 else AnsweringModel(model, divided)
    kinds = [msgspec.structs.replace(kind, layers=_within(kind.layers, place.layers)) for kind in blocks.kinds]
    cache = KVCache(
        part.spec, blocks.counts, config.block_size, compute.kv_dtype, kinds, max_rows=config.step.max_num_seqs,
        most_proposed=blocks.most_proposed,
    )  # fmt: skip
    return LoadedPart(model, plain, cache, blocks, max_model_len)


def _native(
    spec: ModelSpec,
    compute: Compute,
    weights: WeightSource,
    max_model_len: int,
    group: ComputingGroup,
    logits: SharedLogits | None,
    *,
    gathers: bool,
) -> TargetModel:
    rotations = Rotations(decoder_tables(spec.decoder, max_model_len, weights))
    # The layers of a stage with one rank add nothing, but come to the same cuts.
    divided = group if group.members > 1 else None
    return NativeDecoder(spec, compute.native_ops, weights, rotations, divided, group, logits, gathers_logits=gathers)


def _on_torch(
    spec: ModelSpec,
    compute: Compute,
    weights: WeightSource,
    max_model_len: int,
    group: ComputingGroup,
    *,
    gathers: bool,
) -> TargetModel:
    from pagemill_execution.runners.torch_model import TorchModel, load_decoder, rotations_of

    rotations = rotations_of(spec, compute, weights, max_model_len)
    decoder = load_decoder(spec, compute, weights)
    return TorchModel(decoder, compute.ops, rotations, group, gathers_logits=gathers)


def _within(layers: tuple[int, ...], stage: Range) -> tuple[int, ...]:
    """Return the numbers in a stage of those of a model's layers that are in it."""
    return tuple(layer - stage[0] for layer in layers if stage[0] <= layer < stage[1])


def check_settings(config: ExecutionConfig, compute: Compute) -> None:
    """Raise `LoadError` for settings with which ranks do not follow plans."""
    passes_on = config.pipeline_parallel_size > 1 and compute.backend != "triton"
    if passes_on and not compute.is_native and compute.activation_dtype != "float32":
        raise LoadError(
            "SettingsUnsupported",
            f"Stages pass float32 on, but this model computes in {compute.activation_dtype} on torch. Set "
            "pipelineParallel to 1 or dtype to float32.",
        )
