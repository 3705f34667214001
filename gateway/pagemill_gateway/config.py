"""The gateway's settings, with the meaning, the unit and the default of every field. They are read once at start.

Models and endpoints, which change while the gateway runs, are in the catalogue (`discovery`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pagemill_protocol.catalog import Catalog
from pagemill_protocol.request.answer_format import ControlTokenMode, HostedToolMode
from pagemill_protocol.request.sampling import MAX_ANSWER_VALUES
from pagemill_protocol.request.structured_outputs import DEFAULT_FORM_CHARS
from pagemill_routing.config import RoutingConfig
from pagemill_routing.policies.registry import check_policy
from pagemill_servers.auth import is_loopback_address
from pagemill_servers.connection_limits import DEFAULT_MAX_CONNECTIONS, trusted_networks
from pagemill_servers.cors import is_origin
from pagemill_servers.keys import file as keys_file
from pagemill_servers.keys.entries import fault_of
from pagemill_servers.keys.file import KeysFileError
from pagemill_servers.process.settings import SettingsError as SettingsError
from pagemill_servers.process.settings import read_settings
from pagemill_servers.secrets.secret_file import SecretFile
from pagemill_servers.tls.config import TLSConfig
from pagemill_servers.tracing.config import TracingConfig

MAX_WORKERS = 64
MAX_REDIS_VALUE_BYTES = 512 * 1024 * 1024


class KeysSecret(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Secret from which engine tokens are derived; the operator creates it and rotates its keys."""

    namespace: str = "pagemill-system"
    name: str = "pagemill-keys"


class KubernetesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The discovery of models and engines in a cluster, with the credentials of the gateway's pod."""

    namespaces: list[str] = []
    """Namespaces whose LLMDeployments are served; empty for all."""
    keys_secret: KeysSecret = KeysSecret()
    last_known_file: str = "/var/lib/pagemill/catalog.json"
    """File with the latest catalogue and keys, for a start while the API server is down. It contains secrets, so put it
    on a volume in memory."""
    kubeconfig: str | None = None
    """Kubeconfig file for a gateway outside the cluster; `None` for the service account of the pod."""
    api_server: str = ""
    """URL of the API server; empty for that of the kubeconfig or of the pod's environment."""
    watch_idle_timeout_s: float = 40.0
    """A watch that is silent for this long is reopened; API servers are asked to end each watch after 30 s."""
    backoff_base_s: float = 0.2
    backoff_max_s: float = 5.0
    """First and longest pause between attempts to reach the API server; half of each pause is random."""


class RedisConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Redis through which several gateways share limits. While it is unavailable, each applies its share."""

    url: str = ""
    """`redis://`, `rediss://` (TLS; `?ssl_ca_certs=FILE` names the authority) or `unix://`."""
    url_file: str | None = None
    """File whose first line is the URL, instead of `url`; read at the start."""
    password_file: str | None = None
    """File whose first line is the password; read for every connection, and preferred to a password in the URL."""
    prefix: str = "pagemill"
    """Prefix of all keys in Redis."""
    keys: bool = False
    """Also accept the API keys in the hash `PREFIX:keys`: its fields are SHA-256 of keys, its values the rest of the
    entries."""
    timeout_ms: float = 100.0
    """Timeout of a call to Redis. After three in a row, requests do not call Redis until it responds to probes."""
    expected_gateways: int = 1
    """Number of gateways that share the limits, for a start while Redis is unavailable; later they count themselves."""


class StoredResponsesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Store responses of `/v1/responses`: in Redis if `redis` is set, otherwise in the memory of this gateway."""

    max_age_s: float = 24 * 3600.0
    """Time after which a response is deleted."""
    max_per_tenant: int = 1000
    """Maximum number of responses per tenant (or per key without a tenant); beyond it, the oldest are deleted."""
    max_bytes: int = 64 * 1024 * 1024
    """Maximum bytes of all responses in memory; beyond it, the oldest of the tenant with the most bytes are deleted."""
    max_response_bytes: int = 4 * 1024 * 1024
    """A response that is larger, including its whole input, is not stored."""


class BatchesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files and batches (`/v1/files`, `/v1/batches`), which run with the capacity that live requests leave idle."""

    directory: str = ""
    """Directory for files and batches; if gateways share it, file locks must work across them. Empty for Redis."""
    max_file_bytes: int = 100 * 1024 * 1024
    """Maximum size of an uploaded file; at most 512 MiB in Redis."""
    max_files: int = 10_000
    """Maximum number of files per tenant (or per key without a tenant); further uploads are refused."""
    max_tenant_bytes: int = 1024 * 1024 * 1024
    """Maximum bytes of all files of a tenant; further uploads are refused."""
    max_batches: int = 100
    """Maximum number of unfinished batches per tenant; further ones are refused."""
    max_lines: int = 50_000
    """Maximum number of requests in a batch."""
    max_load: float = 0.5
    """Lines start only while no request waits and an engine uses less than this share of its slots and blocks."""
    max_concurrency: int = 64
    """Maximum number of lines that one process of the gateway runs at a time."""
    upload_timeout_s: float = 600.0
    """A longer upload gets status 408."""


class EngineTLSConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The verification of certificates of engines with `https://` URLs."""

    ca_file: str = ""
    """PEM file with the CA certificates, read again when it changes; empty for those of this machine."""
    server_name: str = ""
    """Host name to expect in the certificates; empty for the host of the engine's URL."""


class WorkerBounds(NamedTuple):
    """The limits of one worker."""

    max_connections: int
    max_requests: int
    max_body_bytes: int
    journal_tokens: int


