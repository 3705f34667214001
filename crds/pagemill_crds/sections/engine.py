"""`spec.engine`: settings of the inference engine."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pagemill_crds.base import Section, SectionRule
from pagemill_crds.fields import DottedName, Line, Memory, Text, merged_by
from pagemill_crds.sections.model import Source

ENV_NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
EXTRA_ARG_PATTERN = r"^--[a-z][a-z0-9-]*(=.*)?$"
EnvName = Annotated[str, Text(128, ENV_NAME_PATTERN, "must be letters, digits and _, not starting with a digit")]
ExtraArg = Annotated[str, Text(512, EXTRA_ARG_PATTERN, "must be written --name=value or --name")]


class PrefixCaching(Section):
    """Reuse of the KV cache between requests with a common prefix."""

    enabled: bool = True
    """Whether blocks of finished requests are kept and reused."""
    scope: Literal["deployment", "tenant", "key"] = "tenant"
    """Which requests may share blocks: `tenant`, those of all API keys with the same tenant name (a key without a
    tenant shares with no other key); `key`, those of one API key; `deployment`, all. Requests that share blocks can
    infer from response times and `cached_tokens` what others have sent. Without API keys, all requests share."""


class Speculative(Section):
    """Speculative decoding: tokens are proposed cheaply and verified by the model. Answers do not
    depend on it."""

    method: Annotated[str, Text(63, r"^[A-Za-z0-9][A-Za-z0-9._-]*$", "must be a name such as ngram")]
    """`auto` proposes what a client predicts (`prediction` of a chat), and what the model's own layer drafts where it
    has one (on GPUs not that of a hybrid), otherwise as `ngram`; `ngram` what a client predicts
    and what stood behind the same words before, in the prompt, in the answer or in recent answers to prompts that begin
    alike, `draft` what a client predicts and what the model of `source` drafts, `eagle3` likewise what a head drafts
    that was trained for the model, `mtp` what the model's own layer does, `off` nothing. Packages can register others
    with the engine, which refuses a name that it does not have, and a head or layer that does not fit, before it is
    ready."""
    source: Source | None = None
    """What drafts, with the schemes of `spec.model.source`: a smaller model with the same tokenizer, or with `eagle3` a
    head. Its weights and its KV cache take part of the memory."""
    num_tokens: Annotated[int, Field(ge=1, le=16)] = 4
    """Maximum number of tokens proposed for a request in one step. The engine chooses how many by their expected gain;
    for texts that are copied, 8 are faster than the default."""

    rules: ClassVar[tuple[SectionRule, ...]] = (
        SectionRule(
            "source",
            "method draft needs the draft model's source, and other methods but eagle3 take none",
            "self.method == 'eagle3' || (self.method == 'draft') == has(self.source)",
            lambda s: s.method == "eagle3" or (s.method == "draft") == (s.source is not None),
        ),
    )


class KeyRef(Section):
    name: DottedName
    """Name of the Secret or ConfigMap, in the namespace of the LLMDeployment."""
    key: Line
    """Key inside the Secret or ConfigMap."""


class EnvSource(Section):
    """Source of an environment variable's value."""

    secret_key_ref: KeyRef | None = None
    """A key of a Secret."""
    config_map_key_ref: KeyRef | None = None
    """A key of a ConfigMap."""

    rules: ClassVar[tuple[SectionRule, ...]] = (
        SectionRule(
            "secretKeyRef",
            "set exactly one of secretKeyRef and configMapKeyRef",
            "has(self.secretKeyRef) != has(self.configMapKeyRef)",
            lambda s: (s.secret_key_ref is None) != (s.config_map_key_ref is None),
        ),
    )


class EnvVar(Section):
    name: EnvName
    """Name of the environment variable."""
    value: Annotated[str, Text(32_768, min_length=0)] | None = None
    """Value of the environment variable."""
    value_from: EnvSource | None = None
    """Source of the value, in place of `value`."""

    rules: ClassVar[tuple[SectionRule, ...]] = (
        SectionRule(
            "value",
            "set exactly one of value and valueFrom",
            "has(self.value) != has(self.valueFrom)",
            lambda e: (e.value is None) != (e.value_from is None),
        ),
    )


class LoRA(Section):
    """Places of LoRA adapters in each engine. Engines with this section serve adapters, those with none do not; absent,
    they serve adapters if `spec.model.adapters` lists some."""

    max_loras: Annotated[int, Field(ge=1, le=256)] = 1
    """Number of adapters that one step may use; requests for others wait."""
    max_lora_rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Largest rank of an adapter. Memory is reserved for adapters of this rank."""
    max_cpu_loras: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Number of adapters that stay in memory; others are loaded again when they are asked for. When absent,
    `maxLoras`."""

    rules: ClassVar[tuple[SectionRule, ...]] = (
        SectionRule(
            "maxCpuLoras",
            "maxCpuLoras must be at least maxLoras: raise it, or lower maxLoras",
            "!has(self.maxCpuLoras) || self.maxCpuLoras >= self.maxLoras",
            lambda e: e.max_cpu_loras is None or e.max_cpu_loras >= e.max_loras,
        ),
    )


