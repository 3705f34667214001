"""Cases for every field of every request schema: changes that set it to a value that must change the outcome."""

from __future__ import annotations

from typing import Any

from request_outcomes import EXTENSIONS, PENALTIES, Cases, Changes
from responses_cases import COMPACTED, INPUT_TOKENS, RESPONSE, RESPONSES

from pagemill_api.dialects.transport import RequestInfo
from pagemill_api.openapi import request_schemas

STREAM = {"stream": True}
BEAMS = {"use_beam_search": True, "best_of": 2}
TEXT = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "g", "parameters": SCHEMA}}
CALLS = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
CALLED = [*TEXT, {"role": "assistant", "content": "", "tool_calls": CALLS}]

_SHAPES: Cases = {"temperature": {"temperature": 0.5}, "top_p": {"top_p": 0.5}, "top_k": {"top_k": 5}}
_OPENAI: Cases = {
    **EXTENSIONS,
    **PENALTIES,
    **_SHAPES,
    "model": {"model": "other"},
    "n": {"n": 2},
    "best_of": {"best_of": 2},
    "use_beam_search": ({"best_of": 2}, {"use_beam_search": True}),
    "beam_width": ({"use_beam_search": True}, {"beam_width": 3}),
    "length_penalty": (BEAMS, {"length_penalty": 0.5}),
    "early_stopping": (BEAMS, {"early_stopping": True}),
    "logit_bias": {"logit_bias": {"5": 1}},
    "stop": {"stop": ["x"]},
    "stop_token_ids": {"stop_token_ids": [5]},
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "max_tokens": {"max_tokens": 4},
    "skip_special_tokens": {"skip_special_tokens": False},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 2},
    "bad_words": {"bad_words": ["x"]},
    "allowed_token_ids": {"allowed_token_ids": [5]},
    "return_token_ids": {"return_token_ids": True},
    "stream": STREAM,
    "stream_options.include_usage": (STREAM, {"stream_options": {"include_usage": True}}),
    "stream_options.continuous_usage_stats": (
        {**STREAM, "stream_options": {"include_usage": True}},
        {"stream_options": {"continuous_usage_stats": True}},
    ),
    "request_id": {"request_id": "mine"},
    "add_special_tokens": ({"add_special_tokens": False}, {"add_special_tokens": True}),
    "response_format": {"response_format": {"type": "json_object"}},
    "structured_outputs": {"structured_outputs": {"regex": "a"}},
    "guided_json": {"guided_json": SCHEMA},
    "guided_regex": {"guided_regex": "a"},
    "guided_choice": {"guided_choice": ["a"]},
    "guided_grammar": {"guided_grammar": 'start: "a"'},
    "structural_tag": {"structural_tag": TAG},
}
_TEMPLATE: Cases = {
    "add_generation_prompt": {"add_generation_prompt": False},
    "continue_final_message": (
        {"messages": [*TEXT, {"role": "assistant", "content": "so"}]},
        {"continue_final_message": True},
    ),
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": True}},
    "tools": {"tools": [FUNCTION]},
}
_MESSAGES: Cases = {
    "messages.role": {"messages": [{"role": "system", "content": "hi"}]},
    "messages.content": {"messages": [{"role": "user", "content": "ho"}]},
    "messages.name": {"messages": [{**TEXT[0], "name": "Ann"}]},
    "messages.tool_calls": {"messages": CALLED},
    "messages.tool_call_id": {"messages": [*CALLED, {"role": "tool", "content": "1", "tool_call_id": "c1"}]},
    **{
        f"messages.{name}": (
            {"messages": [*TEXT, {"role": "assistant", "content": "so"}]},
            {"messages": [*TEXT, {"role": "assistant", "content": "so", name: "why"}]},
        )
        for name in ("reasoning_content", "reasoning")
    },
}
_ANTHROPIC_TOOL = {"name": "f", "input_schema": SCHEMA}
_WITH_TOOL = {"tools": [_ANTHROPIC_TOOL]}
_COMPUTER = {"type": "computer_20251124", "name": "computer", "display_width_px": 800, "display_height_px": 600}
_EDITOR = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}
_USE = {"type": "tool_use", "id": "u", "name": "f", "input": {"a": 1}}
_USED = [
    *TEXT,
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, _USE]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u", "content": "so"}]},
]
_NO_USES, _ONE_USE = ({"type": "tool_uses", "value": number} for number in range(2))


