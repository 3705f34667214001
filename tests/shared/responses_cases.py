"""A case for each field of the Responses API's bodies, for the tests of what fields do."""

from __future__ import annotations

from typing import Any

from request_outcomes import EXTENSIONS, PENALTIES, Cases, Changes

RESPONSE: Changes = {"model": "m", "input": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
STREAM = {"stream": True}
_ITEMS_TOOL = {"type": "function", "name": "f", "parameters": SCHEMA}
_ITEMS_WITH_TOOL = {"tools": [_ITEMS_TOOL]}
_GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
_CUSTOM = {"type": "custom", "name": "f", "format": _GRAMMAR}


def _namespace(**changes: Any) -> Changes:
    return {"tools": [{"type": "namespace", "name": "n", "tools": [{**_ITEMS_TOOL, **changes}]}]}


_ITEMS_WITH_NAMESPACE = _namespace()
_ITEMS_PROMPT: Cases = {
    "model": {"model": "other"},
    "input": {"input": "ho"},
    "instructions": {"instructions": "Be brief."},
    "reasoning.effort": {"reasoning": {"effort": "low"}},
    "tools.type": (_ITEMS_WITH_TOOL, {"tools": [{**_ITEMS_TOOL, "type": "custom"}]}),
    "tools.format.type": (
        {"tools": [_CUSTOM]},
        {"tools": [{**_CUSTOM, "format": {**_GRAMMAR, "type": "text"}}]},
    ),
    "tools.format.syntax": ({"tools": [_CUSTOM]}, {"tools": [{**_CUSTOM, "format": {**_GRAMMAR, "syntax": "regex"}}]}),
    "tools.format.definition": (
        {"tools": [_CUSTOM]},
        {"tools": [{**_CUSTOM, "format": {**_GRAMMAR, "definition": 'start: "b"'}}]},
    ),
    **{
        f"tools.tools.{name}": (_ITEMS_WITH_NAMESPACE, _namespace(**change))
        for name, change in {
            "type": {"type": "custom"},
            "name": {"name": "g"},
            "description": {"description": "d"},
            "parameters": {"parameters": {"type": "object"}},
            "strict": {"strict": True},
            "format.type": {"type": "custom", "format": _GRAMMAR},
            "format.syntax": {"type": "custom", "format": {**_GRAMMAR, "syntax": "regex"}},
            "format.definition": {"type": "custom", "format": _GRAMMAR},
        }.items()
    },
    "tools.name": (_ITEMS_WITH_TOOL, {"tools": [{**_ITEMS_TOOL, "name": "g"}]}),
    "tools.description": (_ITEMS_WITH_TOOL, {"tools": [{**_ITEMS_TOOL, "description": "d"}]}),
    "tools.parameters": (_ITEMS_WITH_TOOL, {"tools": [{"type": "function", "name": "f"}]}),
    "tool_choice": (_ITEMS_WITH_TOOL, {"tool_choice": "none"}),
}
"""Of `PromptFields`."""
RESPONSES: Cases = {
    **EXTENSIONS,
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.5},
    "max_output_tokens": {"max_output_tokens": 4},
    "stream": STREAM,
    **PENALTIES,
    "top_k": {"top_k": 5},
    "truncation": {"truncation": "auto"},
    "background": {"background": True},
    **_ITEMS_PROMPT,
    "tools.strict": (_ITEMS_WITH_TOOL, {"tools": [{**_ITEMS_TOOL, "strict": True}]}),
    "parallel_tool_calls": (_ITEMS_WITH_TOOL, {"parallel_tool_calls": False}),
    "text.format.type": {"text": {"format": {"type": "json_object"}}},
    **{
        f"text.format.{name}": (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
            {"text": {"format": {name: value}}},
        )
        for name, value in {"name": "b", "schema": {"required": ["a"]}, "strict": True}.items()
    },
    "text.verbosity": {"text": {"verbosity": "low"}},
    "metadata": {"metadata": {"a": "b"}},
    "conversation": {"conversation": "conv_1"},
    "previous_response_id": {"previous_response_id": "resp_1"},
    "include": {"include": ["message.output_text.logprobs"]},
    "top_logprobs": {"top_logprobs": 2},
    "store": {"store": False},
}
INPUT_TOKENS: Cases = {
    **_ITEMS_PROMPT,
    "tools.strict": (_ITEMS_WITH_TOOL, {"tools": [{**_ITEMS_TOOL, "strict": True}]}),
}
"""Of `InputTokensRequest`."""
COMPACTED: Cases = {
    "model": {"model": "other"},
    "input": {"input": "ho"},
    "instructions": {"instructions": "Be brief."},
}
"""Of `CompactRequest`."""
REPEATED = {
    "metadata": "it is the client's, and repeated",
    "store": "a gateway that stores responses acts on it",
    "truncation": "tests/protocol/test_responses_truncation.py",
    "text.format.name": "a name for people",
    "text.format.strict": "every schema is enforced",
}
"""Fields of a response that change nothing but what it repeats of the request, or of which another test is."""
