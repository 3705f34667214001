"""`vllm serve` and its arguments, as a person or a manifest has them.

What an argument means is said by the engine's table (`pagemill_engine.vllm_arguments`) and `pagemill serve`'s options;
this module knows which field of the resource is which option.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pagemill.converting.deployment import ConvertError, Draft, model_source, resource_name
from pagemill.vllm_options import rewritten
from pagemill_engine.vllm_arguments import lora_module
from pagemill_engine.vllm_speculation import speculative_of

FIELDS: Mapping[str, str] = {
    "max_model_len": "engine.maxModelLen",
    "max_num_seqs": "engine.maxNumSeqs",
    "max_num_batched_tokens": "engine.maxNumBatchedTokens",
    "block_size": "engine.blockSize",
    "kv_cache_memory": "engine.kvCacheMemory",
    "dtype": "engine.dtype",
    "quantization": "engine.quantization",
    "kv_cache_dtype": "engine.kvCacheDtype",
    "deterministic": "engine.deterministic",
    "tensor_parallel_size": "engine.tensorParallel",
    "pipeline_parallel_size": "engine.pipelineParallel",
    "prefix_caching": "engine.prefixCaching.enabled",
    "max_loras": "engine.lora.maxLoras",
    "max_lora_rank": "engine.lora.maxLoraRank",
    "max_cpu_loras": "engine.lora.maxCpuLoras",
    "tool_call_parser": "model.toolCallParser",
    "reasoning_parser": "model.reasoningParser",
}
EXTRA = ("policy", "seed", "threads", "generation_config", "cuda_graphs", "max_num_waiting")
"""Options that `spec.engine.extraArgs` takes."""
EXTRA_NAMES = {"threads": "num-threads"}
MEANINGS: Mapping[str, str] = {
    "port": "Clients use the gateway's port; the chart sets it.",
    "host": "Clients use the gateway; the chart sets its Service.",
    "api_keys_file": "Keys are the gateway's: docs/how-to/keys-and-limits.md.",
    "allow_anonymous": "Keys are the gateway's: docs/how-to/keys-and-limits.md.",
    "tls_cert_file": "TLS is the gateway's; the chart sets it.",
    "tls_key_file": "TLS is the gateway's; the chart sets it.",
    "allowed_origin": "Origins are the gateway's; the chart sets them.",
    "enable_lora": "Adapters are served without it: list them in spec.model.adapters.",
    "enable_lora_routes": "Adapters come and go as LoRAAdapter resources.",
    "nnodes": "The operator divides a replica into pods by spec.engine.podsPerReplica.",
    "node_rank": "The operator gives ranks to pods.",
    "master_addr": "The operator connects the pods of a replica.",
    "master_port": "The operator connects the pods of a replica.",
    "device": "spec.resources.gpus decides it.",
    "chat_template": "Paste the file's text into spec.model.chatTemplate.",
}
_START = ("vllm", "serve")
_PROGRAMS = ("python", "python3", "-m", "vllm.entrypoints.openai.api_server", "-O3", "exec")


def from_command(text: str) -> Draft:
    """Return the deployment of a command such as `vllm serve Qwen/Qwen3-8B --max-model-len 8192`."""
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise ConvertError(f"The command cannot be split into words: {error}.") from None
    if "vllm" in words:
        words = words[words.index("vllm") :]
    draft = Draft("model")
    model = apply_arguments(draft, _without_program(words))
    if model is None:
        raise ConvertError("The command names no model. Write it as `vllm serve MODEL --OPTION VALUE`.")
    draft.metadata["name"] = resource_name(draft.get("model.name") or model.rstrip("/").rpartition("/")[2])
    set_gpus(draft, None)
    return draft


def _without_program(words: Sequence[str]) -> list[str]:
    left = [word for word in words if word not in _PROGRAMS and not word.endswith("/vllm")]
    return left[len(_START) :] if tuple(left[: len(_START)]) == _START else left[left[:1] == ["serve"] :]


def set_gpus(draft: Draft, gpus: int | None) -> None:
    """Set the GPUs of a pod: as given, or as many as the model is divided over."""
    ranks = (draft.get("engine.tensorParallel") or 1) * (draft.get("engine.pipelineParallel") or 1)
    draft.set("resources.gpus", ranks if gpus is None else gpus)


def apply_arguments(draft: Draft, words: Sequence[str]) -> str | None:
    """Set what the arguments say; return the model that they name."""
    values, model = _values(draft, words)
    if model is not None:
        draft.set("model.source", model_source(model))
    names = values.pop("served_name", None) or []
    if names:
        draft.set("model.name", names[0])
        draft.set("model.aliases", names[1:] or None)
    for text in values.pop("lora_modules", None) or []:
        _set_adapter(draft, text)
    if config := values.pop("speculative_config", None):
        _set_speculation(draft, config)
    extra = [
        f"--{EXTRA_NAMES.get(name, name.replace('_', '-'))}={_text(values.pop(name))}"
        for name in EXTRA
        if name in values
    ]
    draft.set("engine.extraArgs", extra or None)
    for name, value in values.items():
        if name in FIELDS:
            draft.set(FIELDS[name], value)
        else:
            shown = f"--{name.replace('_', '-')} {'' if isinstance(value, bool) else value}".strip()
            draft.note(shown, MEANINGS.get(name, "Has no field; `pagemill serve` has it as an option."))
    return model


def _set_adapter(draft: Draft, text: str) -> None:
    try:
        adapter = lora_module(text)
    except ValueError as error:
        draft.note(f"--lora-modules {text}", str(error))
        return
    adapters = draft.get("model.adapters") or []
    draft.set("model.adapters", [*adapters, {"name": adapter.name, "source": model_source(adapter.source)}])


def _set_speculation(draft: Draft, config: str) -> None:
    try:
        wanted = speculative_of(msgspec.json.decode(config))
    except (ValueError, msgspec.DecodeError) as error:
        draft.note(f"--speculative-config {config}", str(error))
        return
    draft.set("engine.speculative.method", wanted.method)
    draft.set("engine.speculative.source", model_source(wanted.source) if wanted.source else None)
    draft.set("engine.speculative.numTokens", wanted.num_tokens)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _values(draft: Draft, words: Sequence[str]) -> tuple[dict[str, Any], str | None]:
    """Return the given options of `pagemill serve` by name, and the model; note the others."""
    from pagemill.main import LazyCommand

    command = LazyCommand("serve", help="", callback=lambda: None).load()
    options = {name: param for param in command.params for name in (*param.opts, *param.secondary_opts)}
    left = rewritten(list(words), lambda line: draft.note(*_split(line)), lambda line: draft.note(*_split(line)))
    values: dict[str, Any] = {}
    model = left.pop(0) if left and not left[0].startswith("-") else None
    while left:
        option, has_value, value = left.pop(0).partition("=")
        given = [value] if has_value else []
        param = options.get(option)
        if option == "--model":
            model = value if has_value else left.pop(0) if left else None
        elif param is None:
            while left and not left[0].startswith("--"):
                given.append(left.pop(0))
            draft.note(" ".join([option, *given]), "Is no option of `pagemill serve` or of a vLLM that it knows.")
        elif param.is_flag:
            values[param.name] = option in param.opts
        else:
            text = value if has_value else left.pop(0) if left else ""
            if param.multiple:
                values.setdefault(param.name, []).append(text)
            else:
                values[param.name] = _number_or_text(text)
    return values, model


def _number_or_text(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _split(line: str) -> tuple[str, str]:
    """Split a line of `rewritten` into the option with its value and what follows."""
    for words in (" has no effect. ", " is not supported. ", ": "):
        what, found, meaning = line.partition(words)
        if found:
            return what, meaning
    return line, ""