def _edit(**changes: Any) -> Changes:
    edit = {"type": "clear_tool_uses_20250919", "trigger": _NO_USES, "keep": _NO_USES}
    return {"messages": _USED, "context_management": {"edits": [{**edit, **changes}]}}


def _clear_thinking(**keep: Any) -> Changes:
    return {"messages": _USED, "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}}


def _system(**changes: Any) -> Changes:
    return {"messages": [*TEXT, {"role": "system", "content": "now", **changes}, *TEXT]}


_EDITS: Cases = {
    "context_management.edits.type": (_edit(), _clear_thinking(type="thinking_turns", value=0)),
    "context_management.edits.keep.type": (
        _clear_thinking(type="all", value=0),
        _clear_thinking(type="thinking_turns", value=0),
    ),
    "context_management.edits.keep.value": (_edit(), _edit(keep=_ONE_USE)),
    "context_management.edits.trigger.type": (
        _edit(trigger=_ONE_USE),
        _edit(trigger={**_ONE_USE, "type": "input_tokens"}),
    ),
    "context_management.edits.trigger.value": (_edit(), _edit(trigger=_ONE_USE)),
    "context_management.edits.clear_at_least.type": (_edit(), _edit(clear_at_least=_ONE_USE)),
    "context_management.edits.clear_at_least.value": (
        _edit(),
        _edit(clear_at_least={"type": "input_tokens", "value": 999}),
    ),
    "context_management.edits.exclude_tools": (_edit(), _edit(exclude_tools=["f"])),
    "context_management.edits.clear_tool_inputs": (_edit(), _edit(clear_tool_inputs=True)),
}
_ANTHROPIC_PROMPT: Cases = {
    **_EDITS,
    "messages.clear_at": (_system(), _system(clear_at="next_user_message")),
    "messages.output_config.effort": (
        {"messages": [*TEXT, {"role": "system", "output_config": {"effort": "low"}}]},
        {"messages": [*TEXT, {"role": "system", "output_config": {"effort": "high"}}]},
    ),
    "tools.defer_loading": (_WITH_TOOL, {"tools": [{**_ANTHROPIC_TOOL, "defer_loading": True}]}),
    "tools.max_characters": ({"tools": [_EDITOR]}, {"tools": [{**_EDITOR, "max_characters": 9}]}),
    **{
        f"tools.{name}": ({"tools": [_COMPUTER]}, {"tools": [{**_COMPUTER, name: value}]})
        for name, value in {"display_width_px": 9, "display_height_px": 9, "enable_zoom": True}.items()
    },
    "model": {"model": "other"},
    "messages.role": {"messages": [{"role": "assistant", "content": "hi"}]},
    "messages.content": {"messages": [{"role": "user", "content": "ho ho"}]},
    "system": {"system": "Be brief."},
    "tools.name": (_WITH_TOOL, {"tools": [{**_ANTHROPIC_TOOL, "name": "other"}]}),
    "tools.description": (_WITH_TOOL, {"tools": [{**_ANTHROPIC_TOOL, "description": "d"}]}),
    "tools.input_schema": (_WITH_TOOL, {"tools": [{"name": "f"}]}),
    "tools.strict": (_WITH_TOOL, {"tools": [{**_ANTHROPIC_TOOL, "strict": True}]}),
    "tools.type": (
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"tools": [{"type": "memory_20250818", "name": "bash"}]},
    ),
    "tool_choice.type": (_WITH_TOOL, {"tool_choice": {"type": "none"}}),
    "tool_choice.name": (
        {"tools": [_ANTHROPIC_TOOL, {**_ANTHROPIC_TOOL, "name": "g"}], "tool_choice": {"type": "tool", "name": "f"}},
        {"tool_choice": {"name": "g"}},
    ),
    "thinking.type": {"thinking": {"type": "enabled"}},
    "output_config.effort": {"output_config": {"effort": "low"}},
}
_ANTHROPIC: Cases = {
    **EXTENSIONS,
    **_SHAPES,
    **_ANTHROPIC_PROMPT,
    "max_tokens": {"max_tokens": 4},
    "stop_sequences": {"stop_sequences": ["x"]},
    "stream": STREAM,
    "tool_choice.disable_parallel_tool_use": (
        {**_WITH_TOOL, "tool_choice": {"type": "auto"}},
        {"tool_choice": {"disable_parallel_tool_use": True}},
    ),
    "thinking.budget_tokens": ({"thinking": {"type": "enabled"}}, {"thinking": {"budget_tokens": 9}}),
    "thinking.display": ({"thinking": {"type": "enabled"}}, {"thinking": {"display": "omitted"}}),
    "output_config.format.type": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "output_config.format.schema": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {"output_config": {"format": {"schema": SCHEMA}}},
    ),
}
_TGI: Cases = {
    "inputs": {"inputs": "ho"},
    "stream": STREAM,
    "model": {"model": "other"},
    **{
        f"parameters.{name}": {"parameters": {name: value}}
        for name, value in {
            "max_new_tokens": 4,
            "do_sample": True,
            "temperature": 0.5,
            "top_k": 5,
            "top_p": 0.5,
            "min_p": 0.1,
            "repetition_penalty": 1.5,
            "frequency_penalty": 0.5,
            "seed": 3,
            "stop": ["x"],
            "truncate": 1,
            "return_full_text": True,
            "details": True,
            "decoder_input_details": True,
        }.items()
    },
    "parameters.top_n_tokens": ({"parameters": {"details": True}}, {"parameters": {"top_n_tokens": 2}}),
    "parameters.grammar.type": {"parameters": {"grammar": {"type": "regex", "value": "a"}}},
    "parameters.grammar.value": (
        {"parameters": {"grammar": {"type": "regex", "value": "a"}}},
        {"parameters": {"grammar": {"value": "b"}}},
    ),
}
_OLLAMA: Cases = {
    "model": {"model": "other"},
    "stream": {"stream": False},
    "format": {"format": "json"},
    "think": {"think": True},
    **{
        f"options.{name}": {"options": {name: value}}
        for name, value in {
            "num_predict": 4,
            "temperature": 0.5,
            "top_k": 5,
            "top_p": 0.5,
            "min_p": 0.1,
            "seed": 3,
            "stop": ["x"],
            "repeat_penalty": 1.5,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
        }.items()
    },
}
_OLLAMA_CALLS = [{"function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "g"}}]


def _ollama_calls(first: Changes, *more: Changes) -> Changes:
    call = {**_OLLAMA_CALLS[0], **first}
    return {"messages": [*TEXT, {"role": "assistant", "tool_calls": [call, _OLLAMA_CALLS[1]]}, *more]}


_RESULT = {"role": "tool", "content": "1"}
_OLLAMA_CHAT: Cases = {
    **_OLLAMA,
    "messages.role": {"messages": [{"role": "system", "content": "hi"}]},
    "messages.content": {"messages": [{"role": "user", "content": "ho"}]},
    "messages.thinking": (
        {"messages": [*TEXT, {"role": "assistant", "content": "so"}]},
        {"messages": [*TEXT, {"role": "assistant", "content": "so", "thinking": "why"}]},
    ),
    "messages.images": {"messages": [{**TEXT[0], "images": ["aaaa"]}]},
    "messages.tool_calls.id": (_ollama_calls({}), _ollama_calls({"id": "mine"})),
    "messages.tool_calls.function.name": (_ollama_calls({}), _ollama_calls({"function": {"name": "h"}})),
    "messages.tool_calls.function.arguments": (_ollama_calls({}), _ollama_calls({"function": {"name": "f"}})),
    "messages.tool_name": (_ollama_calls({}, _RESULT), _ollama_calls({}, {**_RESULT, "tool_name": "g"})),
    "messages.tool_call_id": (_ollama_calls({}, _RESULT), _ollama_calls({}, {**_RESULT, "tool_call_id": "call_1_1"})),
    "tools": {"tools": [FUNCTION]},
}
_OLLAMA_GENERATE: Cases = {
    **_OLLAMA,
    "prompt": {"prompt": "ho"},
    "suffix": {"suffix": "end"},
    "system": {"system": "Be brief."},
    "raw": {"raw": True},
    "images": {"images": ["aaaa"]},
}
_KSERVE: Cases = {
    **EXTENSIONS,
    **PENALTIES,
    **_SHAPES,
    "max_tokens": {"max_tokens": 4},
    "random_seed": {"random_seed": 3},
    "stop": {"stop": ["x"]},
    "stop_words": {"stop_words": ["x"]},
    "exclude_input_in_output": {"exclude_input_in_output": False},
    "text_input": {"text_input": "ho"},
    "parameters": {"parameters": {"top_k": 5}},
    "id": {"id": "mine"},
}
_TENSOR = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["hi"]}
_INFER: Cases = {
    "id": {"id": "mine"},
    "inputs.name": {"inputs": [{**_TENSOR, "name": "other"}]},
    "inputs.shape": {"inputs": [{**_TENSOR, "shape": [1, 1]}]},
    "inputs.datatype": {"inputs": [{**_TENSOR, "datatype": "FP16"}]},
    "inputs.data": {"inputs": [{**_TENSOR, "data": ["ho"]}]},
    "inputs.parameters.binary_data_size": {"inputs": [{**_TENSOR, "parameters": {"binary_data_size": 9}}]},
    "outputs.name": {"outputs": [{"name": "other"}]},
    "outputs.parameters.binary_data": {"outputs": [{"name": "text_output", "parameters": {"binary_data": True}}]},
    "parameters": {"parameters": {"top_k": 5}},
}
_VECTORS: Cases = {
    "model": {"model": "other"},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 2},
    "priority": {"priority": 5},
    "request_id": {"request_id": "mine"},
}