class EngineSection(Section):
    """Settings of the inference engine: precision, context length, batch size and KV cache."""

    image: Annotated[str, Text(512, r"^[^\s]+$", "must be an image reference without spaces")] | None = None
    """Container image of the engine; when absent, the image that the operator is configured with."""
    version: Annotated[str, Text(64, r"^[A-Za-z0-9][A-Za-z0-9.+_-]*$", "must be a version such as 0.1.0")] | None = None
    """Engine version to pin, so that an upgrade of the operator does not replace the pods. Without effect beside
    `image`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of float weights and of the KV cache; `auto` chooses the type that the device computes natively."""
    quantization: Literal["none", "fp8", "w8a8", "int8", "int4", "awq", "gptq"] = "none"
    """How weights are quantized when they are loaded. Weights that a GGUF file already stores in as few bits are kept
    as they are. `fp8` and `w8a8` (int8) also quantize activations and need a GPU."""
    max_model_len: Annotated[int, Field(ge=16, le=10_485_760)] | None = None
    """Maximum number of tokens of prompt and output together; when absent, the model's own limit."""
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Maximum number of requests computed in one step; when absent, chosen for the device: 64 on a CPU, up to 256 on a
    GPU depending on its memory."""
    max_num_batched_tokens: Annotated[int, Field(ge=16, le=1_048_576)] | None = None
    """Maximum number of tokens computed in one step, prefill and decode together; when absent, chosen for the device:
    512 on a CPU, up to 8192 on a GPU depending on its memory."""
    block_size: Literal[8, 16, 32, 64, 128] = 16
    """Number of tokens per block of the KV cache."""
    kv_cache_memory: Memory | None = None
    """Memory for the KV cache; when absent, a share of the memory that is free after the model is loaded. Encoders
    have no KV cache and refuse it, as well as `kvCacheDtype`."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8", "fp8"] = "auto"
    """Data type of the KV cache; `auto` uses that of `dtype`. Compared with float32, bfloat16 needs half the memory,
    int8 and fp8 little more than a quarter. fp8 needs a GPU."""
    prefix_caching: PrefixCaching = PrefixCaching()
    """Reuse of the KV cache between requests with a common prefix."""
    deterministic: bool = False
    """Whether answers are bitwise equal regardless of the other requests in a batch. Reduces speed."""
    speculative: Speculative | None = None
    """Speculative decoding; when absent, method `auto` with up to 8 tokens."""
    lora: LoRA | None = None
    """Places of LoRA adapters in each engine; when absent, one adapter of rank 16 at a time if `spec.model.adapters`
    lists some, otherwise none."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of parts that share each layer: attention heads, inner units and vocabulary. Each is a process: with
    `resources.gpus` on a GPU of its own, on CPUs the pod's cores are divided among them."""
    pipeline_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of stages over which the layers are distributed, each of `tensorParallel` parts, which compute different
    steps at the same time."""
    pods_per_replica: Annotated[int, Field(ge=1, le=64)] | None = None
    """Number of pods among which the parts of one replica are divided equally, as a group that is started, drained and
    restarted together. It needs LeaderWorkerSets in the cluster. When absent, as many as `tensorParallel` x
    `pipelineParallel` parts need with `resources.gpus` in each pod; without GPUs, 1. `resources` are those of a pod."""
    extra_args: Annotated[list[ExtraArg], Field(max_length=64)] = Field(default_factory=list)
    """Engine settings that have no field here, as `--name=value`. They override the fields."""
    env: Annotated[list[EnvVar], merged_by("name", 64)] = Field(default_factory=list)
    """Environment variables of the engine's container."""

    rules: ClassVar[tuple[SectionRule, ...]] = (
        SectionRule(
            "maxNumSeqs",
            "maxNumSeqs must not exceed maxNumBatchedTokens: every request needs a token of the step",
            "!has(self.maxNumBatchedTokens) || !has(self.maxNumSeqs) || self.maxNumSeqs <= self.maxNumBatchedTokens",
            lambda e: None in (e.max_num_batched_tokens, e.max_num_seqs) or e.max_num_seqs <= e.max_num_batched_tokens,
        ),
        SectionRule(
            "maxModelLen",
            "maxModelLen must be at least blockSize: raise maxModelLen or lower blockSize",
            "!has(self.maxModelLen) || self.maxModelLen >= self.blockSize",
            lambda e: e.max_model_len is None or e.max_model_len >= e.block_size,
        ),
        SectionRule(
            "podsPerReplica",
            "podsPerReplica must divide tensorParallel x pipelineParallel: every pod has equally many parts",
            "!has(self.podsPerReplica) || (self.tensorParallel * self.pipelineParallel) % self.podsPerReplica == 0",
            lambda e: (e.tensor_parallel * e.pipeline_parallel) % (e.pods_per_replica or 1) == 0,
        ),
        SectionRule(
            "env",
            "two environment variables have the same name: keep one",
            "!has(self.env) || self.env.all(a, self.env.exists_one(b, b.name == a.name))",
            lambda e: len({v.name for v in e.env}) == len(e.env),
        ),
    )
