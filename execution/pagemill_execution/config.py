"""The settings of execution with meaning, unit and default: what computes steps reads these and no others.

`pagemill_engine.config` adds those of the engine and is what a settings file or the command line fills.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from pagemill_models.adapters.limits import MAX_RANK
from pagemill_protocol.engine_ports import RENDEZVOUS_PORT
from pagemill_protocol.report.cache_kinds import CacheKind
from pagemill_protocol.report.state import StepTimeParams

_LEAST = {
    "max_model_len": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "block_size": 1,
    "kv_cache_memory_bytes": 1,
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
"""Entry points of methods of other packages (`pagemill_engine.loop.speculation`)."""


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
    """`auto`: what a client predicts (`prediction` of a chat), and what the model's own layer drafts, if it has one,
    otherwise as `ngram`;
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


class ExecutionConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    """Source URI or path: `package://dist/path`, `file:///path`, or a plain path to a folder or `.gguf` file."""
    model_folder: str | None = None
    """Folder of the model while it is being fetched (`partial_download`), set when the engine starts; `None`: the
    model is complete and found by `model`."""
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
    enable_lora: bool = False
    """Whether LoRA adapters are served beside the model. Their memory is part of the plan from the start."""
    max_loras: int = 1
    """Adapters that one step may use. Requests for more wait until those of another adapter have ended."""
    max_lora_rank: int = 16
    """Largest rank of an adapter, up to 512."""
    max_cpu_loras: int | None = None
    """Adapters that stay in memory, those that steps use included; others are loaded again from their folders when
    they are asked for. `None`: `max_loras`."""
    null_runner: bool = False
    """Simulated device: real scheduler, KV cache and HTTP, but no model; steps wait the predicted time."""
    num_kv_blocks: int | None = None
    """Blocks of the KV cache; overrides `kv_cache_memory_bytes`."""
    vocab_size: int | None = None
    """Size of the logits for the null runner, which has no model."""
    step_time: StepTimeParams | None = None
    """Step times of the null runner; `None`: its own defaults."""
    simulated_kinds: SimulatedKinds | None = None
    """The cache of the null runner, in place of `num_kv_blocks`; `None`: one kind that keeps everything."""

    OF_TEXT: ClassVar[Mapping[str, Any]] = {"speculative": SpeculationConfig()}
    """Settings of generated text -> the value with which they are not set. They have no effect without it."""

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
        if self.max_lora_rank > MAX_RANK:
            raise ValueError(f"max_lora_rank must be at most {MAX_RANK}, got {self.max_lora_rank}")
