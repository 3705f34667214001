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
from pagemill_protocol.link import LINK_VERSION
from pagemill_protocol.state import EngineLoad, StepTimeParams


@dataclass(slots=True, eq=False, weakref_slot=True)
class EndpointRecord:
    """Everything known of one endpoint. It lives as long as the catalogue lists the endpoint."""

    endpoint: Endpoint
    deployment: str
    reports: EndpointReports
    in_flight: int = 0
    last_chosen: int = 0
    dispatches: Dispatches = field(default_factory=Dispatches)
    pod_report: PodReport | None = None
    """Its latest frame as routing reads it; `None` before the first one."""
    step_time_params: StepTimeParams | None = None
    """The parameters of the model in `pod_report`."""
    seen: dict[int, Candidate] = field(default_factory=dict)
    """Candidates that `brain.placement.candidates` made of it, while they are current."""
    adapters: Adapters = field(default_factory=Adapters)
    ttft_estimator: TtftEstimator = field(default_factory=TtftEstimator)
    reserved: Reservations = field(default_factory=Reservations)
    """What was sent there, in blocks and sequences."""
    refusal_backoff: RefusalBackoff = field(default_factory=RefusalBackoff)
    phase: str = "unreachable"
    """What its `/readyz` last answered, while it is not ready or its stream is down."""
    detail: str = ""

    draining: bool = False
    """The gateway sends it nothing more, since it declined a request or drains; until it restarts or wakes up."""
    readmitted_at: int = 0
    """The latest decision when `draining` ended: refusals of earlier ones do not count."""
    made_token: str | None = None
    """What the engine had made for itself when its state stream was opened; `None`: to be looked for."""
    drain_acknowledged: bool = False
    """It has confirmed the end of new requests."""
    unreachable: bool = False
    """No process listens at its address; until its next report."""
    awaiting_first_report: bool = False
    """Discovery asks it for the first time: requests that come before its answer may wait for it."""

    @property
    def usable(self) -> bool:
        """It may take new requests: it has reported what it serves, and it is not leaving.

        `serving and not leaving` in one expression: every decision evaluates it for every endpoint.
        """
        state = self.reports.latest
        if state is None or state.max_model_len <= 0 or state.sleeping or state.draining:
            return False
        return not (self.draining or self.unreachable or self.endpoint.terminating)

    @property
    def serving(self) -> bool:
        """It would take a request, although it may be leaving."""
        return self.max_model_len > 0 and not self.draining and not self.unreachable and not self.sleeping

    @property
    def expected(self) -> bool:
        """Its platform calls it ready, or its state is not known yet, and it has not reported here."""
        unheard = self.max_model_len == 0 and not self.unreachable
        return unheard and (self.endpoint.probed_ready or self.awaiting_first_report) and not self.leaving

    def phase_at(self, now: float) -> str:
        """The first that is true of: draining, sleeping, starting, stale, ready."""
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
        """Its latest report says that it drains."""
        state = self.reports.latest
        return state is not None and state.draining

    @property
    def sleeping(self) -> bool:
        """Its latest report says that it sleeps: it takes nothing until it is woken."""
        state = self.reports.latest
        return state is not None and state.sleeping

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output; 0 before its first report."""
        state = self.reports.latest
        return state.max_model_len if state is not None else 0

    @property
    def pools(self) -> bool:
        """It answers with vectors or scores, not with text."""
        state = self.reports.latest
        return state is not None and state.pools

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

    @property
    def has_link(self) -> bool:
        """It takes requests over a link of a version that this gateway speaks."""
        state = self.reports.latest
        return state is not None and state.link_version == LINK_VERSION

    def load_elsewhere(self, now: float) -> int:
        return self.reports.external if self.reports.fresh(now) else 0


def has_capacity(record: EndpointRecord, need: Need, now: float) -> bool:
    """Whether the engine has capacity for one more request, by its latest report and what this gateway has sent since.

    Sequences: our own are counted exactly, those of others by the reports. Blocks: what is free or evictable, less what
    the sequences there still have to compute, less what was sent and is not in a report yet, less the growth that our
    answers there are expected to have. While reports are stale only our own reservations count, and a limit that the
    engine never reported does not bind: the engine itself refuses in the end. An idle engine always has capacity.
    Sequences that give way count for others of their kind only: the scheduler takes their slots for the rest.
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
    if not need.gives_way:
        num_there -= record.reserved.num_sequences_giving_way + (record.reports.external_giving_way() if fresh else 0)
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
    """By a report and what was sent since: what another request may still take."""
    growing = _num_tokens_to_come(load, reserved) + load.num_tokens_waiting
    # A sequence's last block is seldom full, so each may need one more than its tokens say.
    num_growing_blocks = -(-growing // block_size) + reserved.num_seen_sequences
    return load.num_blocks_free + load.num_blocks_evictable - reserved.num_unseen_blocks - num_growing_blocks


def _num_tokens_to_come(load: EngineLoad, reserved: Reservations) -> int:
    """Tokens of our reported requests, expected output included, that the report shows neither computed nor waiting."""
    if not reserved.num_seen_sequences:
        return 0
    num_rows = max(1, load.num_requests_running + load.num_requests_waiting)
    share = min(1.0, reserved.num_seen_sequences / num_rows)
    num_there = int(share * (load.num_tokens_running + load.num_tokens_waiting))
    return max(0, reserved.num_seen_prompt_tokens + reserved.num_seen_output_tokens - num_there)
