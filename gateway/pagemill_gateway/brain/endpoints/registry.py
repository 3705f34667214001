"""The endpoints and deployments the brain knows: records, lookup by name, and going from one catalogue to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagemill_gateway.admission.fullness import Fullness
from pagemill_gateway.admission.output_tokens import OutputTokens
from pagemill_gateway.admission.reservations import Reservations
from pagemill_gateway.brain.endpoints.adapters import Adapters
from pagemill_gateway.brain.endpoints.dispatches import Dispatches
from pagemill_gateway.brain.endpoints.reports import Reports
from pagemill_gateway.brain.endpoints.starts import Starts
from pagemill_gateway.brain.endpoints.ttft_estimator import Outlook
from pagemill_gateway.brain.interface import Target
from pagemill_gateway.routing.policy import Candidate
from pagemill_gateway.routing.report import PodReport
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.state import StepTimeParams


@dataclass(slots=True, eq=False, weakref_slot=True)
class EndpointRecord:
    """Everything known of one endpoint. Lives as long as the catalogue names it."""

    endpoint: Endpoint
    deployment: str
    reports: Reports
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
    outlook: Outlook = field(default_factory=Outlook)
    reserved: Reservations = field(default_factory=Reservations)
    """What was sent there, in blocks and sequences."""
    fullness: Fullness = field(default_factory=Fullness)
    phase: str = "unreachable"
    """While it is not ready, or its stream is down: what its `/readyz` said last."""
    detail: str = ""

    let_go: bool = False
    """It takes no requests, or was promised none; until it starts anew, or wakes up."""
    let_in_at: int = 0
    """The latest decision when it did: who was declined before says nothing of it."""
    acknowledged: bool = False
    """It was told so."""
    unreachable: bool = False
    """Nobody listens at its address; until its next report."""
    being_asked: bool = False
    """For the first time, what it is: who comes before the answer may wait for it."""

    @property
    def usable(self) -> bool:
        """It may take new requests: it has said what it serves, and neither side wants it gone.

        `serving and not leaving` in one go: every decision asks that of every endpoint.
        """
        state = self.reports.latest
        if state is None or state.max_model_len <= 0 or state.sleeping or state.draining:
            return False
        return not (self.let_go or self.unreachable or self.endpoint.terminating)

    @property
    def serving(self) -> bool:
        """It would take a request, although it may be on its way out."""
        return self.max_model_len > 0 and not self.let_go and not self.unreachable and not self.sleeping

    @property
    def expected(self) -> bool:
        """Its platform says that it is ready, or nobody can say yet that it is not, and it has not said so here."""
        unheard = self.max_model_len == 0 and not self.unreachable
        return unheard and (self.endpoint.probed_ready or self.being_asked) and not self.leaving

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
        return self.endpoint.terminating or self.draining

    @property
    def draining(self) -> bool:
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


@dataclass(slots=True)
class Deployment:
    model: CatalogModel
    records: list[EndpointRecord] = field(default_factory=list)
    last_served_at: float | None = None
    """When an endpoint last reported and would take requests, or its platform began to call one ready."""
    output_tokens: OutputTokens = field(default_factory=OutputTokens)
    bundle_digest: str = ""
    """Of the tokenizer that one of its endpoints named last: who comes after it will most likely have the same."""
    starts: Starts = field(default_factory=Starts)
    targets: dict[str, Target] = field(default_factory=dict)
    """What requests are told that find it, by the tokenizer of its endpoints, while that is true."""
    _usable: list[EndpointRecord] | None = None
    _with_bundle: dict[str, list[EndpointRecord]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return deployment_key(self.model)

    @property
    def serving(self) -> bool:
        return any(record.serving for record in self.records)

    def adapter_digest(self, name: str) -> str:
        """Of the adapter that clients ask for by `name`; empty: that is none of its adapters."""
        return next((each.digest for each in self.model.adapters if each.name == name), "")

    def usable(self) -> list[EndpointRecord]:
        """Every request asks for them, so they are looked for again only after `changed`."""
        if self._usable is None:
            self._usable = [record for record in self.records if record.usable]
        return self._usable

    def usable_with(self, bundle_digest: str) -> list[EndpointRecord]:
        """Those that understand the token ids of such a tokenizer."""
        records = self._with_bundle.get(bundle_digest)
        if records is None:
            records = [record for record in self.usable() if record.bundle_digest == bundle_digest]
            self._with_bundle[bundle_digest] = records
        return records

    def changed(self) -> None:
        """One of its endpoints may be usable now, or not any more, or is another engine than before."""
        self._usable = None
        self._with_bundle.clear()
        self.targets.clear()

    def departing(self) -> list[EndpointRecord]:
        """Those on their way out that still take requests: better than nothing at all."""
        return [record for record in self.records if record.serving and record.leaving and record.reports.connected]


class Registry:
    def __init__(self, *, stale_after_s: float) -> None:
        self._stale_after_s = stale_after_s
        self.deployments: dict[str, Deployment] = {}
        self.endpoints: dict[str, EndpointRecord] = {}
        self._by_name: dict[str, list[Deployment]] = {}

    def apply(self, catalog: Catalog, now: float) -> None:
        """Replace what is served. Records of endpoints that stay keep their counts, reports and ejection."""
        known, known_deployments = self.endpoints, self.deployments
        self.deployments, self.endpoints, self._by_name = {}, {}, {}
        for model in catalog.models:
            deployment = Deployment(model)
            before = known_deployments.get(deployment.key)
            if before is not None:
                deployment.last_served_at, deployment.output_tokens = before.last_served_at, before.output_tokens
                deployment.starts, deployment.bundle_digest = before.starts, before.bundle_digest
            self.deployments[deployment.key] = deployment
            for endpoint in model.endpoints:
                if endpoint.probed_ready and not _was_probed_ready(known.get(endpoint.id)):
                    deployment.last_served_at = now
                record = self._record(known.get(endpoint.id), endpoint, deployment.key)
                self.endpoints[endpoint.id] = record
                deployment.records.append(record)
            for name in dict.fromkeys([model.name, *model.aliases, *(each.name for each in model.adapters)]):
                self._by_name.setdefault(name, []).append(deployment)

    def changed(self, record: EndpointRecord) -> None:
        """As `Deployment.changed`, of its own one."""
        deployment = self.deployments.get(record.deployment)
        if deployment is not None:
            deployment.changed()

    @property
    def bundle_digests(self) -> set[str]:
        """Of the tokenizers in use; that of a deployment without endpoints as well, which may have some soon."""
        digests = {record.bundle_digest for record in self.endpoints.values()}
        return digests | {deployment.bundle_digest for deployment in self.deployments.values()}

    def named(self, name: str) -> list[Deployment]:
        return self._by_name.get(name, [])

    def names(self) -> list[str]:
        return list(self._by_name)

    def _record(self, known: EndpointRecord | None, endpoint: Endpoint, deployment: str) -> EndpointRecord:
        # Same id at another address: nothing known of it is true any more.
        if known is None or known.endpoint.data_url != endpoint.data_url or known.deployment != deployment:
            return EndpointRecord(endpoint, deployment, Reports(self._stale_after_s))
        known.endpoint = endpoint
        return known


def _was_probed_ready(record: EndpointRecord | None) -> bool:
    return record is not None and record.endpoint.probed_ready


def deployment_key(model: CatalogModel) -> str:
    return f"{model.namespace}/{model.deployment}"
