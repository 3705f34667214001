"""The gateway's settings: every field with meaning, unit and default. Read once at start; nothing else reads settings.

What changes while the gateway runs (models and endpoints) is the catalogue, not a setting: see `discovery`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pagemill_gateway.routing.policies import PolicyName
from pagemill_protocol.catalog import Catalog, QueueLimits
from pagemill_protocol.http.auth import is_loopback_address
from pagemill_protocol.http.cors import is_origin
from pagemill_protocol.http.tls_config import TLSConfig
from pagemill_protocol.keys import file as keys_file
from pagemill_protocol.keys.entries import fault_of
from pagemill_protocol.keys.file import KeysFileError
from pagemill_protocol.secret_file import SecretFile
from pagemill_protocol.settings import SettingsError as SettingsError
from pagemill_protocol.tracing.config import TracingConfig

MAX_WORKERS = 64
MAX_REDIS_VALUE_BYTES = 512 * 1024 * 1024


class KeysSecret(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Secret that engine tokens are derived from; the operator makes it and turns its keys."""

    namespace: str = "pagemill-system"
    name: str = "pagemill-keys"


class KubernetesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the gateway watches in its cluster, with the credentials of its pod."""

    namespaces: list[str] = []
    """Namespaces whose LLMDeployments are served; empty: all."""
    keys_secret: KeysSecret = KeysSecret()
    last_known_file: str = "/var/lib/pagemill/catalog.json"
    """The latest catalogue and keys, for a start while the API server is down. Put it in memory: it holds secrets."""
    kubeconfig: str | None = None
    """For a gateway outside the cluster; `None`: the service account of the pod."""
    api_server: str = ""
    """URL of the API server; empty: what the kubeconfig says, or every pod's environment."""
    watch_idle_timeout_s: float = 40.0
    """A watch silent for this long is opened again; API servers are asked to end each after 30 s at most."""
    backoff_base_s: float = 0.2
    backoff_max_s: float = 5.0
    """First and longest pause between attempts to reach the API server; each is drawn from the upper half."""


class RedisConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What several gateways share, so that each limit holds for all of them together. Never needed to serve."""

    url: str = ""
    """`redis://`, `rediss://` (TLS; `?ssl_ca_certs=FILE` names the authority) or `unix://`."""
    url_file: str | None = None
    """File whose first line is the URL, in place of `url`; read at the start."""
    password_file: str | None = None
    """File whose first line is the password, read anew for every connection; wins over one in the URL."""
    prefix: str = "pagemill"
    """What all names in Redis begin with."""
    keys: bool = False
    """Accept the API keys in the hash `PREFIX:keys` too: SHA-256 of the key, and as its value the rest of the entry."""
    timeout_ms: float = 100.0
    """An answer that takes longer counts as none. After three in a row no request asks until Redis answers again."""
    expected_gateways: int = 1
    """Gateways that share the limits, for a start while Redis is away; later they count themselves."""


class StoredResponsesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keep the answers of `/v1/responses`: in Redis where `redis` is set, else in the memory of this gateway."""

    max_age_s: float = 24 * 3600.0
    """A response is deleted this long after it was made."""
    max_per_tenant: int = 1000
    """Responses of one tenant (of one key that has none); beyond that, its oldest are deleted."""
    max_bytes: int = 64 * 1024 * 1024
    """In memory: of all responses together; beyond that, the oldest of the tenant that has most are deleted."""
    max_response_bytes: int = 4 * 1024 * 1024
    """A response that is larger with its whole input is not stored."""


class BatchesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files and batches (`/v1/files`, `/v1/batches`), run with capacity that live requests leave idle."""

    directory: str = ""
    """Where they are kept; gateways that share it need file locks there that hold for all of them. Empty: in Redis."""
    max_file_bytes: int = 100 * 1024 * 1024
    """Of one uploaded file; at most 512 MiB in Redis."""
    max_files: int = 10_000
    """Files of one tenant (of one key that has none); one more is refused until some are deleted."""
    max_tenant_bytes: int = 1024 * 1024 * 1024
    """Of all files of one tenant; an upload beyond it is refused."""
    max_batches: int = 100
    """Batches of one tenant that are not over; one more is refused."""
    max_lines: int = 50_000
    """Requests in one batch."""
    max_load: float = 0.5
    """Lines are started only while no request waits and an engine has fewer sequences than this share of its most."""
    max_concurrency: int = 64
    """Lines that one process of the gateway runs at once."""
    upload_timeout_s: float = 600.0
    """An upload that takes longer gets 408."""


class EngineTLSConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the certificates of engines are checked whose URLs begin with `https://`."""

    ca_file: str = ""
    """Certificates of the authorities that issued them, in PEM, read again when it changes; empty: this machine's."""
    server_name: str = ""
    """Name that each of their certificates has; empty: the host of the engine's URL."""


