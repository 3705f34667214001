"""`spec.model`: the weights to serve, their names and their defaults."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pagemill_crds.base import Section, SectionRule
from pagemill_crds.fields import DottedName, Line, Memory, ModelName, Text, merged_by

HUB_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9._/-]+|/[^@ ]+[.]gguf)*"
SOURCE_PATTERN = rf"^([a-z][a-z0-9+.-]*://[^\s]+|{HUB_NAME})$"
SOURCE_REMEDY = (
    "must be a URI such as hf://org/name, s3://bucket/prefix, gs://bucket/prefix, oci://host/name:tag, "
    "pvc://claim/path, file:///path or package://package/file, or org/name of a Hugging Face model"
)
HF_PATTERN = rf"^(hf://)?{HUB_NAME}$"
HUB_SOURCE = r"^(hf://|[^:]+$)"
LOCAL = r"^(package|file|pvc)://"
LOCAL_SCHEMES = ("package://", "file://", "pvc://")
"""Schemes that are read in place; every other source is downloaded."""

ParserName = Annotated[str, Text(64, r"^[a-z0-9][a-z0-9_-]*$", "must be the name of a parser, auto or none")]
Source = Annotated[str, Text(1024, SOURCE_PATTERN, SOURCE_REMEDY)]


class SecretRef(Section):
    name: DottedName
    """Name of the Secret, in the namespace of the LLMDeployment."""
    key: Line = "token"
    """Key inside the Secret."""


class GenerationDefaultsSection(Section):
    """Sampling parameters of requests that send none. They override those of the model's generation_config.json."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Sampling temperature; 0 is greedy decoding."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the smallest set of tokens whose probabilities sum to at least this value."""
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    """Sample from the k most likely tokens; 0 or -1 keeps all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Exclude tokens whose probability is below this share of the most likely token's."""
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    """Penalty on tokens that have occurred before; above 1 discourages them."""
    max_tokens: Annotated[int, Field(ge=1, le=2_147_483_647)] | None = None
    """Maximum number of generated tokens. Default without it: 16 in completions, the rest of the context in chats."""


class Adapter(Section):
    name: ModelName
    """Name by which clients request the adapter."""
    source: Source
    """Location of the LoRA weights: a folder as PEFT writes it, with the schemes of `spec.model.source`."""
    pinned: bool = False
    """Whether replicas load the adapter before they are ready, and keep it in memory."""


class Cache(Section):
    """Where downloaded weights are kept: in a PersistentVolumeClaim, in a folder of each node, or in the nodes' image
    store."""

    claim_name: DottedName | None = None
    """Name of an existing PersistentVolumeClaim to use."""
    size: Memory | None = None
    """Size of a PersistentVolumeClaim that the operator creates."""
    storage_class_name: DottedName | None = None
    """Storage class of the created claim; when absent, the cluster's default."""
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] | None = None
    """Access mode of the created claim; default `ReadWriteOnce`, which only pods of one node can mount."""
    host_path: Annotated[str, Text(256, r"^/[^:\s]+$", "must be an absolute path on the nodes")] | None = None
    """Folder on every node, which all LLMDeployments with pods on the node may share: the first pod downloads the
    weights, the others wait for it. The pods' user must be able to write to the folder, and the namespace's Pod
    Security profile must allow hostPath volumes."""
    size_limit: Memory | None = None
    """Maximum size of all models in `hostPath`; the least recently used models are deleted to make space for a new one.
    When absent, only the disk limits the size."""
    image_volume: bool | None = None
    """Whether the kubelet pulls the image of an `oci://` source and mounts it as a volume (Kubernetes 1.33 or newer
    with feature gate ImageVolume)."""

    immutable: ClassVar[dict[str, str]] = {
        "storageClassName": "a claim cannot move: create a new LLMDeployment",
        "accessMode": "a claim keeps its mode: create a new LLMDeployment",
    }
    rules: ClassVar[tuple[SectionRule, ...]] = (
        SectionRule(
            "claimName",
            "set exactly one of claimName (an existing claim), size (a new one), hostPath and imageVolume: true",
            "[has(self.claimName), has(self.size), has(self.hostPath), has(self.imageVolume) && self.imageVolume]"
            ".filter(x, x).size() == 1",
            lambda cache: (cache.claim_name, cache.size, cache.host_path, cache.image_volume or None).count(None) == 3,
        ),
        SectionRule(
            "storageClassName",
            "storageClassName belongs to a new claim: remove it, or set size in place of claimName",
            "!has(self.storageClassName) || has(self.size)",
            lambda cache: cache.storage_class_name is None or cache.size is not None,
        ),
        SectionRule(
            "accessMode",
            "accessMode belongs to a new claim: remove it, or set size in place of claimName",
            "!has(self.accessMode) || has(self.size)",
            lambda cache: cache.access_mode is None or cache.size is not None,
        ),
        SectionRule(
            "sizeLimit",
            "sizeLimit belongs to hostPath: remove it, or set hostPath in place of a claim",
            "!has(self.sizeLimit) || has(self.hostPath)",
            lambda cache: cache.size_limit is None or cache.host_path is not None,
        ),
    )


