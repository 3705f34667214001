"""Metrics of the HTTP process: vLLM's core series and `pagemill_engine_*`, updated by the engine client.

`pagemill_protocol.metrics` defines names, labels and buckets. The values come from the engine's step reports and from
this process's clock, so a latency includes everything that a client of this port waits for. Nothing is decided by them.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from importlib.metadata import version

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import Ready, StepOutputs, TokensOut
from pagemill_engine.output.processor import Processor
from pagemill_protocol import metrics as names
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.metrics import ENGINE_METRICS, Metrics, Scrape
from pagemill_protocol.report.adapters import AdapterSlots, AdapterStatus
from pagemill_protocol.report.cache_kinds import FULL
from pagemill_protocol.report.state import EngineLoad, KindBytes
from pagemill_protocol.request.generate import FinishReason, GenerateRequest

VERSION = version("pagemill-engine")
ENDS: tuple[FinishReason, ...] = ("error", "abort", "length", "stop")
PHASES_AFTER_START = ("ready", "draining", "sleeping", "waking")


@dataclass(slots=True)
class RequestTiming:
    """Times of one request, in seconds of the monotonic clock."""

    arrival_s: float
    queue_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_preemptions: int = 0
    last_delivery_s: dict[int, float] = field(default_factory=dict)
    """Time of the last delivery, by choice."""


class ServerMetrics:
    def __init__(self, model_name: str, config: EngineConfig) -> None:
        self._config = config
        self._metrics = Metrics(ENGINE_METRICS, model_name=model_name, engine="0")
        self._phase: tuple[str, float] | None = None
        self._phase_s: defaultdict[str, float] = defaultdict(float)
        """Seconds spent in each phase; a phase may be entered more than once."""
        self._num_preemptions = 0
        self._rank_s: defaultdict[int, float] = defaultdict(float)
        """Seconds of each rank that are counted."""
        self._lora_labels: dict[str, str] = {}
        self._kinds = [FULL.name]
        """The names of the model's cache kinds."""
        for spec in (
            names.ENGINE_READY,
            names.ENGINE_DRAINING,
            names.ENGINE_SLEEPING,
            names.NUM_REQUESTS_RUNNING,
            names.NUM_REQUESTS_WAITING,
        ):
            self._metrics.gauge(spec).set(0)
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """Create the series with vLLM's names before the first request: some tools look for them only once, at their
        start."""
        for spec in ENGINE_METRICS:
            if not spec.name.startswith("vllm:") or set(spec.labels) - {"model_name", "engine"}:
                continue
            if spec.kind != "gauge":
                self._metrics.begin(spec)
        self._metrics.begin(names.REQUEST_SUCCESS, finished_reason=ENDS)

    def rename(self, model_name: str) -> None:
        self._metrics.relabel(model_name=model_name)

    def scrape(self, accept: str) -> Scrape:
        return self._metrics.scrape(accept)

    # -- the process ---------------------------------------------------------------------------------------------

    def phase(self, phase: str) -> None:
        """Record that the server entered `phase` and left the previous one."""
        now_s = time.monotonic()
        if self._phase is not None and self._phase[0] not in PHASES_AFTER_START:
            before, since_s = self._phase
            self._phase_s[before] += now_s - since_s
            self._metrics.gauge(names.ENGINE_LOAD_SECONDS, phase=before).set(self._phase_s[before])
        self._phase = (phase, now_s)
        self._metrics.gauge(names.ENGINE_READY).set(phase == "ready")
        self._metrics.gauge(names.ENGINE_DRAINING).set(phase == "draining")

    def sleeping(self, sleeps: bool) -> None:
        self._metrics.gauge(names.ENGINE_SLEEPING).set(sleeps)

    def record_wake(self, wake_s: float) -> None:
        self._metrics.histogram(names.ENGINE_WAKE_SECONDS).observe(wake_s)

    def ready(self, ready: Ready) -> None:
        self._metrics.gauge(
            names.CACHE_CONFIG_INFO,
            block_size=str(ready.limits.block_size),
            num_gpu_blocks=str(ready.limits.num_blocks),
            cache_dtype=ready.limits.kv_dtype,
            enable_prefix_caching=str(ready.limits.enable_prefix_caching),
        ).set(1)
        self._metrics.gauge(
            names.ENGINE_INFO,
            version=VERSION,
            weights_digest=ready.limits.weights_digest,
            kv_dtype=ready.limits.kv_dtype,
            device=ready.device,
            compute=ready.compute,
            ranks=str(self._config.num_ranks),
            nodes=str(1 if self._config.nodes is None else self._config.nodes.count),
        ).set(1)
        self._kinds = [kind.name for kind in ready.limits.kinds]
        self._metrics.gauge(names.ENGINE_MAX_NUM_SEQS).set(ready.limits.max_num_seqs)
        self._load(ready.load)

    def step(self, step: StepOutputs) -> None:
        self._load(step.load)
        metrics = self._metrics
        if step.num_step_tokens:
            metrics.histogram(names.ITERATION_TOKENS).observe(step.num_step_tokens)
            metrics.histogram(names.ENGINE_STEP_SECONDS).observe(step.load.step_ms / 1000)
        if step.gained_ms:
            metrics.gauge(names.ENGINE_SPECULATION_GAIN).inc(step.gained_ms / 1000)
        if step.ranks is not None:
            for rank, seconds in enumerate(step.ranks.computed_s):
                counted = self._rank_s[rank]
                metrics.counter(names.ENGINE_RANK_SECONDS, rank=str(rank)).inc(max(0.0, seconds - counted))
                self._rank_s[rank] = seconds
        if step.step_time is not None:
            metrics.gauge(names.ENGINE_STEP_ERROR_P50).set(step.step_time.error_p50)
            metrics.gauge(names.ENGINE_STEP_ERROR_P95).set(step.step_time.error_p95)

    def adapters(
        self,
        max_loras: int,
        running: list[str],
        waiting: list[str],
        known: list[AdapterStatus],
        slots: AdapterSlots,
    ) -> None:
        """Record the adapters that are served, and the names of those with running and waiting requests."""
        labels = {
            "max_lora": str(max_loras),
            "running_lora_adapters": ",".join(running),
            "waiting_lora_adapters": ",".join(waiting),
        }
        if labels != self._lora_labels:
            if self._lora_labels:
                self._metrics.forget(names.LORA_REQUESTS_INFO, **self._lora_labels)
            self._lora_labels = labels
            self._metrics.gauge(names.LORA_REQUESTS_INFO, **labels).set(time.time())
        numbers = Counter(each.state for each in known)
        states = {"resident": slots.resident, "loading": slots.loading, "running": running, "waiting": waiting}
        for state in ("fetching", "known", "refused"):
            self._metrics.gauge(names.ENGINE_ADAPTERS, state=state).set(numbers[state])
        for state, found in states.items():
            self._metrics.gauge(names.ENGINE_ADAPTERS, state=state).set(len(found))
        self._metrics.gauge(names.ENGINE_ADAPTER_LOAD_SECONDS).set(slots.load_ms / 1000)

    def adapter_loads(self, num_loads: int, num_evictions: int) -> None:
        self._metrics.counter(names.ENGINE_ADAPTER_LOADS).inc(num_loads)
        self._metrics.counter(names.ENGINE_ADAPTER_EVICTIONS).inc(num_evictions)

    def _load(self, load: EngineLoad) -> None:
        metrics = self._metrics
        metrics.gauge(names.NUM_REQUESTS_RUNNING).set(load.num_requests_running)
        metrics.gauge(names.NUM_REQUESTS_WAITING).set(load.num_requests_waiting)
        metrics.gauge(names.KV_CACHE_USAGE).set(load.kv_cache_usage)
        one = KindBytes(load.num_kv_bytes_total, load.num_kv_bytes_active, load.num_kv_bytes_evictable)
        for kind, each in zip(self._kinds, load.kind_bytes or [one], strict=False):
            metrics.gauge(names.ENGINE_KV_BYTES, kind=kind, state="active").set(each.active)
            metrics.gauge(names.ENGINE_KV_BYTES, kind=kind, state="evictable").set(each.evictable)
            metrics.gauge(names.ENGINE_KV_BYTES, kind=kind, state="free").set(each.total - each.active - each.evictable)
        metrics.gauge(names.ENGINE_WAITING_TOKENS).set(load.num_tokens_waiting)
        metrics.gauge(names.ENGINE_CONTEXT_TOKENS).set(load.num_tokens_running)
        metrics.counter(names.NUM_PREEMPTIONS).inc(max(0, load.num_preemptions - self._num_preemptions))
        self._num_preemptions = load.num_preemptions

    def state_streams(self, change: int) -> None:
        self._metrics.gauge(names.ENGINE_STATE_STREAMS).inc(change)

    def http_request(self, route: str, status: int) -> None:
        self._metrics.counter(names.ENGINE_HTTP_REQUESTS, route=route, status=str(status)).inc()

    # -- one request ---------------------------------------------------------------------------------------------

    def request_accepted(self, request: GenerateRequest) -> RequestTiming:
        metrics, num_prompt_tokens = self._metrics, len(request.prompt_token_ids)
        metrics.counter(names.PROMPT_TOKENS).inc(num_prompt_tokens)
        metrics.histogram(names.REQUEST_PROMPT_TOKENS).observe(num_prompt_tokens)
        metrics.histogram(names.REQUEST_PARAMS_N).observe(request.sampling.n)
        if request.sampling.max_tokens is not None:
            metrics.histogram(names.REQUEST_PARAMS_MAX_TOKENS).observe(request.sampling.max_tokens)
        return RequestTiming(arrival_s=time.monotonic())

    def request_refused(self, error: PagemillError) -> None:
        self._metrics.counter(names.ENGINE_REJECTED, code=error.code or str(error.status)).inc()

    def tokens(self, timing: RequestTiming, output: TokensOut, num_prompt_tokens: int) -> None:
        """Record tokens of one choice that the engine delivered."""
        timing.num_preemptions = max(timing.num_preemptions, output.num_preemptions)
        if not output.token_ids:
            return
        now_s = time.monotonic()
        self._metrics.counter(names.GENERATION_TOKENS).inc(len(output.token_ids))
        if output.num_proposed:
            self._count_proposed(output)
        if timing.first_token_s is None:
            timing.first_token_s = now_s
            timing.queue_s = output.queue_s
            self._metrics.histogram(names.TIME_TO_FIRST_TOKEN).observe(now_s - timing.arrival_s)
            self._metrics.histogram(names.REQUEST_QUEUE_TIME).observe(output.queue_s)
            self._metrics.counter(names.PREFIX_CACHE_QUERIES).inc(num_prompt_tokens)
            self._metrics.counter(names.PREFIX_CACHE_HITS).inc(min(output.num_cached_tokens, num_prompt_tokens))
        if output.choice in timing.last_delivery_s:
            gap_s = now_s - timing.last_delivery_s[output.choice]
            self._metrics.histogram(names.INTER_TOKEN_LATENCY).observe(gap_s)
        timing.last_delivery_s[output.choice] = timing.last_token_s = now_s

    def _count_proposed(self, output: TokensOut) -> None:
        metrics = self._metrics
        metrics.counter(names.SPEC_DRAFTS).inc()
        metrics.counter(names.SPEC_DRAFT_TOKENS).inc(output.num_proposed)
        metrics.counter(names.SPEC_ACCEPTED).inc(output.num_accepted)
        for position in range(output.num_accepted):
            metrics.counter(names.SPEC_ACCEPTED_AT, position=str(position)).inc()

    def request_finished(self, timing: RequestTiming, processor: Processor) -> None:
        metrics, num_tokens = self._metrics, processor.num_new_tokens
        reasons = processor.finish_reasons
        if reasons:
            # One request, whatever its number of choices: the end that matters most.
            reason = next((each for each in ENDS if each in reasons), reasons[0])
            metrics.counter(names.REQUEST_SUCCESS, finished_reason=reason).inc()
        metrics.histogram(names.REQUEST_GENERATION_TOKENS).observe(num_tokens)
        metrics.histogram(names.REQUEST_NUM_PREEMPTIONS).observe(timing.num_preemptions)
        metrics.histogram(names.E2E_REQUEST_LATENCY).observe(time.monotonic() - timing.arrival_s)
        if timing.first_token_s is None:
            return
        prefill_s = max(0.0, timing.first_token_s - timing.arrival_s - timing.queue_s)
        decode_s = timing.last_token_s - timing.first_token_s
        metrics.histogram(names.REQUEST_PREFILL_TIME).observe(prefill_s)
        metrics.histogram(names.REQUEST_DECODE_TIME).observe(decode_s)
        metrics.histogram(names.REQUEST_INFERENCE_TIME).observe(prefill_s + decode_s)
        sampling = processor.request.sampling
        # The tokens of a beam search arrive all at once: the time between them means nothing.
        if num_tokens > sampling.num_reported and not sampling.use_beam_search:
            mean_s = decode_s * sampling.num_reported / (num_tokens - sampling.num_reported)
            metrics.histogram(names.TIME_PER_OUTPUT_TOKEN).observe(mean_s)

    def request_failed(self) -> None:
        self._metrics.counter(names.ENGINE_FAILED).inc()

    def request_aborted(self, reason: str) -> None:
        self._metrics.counter(names.ENGINE_ABORTED, reason=reason).inc()
