"""Describes one replica of a planned deployment: bytes, concurrency and step times, each with its source.

Bytes are measured in an engine process, or computed by the engine's memory budget from the model's header.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pagemill.planning.accelerators import Accelerator
from pagemill.planning.errors import PlanError
from pagemill.planning.headers import Header, header_of
from pagemill.planning.links.exchange import Exchange, exchange_of
from pagemill.planning.measuring import SingleRequestLatency, measure
from pagemill.planning.placement import check_groups, place
from pagemill_engine.config import EngineConfig
from pagemill_engine.server.fit import RUNTIME_BYTES
from pagemill_execution.config import MOST_PROPOSED, ExecutionConfig, SimulatedKinds
from pagemill_execution.sizing.budget import MemoryPlan, RankSizes, Sizes, plan_memory
from pagemill_execution.sizing.memory import MemoryBudget, MemoryState, measure_memory
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.quantized import SCALED
from pagemill_models.files.safetensors_header import lacks_weights
from pagemill_models.sources import SourceError, resolve_source
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.spec.model_spec import ModelSpec
from pagemill_operator.plan.types import Plan
from pagemill_protocol.report.cache_kinds import blocks_at
from pagemill_protocol.report.shape import Shape
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.report.step_time import StepTimeModel
from pagemill_servers.process.cgroup import usable_cores

if TYPE_CHECKING:
    from pagemill_execution.adapters.store import AdapterLimits
    from pagemill_execution.sizing.kv_sizes import CacheBlocks

FORMS = (
    "give the output of `pagemill why NAME -o json` or `pagemill plan -o json`, or an object with knots_tokens and "
    "knot_ms"
)


def read_fit(path: Path) -> StepTimeParams:
    """Read the step times in the file. Raises `PlanError`."""
    try:
        body = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise PlanError(f"--fit {path}: cannot be read: {error.strerror}; {FORMS}") from None
    except ValueError:
        raise PlanError(f"--fit {path}: is not JSON; {FORMS}") from None
    try:
        fit = msgspec.convert(_step_time(body), StepTimeParams)
        known = StepTimeModel.from_params(fit).known
    except (msgspec.ValidationError, ValueError) as error:
        raise PlanError(f"--fit {path}: {error}; {FORMS}") from None
    if not known:
        raise PlanError(f"--fit {path}: contains no step times; {FORMS}")
    return fit


def _step_time(body: Any) -> Any:
    """Return the step times from a plan, from the latest record of `pagemill why` that has some, or the body itself."""
    if not isinstance(body, dict):
        return body
    if "stepTime" in body:
        return body["stepTime"]
    for record in reversed(body.get("records") or []):
        reported = record.get("signals", {}).get("engines", {}).get("step_time") or {}
        remembered = ((record.get("memory") or {}).get("shape") or {}).get("step_time") or {}
        if reported.get("knots_tokens") or remembered.get("knots_tokens"):
            return reported if reported.get("knots_tokens") else remembered
    return body


class PerDecode(NamedTuple):
    """What a decode samples and computes in a step, by proposed tokens that are right, and by all."""

    sampled: float = 1.0
    computed: float = 1.0


def per_decode_of(text: str | None) -> PerDecode | None:
    """Read the option. Raises `PlanError`."""
    if text is None:
        return None
    try:
        found = PerDecode(*(float(each) for each in text.split("/")))
    except (ValueError, TypeError):
        found = PerDecode(0.0)
    if not 1 <= found.sampled <= found.computed <= MOST_PROPOSED + 1:
        raise PlanError(
            f"--tokens-per-decode {text}: give the tokens that are sampled and those that are computed, 1 to "
            f"{MOST_PROPOSED + 1}, the second no less than the first, such as 2.4/4"
        )
    return found


class Division(NamedTuple):
    """How many processes or devices share a model."""

    tensor_parallel: int
    pipeline_parallel: int

    @property
    def size(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def __str__(self) -> str:
        stages = f" x pipelineParallel {self.pipeline_parallel}" if self.pipeline_parallel > 1 else ""
        return f"tensorParallel {self.tensor_parallel}{stages}"


class PlannedReplica(NamedTuple):
    shape: Shape
    """The autoscaler's description of the replica."""
    max_model_len: int
    weight_bytes: int
    kv_bytes_per_token: int
    budget: MemoryBudget | None
    """`None` if the device is simulated and has no memory."""
    device: str
    step_time_from: str
    """The source of the step times, as shown in the output."""
    overlaps: bool = False
    """Whether a step is launched before the tokens of the last one are read."""
    blocks_at_longest: int | None = None
    """The blocks that requests of `max_model_len` tokens find; `None`: those of `shape`."""
    state_bytes: int = 0
    """What each running request has beside its tokens: a state and the inputs since."""
    alone: SingleRequestLatency | None = None
    """The latencies of one request alone; `None` unless measured on this machine."""
    ranks: tuple[RankSizes, ...] = ()
    """The parts of several processes."""
    ranks_of_stage: int = 1
    exchange: Exchange | None = None
    """What the ranks send to each other, on devices whose links are known."""
    tightest_rank: int | None = None
    """The rank whose device has room for fewest blocks, which limits all."""
    adapters: AdapterLimits | None = None
    """`None`: the engine serves no adapters."""
    kinds: SimulatedKinds | None = None
    """The cache for simulations, if something frees blocks behind windows or keeps states; `None`: one kind that keeps
    everything."""