class GatewayConfig(RoutingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8080
    """The data port, with the OpenAI routes."""
    workers: int = 1
    """
    Number of processes that serve the data port, for traffic of more than about one CPU core. With 1, the whole gateway
    is one process. With more, one further process makes all decisions and serves the control port, and another one
    keeps all of them running; each worker gets its share of `max_connections`, `max_requests`,
    `max_in_flight_body_bytes` and `journal_tokens`.
    """
    hang_timeout_s: float = 30.0
    """
    With more than one worker, a process of the gateway that hangs for this long is killed and replaced. Below 5, a
    process on a busy machine may be taken for a hanging one.
    """
    control_host: str = "127.0.0.1"
    control_port: int = 8081
    control_token: str = ""
    """
    Bearer token for all routes of the control port but `/livez`, `/readyz`, `/metrics` and `/version`. Without a token
    and without a file, which is possible on a loopback address only, the gateway creates a token at its start, in a
    file that only its user can read: `pagemill-UID/control-ADDRESS-PORT.token` in `$XDG_RUNTIME_DIR` or the temporary
    folder. With discovery `kubernetes`, further tokens are derived from `kubernetes.keys_secret`, and none is created.
    """
    control_token_file: str | None = None
    """File with further control tokens, one per line; it is read again when it changes."""
    control_allowed_hosts: list[str] = []
    """
    Further values of the Host header that requests with a control token may have. IP addresses, the machine's own name,
    names without a dot, and names in `localhost`, `local`, `internal` and `svc` are always accepted.
    """
    allowed_hosts: list[str] = []
    """
    Further values of the Host header that requests to a gateway on loopback without API keys may have, besides those
    that are always accepted (see `control_allowed_hosts`). Other names are refused, because a web page could use DNS
    rebinding.
    """
    allowed_origins: list[str] = []
    """
    Origins whose web pages may call the data port from a browser (CORS), such as `https://app.example.com`, or `*` for
    all. Cookies are never allowed. Empty for none.
    """
    api_keys: list[str] = []
    """
    Accepted API keys, each with the SHA-256 in hex and, optionally, tenant, models, limits and priority:
    `HASH tenant=NAME models=A,B requests_per_minute=N tokens_per_minute=N concurrency=N tokens_per_day=N
    tokens_per_month=N priority=high|normal|low role=admin`. `tokens_per_minute@A=N` and the like limit one model or
    adapter. A key with `role=admin` may look at the page `/ui`.
    """
    api_keys_file: str | None = None
    """
    File with further entries of API keys, one per line; empty lines and comments (`#`) are ignored. A change takes
    effect within a second. If the file has an invalid line, the previous entries stay in use, and
    `pagemill_gateway_api_keys_file_valid` is 0. At the start, invalid lines are skipped with a warning; a file with
    lines but without a valid entry is an error. With an empty file, every request is refused.
    """
    redis: RedisConfig | None = None
    """Share limits with other gateways; `None`: each gateway counts alone."""
    stored_responses: StoredResponsesConfig | None = None
    """Store responses of `/v1/responses`, for `previous_response_id`; `None`: do not store any."""
    batches: BatchesConfig | None = None
    """Turn on files and batches; `None`: their routes return an error that names this setting."""
    tls: TLSConfig | None = None
    """Serve the data port with HTTPS, TLS 1.2 or later; `None`: with HTTP. The control port is always HTTP."""
    engine_tls: EngineTLSConfig = EngineTLSConfig()
    tracing: TracingConfig | None = None
    """Send OpenTelemetry traces; `None`: no tracing."""
    allow_anonymous: bool = False
    """Serve clients without a key on an address that other machines can reach. It cannot be combined with keys."""
    discovery: Literal["static", "kubernetes"] = "static"
    """
    Source of the catalogue. `static`: `catalog`, then `PUT /catalog`. `kubernetes`: watched LLMDeployments and
    EndpointSlices.
    """
    kubernetes: KubernetesConfig = KubernetesConfig()
    catalog: Catalog = Catalog()
    """Models and endpoints to serve at start; `PUT /catalog` replaces them."""

    max_connections: int = DEFAULT_MAX_CONNECTIONS
    """
    Maximum number of open connections of the data port, also limited by this process's limit of open files. One client
    has at most half of them: a tenant (or a key without one), and an address (or an IPv6 network of 64 bits) for
    connections without a valid key so far. At a limit, a new connection takes the place of the one that has been idle
    for longest; where all are busy, it gets status 503.
    """
    trusted_proxies: list[str] = []
    """
    Addresses and networks of proxies, such as `10.0.0.0/8`. A request from one of them counts for the last address in
    its header `X-Forwarded-For` that is not a trusted proxy's. Without it, all connections of a proxy that have had no
    valid key count as one client's.
    """
    max_body_bytes: int = 8 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    """Maximum bytes of the headers of a request; a request may have 100 of them."""
    idle_connection_timeout_s: int = 75
    """A client's connection that is idle for this long is closed. A proxy before the gateway must close its idle
    connections earlier: otherwise a request may meet a connection that is being closed, and gets status 502."""
    websocket_idle_timeout_s: float = 600.0
    """A WebSocket on which no message arrives for this long is closed. Where connections are short, one without a
    response in progress makes room for another earlier."""
    body_timeout_s: float = 30.0
    """A body that takes longer to arrive gets status 408."""
    max_answer_values: int = MAX_ANSWER_VALUES
    """Maximum number of log probabilities and token ids of an answer that is not streamed: `n` (or `best_of`) x
    `max_tokens` x those of each token, of all prompts of a body together. Larger requests get status 400; an answer
    without `max_tokens` ends where it has that many. Engines have the same setting."""
    max_form_chars: int = DEFAULT_FORM_CHARS
    """Maximum characters of a form of answers (a JSON schema, a grammar), and of the schemas of all strict or forced
    tools together. Larger ones get status 400; 2,097,152 at most. Engines have the same setting."""
    chat_control_tokens: ControlTokenMode = "text"
    """What control tokens such as `<|im_end|>` are that clients write in the messages and tools of chats: `text`, or
    the `tokens` themselves, with which a client ends its message and writes others. Prompts that are not rendered have
    tokens. Engines have the same setting."""
    hosted_tools: HostedToolMode = "ignore"
    """What is done with tools of `/v1/responses` that run at OpenAI, such as `web_search`: `ignore` leaves them out and
    names them in the header `x-pagemill-unread-fields` and in the log, `refuse` answers with status 400. Engines have
    the same setting."""
    max_requests: int = 4096
    """
    Maximum number of requests inside the gateway; further ones get status 503. It limits the memory for streams. A
    tenant (or key without a tenant) may have nine times as many as are free, so alone all but the last tenth; further
    ones of it get status 429. Without keys there are no shares.
    """
    max_in_flight_body_bytes: int = 256 * 1024 * 1024
    """
    Maximum bytes of the requests inside the gateway: bodies with what they become while they are parsed and tokenized,
    answers that must be whole before they are sent, and answers that their clients do not read. Further requests get
    status 503. Tenants have shares as in `max_requests`; beyond its share, a tenant's requests get status 429, and its
    answers that have remained unread for longest are ended.
    """
    request_timeout_s: float | None = None
    """Deadline of requests without the header `x-request-timeout-s`; `None` for none."""
    connect_timeout_s: float = 2.0
    """Timeout of connecting to an engine."""
    accept_timeout_s: float = 30.0
    """An engine that neither accepts nor refuses a request within this time counts as failed."""
    silence_timeout_s: float = 5.0
    """An engine that is silent in an answer and in its state stream for this long counts as failed."""
    journal_tokens: int = 16 * 1024 * 1024
    """Maximum number of tokens of answers in progress that are kept (4 bytes each), so that another engine can continue
    them. Further answers are served, but cannot be continued. Tenants have shares as in `max_requests`.
    """
    slow_client_timeout_s: float = 120.0
    """A client that reads nothing for this long loses its stream."""
    keep_alive_interval_s: float = 10.0
    """Interval of SSE comments for waiting streaming clients, so that their connections are not taken for dead."""
    state_idle_timeout_s: float = 10.0
    """A state stream that is silent for this long is reopened."""
    reconnect_base_s: float = 0.1
    reconnect_max_s: float = 5.0
    """First and longest pause between attempts to open a state stream; half of each pause is random."""

    drain_delay_s: float = 0.0
    """Time after SIGTERM in which new requests are still accepted, until load balancers notice that `/readyz` fails."""
    drain_timeout_s: float = 30.0
    """Time that running requests have after the delay; then they end with an error event."""

    @property
    def has_control_token(self) -> bool:
        return bool(self.control_token) or self.control_token_file is not None

    def bounds_of_one_worker(self) -> WorkerBounds:
        """Return one worker's share of the limits, but at least the largest body."""
        return WorkerBounds(
            max_connections=-(-self.max_connections // self.workers),
            max_requests=-(-self.max_requests // self.workers),
            max_body_bytes=max(self.max_body_bytes, self.max_in_flight_body_bytes // self.workers),
            journal_tokens=self.journal_tokens // self.workers,
        )

    def checked(self) -> GatewayConfig:
        """Return self, or raise `SettingsError` for the first invalid setting."""
        check_entries(self.api_keys, "api_keys")
        check_redis(self.redis)
        check_above_zero("stored_responses", self.stored_responses)
        check_batches(self.batches, self.redis)
        if self.tracing is not None:
            self.tracing.check()
        try:
            check_policy(self.routing_policy)
        except ValueError as error:
            raise SettingsError(f"routing_policy: {error}") from error
        self._check_access()
        self._check_numbers()
        return self

    def _check_access(self) -> None:
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
        for proxy in self.trusted_proxies:
            try:
                trusted_networks([proxy])
            except ValueError as error:
                raise SettingsError(
                    f"trusted_proxies: {proxy[:80]!r} is neither an address nor a network. Write it like 10.0.0.0/8."
                ) from error
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
        for field in (
            "max_connections",
            "max_body_bytes",
            "max_header_bytes",
            "max_requests",
            "max_attempts",
            "remembered_prefix_chunks",
            "max_answer_values",
            "max_form_chars",
            "idle_connection_timeout_s",
        ):
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
        for field in ("keep_alive_interval_s", "websocket_idle_timeout_s"):
            if getattr(self, field) <= 0:
                raise SettingsError(f"{field}: {getattr(self, field)} must be above 0.")
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
    """Read and check a JSON settings file. Raises `SettingsError`."""
    return read_settings(path, GatewayConfig).checked()


def open_keys_file(path: str | None, *, quiet: bool = False) -> SecretFile | None:
    """Open a file of API keys; None without a path.

    `quiet`: do not log invalid lines, because another part of this process does. Raises `SettingsError` if the file
    cannot be read, or has lines but no valid entry.
    """
    if path is None:
        return None
    try:
        return keys_file.open_keys_file(Path(path), quiet=quiet)
    except KeysFileError as error:
        raise SettingsError(f"api_keys_file: {error}") from error


def check_entries(entries: Iterable[str], where: str) -> None:
    """Raise `SettingsError` for the first invalid entry, without showing it, because it may be a key."""
    for index, entry in enumerate(entries):
        fault = fault_of(entry)
        if fault is not None:
            raise SettingsError(f"{where}[{index}]: {fault}")


def check_above_zero(where: str, settings: msgspec.Struct | None) -> None:
    """Raise `SettingsError` for the first number in the settings that is not above zero."""
    for name, value in msgspec.structs.asdict(settings).items() if settings is not None else ():
        if isinstance(value, int | float) and not value > 0:
            raise SettingsError(f"{where}.{name}: {value} must be above 0.")


def check_batches(batches: BatchesConfig | None, redis: RedisConfig | None) -> None:
    """Raise `SettingsError` for the first invalid setting of batches."""
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
    """Raise `SettingsError` for the first invalid setting of Redis, without its URL, which may have a password."""
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
