"""The record of one endpoint: what its reports and our requests say, and the checks for capacity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagemill_protocol.catalog import Endpoint
from pagemill_protocol.report.cache_kinds import ONE_KIND, CacheKind, needed_bytes
from pagemill_protocol.report.state import EngineLoad, StateFrame, StepTimeParams
from pagemill_routing.admission.reservations import CapacityNeed, RefusalBackoff, Reservations
from pagemill_routing.brain.endpoints.adapters import Adapters
from pagemill_routing.brain.endpoints.dispatches import Dispatches
from pagemill_routing.brain.endpoints.pod_reports import read_report
from pagemill_routing.brain.endpoints.reports import EndpointReports
from pagemill_routing.policies.policy import Candidate
from pagemill_routing.policies.report import PodReport

UNREPORTED_MAX_SEQS = 8
"""The assumed `max_num_seqs` of engines that do not report it."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class EndpointRecord:
    """The state of one endpoint, which exists while the catalogue lists the endpoint."""

    endpoint: Endpoint
    deployment: str
    reports: EndpointReports
    in_flight: int = 0
    last_chosen: int = 0
    dispatches: Dispatches = field(default_factory=Dispatches)
    pod_report: PodReport | None = None
    """The latest frame in routing's form; `None` before the first one."""
    step_time_params: StepTimeParams | None = None
    """The parameters of the model in `pod_report`."""
    seen: dict[int, Candidate] = field(default_factory=dict)
    """The cache of `brain.placement.candidates`."""
    adapters: Adapters = field(default_factory=Adapters)
    reserved: Reservations = field(default_factory=Reservations)
    """The bytes and sequences of requests that were sent to the engine."""
    refusal_backoff: RefusalBackoff = field(default_factory=RefusalBackoff)
    phase: str = "unreachable"
    """The latest phase from `/readyz`, while the engine is not ready or its stream is down."""
    detail: str = ""

    draining: bool = False
    """Whether the gateway sends it no requests, because it declined one or drains, until it restarts or wakes up."""
    readmitted_at: int = 0
    """The latest decision when `draining` ended; refusals of earlier decisions are ignored."""
    generated_token: str | None = None
    """The token that the engine generated for itself, read when its stream was opened; `None` if not read yet."""
    drain_acknowledged: bool = False
    """Whether it has received the confirmation that this gateway sends no more requests."""
    unreachable: bool = False
    """Whether no process listens at its address; false again with its next report."""
    awaiting_first_report: bool = False
    """Whether its first stream is being opened, so that requests may wait for its first report."""

    def accept(self, frame: StateFrame, now: float, decision: int) -> None:
        """Apply a state frame. `decision` is the number of the gateway's latest decision. Raises `StateGap`."""
        before, ours = self.reports.latest, self.reserved
        self.reports.accept(frame, ours.num_sequences, now, ours.num_low_priority_sequences)
        ours.reported()
        self.adapters.update(frame.adapters, now, new_engine=frame.snapshot)
        reported = frame.load.num_requests_running + frame.load.num_requests_waiting
        self.dispatches.reported(ours.num_sequences + self.reports.external - reported)
        self.pod_report = read_report(frame, self.pod_report, self.step_time_params)
        self.step_time_params = frame.step_time
        self.unreachable = False
        # An engine may fall asleep and wake up between two of its frames.
        is_new = frame.snapshot or (before is not None and (before.sleeping or frame.num_wakes > before.num_wakes))
        if is_new and not (frame.draining or frame.sleeping):
            self.draining = self.drain_acknowledged = False
            self.readmitted_at = decision
        if frame.max_model_len > 0:
            self.awaiting_first_report = False
            self.phase, self.detail = "sleeping" if frame.sleeping else "ready", ""

    @property
    def usable(self) -> bool:
        """Whether it may take new requests: it has reported what it serves, and it is not leaving.

        Equal to `serving and not leaving`, in one expression because every decision evaluates it for every endpoint.
        """
        state = self.reports.latest
        if state is None or state.max_model_len <= 0 or state.sleeping or state.draining:
            return False
        return not (self.draining or self.unreachable or self.endpoint.terminating)

    @property
    def serving(self) -> bool:
        """Whether it would take a request, although it may be leaving."""
        return self.max_model_len > 0 and not self.draining and not self.unreachable and not self.sleeping

    @property
    def expected(self) -> bool:
        """Whether its first report is expected soon: the platform finds it ready, or its stream is being opened."""
        unheard = self.max_model_len == 0 and not self.unreachable
        return unheard and (self.endpoint.probed_ready or self.awaiting_first_report) and not self.leaving

    def phase_at(self, now: float) -> str:
        """Return the first phase that applies of draining, sleeping, starting, stale, ready."""
        if self.leaving:
            return "draining"
        if self.sleeping:
            return "sleeping"
        if not self.usable:
            return "starting"
        return "ready" if self.reports.fresh(now) else "stale"

    @property
    def leaving(self) -> bool:
        return self.endpoint.terminating or self.drain_reported

    @property
    def drain_reported(self) -> bool:
        """Whether its latest report says that it drains."""
        state = self.reports.latest
        return state is not None and state.draining

    @property
    def sleeping(self) -> bool:
        """Whether its latest report says that it sleeps, so that it takes no requests until it is woken."""
        state = self.reports.latest
        return state is not None and state.sleeping

    @property
    def max_model_len(self) -> int:
        """The maximum tokens of prompt and output; 0 before its first report."""
        state = self.reports.latest
        return state.max_model_len if state is not None else 0

    @property
    def pools(self) -> bool:
        """Whether it answers with vectors or scores instead of text."""
        state = self.reports.latest
        return state is not None and state.pools

    @property
    def block_size(self) -> int:
        """The number of tokens in a KV block."""
        state = self.reports.latest
        return max(1, state.block_size) if state is not None else 1

    @property
    def kinds(self) -> Sequence[CacheKind]:
        """The cache kinds of its model."""
        state = self.reports.latest
        return state.kinds or ONE_KIND if state is not None else ONE_KIND

    @property
    def bundle_digest(self) -> str:
        state = self.reports.latest
        return state.digests.tokenizer_bundle if state is not None else ""

    @property
    def weights_digest(self) -> str:
        state = self.reports.latest
        return state.digests.weights if state is not None else ""

    def load_elsewhere(self, now: float) -> int:
        return self.reports.external if self.reports.fresh(now) else 0