class ReplicaOptions(NamedTuple):
    """The sources of a replica's model and step times. Without fit and accelerator step times are measured here."""

    fit: Path | None
    accelerator: Accelerator | None
    model: str | None
    """A source to read instead of the deployment's."""
    measure_s: float
    show_progress: Callable[[str], None]
    per_decode: PerDecode | None = None
    """`None`: as `fit` says, or one token."""


def replica_of(plan: Plan, options: ReplicaOptions, input_tokens: int, output_tokens: int) -> PlannedReplica:
    """Return the replica of a plan. Raises `PlanError`."""
    return _verifying(_replica_of(plan, options, input_tokens, output_tokens), options)


def _verifying(replica: PlannedReplica, options: ReplicaOptions) -> PlannedReplica:
    """Return the replica with what its decodes sample and compute in a step."""
    step_time = replica.shape.step_time
    sampled, computed = options.per_decode or (step_time.tokens_per_decode, step_time.computed_per_decode)
    if sampled > 1 and step_time.stages > 1:
        raise PlanError("--tokens-per-decode: engines with stages (pipelineParallel) propose nothing; give 1/1")
    draft_ms = step_time.draft_ms if computed > 1 else 0.0
    step_time = msgspec.structs.replace(
        step_time, tokens_per_decode=sampled, computed_per_decode=computed, draft_ms=draft_ms
    )
    return replica._replace(shape=msgspec.structs.replace(replica.shape, step_time=step_time))


def _replica_of(plan: Plan, options: ReplicaOptions, input_tokens: int, output_tokens: int) -> PlannedReplica:
    config = engine_config(plan, options)
    check_length(input_tokens, output_tokens, config.max_model_len)
    if options.fit is None and options.accelerator is None:
        return _measured(plan, config, options, input_tokens, output_tokens)
    fit = None if options.fit is None else read_fit(options.fit)
    with header_of(config.model, _field(options)) as header, _engines_refusals():
        length, memory_bytes = input_tokens + output_tokens, _memory_bytes(plan)
        if options.accelerator is not None:
            return _on_accelerator(options.accelerator, config, header, fit, f"from {options.fit}", length)
        assert fit is not None
        return _on_cpu(memory_bytes, config, header, fit, f"from {options.fit}", length)


def can_choose(plan: Plan, options: ReplicaOptions) -> bool:
    """Whether the number of devices is open: of accelerators, unless the settings divide the model."""
    return options.accelerator is not None and engine_config(plan, options).num_ranks == 1


