"""The engine's settings: every knob with meaning, unit and default. Filled from the command line or from a plan."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from pagemill_protocol.generation_defaults import GenerationConfig, GenerationDefaults
from pagemill_protocol.http.tls_config import TLSConfig
from pagemill_protocol.state import StepTimeParams
from pagemill_protocol.tracing.config import TracingConfig

PrefixScope = Literal["deployment", "tenant", "key"]

_LEAST = {
    "max_model_len": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "block_size": 1,
    "kv_cache_memory_bytes": 1,
    "max_num_waiting": 1,
    "num_threads": 1,
    "num_kv_blocks": 1,
    "vocab_size": 1,
}
"""One token of prompt and one of output is the smallest context."""


class StepLimits(NamedTuple):
    """What one step may hold, at most."""

    max_num_seqs: int
    max_num_batched_tokens: int


CPU_STEP = StepLimits(64, 512)
"""What the settings leave open, on a CPU and for a simulated device; for a GPU `runner.step_limits` decides."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    """Source URI or path: `package://dist/path`, `file:///path`, or a plain path to a folder or `.gguf` file."""
    model_folder: str | None = None
    """Where the model lies while it is fetched (`arriving_files`), filled when the engine starts; `None`: it is whole,
    and found by `model`."""
    served_names: list[str] = []
    """Names clients may use; empty: derived from the source."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """`cuda`: the NVIDIA device that is visible, by Triton kernels (compute capability 8.0 and later), or, with
    TRITON_INTERPRET=1, Triton's interpreter on the CPU; `auto`: `cuda` where there is such a device, else `cpu`."""
    kernel_cache_dir: str | None = None
    """Folder where a GPU's compiled kernels are kept from one start to the next, for all that share it; `None`: where
    Triton keeps them, in the home of the process."""
    cuda_graphs: bool = True
    """Steps on a GPU run as CUDA graphs, recorded at the start for padded numbers of requests and tokens: decodes of up
    to 512 requests, and steps that hold prompts up to 1024 tokens, of small models up to 8192; off: each kernel is
    launched by itself, which takes less memory and more of the host's time."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of float weights and of the KV cache. `auto` on a GPU: bfloat16; on a CPU: bfloat16 where it is multiplied
    (AVX512_BF16: by our own products, which keep codes of 8 and 4 bits; AMX: by oneDNN's), else float32; float32 also
    with `deterministic`, where oneDNN multiplies with `quantization`, and for models that pool on Intel's processors
    without AMX. The native kernels add up in float32
    whatever it is, and keep matrices that are stored in bfloat16 so. With `auto` they round activations to 16 bits
    where they meet 4-bit weights, which is faster; with `float32` they do not. On a CPU float16 is torch's alone."""
    quantization: Literal["none", "int8", "int4", "w8a8", "fp8"] = "none"
    """Rounds weights to codes while they are loaded. `int8`, `int4`: codes of 8 or 4 bits (embedding and head always
    8), a scale for every 32 inputs; what is stored in codes of so few bits already stays as it is. `w8a8` and `fp8`
    need a GPU: weights and activations are multiplied as int8 or as e4m3 (compute capability 8.9 and later), with a
    scale for each output and each token; embedding and head as with `int8`; stored codes stay as they are."""
    max_model_len: int | None = None
    """Tokens of prompt and output together; `None`: the model's own limit, capped by the KV cache."""
    max_num_seqs: int | None = None
    """Requests in one step; `None`: chosen for the device. On a CPU 64. On a GPU 256 with 36 GiB of memory or more, 128
    with 14, else 64; fewer where the largest step would take more than a quarter of what the weights leave."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step, prefill and decode together; `None`: chosen with `max_num_seqs`: 512 on a CPU; 8192,
    2048 or 1024 on a GPU. More makes prefills cheaper, and decodes wait longer for the step they share with one."""
    block_size: int = 16
    """Tokens of one KV block."""
    kv_cache_memory_bytes: int | None = None
    """Memory of the KV cache; `None`: 1 GiB or a quarter of the free memory, whichever is less; on a GPU what weights
    and the largest step leave of nine tenths of its free memory."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8", "fp8"] = "auto"
    """How keys and values are kept; `auto`: as `dtype`. bfloat16 halves, int8 and fp8 (a scale for each token and head)
    nearly quarter what float32 takes; on a CPU a type other than `dtype` needs the native kernels. fp8 (e4m3) needs a
    GPU of compute capability 8.9 or later."""
    deterministic: bool = False
    """The same bits for a request whatever else runs, however its prompt is cut and whatever the prefix cache holds.
    Needs the CPU's native kernels, float32 or bfloat16, and keeps to our own products; costs attention some speed."""
    enable_prefix_caching: bool = True
    prefix_scope: PrefixScope = "tenant"
    """Which callers share cached prompts, where `api_keys_file` or a gateway says who calls."""
    policy: Literal["fcfs", "priority", "shortest-prefill-first"] = "fcfs"
    """Order of prefills: as they came; a level of `priority` as 30 s; a token of the prompt as 2 ms of later arrival.
    Whatever it is, the newest request of the lowest priority is preempted first."""
    max_num_waiting: int = 1024
    """Choices that may wait in the engine; one more is refused with 503, a request of more than that with 400."""
    overlap: bool | None = None
    """Launch a step before the tokens of the one before are read; `None`: where the device gains by it."""
    num_threads: int | None = None
    """Compute threads; `None`: the cores this process may use (affinity and cgroup quota). The level of the CPU's
    kernels is an environment variable, `PAGEMILL_CPU_LEVEL`: `x86-64-v4-bf16`, `x86-64-v4`, `x86-64-v3`, `armv8-a`, or
    `none` for torch's; without it the highest that the processor has."""
    seed: int | None = None
    """Seed of requests that send none; `None`: drawn at random per request."""
    chat_template: str | None = None
    """Overrides the model's own template."""
    generation_config: GenerationConfig = "auto"
    """Whether the model's generation_config.json gives sampling values to requests that send none; `vllm`: it does
    not."""
    generation_defaults: GenerationDefaults | None = None
    """Sampling values for requests that send none, before the model's own."""
    tool_call_parser: str = "auto"
    """How tool calls are read from answers; `auto`: as the chat template asks for them, `none`: tools are refused."""
    reasoning_parser: str = "auto"
    """How reasoning is separated from text; `auto`: as the chat template marks it, `none`: it stays in the text."""
    null_runner: bool = False
    """Simulated device: real scheduler, KV and HTTP, no model; steps wait the predicted time."""
    num_kv_blocks: int | None = None
    """Blocks of the KV cache; overrides `kv_cache_memory_bytes`."""
    eos_token_ids: list[int] = []
    """Tokens that end a choice; filled from the tokenizer bundle when the engine starts."""
    vocab_size: int | None = None
    """Rows of the logits, for the null runner, which has no model to ask."""
    step_time: StepTimeParams | None = None
    """What the null runner waits; `None`: its own defaults."""

    @property
    def step(self) -> StepLimits:
        """What is set; where nothing is, what suits a CPU."""
        return self.step_beside(CPU_STEP)

    def step_beside(self, usual: StepLimits) -> StepLimits:
        """What is set; where nothing is, what is usual, with a token for every request."""
        num_seqs, num_tokens = self.max_num_seqs, self.max_num_batched_tokens
        if num_seqs is None:
            num_seqs = usual.max_num_seqs if num_tokens is None else min(usual.max_num_seqs, num_tokens)
        return StepLimits(num_seqs, max(usual.max_num_batched_tokens, num_seqs) if num_tokens is None else num_tokens)

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 8000
    """Data port; 0 takes a free one."""
    control_host: str = "127.0.0.1"
    control_port: int = 8001
    internal_token: str = ""
    """Bearer token that `/internal/*` and all of the control port but `/livez`, `/readyz`, `/metrics` and `/version`
    ask for. Without it and without a file, the server makes one at its start, in a file that its user alone can read:
    `pagemill-UID/control-ADDRESS-PORT.token` below `$XDG_RUNTIME_DIR`, or below the temporary folder."""
    internal_tokens_file: str | None = None
    """File of further such tokens, one a line, read again when it changes. With an empty file none is accepted."""
    api_keys_file: str | None = None
    """
    File of the API keys that the OpenAI routes ask for, one entry a line: the SHA-256 of a key in hex, and its tenant
    (`HASH tenant=NAME`). The format is that of a gateway's `api_keys_file`, but limits, models and priorities are
    refused: only a gateway keeps them. A change takes effect within a second. `None`: no key is asked.
    """
    only_gateways: bool = False
    """The OpenAI routes ask for the internal token, and for nothing else: clients come through a gateway, which keeps
    keys and limits."""
    allowed_hosts: list[str] = []
    """Names by which clients may address this server on loopback without API keys, in the header Host, beside those
    that `control_allowed_hosts` describes: a web page could bind any other name to this machine."""
    allowed_origins: list[str] = []
    """Origins of web pages that may use the data port from a browser (CORS), such as `https://app.example.com`; `*`:
    all. Cookies are never allowed. Empty: none."""
    control_allowed_hosts: list[str] = []
    """Names by which callers of those routes may address this server, in the header Host. IP addresses, the machine's
    own name, names without a dot and names below `localhost`, `local`, `internal` and `svc` always may."""
    tls: TLSConfig | None = None
    """Serve both ports by HTTPS, TLS 1.2 and later; `None`: by HTTP."""
    max_body_bytes: int = 8 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    body_timeout_s: float = 30.0
    """A body that takes longer to arrive gets 408."""
    tracing: TracingConfig | None = None
    """OpenTelemetry traces of what clients send here directly; what comes through a gateway, the gateway traces."""
    drain_timeout_s: float = 30.0
    """After SIGTERM, running requests get this long; then they end with an error event."""
    termination_log: str | None = None
    """File that gets the termination message, such as Kubernetes' `/dev/termination-log`."""

    def __post_init__(self) -> None:
        for name in ("port", "control_port"):
            value = getattr(self, name)
            # The resolver of addresses would take such a number modulo 65536.
            if not 0 <= value <= 65535:
                raise ValueError(f"{name}: {value} is not a port; use 1 to 65535, or 0 for a free one")
