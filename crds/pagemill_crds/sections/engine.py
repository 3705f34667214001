"""`spec.engine`: how the engine computes, and how much it holds at once."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pagemill_crds.base import Rule, Section
from pagemill_crds.fields import DottedName, Line, Memory, Text
from pagemill_crds.sections.model import Source

ENV_NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
EXTRA_ARG_PATTERN = r"^--[a-z][a-z0-9-]*(=.*)?$"
EnvName = Annotated[str, Text(128, ENV_NAME_PATTERN, "must be letters, digits and _, not starting with a digit")]
ExtraArg = Annotated[str, Text(512, EXTRA_ARG_PATTERN, "must be written --name=value or --name")]


class PrefixCaching(Section):
    """Reuse of the KV cache between requests that begin alike."""

    enabled: bool = True
    """Keep and reuse blocks of finished requests."""
    scope: Literal["deployment", "tenant", "key"] = "tenant"
    """Which requests share blocks: those of one tenant (all API keys with its name; a key without one is by
    itself), those of one API key, or all of the deployment. Who shares can see from times and `cached_tokens` what
    others asked. Without API keys all share."""


class Speculative(Section):
    """Speculative decoding: tokens guessed cheaply and verified by the model."""

    method: Literal["ngram", "draft"]
    """`ngram` guesses from the request's own text; `draft` from a small model."""
    source: Source | None = None
    """Draft model; the schemes of `spec.model.source`."""
    num_tokens: Annotated[int, Field(ge=1, le=16)] = 4
    """Tokens guessed per step."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "source",
            "method draft needs the draft model's source, and method ngram takes none",
            "(self.method == 'draft') == has(self.source)",
            lambda s: (s.method == "draft") == (s.source is not None),
        ),
    )


class KeyRef(Section):
    name: DottedName
    """Name of the object, in the deployment's namespace."""
    key: Line
    """Key inside the object."""


class EnvSource(Section):
    """Where the value of an environment variable comes from."""

    secret_key_ref: KeyRef | None = None
    """A key of a Secret."""
    config_map_key_ref: KeyRef | None = None
    """A key of a ConfigMap."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "secretKeyRef",
            "set exactly one of secretKeyRef and configMapKeyRef",
            "has(self.secretKeyRef) != has(self.configMapKeyRef)",
            lambda s: (s.secret_key_ref is None) != (s.config_map_key_ref is None),
        ),
    )


class EnvVar(Section):
    name: EnvName
    """Name of the variable."""
    value: Annotated[str, Text(32_768, min_length=0)] | None = None
    """Its value."""
    value_from: EnvSource | None = None
    """Its value, taken from another object."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "value",
            "set exactly one of value and valueFrom",
            "has(self.value) != has(self.valueFrom)",
            lambda e: (e.value is None) != (e.value_from is None),
        ),
    )


class EngineSection(Section):
    """How the engine computes, and how much it holds at once."""

    image: Annotated[str, Text(512, r"^[^\s]+$", "must be an image reference without spaces")] | None = None
    """Container image of the engine; the operator's own when absent."""
    version: Annotated[str, Text(64, r"^[A-Za-z0-9][A-Za-z0-9.+_-]*$", "must be a version such as 0.1.0")] | None = None
    """Engine version to pin, so that an operator upgrade leaves the pods alone."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of float weights and of the KV cache; `auto` takes what the device computes natively."""
    quantization: Literal["none", "fp8", "w8a8", "int8", "int4", "awq", "gptq"] = "none"
    """How weights are quantized when they are loaded; what a GGUF file holds in so few bits already stays as it is.
    `fp8` and `w8a8` (int8) round activations too, and need a GPU."""
    max_model_len: Annotated[int, Field(ge=16, le=10_485_760)] | None = None
    """Tokens of prompt and output together; the model's own limit when absent."""
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Requests computed in one step; chosen for the device when absent: 64 on a CPU, by its memory up to 256 on a
    GPU."""
    max_num_batched_tokens: Annotated[int, Field(ge=16, le=1_048_576)] | None = None
    """Token budget of one step, prefill and decode together; chosen for the device when absent: 512 on a CPU, by its
    memory up to 8192 on a GPU."""
    block_size: Literal[8, 16, 32, 64, 128] = 16
    """Tokens of one KV-cache block."""
    kv_cache_memory: Memory | None = None
    """Memory of the KV cache; a share of what is free after loading when absent."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8", "fp8"] = "auto"
    """Type of the KV cache; `auto` takes dtype's. bfloat16 halves, int8 and fp8 nearly quarter float32's memory; fp8
    needs a GPU."""
    prefix_caching: PrefixCaching = PrefixCaching()
    """Reuse of the KV cache between requests that begin alike."""
    deterministic: bool = False
    """Bitwise equal answers whatever else runs in the batch, at some cost in speed."""
    speculative: Speculative | None = None
    """Speculative decoding; off when absent. Reserved: this version runs without it and notes so in `Planned`."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Devices that share each layer. This version supports 1; more is reported as `Planned=False`."""
    pipeline_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Devices that each hold some of the layers. This version supports 1; more is reported as `Planned=False`."""
    extra_args: Annotated[list[ExtraArg], Field(max_length=64)] = Field(default_factory=list)
    """Engine settings without a field here, as `--name=value`; they win over the fields."""
    env: Annotated[
        list[EnvVar],
        Field(
            max_length=64,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = Field(default_factory=list)
    """Environment variables of the engine."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "maxNumSeqs",
            "maxNumSeqs must not exceed maxNumBatchedTokens: every request needs a token of the step",
            "!has(self.maxNumBatchedTokens) || !has(self.maxNumSeqs) || self.maxNumSeqs <= self.maxNumBatchedTokens",
            lambda e: None in (e.max_num_batched_tokens, e.max_num_seqs) or e.max_num_seqs <= e.max_num_batched_tokens,
        ),
        Rule(
            "maxModelLen",
            "maxModelLen must hold at least one block: raise it or lower blockSize",
            "!has(self.maxModelLen) || self.maxModelLen >= self.blockSize",
            lambda e: e.max_model_len is None or e.max_model_len >= e.block_size,
        ),
        Rule(
            "env",
            "two environment variables have the same name: keep one",
            "!has(self.env) || self.env.all(a, self.env.exists_one(b, b.name == a.name))",
            lambda e: len({v.name for v in e.env}) == len(e.env),
        ),
    )
