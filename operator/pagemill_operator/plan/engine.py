"""The settings file of one engine: fields of the resource under the engine's own names, as plain JSON values.

The operator does not import the engine; a test decodes these dictionaries into the engine's strict structs.
"""

from __future__ import annotations

import math
from typing import Any

from pagemill_crds.models import LLMDeployment
from pagemill_crds.sections.engine import LoRA, Speculative
from pagemill_crds.sections.model import GenerationDefaultsSection
from pagemill_models.sources import in_full
from pagemill_protocol.engine_ports import CONTROL_PORT, DATA_PORT
from pagemill_protocol.resource.quantities import cpu_cores, duration_seconds, memory_bytes


def engine_settings(deployment: LLMDeployment) -> dict[str, Any]:
    """Return `engine` of the settings file. Absent keys take the engine's defaults."""
    engine, model = deployment.spec.engine, deployment.spec.model
    settings: dict[str, Any] = {
        "model": source_with_revision(deployment),
        "served_names": deployment.names,
        "dtype": engine.dtype,
        "block_size": engine.block_size,
        "enable_prefix_caching": engine.prefix_caching.enabled,
        "prefix_scope": engine.prefix_caching.scope,
    }
    optional = {
        "device": "cuda" if deployment.spec.resources.gpus else None,
        "kv_cache_dtype": None if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype,
        "deterministic": engine.deterministic or None,
        "quantization": None if engine.quantization == "none" else engine.quantization,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "kv_cache_memory_bytes": _optional_bytes(engine.kv_cache_memory),
        "num_threads": _num_threads(deployment),
        "tensor_parallel_size": _unless_one(engine.tensor_parallel),
        "pipeline_parallel_size": _unless_one(engine.pipeline_parallel),
        "chat_template": model.chat_template,
        "generation_defaults": _defaults(model.generation_defaults),
        "tool_call_parser": _unless_auto(model.tool_call_parser),
        "reasoning_parser": _unless_auto(model.reasoning_parser),
        "speculative": _speculative(engine.speculative),
        **_adapter_settings(engine.lora, bool(model.adapters)),
    }
    return settings | {name: value for name, value in optional.items() if value is not None}


def without_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings file without the model's names, which running engines read from a file of their own."""
    return settings | {"engine": {name: value for name, value in settings["engine"].items() if name != "served_names"}}


def _adapter_settings(section: LoRA | None, lists_adapters: bool) -> dict[str, Any]:
    """Return the places of adapters; the backend adds the path of the file that lists them."""
    if section is None and not lists_adapters:
        return {}
    return {"enable_lora": True, **(section or LoRA()).model_dump(by_alias=False)}


def _defaults(defaults: GenerationDefaultsSection | None) -> dict[str, float] | None:
    return None if defaults is None else defaults.model_dump(by_alias=False, exclude_none=True) or None


def _speculative(section: Speculative | None) -> dict[str, Any] | None:
    if section is None or lacks_head(section):
        return None
    settings: dict[str, Any] = {"method": section.method, "num_tokens": section.num_tokens}
    return settings if section.source is None else {**settings, "source": in_full(section.source)}


def lacks_head(section: Speculative) -> bool:
    """Whether the section asks for a head without naming it, as objects could before engines ran heads."""
    return section.method == "eagle3" and section.source is None


def _unless_one(size: int) -> int | None:
    return None if size == 1 else size


def _unless_auto(parser: str) -> str | None:
    return None if parser == "auto" else parser


def server_settings(deployment: LLMDeployment) -> dict[str, Any]:
    """Return `server` of the settings file; the backend sets hosts, ports and the token."""
    return {
        "port": DATA_PORT,
        "control_port": CONTROL_PORT,
        "only_gateways": True,
        "drain_timeout_s": duration_seconds(deployment.spec.rollout.drain_timeout),
    }


def source_with_revision(deployment: LLMDeployment) -> str:
    """Return the source as a URI that includes `revision`, if the resource sets it separately."""
    model = deployment.spec.model
    source = in_full(model.source)
    if not model.revision:
        return source
    org, name, *file = source.removeprefix("hf://").split("/", 2)
    return "/".join([f"hf://{org}/{name}@{model.revision}", *file])


def _num_threads(deployment: LLMDeployment) -> int | None:
    cpu = deployment.spec.resources.cpu
    if cpu is None or cpu_cores(cpu) == 0:
        return None
    return max(1, math.ceil(cpu_cores(cpu)))


def _optional_bytes(quantity: int | str | None) -> int | None:
    return None if quantity is None else memory_bytes(quantity)