def has_capacity(record: EndpointRecord, need: CapacityNeed, now: float) -> bool:
    """Whether the engine has capacity for another request, by its latest report and the requests sent since.

    Our sequences are counted exactly, others by the reports. Available bytes are those of free and evictable
    blocks, less what the engine's waiting tokens need, requests sent since, and the expected growth of our answers.
    While reports are stale, only our own reservations count. Limits that the engine has not reported are ignored,
    because the engine itself refuses requests. An idle engine always has capacity. Low-priority sequences count only
    against other low-priority requests, because the scheduler preempts them for the others.
    """
    if not record.refusal_backoff.allows(record.in_flight, now):
        return False
    frame = record.reports.latest
    if frame is None:
        return True
    fresh = record.reports.fresh(now)
    num_there = record.reserved.num_sequences + (record.reports.external if fresh else 0)
    if not num_there:
        return True
    if not need.is_low_priority:
        num_there -= record.reserved.num_low_priority_sequences + (
            record.reports.external_low_priority() if fresh else 0
        )
    if 0 < frame.max_num_seqs < num_there + need.num_sequences:
        return False
    total = frame.load.num_kv_bytes_total
    if not total:
        return True
    kinds = frame.kinds or ONE_KIND
    wanted = min(total, need.num_bytes(record.block_size, kinds))
    if not fresh:
        return record.reserved.num_bytes + wanted <= total
    return wanted <= num_bytes_left(frame.load, record.reserved, record.block_size, kinds)


def is_idle(record: EndpointRecord, max_load: float, now: float) -> bool:
    """Whether the endpoint can take a low-priority request now, because nothing waits there and it has capacity left.

    `max_load` is the share of the engine's sequence slots and memory up to which it may be filled.
    """
    frame = record.reports.latest
    if frame is None or not (record.usable and record.reports.fresh(now)) or frame.load.num_requests_waiting:
        return False
    if frame.load.num_kv_bytes_active > max_load * frame.load.num_kv_bytes_total:
        return False
    most = int(max_load * (frame.max_num_seqs or UNREPORTED_MAX_SEQS))
    return most > record.reserved.num_sequences + record.load_elsewhere(now)


def num_bytes_left(load: EngineLoad, reserved: Reservations, block_size: int, kinds: Sequence[CacheKind]) -> int:
    """Return the bytes that another request may take, by a report and the requests sent since."""
    growing = _num_tokens_to_come(load, reserved) + load.num_tokens_waiting
    # A sequence's last block is rarely full, so each sequence may need one block more than its tokens.
    num_blocks = -(-growing // block_size) + reserved.num_reported_sequences
    num_sequences = load.num_requests_running + load.num_requests_waiting
    held = [each.active for each in load.kind_bytes] if len(load.kind_bytes) == len(kinds) else ()
    growth = needed_bytes(kinds, num_blocks, num_sequences, load.num_tokens_running + growing, block_size, held)
    return load.num_kv_bytes_total - load.num_kv_bytes_active - reserved.num_unreported_bytes - growth


def _num_tokens_to_come(load: EngineLoad, reserved: Reservations) -> int:
    """Return the expected tokens of our reported requests that the report shows neither computed nor waiting."""
    if not reserved.num_reported_sequences:
        return 0
    num_rows = max(1, load.num_requests_running + load.num_requests_waiting)
    share = min(1.0, reserved.num_reported_sequences / num_rows)
    num_there = int(share * (load.num_tokens_running + load.num_tokens_waiting))
    return max(0, reserved.num_reported_prompt_tokens + reserved.num_reported_output_tokens - num_there)