def divided_replicas(
    plan: Plan, options: ReplicaOptions, length: int, numbers: Iterable[Division]
) -> dict[Division, PlannedReplica | PlanError]:
    """Return the replica of each number of ranks on an accelerator, or why there is none. `length`: of a request."""
    accelerator, config = options.accelerator, engine_config(plan, options)
    found: dict[Division, PlannedReplica | PlanError] = {}
    assert accelerator is not None, "a machine's own devices are given by the settings"
    with header_of(config.model, _field(options)) as header:
        for ranks in numbers:
            tensor, stages = ranks
            one = msgspec.structs.replace(config, tensor_parallel_size=tensor, pipeline_parallel_size=stages)
            try:
                check_groups(header.spec, tensor)
                with _engines_refusals():
                    replica = _on_accelerator(accelerator, one, header, None, "", length)
                found[ranks] = _verifying(replica, options)
            except PlanError as error:
                found[ranks] = error
    return found


def check_length(input_tokens: int, output_tokens: int, max_model_len: int | None) -> None:
    """Raise `PlanError` for requests longer than `max_model_len`; `None` if that is not known yet."""
    length = input_tokens + output_tokens
    if max_model_len is not None and length > max_model_len:
        raise PlanError(
            f"--input {input_tokens} and --output {output_tokens} are {length} tokens, but a request may have "
            f"{max_model_len}: lower them, or raise spec.engine.maxModelLen or kvCacheMemory"
        )


def engine_config(plan: Plan, options: ReplicaOptions) -> EngineConfig:
    """Return the engine's settings, as if all ranks were on this machine."""
    config = msgspec.convert(plan.groups[0].process.settings["engine"], EngineConfig)
    config = msgspec.structs.replace(config, nodes=None)
    return config if options.model is None else msgspec.structs.replace(config, model=options.model)


def _field(options: ReplicaOptions) -> str:
    """Return the option or field that names the model."""
    return "--model" if options.model else "spec.model.source"


def _on_accelerator(
    accelerator: Accelerator,
    config: EngineConfig,
    header: Header,
    fit: StepTimeParams | None,
    fit_from: str,
    length: int,
) -> PlannedReplica:
    placement = place(accelerator, config, header)
    limited, sizes, ranks = placement.config, placement.sizes, placement.ranks
    exchange = exchange_of(accelerator, ranks, config.tensor_parallel_size) if ranks else None
    if fit is None:
        in_8_bits = config.quantization in SCALED
        most = limited.step.max_num_batched_tokens
        fit = step_time(accelerator, header.spec, sizes, most, in_8_bits=in_8_bits)
        if exchange is not None:
            fit = shared_step_time(fit, sizes, ranks, exchange, accelerator)
        fit_from = f"computed from a data sheet, not measured: {accelerator.source}"
    memory = placement.memory
    cache = _divided(limited, header.spec, memory.num_blocks, sizes)
    shares_memory = not ranks
    replica = _replica(
        limited, header.spec, sizes, memory, fit, accelerator.name, fit_from, cache, shares_memory=shares_memory
    )
    return _holding(replica, cache, length, shares_memory=shares_memory)._replace(
        overlaps=config.overlap is not False or config.pipeline_parallel_size > 1,
        ranks=ranks,
        ranks_of_stage=config.tensor_parallel_size,
        exchange=exchange,
        tightest_rank=placement.tightest,
    )


def _on_cpu(
    memory_bytes: int | None, config: EngineConfig, header: Header, fit: StepTimeParams, fit_from: str, length: int
) -> PlannedReplica:
    from pagemill_execution.sizing.rank_parts import together
    from pagemill_execution.sizing.sizing import ranks_here, sizes_here

    spec = header.spec
    ranks = ranks_here(config, header.path, spec)
    fit = msgspec.structs.replace(fit, stages=config.pipeline_parallel_size)
    sizes = together(sizes_here(config, header.path, spec), ranks)
    memory = plan_memory(config, spec, sizes, _pod_memory(memory_bytes) if memory_bytes else measure_memory(), ranks)
    device = "CPU with resources.memory" if memory_bytes else "CPU with the memory of this machine"
    cache = _divided(config, spec, memory.num_blocks, sizes)
    shares_memory = not ranks
    replica = _replica(config, spec, sizes, memory, fit, device, fit_from, cache, shares_memory=shares_memory)
    held = _holding(replica, cache, length, shares_memory=shares_memory)
    return held._replace(ranks=tuple(ranks), ranks_of_stage=config.tensor_parallel_size)


