"""Translation of vLLM's arguments: one table for `LLM(...)`, `pagemill serve` and the reference page.

An argument sets a field of `EngineConfig`, or changes nothing if it has one of the listed values; other values are
refused with the remedy. `offline` and the command line translate with this table; neither knows an argument of vLLM's
itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from pagemill_engine.vllm_speculation import speculative_of
from pagemill_protocol.errors import show_python
from pagemill_protocol.report.adapters import WantedAdapter

logger = logging.getLogger(__name__)

ANY = None
"""Accept every value."""
EITHER = (True, False)
"""Accept both values of a flag."""
_reported: set[str] = set()


class Argument(NamedTuple):
    meaning: str
    """The argument's effect, or what to do instead."""
    taken: tuple[Any, ...] | None = ()
    """Accepted values that change nothing."""
    sets: str = ""
    """The field of `EngineConfig` that it sets."""
    values: Mapping[Any, Any] = {}
    """Pagemill's values by vLLM's values of that field; other values are used unchanged."""
    option: str = ""
    """The equivalent option of `pagemill serve`; an option of the same name needs no row."""
    only: str = ""
    """`serve` or `LLM` if only one of them has the argument."""


_PARSERS = {
    "llama3_json": "llama3-json",
    "qwen3_coder": "qwen3-coder",
    "qwen3_xml": "qwen3-coder",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "openai": "harmony",
    "glm45": "glm",
    "glm47": "glm",
    "kimi_k2": "kimi-k2",
    "minimax_m2": "minimax-m2",
    "seed_oss": "seed-oss",
    "hunyuan_a13b": "hunyuan",
    "ernie45": "hermes",
}
_REASONING = {
    **dict.fromkeys(("deepseek_r1", "qwen3", "glm45", "kimi_k2", "minimax_m2"), "think"),
    "hunyuan_a13b": "hunyuan",
    "ernie45": "ernie",
    "mistral": "magistral",
    "seed_oss": "seed-oss",
    "openai_gptoss": "harmony",
}
_FLOATS = {"half": "float16", "float": "float32"}
_KV = "The KV cache takes nine tenths of a GPU's free memory, on a CPU 1 GiB or a quarter of the free memory; "
_ONE = (
    "One engine computes a model, on one machine or several (`tensor_parallel_size`, `pipeline_parallel_size`, "
    "`nnodes`). Run more replicas behind `pagemill gateway`."
)
_TEXT = "Models here read text only."
_LOGS = "Requests are not logged one by one; counters are at /metrics."
_POOLS = "The model's files say whether it generates text, embeds or scores. Remove it."
_FOLDER = "The model's folder or file decides it. Name a revision in the source: hf://ORG/NAME@REVISION."
_CORS = "The headers and methods that pages may use are fixed; cookies are never allowed."