class WorkerBounds(NamedTuple):
    """Of what one worker may hold."""

    max_requests: int
    max_body_bytes: int
    journal_tokens: int


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8080
    """Data port: the OpenAI routes."""
    workers: int = 1
    """
    Processes that serve the data port, for more than about one core of traffic. 1: all of the gateway is one process.
    With more, one further process decides for all of them and serves the control port, and another one keeps all of
    them running; each worker may hold its share of `max_requests`, `max_in_flight_body_bytes` and `journal_tokens`.
    """
    hang_timeout_s: float = 30.0
    """
    With more than one worker: a process of the gateway that stands still for this long is killed and replaced, as one
    that died. Below 5 a machine that is merely busy may look like that.
    """
    control_host: str = "127.0.0.1"
    control_port: int = 8081
    control_token: str = ""
    """
    Bearer token of all of the control port but `/livez`, `/readyz`, `/metrics` and `/version`. Without it and without a
    file, which only a loopback bind allows, the gateway makes one at its start, in a file that its user alone can read:
    `pagemill-UID/control-ADDRESS-PORT.token` below `$XDG_RUNTIME_DIR`, or below the temporary folder. With discovery
    `kubernetes` further ones are derived from `kubernetes.keys_secret`, and none is made.
    """
    control_token_file: str | None = None
    """File of further such tokens, one a line, read again when it changes."""
    control_allowed_hosts: list[str] = []
    """
    Names by which callers of those routes may address this gateway, in the header Host. IP addresses, the machine's own
    name, names without a dot and names below `localhost`, `local`, `internal` and `svc` always may.
    """
    allowed_hosts: list[str] = []
    """
    Names by which clients may address a gateway on loopback without API keys, in the header Host, beside those that
    `control_allowed_hosts` describes: a web page could bind any other name to this machine.
    """
    allowed_origins: list[str] = []
    """
    Origins of web pages that may use the data port from a browser (CORS), such as `https://app.example.com`; `*`: all.
    Cookies are never allowed. Empty: none.
    """
    api_keys: list[str] = []
    """
    Accepted API keys: the SHA-256 in hex, and what the key may have:
    `HASH tenant=NAME models=A,B requests_per_minute=N tokens_per_minute=N concurrency=N tokens_per_day=N
    tokens_per_month=N priority=high|normal|low`, all of it optional.
    """
    api_keys_file: str | None = None
    """
    File of further such entries, one a line, with comments (`#`) and empty lines. A change takes effect within a
    second. A file with a wrong line is not used: the entries known before stay in use, and
    `pagemill_gateway_api_keys_file_valid` is 0. At the start wrong lines are left out with a warning; a file that has
    lines and no entry is refused. With an empty file every request is refused.
    """
    redis: RedisConfig | None = None
    """Share the limits with other gateways; `None`: each gateway counts for itself."""
    stored_responses: StoredResponsesConfig | None = None
    """Store responses of `/v1/responses`, for `previous_response_id`; `None`: none are stored."""
    batches: BatchesConfig | None = None
    """Take files and batches; `None`: their routes say that this is not set."""
    tls: TLSConfig | None = None
    """Serve the data port by HTTPS, TLS 1.2 and later; `None`: by HTTP. The control port is always HTTP."""
    engine_tls: EngineTLSConfig = EngineTLSConfig()
    tracing: TracingConfig | None = None
    """Send OpenTelemetry traces; `None`: none are made."""
    allow_anonymous: bool = False
    """No key is asked on a bind that others can reach. Without keys, that must be said; never together with keys."""
    discovery: Literal["static", "kubernetes"] = "static"
    """
    Where the catalogue comes from. `static`: `catalog`, then `PUT /catalog`. `kubernetes`: LLMDeployments and
    EndpointSlices, watched.
    """
    kubernetes: KubernetesConfig = KubernetesConfig()
    catalog: Catalog = Catalog()
    """What is served at start; `PUT /catalog` replaces it."""

    max_body_bytes: int = 8 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    body_timeout_s: float = 30.0
    """A body that takes longer to arrive gets 408."""
    max_requests: int = 4096
    """Requests inside the gateway at once; one more gets 503. Bounds the memory of streams."""
    max_in_flight_body_bytes: int = 256 * 1024 * 1024
    """Bytes of request bodies inside the gateway at once, each from its arrival to the end of its answer; one beyond it
    gets 503. Parsed and tokenized, a body takes several times its size.
    """
    max_attempts: int = 3
    """Engines that may fail one request. Engines that refuse it, that end or that do not listen do not count."""
    request_timeout_s: float | None = None
    """Deadline of requests that send no `x-request-timeout-s`; `None`: none."""
    connect_timeout_s: float = 2.0
    """Opening a connection to an engine."""
    accept_timeout_s: float = 30.0
    """An engine that neither accepts nor refuses a request within this time counts as failed."""
    silence_timeout_s: float = 5.0
    """Silence of an engine inside one request, while its state stream is silent too, before it is left behind."""
    stall_timeout_s: float = 6.0
    """An engine whose server reports for longer than this, and than four times what the step is predicted to take, that
    it makes no step loses its answers at once: other engines continue them."""
    freeze_timeout_s: float = 4.0
    """The same without heartbeats of the engine process, which come every second however long a step takes."""
    journal_tokens: int = 16 * 1024 * 1024
    """Tokens of answers in progress that are kept (4 bytes each), so that another engine can continue what one has
    begun. An answer beyond it is served as usual; it cannot be continued.
    """
    slow_client_timeout_s: float = 120.0
    """A client that reads nothing for this long loses its stream."""

    queue: QueueLimits = QueueLimits(max_requests=1000, max_bytes=256 * 1024 * 1024, timeout_s=60.0)
    """Requests of one deployment that may wait for capacity on its engines, unless its `routing.queue` says otherwise.
    """
    keep_alive_interval_s: float = 10.0
    """A streaming client that waits gets an SSE comment this often, so that its connection is not taken for dead."""
    outage_wait_s: float = 30.0
    """Requests for a deployment wait this long after it lost its last engine for one to come back, or twice as long as
    its engines need for that, where that is longer and the queue's timeout allows it; then 503. They also wait for the
    first report of engines that the gateway has just learned of, as after its own restart. 0: they do not wait.
    """
    handover_timeout_s: float = 4.0
    """An engine that drains while no other of its deployment can take over is kept in use this long at most."""

    routing_policy: PolicyName = "Cost"
    """
    Of deployments whose `routing.policy` is `Auto`. `Cost`: where the request costs the fewest milliseconds. The others
    are there to be compared with it: `LeastRequest`, `RoundRobin`, `PowerOfTwo`, `PrefixHash` (KubeAI's) and
    `Weighted322` (llm-d's).
    """
    routing_session_ms: float = 50.0
    """Most predicted milliseconds that a session (`routing.sessionHeader`) may cost for staying on its endpoint."""
    remembered_prefix_chunks: int = 65536
    """Prefix chunks of prompts whose hashes are remembered, each of a block to 64 tokens or more; about 0.5 KB each."""
    decision_log_size: int = 256
    """Latest routing decisions that `/debug/decisions` can show."""

    state_stale_after_s: float = 3.0
    """No state frame for this long (engines send one a second): its load is ignored, own in-flight counts go on."""
    state_idle_timeout_s: float = 10.0
    """A state stream silent for this long is opened again."""
    reconnect_base_s: float = 0.1
    reconnect_max_s: float = 5.0
    """First and longest pause between attempts to open a state stream; each is drawn from the upper half."""
    ejection_base_s: float = 0.5
    ejection_max_s: float = 10.0
    """First and longest pause of an endpoint that failed; doubles with each failed probe."""
    max_ejected_share: float = 0.3
    """Share of a deployment's endpoints with fresh reports (at least one) that may be ejected for failures or slowness.
    """
    retry_share: float = 0.2
    """
    Tries beyond the first that may fail again, as share of the requests of the last 10 s; 10 are always allowed.
    Continuing what a lost engine had under way, and asking elsewhere after a refusal, do not count.
    """

    drain_delay_s: float = 0.0
    """After SIGTERM, time in which new requests are still taken while load balancers learn that `/readyz` fails."""
    drain_timeout_s: float = 30.0
    """After that, running requests get this long; then they end with an error event."""

    @property
    def has_control_token(self) -> bool:
        return bool(self.control_token) or self.control_token_file is not None

    def bounds_of_one_worker(self) -> WorkerBounds:
        """Its share, but never less than the largest body."""
        return WorkerBounds(
            max_requests=-(-self.max_requests // self.workers),
            max_body_bytes=max(self.max_body_bytes, self.max_in_flight_body_bytes // self.workers),
            journal_tokens=self.journal_tokens // self.workers,
        )

    def checked(self) -> GatewayConfig:
        """Return self, or raise `SettingsError` for the first setting that must not be used."""
        check_entries(self.api_keys, "api_keys")
        check_redis(self.redis)
        check_above_zero("stored_responses", self.stored_responses)
        check_batches(self.batches, self.redis)
        if self.tracing is not None:
            self.tracing.check()
        self._check_doors()
        self._check_numbers()
        return self

    def _check_doors(self) -> None:
        shares_keys = self.redis is not None and self.redis.keys
        has_keys = bool(self.api_keys) or self.api_keys_file is not None or shares_keys
        if has_keys and self.allow_anonymous:
            raise SettingsError(
                "allow_anonymous: true contradicts api_keys, api_keys_file and redis.keys. Remove the keys to accept "
                "all clients, or remove allow_anonymous."
            )
        if not has_keys and not self.allow_anonymous and not is_loopback_address(self.host):
            raise SettingsError(
                f"host: {self.host!r} can be reached from other machines and api_keys is empty, so every client could "
                "use the models. Set api_keys or api_keys_file, or bind to 127.0.0.1, or set allow_anonymous."
            )
        if self.discovery == "static" and not self.has_control_token and not is_loopback_address(self.control_host):
            raise SettingsError(
                f"control_host: {self.control_host!r} can be reached from other machines and control_token is empty; a "
                "token that is made at the start would be known on this machine only. Set control_token or "
                "control_token_file, or bind to 127.0.0.1."
            )
        if self.discovery == "kubernetes" and self.catalog.models:
            raise SettingsError(
                "catalog: with discovery `kubernetes` the cluster's objects are the catalogue. Empty it."
            )
        for origin in self.allowed_origins:
            if not is_origin(origin):
                raise SettingsError(
                    f"allowed_origins: {origin[:80]!r} is no origin. Write it like https://app.example.com."
                )

    def _check_numbers(self) -> None:
        for field in ("port", "control_port"):
            if not 0 <= getattr(self, field) <= 65535:
                value = getattr(self, field)
                raise SettingsError(f"{field}: {value} is not a port. Use 1 to 65535, or 0 for a free one.")
        for field in ("max_body_bytes", "max_header_bytes", "max_requests", "max_attempts", "remembered_prefix_chunks"):
            if getattr(self, field) < 1:
                raise SettingsError(f"{field}: {getattr(self, field)} must be at least 1.")
        if not 1 <= self.workers <= MAX_WORKERS:
            raise SettingsError(f"workers: {self.workers} is not between 1 and {MAX_WORKERS}. Use one a core at most.")
        for field in ("routing_session_ms", "decision_log_size"):
            if not getattr(self, field) >= 0:
                raise SettingsError(f"{field}: {getattr(self, field)} must be 0 or more.")
        if self.queue.max_requests < 0 or self.queue.max_bytes < 0 or self.queue.timeout_s < 0:
            raise SettingsError(
                f"queue: max_requests ({self.queue.max_requests}), max_bytes ({self.queue.max_bytes}) and timeout_s "
                f"({self.queue.timeout_s}) must be 0 or more. max_requests 0 lets no request wait but answers "
                "that lost their engine."
            )
        if not self.hang_timeout_s >= 1:
            raise SettingsError(f"hang_timeout_s: {self.hang_timeout_s} must be at least 1.")
        if self.keep_alive_interval_s <= 0:
            raise SettingsError(f"keep_alive_interval_s: {self.keep_alive_interval_s} must be above 0.")
        for field in ("max_ejected_share", "retry_share"):
            if not 0 <= getattr(self, field) <= 1:
                raise SettingsError(f"{field}: {getattr(self, field)} is not a share. Use a number from 0 to 1.")
        if self.journal_tokens < 0:
            raise SettingsError(f"journal_tokens: {self.journal_tokens} must not be negative. 0 keeps none.")
        if self.max_in_flight_body_bytes < self.max_body_bytes:
            raise SettingsError(
                f"max_in_flight_body_bytes: {self.max_in_flight_body_bytes} must be at least max_body_bytes "
                f"({self.max_body_bytes}), or the largest bodies would always be refused."
            )


def load_config(path: Path) -> GatewayConfig:
    """Read and check a JSON settings file; `SettingsError` names what is wrong."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"settings: cannot read {path}: {error.strerror}.") from error
    try:
        return msgspec.json.decode(raw, type=GatewayConfig).checked()
    except msgspec.ValidationError as error:
        raise SettingsError(f"settings: {path}: {error}.") from error
    except msgspec.DecodeError as error:
        raise SettingsError(f"settings: {path} is not valid JSON: {error}.") from error


def open_keys_file(path: str | None, *, quiet: bool = False) -> SecretFile | None:
    """Raises `SettingsError` when the file cannot be read, or has lines of which none is a key's entry.

    `quiet`: another part of this process logs what is wrong with it.
    """
    if path is None:
        return None
    try:
        return keys_file.open_keys_file(Path(path), quiet=quiet)
    except KeysFileError as error:
        raise SettingsError(f"api_keys_file: {error}") from error


def check_entries(entries: Iterable[str], where: str) -> None:
    """Raises `SettingsError` for the first that is wrong; a key itself must not be shown."""
    for index, entry in enumerate(entries):
        fault = fault_of(entry)
        if fault is not None:
            raise SettingsError(f"{where}[{index}]: {fault}")


def check_above_zero(where: str, settings: msgspec.Struct | None) -> None:
    """Raises `SettingsError` for the first number that is not."""
    for name, value in msgspec.structs.asdict(settings).items() if settings is not None else ():
        if isinstance(value, int | float) and not value > 0:
            raise SettingsError(f"{where}.{name}: {value} must be above 0.")


def check_batches(batches: BatchesConfig | None, redis: RedisConfig | None) -> None:
    """Raises `SettingsError` for the first setting that must not be used."""
    if batches is None:
        return
    check_above_zero("batches", batches)
    if not batches.directory and redis is None:
        raise SettingsError("batches: they need a place. Set batches.directory, or redis.")
    if batches.max_load > 1:
        raise SettingsError(f"batches.max_load: {batches.max_load} is not a share. Use a number up to 1.")
    if not batches.directory and batches.max_file_bytes > MAX_REDIS_VALUE_BYTES:
        raise SettingsError(
            f"batches.max_file_bytes: {batches.max_file_bytes} is more than a value in Redis may have, "
            f"{MAX_REDIS_VALUE_BYTES}. Use less, or batches.directory."
        )


def check_redis(redis: RedisConfig | None) -> None:
    """Raises `SettingsError` for the first setting that must not be used; a URL may hold a password."""
    if redis is None:
        return
    if bool(redis.url) == (redis.url_file is not None):
        raise SettingsError("redis: exactly one of url and url_file says where Redis is. Set one, or leave redis out.")
    if redis.url and not redis.url.startswith(("redis://", "rediss://", "unix://")):
        raise SettingsError("redis.url: begins with none of redis://, rediss:// and unix://.")
    if not 1 <= redis.timeout_ms <= 10_000:
        raise SettingsError(f"redis.timeout_ms: {redis.timeout_ms} is not between 1 and 10000.")
    if not redis.prefix or set(redis.prefix) & set("{} \n"):
        raise SettingsError(f"redis.prefix: {redis.prefix!r} must have a character, and no blanks or braces.")
    if redis.expected_gateways < 1:
        raise SettingsError(f"redis.expected_gateways: {redis.expected_gateways} must be at least 1.")
