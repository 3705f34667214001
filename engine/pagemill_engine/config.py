"""The engine's settings with meaning, unit and default. They are filled from the command line or from a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from pagemill_execution.config import ExecutionConfig
from pagemill_models.tokenizer_files.generation_defaults import GenerationConfig, GenerationDefaults
from pagemill_protocol.report.adapters import WantedAdapter
from pagemill_protocol.request.answer_format import ControlTokenMode, HostedToolMode
from pagemill_protocol.request.sampling import MAX_ANSWER_VALUES
from pagemill_protocol.request.structured_outputs import DEFAULT_FORM_CHARS
from pagemill_servers.tls.config import TLSConfig
from pagemill_servers.tracing.config import TracingConfig

PrefixScope = Literal["deployment", "tenant", "key"]


class EngineConfig(ExecutionConfig, frozen=True, kw_only=True):
    """All settings of an engine."""

    served_names: list[str] = []
    """Names that clients may use; empty: derived from the source."""
    enable_prefix_caching: bool = True
    prefix_scope: PrefixScope = "tenant"
    """Which callers share cached prompts, if `api_keys_file` or a gateway identifies callers."""
    policy: Literal["fcfs", "priority", "shortest-prefill-first"] = "fcfs"
    """Order of prefills. `fcfs`: by arrival; `priority`: each level counts as an arrival 30 s later;
    `shortest-prefill-first`: each prompt token counts as an arrival 2 ms later. With every policy the newest
    request of the lowest priority is preempted first."""
    max_num_waiting: int = 1024
    """Most choices that may wait in the engine. Further requests get 503, and a request with more choices than that
    400."""
    max_answer_values: int = MAX_ANSWER_VALUES
    """Most log probabilities and token ids of an answer that is not streamed: `n` (or `best_of`) x `max_tokens` x those
    of each token, of all prompts of a body together. Larger requests get 400; an answer without `max_tokens` ends where
    it has that many."""
    max_form_chars: int = DEFAULT_FORM_CHARS
    """Most characters of a form of answers (a JSON schema, a grammar), and of the schemas of all strict or forced tools
    together. Larger ones get 400; 2,097,152 at most."""
    seed: int | None = None
    """Seed of requests that send none; `None`: drawn at random per request."""
    chat_template: str | None = None
    """Chat template that replaces the model's own."""
    generation_config: GenerationConfig = "auto"
    """Whether the model's generation_config.json sets sampling values of requests that send none; `vllm`: it does
    not."""
    generation_defaults: GenerationDefaults | None = None
    """Sampling values for requests that send none; they replace the model's own."""
    tool_call_parser: str = "auto"
    """How tool calls are read from answers; `auto`: in the form that the chat template asks for, `none`: requests
    with tools are refused."""
    reasoning_parser: str = "auto"
    """How reasoning is separated from text; `auto`: by the chat template's markers, `none`: it stays in the text."""
    chat_control_tokens: ControlTokenMode = "text"
    """What control tokens such as `<|im_end|>` are that clients write in the messages and tools of chats: `text`, or
    the `tokens` themselves, with which a client ends its message and writes others. Prompts that are not rendered have
    tokens."""
    hosted_tools: HostedToolMode = "ignore"
    """What is done with tools of `/v1/responses` that run at OpenAI, such as `web_search`: `ignore` leaves them out and
    names them in the header `x-pagemill-unread-fields` and in the log, `refuse` answers with status 400."""
    lora_modules: list[WantedAdapter] = []
    """Adapters to serve from the start. The engine does not start if one of them is refused."""
    adapters_file: str | None = None
    """File that lists adapters to serve: `{"adapters": [{"name": "a", "source": "s3://B/P", "pinned": true}]}`.
    A change takes effect within seconds. What is wrong with an adapter concerns only that adapter."""
    eos_token_ids: list[int] = []
    """Tokens that end a choice; filled from the tokenizer bundle when the engine starts."""

    OF_TEXT: ClassVar[Mapping[str, Any]] = {
        **ExecutionConfig.OF_TEXT,
        "generation_defaults": None,
        "tool_call_parser": "auto",
        "reasoning_parser": "auto",
        "chat_template": None,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_num_waiting", "max_answer_values", "max_form_chars"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.enable_lora and (self.lora_modules or self.adapters_file is not None):
            name = "lora_modules" if self.lora_modules else "adapters_file"
            raise ValueError(f"{name} needs enable_lora: set it, or remove {name}")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 8000
    """Data port; 0 takes a free one."""
    control_host: str = "127.0.0.1"
    control_port: int = 8001
    internal_token: str = ""
    """Bearer token for `/internal/*` and for all of the control port but `/livez`, `/readyz`, `/metrics` and
    `/version`. Without this token and without a token file, the server creates a token at its start, in a file
    that only its user can read: `pagemill-UID/control-ADDRESS-PORT.token` below `$XDG_RUNTIME_DIR`, or below the
    temporary folder."""
    internal_tokens_file: str | None = None
    """File of further such tokens, one per line, read again when it changes. With an empty file no token is
    accepted."""
    api_keys_file: str | None = None
    """File of the API keys for the OpenAI routes, one entry per line: the SHA-256 of a key in hex, and its tenant
    (`HASH tenant=NAME`). The format is that of a gateway's `api_keys_file`, but limits, models and priorities are
    refused: only a gateway enforces them. A change takes effect within a second. `None`: the routes need no key."""
    names_file: str | None = None
    """File of the model's names, `{"names": ["chat"]}`, in place of `served_names`; one that is absent or lists none
    changes nothing. A change takes effect within seconds. `None`: `names.json` beside `internal_tokens_file`."""
    only_gateways: bool = False
    """Whether the OpenAI routes need the internal token and nothing else: clients use a gateway, which enforces keys
    and limits."""
    allowed_hosts: list[str] = []
    """Names in the Host header by which clients may address this server on loopback without API keys, besides those
    that `control_allowed_hosts` describes: a web page could bind any other name to this machine."""
    allowed_origins: list[str] = []
    """Origins of web pages that may use the data port from a browser (CORS), such as `https://app.example.com`; `*`:
    all. Cookies are never allowed. Empty: none."""
    control_allowed_hosts: list[str] = []
    """Names in the Host header by which callers may address the control port. IP addresses, the machine's own name,
    names without a dot and names below `localhost`, `local`, `internal` and `svc` are always allowed."""
    tls: TLSConfig | None = None
    """Serve both ports by HTTPS, TLS 1.2 and later; `None`: by HTTP."""
    max_body_bytes: int = 8 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    max_in_flight_body_bytes: int = 128 * 1024 * 1024
    """Memory for the requests inside the server: bodies that arrive, and prompts (72 bytes a token, and 8 for each
    choice) until their answers end. Further requests get 503. With `api_keys_file`, a tenant (or key without a tenant)
    has at most nine times as much as is free, and further requests of it get 429."""
    max_unread_bytes: int = 256 * 1024 * 1024
    """Memory for the answers that were generated and not read yet, of all requests together. When it is full, the
    slowest readers' requests end with an error. A single stream may take 16 MiB of it."""
    idle_connection_timeout_s: int = 120
    """A client's connection that is idle for this long is closed; longer than proxies and gateways keep theirs."""
    body_timeout_s: float = 30.0
    """Longest time for a request body to arrive; a slower one gets 408."""
    enable_lora_routes: bool = False
    """Whether clients may load and unload adapters, by vLLM's routes `/v1/load_lora_adapter` and
    `/v1/unload_lora_adapter`. A client names any path or source that the engine can read."""
    tracing: TracingConfig | None = None
    """OpenTelemetry traces of requests that clients send to this engine directly. A gateway traces the requests that
    it sends."""
    drain_timeout_s: float = 30.0
    """Time for running requests after SIGTERM; then they end with an error event."""
    termination_log: str | None = None
    """File for the termination message, such as Kubernetes' `/dev/termination-log`."""

    def __post_init__(self) -> None:
        for name in ("port", "control_port"):
            value = getattr(self, name)
            # The address resolver would take such a number modulo 65536.
            if not 0 <= value <= 65535:
                raise ValueError(f"{name}: {value} is not a port; use 1 to 65535, or 0 for a free one")
        if self.idle_connection_timeout_s < 1:
            raise ValueError(f"idle_connection_timeout_s: {self.idle_connection_timeout_s} must be at least 1")