def _divided(config: ExecutionConfig, spec: ModelSpec, num_blocks: int, sizes: Sizes) -> CacheBlocks:
    """Return how an engine divides the cache among its kinds. States have the same size whatever the cache's type."""
    from pagemill_execution.sizing.kv_sizes import cache_kinds, kv_type_of

    beside = sizes.draft_kv_bytes_per_token
    kind = kv_type_of(spec, sizes.kv_bytes_per_token - beside)
    return cache_kinds(config, spec, kind, num_blocks, beside * config.block_size)


def _holding(replica: PlannedReplica, cache: CacheBlocks, length: int, *, shares_memory: bool) -> PlannedReplica:
    """Return the replica with the blocks that requests of `length` tokens find, by what they hold of each kind."""
    shape, longest = replica.shape, replica.max_model_len
    num_blocks, at_longest = (
        blocks_at(cache.kinds, cache.counts, num_tokens, shape.block_size) for num_tokens in (length, longest)
    )
    return replica._replace(
        shape=msgspec.structs.replace(shape, num_bytes=num_blocks),
        blocks_at_longest=at_longest,
        state_bytes=sum(kind.block_bytes + kind.row_bytes for kind in cache.kinds if kind.state),
        kinds=None
        if all(kind.keeps_all for kind in cache.kinds)
        else SimulatedKinds(cache.kinds, cache.counts, shares_memory=shares_memory),
    )


def _replica(
    config: ExecutionConfig,
    spec: ModelSpec,
    sizes: Sizes,
    memory: MemoryPlan,
    fit: StepTimeParams,
    device: str,
    fit_from: str,
    cache: CacheBlocks,
    *,
    shares_memory: bool = False,
) -> PlannedReplica:
    """Return the replica. `cache`: limits the tokens of one request. `shares_memory`: whether its kinds do."""
    from pagemill_execution.sizing.kv_sizes import max_model_len_for

    shape = Shape(memory.num_blocks, config.block_size, *config.step, fit)
    return PlannedReplica(
        shape=shape,
        max_model_len=max_model_len_for(config, spec, cache, shares_memory=shares_memory),
        weight_bytes=sizes.weight_bytes,
        kv_bytes_per_token=sizes.kv_bytes_per_token,
        budget=memory.budget,
        device=device,
        step_time_from=fit_from,
        overlaps=_overlaps_on_cpu(config),
        adapters=_adapters(config),
    )


def _adapters(config: ExecutionConfig) -> AdapterLimits | None:
    from pagemill_execution.adapters.starting import limits_of

    return limits_of(config) if config.enable_lora else None


def _overlaps_on_cpu(config: ExecutionConfig) -> bool:
    """Whether an engine launches a step before it has read the one before: on CPUs where a setting says so, or with
    stages, which compute different steps at the same time."""
    return config.pipeline_parallel_size > 1 if config.overlap is None else config.overlap


