"""One endpoint: everything the gateway knows of it, and whether it has capacity for one more request."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagemill_gateway.admission.reservations import Need, RefusalBackoff, Reservations
from pagemill_gateway.brain.endpoints.adapters import Adapters
from pagemill_gateway.brain.endpoints.dispatches import Dispatches
from pagemill_gateway.brain.endpoints.reports import EndpointReports
from pagemill_gateway.brain.endpoints.ttft_estimator import TtftEstimator
from pagemill_gateway.routing.policy import Candidate
from pagemill_gateway.routing.report import PodReport
from pagemill_protocol.catalog import Endpoint
from pagemill_protocol.state import EngineLoad, StepTimeParams


@dataclass(slots=True, eq=False, weakref_slot=True)
class EndpointRecord:
    """Everything known of one endpoint. Lives as long as the catalogue names it."""

    endpoint: Endpoint
    deployment: str
    reports: EndpointReports
    in_flight: int = 0
    last_chosen: int = 0
    dispatches: Dispatches = field(default_factory=Dispatches)
    pod_report: PodReport | None = None
    """Its latest frame as routing reads it; `None` before the first one."""
    step_time_params: StepTimeParams | None = None
    """Those that the report's model was made from."""
    seen: dict[int, Candidate] = field(default_factory=dict)
    """What `brain.placement.candidates` made of it, while that is true."""
    adapters: Adapters = field(default_factory=Adapters)
    ttft_estimator: TtftEstimator = field(default_factory=TtftEstimator)
    reserved: Reservations = field(default_factory=Reservations)
    """What was sent there, in blocks and sequences."""
    refusal_backoff: RefusalBackoff = field(default_factory=RefusalBackoff)
    phase: str = "unreachable"
    """While it is not ready, or its stream is down: what its `/readyz` said last."""
    detail: str = ""

    draining: bool = False
    """It takes no requests, or was promised none; until it starts anew, or wakes up."""
    readmitted_at: int = 0
    """The latest decision when it did: who was declined before says nothing of it."""
    drain_acknowledged: bool = False
    """It was told so."""
    unreachable: bool = False
    """Nobody listens at its address; until its next report."""
    awaiting_first_report: bool = False
    """For the first time, what it is: who comes before the answer may wait for it."""

    @property
    def usable(self) -> bool:
        """It may take new requests: it has said what it serves, and neither side wants it gone.

        `serving and not leaving` in one go: every decision asks that of every endpoint.
        """
        state = self.reports.latest
        if state is None or state.max_model_len <= 0 or state.sleeping or state.draining:
            return False
        return not (self.draining or self.unreachable or self.endpoint.terminating)

    @property
    def serving(self) -> bool:
        """It would take a request, although it may be on its way out."""
        return self.max_model_len > 0 and not self.draining and not self.unreachable and not self.sleeping

    @property
    def expected(self) -> bool:
        """Its platform says that it is ready, or nobody can say yet that it is not, and it has not said so here."""
        unheard = self.max_model_len == 0 and not self.unreachable
        return unheard and (self.endpoint.probed_ready or self.awaiting_first_report) and not self.leaving

    def phase_at(self, now: float) -> str:
        """One word: draining, sleeping, starting, stale or ready; the first that is true."""
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
        """By its own word."""
        state = self.reports.latest
        return state is not None and state.draining

    @property
    def sleeping(self) -> bool:
        """By its own word: it takes nothing until it is woken."""
        state = self.reports.latest
        return state is not None and state.sleeping

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output; 0 until the engine has told."""
        state = self.reports.latest
        return state.max_model_len if state is not None else 0

    @property
    def block_size(self) -> int:
        """Tokens of one KV block."""
        state = self.reports.latest
        return max(1, state.block_size) if state is not None else 1

    @property
    def bundle_digest(self) -> str:
        state = self.reports.latest
        return state.digests.tokenizer_bundle if state is not None else ""

    @property
    def weights_digest(self) -> str:
        state = self.reports.latest
        return state.digests.weights if state is not None else ""

    def load_elsewhere(self, now: float) -> int:
        return self.reports.external() if self.reports.fresh(now) else 0


def has_capacity(record: EndpointRecord, need: Need, now: float) -> bool:
    """Whether the engine has capacity for one more request, by its latest report and what this gateway has sent since.

    Sequences: our own are counted exactly, those of others by the reports. Blocks: what is free or evictable, less what
    rows there still have to compute, less what was sent and is not in a report yet, less the growth that our answers
    there are expected to have. Of an engine whose reports are stale only our own reservations count, and a limit that
    it never reported does not bind: the engine itself refuses in the end. An idle engine always has capacity.
    """
    if not record.refusal_backoff.allows(record.in_flight, now):
        return False
    frame = record.reports.latest
    if frame is None:
        return True
    fresh = record.reports.fresh(now)
    num_there = record.reserved.num_sequences + (record.reports.external() if fresh else 0)
    if not num_there:
        return True
    if 0 < frame.max_num_seqs < num_there + need.num_sequences:
        return False
    total = frame.load.num_blocks_total
    if not total:
        return True
    wanted = min(total, need.num_blocks(record.block_size))
    if not fresh:
        return record.reserved.num_blocks + wanted <= total
    return wanted <= num_blocks_left(frame.load, record.reserved, record.block_size)


def num_blocks_left(load: EngineLoad, reserved: Reservations, block_size: int) -> int:
    growing = _num_tokens_to_come(load, reserved) + load.num_tokens_waiting
    # A sequence's last block is seldom full, so each may need one more than its tokens say.
    num_growing_blocks = -(-growing // block_size) + reserved.num_seen_sequences
    return load.num_blocks_free + load.num_blocks_evictable - reserved.num_unseen_blocks - num_growing_blocks


def _num_tokens_to_come(load: EngineLoad, reserved: Reservations) -> int:
    """Of our requests that reports show, with their expected output, what is neither computed nor due by the report."""
    if not reserved.num_seen_sequences:
        return 0
    num_rows = max(1, load.num_requests_running + load.num_requests_waiting)
    share = min(1.0, reserved.num_seen_sequences / num_rows)
    num_there = int(share * (load.num_tokens_running + load.num_tokens_waiting))
    return max(0, reserved.num_seen_prompt_tokens + reserved.num_seen_output_tokens - num_there)