class ModelSection(Section):
    """The model to serve and the names under which clients request it."""

    source: Source
    """Location of the weights, a Hugging Face folder with safetensors or a GGUF file: `hf://org/name@revision` or
    `org/name`, `s3://bucket/prefix`, `gs://bucket/prefix`, `oci://host/repository:tag`, `pvc://claim/path`, `file://`,
    or `package://dist/path` (a file of an installed Python package)."""
    name: ModelName | None = None
    """Model name that clients send in `model`; when absent, the name of the LLMDeployment."""
    aliases: Annotated[list[ModelName], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "set"})] = (
        Field(default_factory=list)
    )
    """Additional names of the same model."""
    revision: Annotated[str, Text(128, r"^[A-Za-z0-9._/-]+$", "must be a branch, tag or commit")] | None = None
    """Branch, tag or commit of an `hf://` source."""
    credentials_secret_ref: SecretRef | None = None
    """Secret with the credentials of the source. Only the container that downloads the weights receives them. `hf://`:
    a token under `key`; `s3://`: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and optionally `AWS_SESSION_TOKEN`;
    `gs://`: the JSON key of a service account under `key`; `oci://`: a Secret of type dockerconfigjson."""
    chat_template: Annotated[str, Text(65_536)] | None = None
    """Jinja2 chat template that replaces the model's own."""
    tool_call_parser: ParserName = "auto"
    """Parser of tool calls in answers: `hermes`, `llama3-json`, `pythonic`, `mistral`, `qwen3-coder`, `deepseek`,
    `harmony`, `gemma4`, `glm`, `hunyuan`, `kimi-k2`, `lfm2`, `minimax-m2`, `nemotron`, `seed-oss` or a parser of an
    installed package. `auto` chooses the parser that fits the chat template; with `none`,
    requests with tools are refused."""
    reasoning_parser: ParserName = "auto"
    """Parser that separates reasoning from the answer: `think`, `magistral`, `harmony`, `gemma4`, `seed-oss`,
    `hunyuan`, `ernie` or `auto`.
    With `none`, reasoning stays in the text."""
    generation_defaults: GenerationDefaultsSection | None = None
    """Sampling parameters of requests that send none."""
    adapters: Annotated[list[Adapter], merged_by("name", 64)] = Field(default_factory=list)
    """LoRA adapters to serve beside the model. The resource `LoRAAdapter` adds one without a change of this resource. A
    change of the list restarts no replica, but without `spec.engine.lora` the first entry does, and the end of the last
    one."""
    cache: Cache | None = None
    """Where downloaded weights are kept; when absent, each pod downloads to its own disk."""

    rules: ClassVar[tuple[SectionRule, ...]] = (
        SectionRule(
            "source",
            "an hf:// source is hf://org/name, hf://org/name@revision or either of them followed by /file.gguf",
            f"!self.source.startsWith('hf://') || self.source.matches('{HF_PATTERN}')",
            lambda m: not m.source.startswith("hf://") or bool(re.search(HF_PATTERN, m.source)),
        ),
        SectionRule(
            "revision",
            "revision is for hf:// sources: remove it",
            f"!has(self.revision) || self.source.matches('{HUB_SOURCE}')",
            lambda m: m.revision is None or m.source.startswith("hf://") or m.source.find("://") < 0,
        ),
        SectionRule(
            "revision",
            "the source already names a revision after @: remove one of them",
            "!has(self.revision) || !self.source.contains('@')",
            lambda m: m.revision is None or "@" not in m.source,
        ),
        SectionRule(
            "revision",
            "a revision with / cannot be told from the path of one file: name the commit, or a tag or branch without /",
            "!has(self.revision) || !self.revision.contains('/') || !self.source.endsWith('.gguf')",
            lambda m: m.revision is None or "/" not in m.revision or not m.source.endswith(".gguf"),
        ),
        SectionRule(
            "credentialsSecretRef",
            "credentials are for sources that are downloaded, such as hf:// and s3://: remove credentialsSecretRef",
            f"!has(self.credentialsSecretRef) || !self.source.matches('{LOCAL}')",
            lambda m: m.credentials_secret_ref is None or not m.source.startswith(LOCAL_SCHEMES),
        ),
        SectionRule(
            "cache",
            "a cache is for sources that are downloaded, such as hf:// and s3://: remove it",
            f"!has(self.cache) || !self.source.matches('{LOCAL}')",
            lambda m: m.cache is None or not m.source.startswith(LOCAL_SCHEMES),
        ),
        SectionRule(
            "cache",
            "an image volume is for oci:// sources: name a claim, a size or a hostPath in place of imageVolume",
            "!has(self.cache) || !has(self.cache.imageVolume) || !self.cache.imageVolume || "
            "self.source.startsWith('oci://')",
            lambda m: m.cache is None or not m.cache.image_volume or m.source.startswith("oci://"),
        ),
        SectionRule(
            "aliases",
            "aliases repeat a name: list each name once",
            "!has(self.aliases) || self.aliases.all(a, self.aliases.exists_one(b, b == a))",
            lambda m: len(set(m.aliases)) == len(m.aliases),
        ),
        SectionRule(
            "aliases",
            "aliases must not repeat the model's own name: remove it from aliases",
            "!has(self.aliases) || !has(self.name) || !(self.name in self.aliases)",
            lambda m: m.name not in m.aliases,
        ),
        SectionRule(
            "adapters",
            "two adapters have the same name: rename one",
            "!has(self.adapters) || self.adapters.all(a, self.adapters.exists_one(b, b.name == a.name))",
            lambda m: len({a.name for a in m.adapters}) == len(m.adapters),
        ),
    )