DIALECTS: dict[str, tuple[str, Changes, Cases]] = {
    "ChatCompletionRequest": (
        "chat",
        {"model": "m", "messages": TEXT},
        {
            **_OPENAI,
            **_TEMPLATE,
            **_MESSAGES,
            "max_completion_tokens": {"max_completion_tokens": 4},
            "logprobs": {"logprobs": True},
            "top_logprobs": ({"logprobs": True}, {"top_logprobs": 2}),
            "logprob_token_ids": ({"logprobs": True}, {"logprob_token_ids": [5]}),
            "tool_choice": ({"tools": [FUNCTION, OTHER]}, {"tool_choice": "none"}),
            "parallel_tool_calls": ({"tools": [FUNCTION]}, {"parallel_tool_calls": False}),
            "reasoning_effort": {"reasoning_effort": "low"},
            "thinking_token_budget": {"thinking_token_budget": 9},
            "reasoning.effort": {"reasoning": {"effort": "low"}},
            "reasoning.max_tokens": {"reasoning": {"max_tokens": 9}},
            "include_reasoning": {"include_reasoning": False},
            "verbosity": {"verbosity": "low"},
            "prediction.type": {"prediction": {"type": "content", "content": "so"}},
            "prediction.content": (
                {"prediction": {"type": "content", "content": "so"}},
                {"prediction": {"type": "content", "content": "no"}},
            ),
        },
    ),
    "CompletionRequest": (
        "completions",
        {"model": "m", "prompt": "hi"},
        {
            **_OPENAI,
            "prompt": {"prompt": "ho"},
            "logprobs": {"logprobs": 2},
            "logprob_token_ids": ({"logprobs": 2}, {"logprob_token_ids": [5]}),
            "suffix": {"suffix": "end"},
            "echo": {"echo": True},
        },
    ),
    "MessagesRequest": ("messages", {"model": "m", "max_tokens": 9, "messages": TEXT}, _ANTHROPIC),
    "ResponsesRequest": ("responses", RESPONSE, RESPONSES),
    "CompactRequest": ("responses-compact", RESPONSE, COMPACTED),
    "EmbeddingRequest": (
        "embeddings",
        {"model": "m", "input": "hi"},
        {
            **_VECTORS,
            "input": {"input": ["hi", "ho"]},
            "encoding_format": {"encoding_format": "base64"},
            "dimensions": {"dimensions": 2},
            "prompt_name": {"prompt_name": "query"},
        },
    ),
    "RerankRequest": (
        "rerank",
        {"model": "m", "query": "hi", "documents": ["a", "bcd"]},
        {
            **_VECTORS,
            "query": {"query": "ho"},
            "documents": {"documents": ["b", "bcd"]},
            "top_n": {"top_n": 1},
            "return_documents": {"return_documents": False},
        },
    ),
    "ScoreRequest": (
        "score",
        {"model": "m", "text_1": "hi", "text_2": ["a", "bcd"]},
        {**_VECTORS, "text_1": {"text_1": "ho"}, "text_2": {"text_2": ["b", "bcd"]}},
    ),
    "TgiRequest": ("tgi", {"inputs": "hi"}, _TGI),
    "OllamaChatRequest": ("ollama-chat", {"model": "m", "messages": TEXT}, _OLLAMA_CHAT),
    "OllamaGenerateRequest": ("ollama-generate", {"model": "m", "prompt": "hi"}, _OLLAMA_GENERATE),
    "GenerateBody": ("kserve-generate", {"text_input": "hi"}, _KSERVE),
    "InferBody": ("kserve-infer", {"inputs": [_TENSOR]}, _INFER),
}
"""Schema -> dialect, a body, and a case for each field."""
COUNTS: dict[str, tuple[str, Changes, Cases]] = {
    "TokenizeRequest": (
        "/tokenize",
        {"messages": TEXT},
        {
            **_TEMPLATE,
            **_MESSAGES,
            "model": {"model": "other"},
            "prompt": ({"messages": None, "prompt": "hi"}, {"prompt": "ho"}),
            "add_special_tokens": {"add_special_tokens": True},
            "return_token_strs": {"return_token_strs": True},
        },
    ),
    "CountRequest": (
        "/v1/messages/count_tokens",
        {"model": "m", "messages": TEXT},
        {
            **_ANTHROPIC_PROMPT,
            "tool_choice.name": (_WITH_TOOL, {"tool_choice": {"type": "tool", "name": "other"}}),
        },
    ),
    "InputTokensRequest": ("/v1/responses/input_tokens", RESPONSE, INPUT_TOKENS),
}
"""Schema -> route, a body, and a case for each field."""
ELSEWHERE = {
    "DetokenizeRequest": "tests/gateway/test_gateway_tools.py",
    "ShowRequest": "tests/protocol/test_ollama_dialects.py",
    "BatchRequest": "tests/gateway/test_batches.py",
    **dict.fromkeys(("ConversationRequest", "ItemsRequest", "MetadataRequest"), "tests/gateway/test_conversations.py"),
    "MessageBatchRequest": "tests/gateway/test_message_batches.py",
}
"""Schemas of routes with state, or of fewer than three fields, and the tests of their effects."""
SCHEMAS = {schema.__name__: schema for schema in request_schemas()}


def place_of(dialect: str) -> RequestInfo:
    """Return the place of a body whose fields decide as much as possible."""
    return RequestInfo("/" if dialect == "tgi" else "", {"model": "m"}, only_model="m")
