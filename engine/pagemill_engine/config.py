"""The engine's settings with meaning, unit and default. They are filled from the command line or from a plan."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Literal, NamedTuple

import msgspec

from pagemill_models.adapters.limits import MAX_RANK
from pagemill_models.tokenizer_files.generation_defaults import GenerationConfig, GenerationDefaults
from pagemill_protocol.engine_ports import RENDEZVOUS_PORT
from pagemill_protocol.report.adapters import WantedAdapter
from pagemill_protocol.report.cache_kinds import CacheKind
from pagemill_protocol.report.state import StepTimeParams
from pagemill_protocol.request.answer_format import ControlTokenMode, HostedToolMode
from pagemill_protocol.request.sampling import MAX_ANSWER_VALUES
from pagemill_protocol.request.structured_outputs import DEFAULT_FORM_CHARS
from pagemill_servers.tls.config import TLSConfig
from pagemill_servers.tracing.config import TracingConfig

PrefixScope = Literal["deployment", "tenant", "key"]

_LEAST = {
    "max_model_len": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "block_size": 1,
    "kv_cache_memory_bytes": 1,
    "max_num_waiting": 1,
    "max_answer_values": 1,
    "max_form_chars": 1,
    "num_threads": 1,
    "num_kv_blocks": 1,
    "vocab_size": 1,
    "max_loras": 1,
    "max_lora_rank": 1,
    "max_cpu_loras": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
}
"""Smallest values. The smallest context is one token of prompt and one of output."""


MOST_RANKS = 64
"""Most processes that compute one model together."""
MOST_PROPOSED = 16
"""Most tokens that may be proposed for a request in one step."""


PROPOSING = ("auto", "ngram", "draft", "eagle3", "mtp", "off")
"""Methods of this package."""
WITH_SOURCE = ("draft", "eagle3")
"""Methods that name what drafts."""
PROPOSER_GROUP = "pagemill.proposers"
"""Entry points of methods of other packages (`loop.speculation`)."""


class SimulatedKinds(msgspec.Struct, frozen=True):
    """The cache of a simulated model with windows or states."""

    kinds: tuple[CacheKind, ...]
    counts: tuple[int, ...]
    """Blocks of each."""
    shares_memory: bool = False
    """Whether memory moves between the first and the last kind."""


class StepLimits(NamedTuple):
    """The most requests and tokens of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int