def _measured(
    plan: Plan, config: EngineConfig, options: ReplicaOptions, input_tokens: int, output_tokens: int
) -> PlannedReplica:
    try:
        path = resolve_source(config.model, _field(options))
    except SourceError as error:
        raise PlanError(
            f"{error.field}: {error.message} (--model can name another copy, and --accelerator plans for another "
            "device than this machine)"
        ) from None
    if path.is_dir() and lacks_weights(path):
        raise PlanError(
            f"{_field(options)}: `{config.model}` has the index of its weights but not the weights, so no engine can "
            "be measured with it; name an accelerator with --accelerator, or step times with --fit"
        )
    from pagemill_execution.sizing.kv_sizes import CacheBlocks
    from pagemill_execution.sizing.sizing import ranks_here

    measured = asyncio.run(measure(config, input_tokens, output_tokens, options.measure_s, options.show_progress))
    ready, limits = measured.ready, measured.ready.limits
    cache, budget = CacheBlocks(limits.kinds, limits.blocks_of_kinds), ready.memory
    memory_bytes = _memory_bytes(plan)
    with _engines_refusals():
        ranks = ranks_here(config, path, load_model_spec(path))
    if memory_bytes and budget is not None:
        # The pod runs the native CPU kernels: activations are float32 and weights are not gathered.
        sizes = Sizes(ready.weight_bytes, ready.kv_bytes_per_token, item_bytes=4, gathers=False)
        sizes = sizes._replace(adapter_bytes=budget.adapter_bytes)
        with _engines_refusals():
            spec = load_model_spec(path)
            num_blocks, budget = plan_memory(config, spec, sizes, _pod_memory(memory_bytes), ranks)
            cache = _divided(config, spec, num_blocks, sizes)
    num_blocks = cache.counts[0]
    # Answers to random tokens repeat themselves, so their proposals say nothing about those of clients.
    step_time = msgspec.structs.replace(
        measured.step_time, tokens_per_decode=1.0, computed_per_decode=1.0, draft_ms=0.0
    )
    replica = PlannedReplica(
        shape=Shape(num_blocks, limits.block_size, limits.max_num_seqs, limits.max_num_batched_tokens, step_time),
        max_model_len=min(limits.max_model_len, num_blocks * limits.block_size),
        weight_bytes=ready.weight_bytes,
        kv_bytes_per_token=ready.kv_bytes_per_token,
        budget=budget,
        device=_this_machine(config.num_threads, ready.compute),
        step_time_from=f"measured on this machine, with up to {measured.most_at_once} requests at once",
        overlaps=_overlaps_on_cpu(config),
        alone=measured.alone,
        adapters=_adapters(config),
        ranks=tuple(ranks),
        ranks_of_stage=config.tensor_parallel_size,
    )
    return _holding(replica, cache, input_tokens + output_tokens, shares_memory=limits.shares_memory)


def _this_machine(num_threads: int | None, compute: str) -> str:
    cores = usable_cores()
    shortage = f" ({cores} of the {num_threads} cores of resources.cpu)" if num_threads and num_threads > cores else ""
    return f"this machine{shortage}: {compute}"


def _memory_bytes(plan: Plan) -> int | None:
    """Return the memory of all pods of a replica; they have equal parts of the model."""
    of_pod = plan.groups[0].process.memory_bytes
    return None if of_pod is None else of_pod * plan.pods_per_replica


def _pod_memory(memory_bytes: int) -> MemoryState:
    used_bytes = min(memory_bytes, RUNTIME_BYTES)
    return MemoryState(memory_bytes, memory_bytes - used_bytes, used_bytes)


@contextlib.contextmanager
def _engines_refusals() -> Iterator[None]:
    """Raise the engine's `LoadError` as `PlanError`, with the engine's message."""
    try:
        yield
    except LoadError as error:
        raise PlanError(f"the engine would refuse this: {error.reason}: {error.message}") from None


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
        chunk_context_ms=4 * _attended(spec) / attention_per_ms,
    )


def shared_step_time(
    whole: StepTimeParams, sizes: Sizes, ranks: Sequence[RankSizes], exchange: Exchange, accelerator: Accelerator
) -> StepTimeParams:
    """Return the times of a stage of a model that ranks share. `whole`, `sizes`: as if one device had all of it.

    The rank with most weights, and the one with most heads, sets the pace of all.
    """
    part = max(each.sizes.weight_bytes for each in ranks) / max(1, sizes.weight_bytes)
    cached = max(each.sizes.kv_bytes_per_token for each in ranks)
    attended = [_attended(each.spec) for each in ranks]
    return msgspec.structs.replace(
        whole,
        knot_ms=[
            STEP_OVERHEAD_MS + part * (ms - STEP_OVERHEAD_MS) + exchange.ms(tokens)
            for tokens, ms in zip(whole.knots_tokens, whole.knot_ms, strict=True)
        ],
        decode_context_ms=cached / (accelerator.bytes_per_s * MEMORY_SHARE / 1000),
        chunk_context_ms=whole.chunk_context_ms * max(attended) / max(1, sum(attended)),
        stages=exchange.stages,
    )


def _attended(spec: ModelSpec) -> int:
    return sum(each.num_heads * each.head_dim for each in spec.decoder.attentions())


def _multiplied(spec: ModelSpec) -> int:
    """Return the number of weights that each token is multiplied with: all but the embedding and the output head."""
    tables = 1 if spec.tie_word_embeddings else 2
    return max(1, spec.num_read_parameters() - tables * spec.vocab_size * spec.hidden_size)