ARGUMENTS: Mapping[str, Argument] = {
    # Arguments that engines have under the same or another name.
    "dtype": Argument("Type of float weights and of the KV cache.", sets="dtype", values=_FLOATS, option="dtype"),
    "quantization": Argument(
        "Quantized checkpoints are recognised; int8, int4, w8a8 and fp8 quantize weights while they are loaded.",
        sets="quantization",
        values=dict.fromkeys((None, "gguf", "gptq", "awq", "compressed-tensors", "mxfp4", "gptq_marlin"), "none"),
        option="quantization",
    ),
    "kv_cache_dtype": Argument(
        "Type of the KV cache.", sets="kv_cache_dtype", values={"fp8_e4m3": "fp8"}, option="kv-cache-dtype"
    ),
    "served_model_name": Argument("Names for clients.", sets="served_names", option="served-name"),
    "num_gpu_blocks_override": Argument(
        "Blocks of the KV cache; for a server --kv-cache-memory sets it.", sets="num_kv_blocks", only="LLM"
    ),
    "scheduling_policy": Argument("Order of waiting requests.", sets="policy", option="policy"),
    "enforce_eager": Argument(
        "True: no CUDA graphs. Nothing is compiled in either case.",
        sets="cuda_graphs",
        values={True: False, False: True},
        option="no-cuda-graphs",
    ),
    "async_scheduling": Argument("Steps overlap if the device gains by it; see `overlap`.", EITHER),
    "override_generation_config": Argument(
        "Default sampling values; for a server send them with the requests.", sets="generation_defaults", only="LLM"
    ),
    "tool_call_parser": Argument(
        "Form of tool calls.", sets="tool_call_parser", values=_PARSERS, option="tool-call-parser"
    ),
    "reasoning_parser": Argument(
        "How reasoning is read.", sets="reasoning_parser", values=_REASONING, option="reasoning-parser"
    ),
    "enable_prefix_caching": Argument(
        "Shared beginnings of prompts are computed once.", sets="enable_prefix_caching", option="prefix-caching"
    ),
    "kv_cache_memory_bytes": Argument(
        "Memory of the KV cache.", sets="kv_cache_memory_bytes", option="kv-cache-memory"
    ),
    # Memory.
    "gpu_memory_utilization": Argument(_KV + "`kv_cache_memory_bytes` (--kv-cache-memory) sets it.", ANY),
    "swap_space": Argument("Nothing is swapped: a preempted request is computed again.", ANY),
    "cpu_offload_gb": Argument("Weights stay on their device. `quantization` makes them smaller.", (0, 0.0, None)),
    "enable_sleep_mode": Argument("Every server can sleep; an `LLM` is closed instead.", (False,)),
    # Parallelism.
    "data_parallel_size": Argument(_ONE, (1,)),
    "enable_expert_parallel": Argument(_ONE, (False,)),
    "distributed_executor_backend": Argument(_ONE, (None, "mp", "uni")),
    "worker_use_ray": Argument(_ONE, (False,)),
    "disable_custom_all_reduce": Argument(_ONE, EITHER),
    "api_server_count": Argument("One process serves HTTP.", (1, None), only="serve"),
    "headless": Argument(_ONE, (False,), only="serve"),
    # The model's files.
    "trust_remote_code": Argument("Code in a model's files is never run.", EITHER),
    "load_format": Argument("The files show the format.", ("auto", "safetensors", "gguf", None)),
    "config_format": Argument("The files show the format.", ("auto", "hf", None)),
    "tokenizer_mode": Argument("The tokenizer is the model's, in its fast form.", ("auto", "hf", None)),
    "tokenizer": Argument(_FOLDER, (None,)),
    "tokenizer_revision": Argument(_FOLDER, (None,)),
    "revision": Argument(_FOLDER, (None,)),
    "code_revision": Argument(_FOLDER, (None,)),
    "skip_tokenizer_init": Argument("The tokenizer is always read. Send token ids and detokenize=False.", (False,)),
    "hf_token": Argument("Set the environment variable HF_TOKEN.", (None,)),
    "hf_config_path": Argument(_FOLDER, (None,)),
    "hf_overrides": Argument("Change config.json in the model's folder.", (None, {})),
    "download_dir": Argument("Downloads go to `~/.cache/pagemill/models`; PAGEMILL_MODEL_CACHE moves it.", (None,)),
    "ignore_patterns": Argument("Only files that a model needs are downloaded.", ANY),
    "model_impl": Argument("The architecture decides how a model runs.", ("auto",)),
    "runner": Argument(_POOLS, ("auto", "generate")),
    "task": Argument(_POOLS, ("auto", "generate", None)),
    "convert": Argument(_POOLS, ("auto", "none")),
    "pooler_config": Argument(_POOLS, (None,)),
    "lora_modules": Argument(
        "Adapters from the start, `NAME=PATH` or as JSON.", sets="lora_modules", option="lora-modules", only="serve"
    ),
    "lora_dtype": Argument("Adapters are kept in bfloat16 beside native kernels, else in float32.", ("auto",)),
    "fully_sharded_loras": Argument(_ONE, (False,)),
    "default_mm_loras": Argument(_TEXT, (None,)),
    "limit_mm_per_prompt": Argument(_TEXT, ANY),
    "mm_processor_kwargs": Argument(_TEXT, (None, {})),
    "allowed_local_media_path": Argument(_TEXT, (None, "")),
    # Scheduler and kernels.
    "enable_chunked_prefill": Argument(
        "Long prompts are always computed in parts; `max_num_batched_tokens` sizes them.", (True, None)
    ),
    "long_prefill_token_threshold": Argument("`max_num_batched_tokens` sizes the parts of prompts.", (0,)),
    "max_num_partial_prefills": Argument("`max_num_batched_tokens` sizes the parts of prompts.", (1,)),
    "num_lookahead_slots": Argument("Proposed tokens are counted in a step's budget.", ANY),
    "speculative_config": Argument(
        "Proposed tokens: n-grams, a draft model, an EAGLE-3 head, the model's own layer (`mtp`), or `off`.",
        sets="speculative",
        option="speculative-config",
    ),
    "preemption_mode": Argument("A preempted request is computed again.", (None, "recompute")),
    "disable_sliding_window": Argument("Windows are the model's own.", (False,)),
    "max_seq_len_to_capture": Argument("CUDA graphs include decodes of any length.", ANY),
    "compilation_config": Argument("Nothing is compiled by torch.", ANY),
    "use_v2_block_manager": Argument("There is only one block manager.", EITHER),
    "disable_cascade_attention": Argument("There is no cascade attention.", EITHER),
    "prefix_caching_hash_algo": Argument("Blocks have one hash, blake2b.", ANY),
    "calculate_kv_scales": Argument("Scales of int8 and fp8 are computed for each token and head.", EITHER),
    "max_logprobs": Argument("Answers have up to 20 log probabilities a token.", tuple(range(21))),
    "logits_processors": Argument("Use `logit_bias` or `structured_outputs` of a request.", (None, [])),
    "guided_decoding_backend": Argument("Forms are compiled by llguidance.", ("auto", "guidance", None)),
    "structured_outputs_config": Argument("Forms are compiled by llguidance.", (None, {})),
    "kv_transfer_config": Argument("Prefill and decode run in one engine.", (None,)),
    # Logs and HTTP.
    "disable_log_stats": Argument("Statistics are metrics, not log lines.", EITHER),
    "disable_log_requests": Argument(_LOGS, EITHER, only="serve"),
    "enable_log_requests": Argument(_LOGS, (False,), only="serve"),
    "disable_uvicorn_access_log": Argument(_LOGS, EITHER, only="serve"),
    "max_log_len": Argument(_LOGS, ANY, only="serve"),
    "uvicorn_log_level": Argument(_LOGS, ANY, only="serve"),
    "enable_auto_tool_choice": Argument("Tools are always accepted.", (True,), only="serve"),
    "chat_template_content_format": Argument("Templates get text.", ("auto", "string"), only="serve"),
    "response_role": Argument("The role is `assistant`.", ("assistant",), only="serve"),
    "enable_prompt_tokens_details": Argument("Usage always includes cached tokens.", (True,), only="serve"),
    "enable_request_id_headers": Argument("Answers always have X-Request-Id.", (True,), only="serve"),
    "enable_server_load_tracking": Argument("/load always answers.", (True,), only="serve"),
    "root_path": Argument("Let the proxy remove the path.", ("",), only="serve"),
    "ssl_keyfile": Argument("Private key of the certificate.", option="tls-key-file", only="serve"),
    "ssl_certfile": Argument("Certificate chain for HTTPS.", option="tls-cert-file", only="serve"),
    "allowed_origins": Argument("Web pages that may use the server.", option="allowed-origin", only="serve"),
    "allowed_methods": Argument(_CORS, ('["*"]',), only="serve"),
    "allowed_headers": Argument(_CORS, ('["*"]',), only="serve"),
    "allow_credentials": Argument(_CORS, (False,), only="serve"),
    "middleware": Argument("Engines run no code of other packages in their server. Use a proxy.", only="serve"),
}


def translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate arguments of `LLM(...)` to fields of `EngineConfig`; other arguments stay. Raises `TypeError`."""
    settings: dict[str, Any] = {}
    for name, value in given.items():
        argument = ARGUMENTS.get(name)
        if argument is None or argument.only == "serve":
            settings[name] = value
        elif argument.sets:
            if argument.sets in settings or (argument.sets != name and argument.sets in given):
                raise TypeError(f"LLM: {name} and {argument.sets} are the same here. Remove one of them.")
            settings[argument.sets] = value_of(argument, value)
        elif takes(argument, value):
            report(name, f"LLM: {name}={show_python(value)} changes nothing. {argument.meaning}")
        else:
            raise TypeError(f"LLM: {name}={show_python(value)} is not supported. {argument.meaning}")
    return settings


def value_of(argument: Argument, value: Any) -> Any:
    if argument.sets == "speculative":
        try:
            return speculative_of(value)
        except ValueError as error:
            raise TypeError(f"LLM: {error}") from None
    plain = str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value
    if argument.sets == "served_names" and isinstance(plain, str):
        return [plain]
    return argument.values.get(plain, plain) if isinstance(plain, str | bool | None) else plain


def lora_module(text: str) -> WantedAdapter:
    """Return the adapter of `NAME=PATH`, or of the JSON form. Raises `ValueError`."""
    name: Any
    name, _, path = text.partition("=")
    why = "it lacks a name or a path"
    if text.lstrip().startswith("{"):
        try:
            fields = json.loads(text)
        except ValueError as error:
            fields, why = {}, str(error)
        name, path = fields.get("name"), fields.get("path")
        if unknown := sorted(fields.keys() - {"name", "path", "base_model_name"}):
            name, why = None, f"it has the unknown key `{unknown[0]}`"
    if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
        form = 'Write NAME=PATH, or {"name": "NAME", "path": "PATH"}.'
        raise ValueError(f"`lora_modules` {text[:200]!r}: {why}. {form}")
    return WantedAdapter(name=name, source=path)


def takes(argument: Argument, value: Any) -> bool:
    return argument.taken is None or any(type(value) is type(each) and value == each for each in argument.taken)


def report(name: str, line: str) -> None:
    """Log the line once in this process."""
    if name not in _reported:
        _reported.add(name)
        logger.warning(line)