CPU_STEP = StepLimits(64, 512)
"""Defaults on a CPU and for a simulated device; `sizing.step_limits` chooses those of a GPU."""


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are proposed that a step verifies together. Answers do not depend on it."""

    method: str = "auto"
    """`auto`: what a client predicts (`prediction` of a chat), and what the model's own layer drafts, if it has one and
    is no hybrid;
    `ngram`: what a client predicts, and what followed the last tokens where they stood before, in the prompt, in the
    answer or in recent answers to prompts that begin alike; `draft`: what clients predict, and what the model of
    `source` drafts; `eagle3`: likewise, by a head that was trained for the model; `mtp`: likewise, by the model's own
    layer; `off`: nothing. Installed packages can register others."""
    source: str | None = None
    """What drafts, with the schemes of `model`: a smaller model with the same tokenizer, or with `eagle3` a head."""
    num_tokens: int = 8
    """Most tokens proposed for a request in one step, 1 to 16. How many are, if any, is chosen by what a step costs."""

    def __post_init__(self) -> None:
        if self.method not in PROPOSING and self.method not in entry_points(group=PROPOSER_GROUP).names:
            raise ValueError(
                f"there is no method {self.method[:80]!r}; there are {', '.join(PROPOSING)}, and those that installed "
                f"packages register (entry point group {PROPOSER_GROUP})"
            )
        if (self.method in WITH_SOURCE) != (self.source is not None):
            problem = "needs the source of what drafts" if self.source is None else "takes no source; remove it"
            raise ValueError(f"method {self.method} {problem}")
        if not 1 <= self.num_tokens <= MOST_PROPOSED:
            raise ValueError(f"num_tokens must be 1 to {MOST_PROPOSED}, got {self.num_tokens}")


class NodesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several machines or pods whose processes compute one model together, each with equally many of them."""

    count: int
    """Number of nodes."""
    rank: int = 0
    """Number of this node. Node 0 serves; the others compute with it."""
    address: str = ""
    """Name or address of node 0, which all nodes know."""
    of_group: bool = False
    """Whether the nodes are the pods of a LeaderWorkerSet's group: each gets its `rank` and the `address` from the
    environment (`LWS_WORKER_INDEX`, `LWS_LEADER_ADDRESS`), and is restarted with its group."""
    port: int = RENDEZVOUS_PORT
    """Port of node 0 at which the others join. Ranks also listen at free ports of their own."""
    token: str = ""
    """What ranks must know to join; the same on all nodes."""
    tokens_file: str | None = None
    """File whose first line is the token, if `token` is empty."""
    timeout_s: float = 300.0
    """How long nodes wait for each other at the start."""

    def __post_init__(self) -> None:
        if not 2 <= self.count <= MOST_RANKS:
            raise ValueError(f"nnodes must be 2 to {MOST_RANKS}, got {self.count}")
        if not 0 <= self.rank < self.count:
            raise ValueError(f"node_rank must be 0 to {self.count - 1}, got {self.rank}")
        if not self.address and not self.of_group:
            raise ValueError("master_addr is empty; set it to a name or an IP address of node 0")
        if not 1 <= self.port <= 65535:
            raise ValueError(f"master_port: {self.port} is not a port; use 1 to 65535")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    """Source URI or path: `package://dist/path`, `file:///path`, or a plain path to a folder or `.gguf` file."""
    model_folder: str | None = None
    """Folder of the model while it is being fetched (`partial_download`), set when the engine starts; `None`: the
    model is complete and found by `model`."""
    served_names: list[str] = []
    """Names that clients may use; empty: derived from the source."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """`cuda`: the visible NVIDIA device, with Triton kernels (compute capability 8.0 and later), or, with
    TRITON_INTERPRET=1, Triton's interpreter on the CPU; `auto`: `cuda` if there is such a device, else `cpu`."""
    kernel_cache_dir: str | None = None
    """Folder that keeps a GPU's compiled kernels from one start to the next, for all engines that share it; `None`:
    Triton's own folder in the home directory of the process."""
    cuda_graphs: bool = True
    """Whether steps on a GPU run as CUDA graphs, recorded at the start for padded numbers of requests and tokens:
    decodes of up to 512 requests, and steps with prompts of up to 1024 tokens, of small models up to 8192.
    Without graphs each kernel is launched by itself, which takes less memory and more of the host's time."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of float weights and of the KV cache. `auto` on a GPU: bfloat16. `auto` on a CPU: bfloat16 if the
    processor multiplies it (with AVX512_BF16 by Pagemill's kernels, which keep 8- and 4-bit weights quantized;
    with AMX by oneDNN), else float32; float32 also with `deterministic`, with `quantization` if oneDNN multiplies,
    and for embedding and reranking models on Intel processors without AMX. The native kernels always accumulate in
    float32 and keep matrices that are stored in bfloat16 in that type. With `auto` they round activations to 16
    bits when they multiply 4-bit weights, which is faster; with `float32` they do not. On a CPU only torch computes
    in float16."""
    quantization: Literal["none", "int8", "int4", "w8a8", "fp8"] = "none"
    """Quantizes weights while they are loaded. `int8`, `int4`: integers of 8 or 4 bits (embedding and head always
    8), with a scale for every 32 inputs; weights that are stored in as few bits already stay as they are. `w8a8`
    and `fp8` need a GPU: weights and activations are multiplied as int8 or as e4m3 (compute capability 8.9 and
    later), with a scale for each output and each token; embedding and head as with `int8`; weights that are
    stored quantized stay as they are."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together; `None`: the model's own limit, capped by the KV cache."""
    max_num_seqs: int | None = None
    """Most requests in one step; `None`: chosen for the device. On a CPU 64. On a GPU 256 with 36 GiB of memory or
    more, 128 with 14, else 64; fewer if the largest step would take more than a quarter of the memory that the
    weights leave."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step, prefill and decode together; `None`: chosen with `max_num_seqs`: 512 on a CPU; 8192,
    2048 or 1024 on a GPU. A larger budget makes prefills cheaper, but decodes wait longer for a step that they
    share with one."""
    block_size: int = 16
    """Tokens of one KV block."""
    kv_cache_memory_bytes: int | None = None
    """Memory of the KV cache; `None`: 1 GiB or a quarter of the free memory, whichever is less; on a GPU nine tenths
    of its free memory, less the weights and the largest step."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8", "fp8"] = "auto"
    """Type of keys and values; `auto`: as `dtype`. Compared with float32, bfloat16 takes half the memory, int8 and
    fp8 (with a scale for each token and head) little more than a quarter. On a CPU a type other than `dtype`
    needs the native kernels. fp8 (e4m3) needs a GPU of compute capability 8.9 or later."""
    deterministic: bool = False
    """Whether a request gets the same bits whatever else runs, however its prompt is divided and whatever the prefix
    cache contains. This needs the CPU's native kernels in float32 or bfloat16, does not use oneDNN, and makes
    attention somewhat slower."""
    speculative: SpeculationConfig = SpeculationConfig()
    """Proposed tokens, of which a step verifies several for a request."""
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
    overlap: bool | None = None
    """Whether a step is launched before the tokens of the one before are read; `None`: if the device gains by it."""
    num_threads: int | None = None
    """Number of compute threads; `None`: the cores this process may use (affinity and cgroup quota). The environment
    variable `PAGEMILL_CPU_LEVEL` sets the instruction level of the CPU's kernels: `x86-64-v4-bf16`, `x86-64-v4`,
    `x86-64-v3`, `armv8-a`, or `none` for torch's kernels; without it the highest level of the processor is used."""
    tensor_parallel_size: int = 1
    """Number of processes on this machine that divide each layer: the heads of attention, the inner units of MLPs and
    the vocabulary, as evenly as they go. CPU only. The threads are divided among all processes."""
    pipeline_parallel_size: int = 1
    """Number of stages of the model's layers, each of `tensor_parallel_size` processes, which compute different steps
    at the same time. CPU only."""
    nodes: NodesConfig | None = None
    """Nodes among which the processes of `tensor_parallel_size` x `pipeline_parallel_size` are divided; `None`: all are
    on this machine."""
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
    enable_lora: bool = False
    """Whether LoRA adapters are served beside the model. Their memory is part of the plan from the start."""
    max_loras: int = 1
    """Adapters that one step may use. Requests for more wait until those of another adapter have ended."""
    max_lora_rank: int = 16
    """Largest rank of an adapter, up to 512."""
    max_cpu_loras: int | None = None
    """Adapters that stay in memory, those that steps use included; others are loaded again from their folders when
    they are asked for. `None`: `max_loras`."""
    lora_modules: list[WantedAdapter] = []
    """Adapters to serve from the start. The engine does not start if one of them is refused."""
    adapters_file: str | None = None
    """File that lists adapters to serve: `{"adapters": [{"name": "a", "source": "s3://B/P", "pinned": true}]}`.
    A change takes effect within seconds. What is wrong with an adapter concerns only that adapter."""
    null_runner: bool = False
    """Simulated device: real scheduler, KV cache and HTTP, but no model; steps wait the predicted time."""
    num_kv_blocks: int | None = None
    """Blocks of the KV cache; overrides `kv_cache_memory_bytes`."""
    eos_token_ids: list[int] = []
    """Tokens that end a choice; filled from the tokenizer bundle when the engine starts."""
    vocab_size: int | None = None
    """Size of the logits for the null runner, which has no model."""
    step_time: StepTimeParams | None = None
    """Step times of the null runner; `None`: its own defaults."""
    simulated_kinds: SimulatedKinds | None = None
    """The cache of the null runner, in place of `num_kv_blocks`; `None`: one kind that keeps everything."""

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_here(self) -> int:
        """Number of these on this node."""
        return self.num_ranks // (1 if self.nodes is None else self.nodes.count)

    @property
    def step(self) -> StepLimits:
        """The configured step limits, with a CPU's defaults."""
        return self.step_with_defaults(CPU_STEP)

    def step_with_defaults(self, usual: StepLimits) -> StepLimits:
        """Return the configured step limits, with `usual` as defaults and at least one token per request."""
        num_seqs, num_tokens = self.max_num_seqs, self.max_num_batched_tokens
        if num_seqs is None:
            num_seqs = usual.max_num_seqs if num_tokens is None else min(usual.max_num_seqs, num_tokens)
        return StepLimits(num_seqs, max(usual.max_num_batched_tokens, num_seqs) if num_tokens is None else num_tokens)

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.num_ranks > MOST_RANKS:
            sizes = f"{self.tensor_parallel_size} x {self.pipeline_parallel_size}"
            raise ValueError(
                f"tensor_parallel_size x pipeline_parallel_size must be at most {MOST_RANKS} processes, got {sizes}"
            )
        if self.nodes is not None and self.num_ranks % self.nodes.count:
            raise ValueError(
                f"{self.num_ranks} processes (tensor_parallel_size x pipeline_parallel_size) cannot be divided equally "
                f"among {self.nodes.count} nodes; change nnodes"
            )
        if not self.enable_lora and (self.lora_modules or self.adapters_file is not None):
            name = "lora_modules" if self.lora_modules else "adapters_file"
            raise ValueError(f"{name} needs enable_lora: set it, or remove {name}")
        if self.max_lora_rank > MAX_RANK:
            raise ValueError(f"max_lora_rank must be at most {MAX_RANK}, got {self.max_lora_rank}")


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
