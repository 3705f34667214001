"""The answer formats by name, and the detection of a model's formats from its chat template.

A deployment's `model.toolCallParser` and `model.reasoningParser` override what is detected. Installed packages add
formats of tool calls with entry points in the group `pagemill.tool_parsers`, whose objects are `ToolFormat`s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from importlib.metadata import entry_points
from typing import Literal, NamedTuple

from pagemill_api.answers.call_syntax import CallSyntax
from pagemill_api.answers.events import Parser
from pagemill_api.answers.formats import (
    deepseek,
    gemma4,
    glm,
    harmony,
    hermes,
    json_list,
    llama3_json,
    mistral,
    pythonic,
    tagged,
)
from pagemill_api.answers.formats.deepseek import DeepSeekParser
from pagemill_api.answers.formats.gemma4 import Gemma4Parser
from pagemill_api.answers.formats.glm import GlmParser
from pagemill_api.answers.formats.harmony import HarmonyParser
from pagemill_api.answers.formats.hermes import HermesParser
from pagemill_api.answers.formats.json_list import JsonListParser
from pagemill_api.answers.formats.llama3_json import Llama3JsonParser
from pagemill_api.answers.formats.mistral import MistralParser
from pagemill_api.answers.formats.pythonic import PythonicParser
from pagemill_api.answers.formats.tagged import TaggedParser, Tags
from pagemill_api.answers.formats.think import ThinkParser
from pagemill_protocol.request.answer_format import AnswerFormat, ParserSettings
from pagemill_protocol.source_errors import SourceError

GROUP = "pagemill.tool_parsers"
AUTO, NONE = "auto", "none"
HERMES, HARMONY = "hermes", "harmony"
StringParameters = Mapping[str, Sequence[str]]


class ToolFormat(NamedTuple):
    name: str
    make: Callable[[StringParameters], Parser]
    sign: str
    """Regular expression that matches the chat templates of models with this format."""
    syntax: Callable[[str], CallSyntax] | None = None
    """Returns the call syntax of a model with this chat template; `None`: calls can be neither forced nor
    constrained."""
    call_ids: Literal["", "short", "named"] = ""
    """The form of the ids of calls that the templates of these models require: nine letters and digits, or
    `functions.NAME:NUMBER`, counted over the chat; empty: any."""


def _tagged(name: str, tags: Tags, sign: str) -> ToolFormat:
    syntax = tagged.syntax_of(tags)
    return ToolFormat(name, partial(TaggedParser, tags), sign, lambda _: syntax)


def _json_list(name: str, begin: str, end: str) -> ToolFormat:
    syntax = json_list.syntax_of(begin, end)
    return ToolFormat(name, lambda _: JsonListParser(begin, end), re.escape(begin), lambda _: syntax)


BUILT_IN = (
    ToolFormat(HARMONY, lambda _: HarmonyParser(), r"<\|channel\|>", lambda _: harmony.SYNTAX),
    ToolFormat("deepseek", lambda _: DeepSeekParser(), re.escape(deepseek.DEEPSEEK.begin), deepseek.syntax),
    ToolFormat(
        "kimi-k2",
        lambda _: DeepSeekParser(deepseek.KIMI_K2),
        re.escape(deepseek.KIMI_K2.begin),
        lambda _: deepseek.KIMI_K2_SYNTAX,
        call_ids="named",
    ),
    ToolFormat("gemma4", lambda _: Gemma4Parser(), r"<\|tool_call>", lambda _: gemma4.SYNTAX),
    _tagged("minimax-m2", tagged.MINIMAX_M2, re.escape(tagged.MINIMAX_M2.call)),
    _tagged("seed-oss", tagged.SEED_OSS, re.escape(tagged.SEED_OSS.call)),
    _tagged("qwen3-coder", tagged.QWEN3_CODER, r"<function=[\s\S]*<parameter="),
    ToolFormat("glm", GlmParser, re.escape(glm.KEY), lambda _: glm.SYNTAX),
    ToolFormat(HERMES, lambda _: HermesParser(), r"<tool_call>", lambda _: hermes.SYNTAX),
    ToolFormat("mistral", lambda _: MistralParser(), r"\[TOOL_CALLS\]", mistral.syntax, call_ids="short"),
    _json_list("nemotron", *json_list.NEMOTRON),
    _json_list("hunyuan", *json_list.HUNYUAN),
    ToolFormat(
        "lfm2",
        lambda _: PythonicParser(pythonic.LFM2[:1], pythonic.LFM2[1]),
        re.escape(pythonic.LFM2[0]),
        lambda _: pythonic.LFM2_SYNTAX,
    ),
    ToolFormat("pythonic", lambda _: PythonicParser(), r"\[\w+\(\w+=", lambda _: pythonic.SYNTAX),
    ToolFormat(
        "llama3-json",
        lambda _: Llama3JsonParser(),
        r'<\|python_tag\|>|"name": function name',
        lambda _: llama3_json.SYNTAX,
    ),
)
"""In the order of detection."""
_THINK = ("<think>", "</think>")
MARKERS = {
    "think": _THINK,
    "magistral": ("[THINK]", "[/THINK]"),
    "seed-oss": ("<seed:think>", "</seed:think>"),
    "gemma4": gemma4.REASONING,
    "hunyuan": _THINK,
    "ernie": _THINK,
}
ENCLOSED = {"hunyuan": ("<answer>", "</answer>"), "ernie": ("<response>", "</response>")}
"""The markers around the text behind reasoning, which an answer may leave out."""
REASONING_ENDS = {**MARKERS, HARMONY: harmony.REASONING}
"""The markers before and after reasoning."""


@cache
def tool_formats() -> Mapping[str, ToolFormat]:
    added: list[ToolFormat] = [entry.load() for entry in entry_points(group=GROUP)]
    return {each.name: each for each in (*BUILT_IN, *added)}


def tool_parser_names() -> list[str]:
    return [AUTO, NONE, *tool_formats()]


def reasoning_parser_names() -> list[str]:
    return [AUTO, NONE, *MARKERS, HARMONY]


def tool_parser(name: str, string_parameters: StringParameters) -> Parser:
    return tool_formats()[name].make(string_parameters)


def call_syntax(name: str, template: str) -> CallSyntax | None:
    """Return the call syntax of a model with this chat template, or None where the format declares none."""
    declared = tool_formats()[name].syntax if name else None
    return None if declared is None else declared(template)


def reasoning_parser(answer_format: AnswerFormat) -> Parser:
    """Return the reasoning parser of a format other than harmony."""
    begin, end = MARKERS[answer_format.reasoning]
    enclosed = ENCLOSED.get(answer_format.reasoning)
    if not answer_format.tools:
        return ThinkParser(begin, end, answer_format.starts_in_reasoning, enclosed=enclosed)
    make_tools = partial(tool_parser, answer_format.tools, answer_format.string_parameters)
    call_markers = make_tools().call_markers
    return ThinkParser(begin, end, answer_format.starts_in_reasoning, call_markers, make_tools, enclosed)


def call_id_form(name: str) -> Literal["", "short", "named"]:
    return tool_formats()[name].call_ids if name else ""


def check_parsers(settings: ParserSettings) -> None:
    """Raise `SourceError` for a parser that is not installed here."""
    detect_tools("", settings.tools)
    detect_reasoning("", settings.reasoning)


def hides_markers(answer_format: AnswerFormat) -> bool:
    """Whether the text contains the format's markers only if special tokens are included."""
    return bool(answer_format.tools) or answer_format.reasoning in ("magistral", "seed-oss", "gemma4", HARMONY)


@lru_cache(maxsize=256)
def detect_tools(template: str, setting: str = AUTO) -> str:
    """Return the name of the tool-call parser for a model with this chat template; "" if there is none."""
    if setting != AUTO:
        return "" if setting == NONE else _known(setting, tool_parser_names(), "model.toolCallParser")
    return next((each.name for each in tool_formats().values() if re.search(each.sign, template)), "")


@lru_cache(maxsize=256)
def detect_reasoning(template: str, setting: str = AUTO) -> str:
    """Return the name of the reasoning parser for a model with this chat template; "" if there is none."""
    if setting != AUTO:
        return "" if setting == NONE else _known(setting, reasoning_parser_names(), "model.reasoningParser")
    if "<|channel|>" in template:
        return HARMONY
    names = (*(name for name, (_, end) in ENCLOSED.items() if end in template), *MARKERS)
    return next((name for name in names if MARKERS[name][1] in template), "")


def _known(name: str, names: Sequence[str], field: str) -> str:
    if name in names:
        return name
    message = f"there is no parser {name[:40]!r}. Use one of: {', '.join(names)}."
    raise SourceError(field, message, reason="UnknownParser")
