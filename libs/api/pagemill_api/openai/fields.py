"""Building blocks of the request schemas: the strict base class and the fields with several shapes.

Every refusal is a pydantic error whose context may carry `field`, a path relative to pydantic's own location; `parse`
turns it into the client's error. Shapes are normalized here, so that `schemas` has one type per field: a list of stop
strings, a list of prompts, a message's text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from pagemill_api.openai.unknown_fields import left_at, left_by
from pagemill_api.openai.unsupported import Unsupported
from pagemill_protocol.errors import show
from pagemill_protocol.request.sampling import MAX_LOGIT_BIAS

MAX_TEXT_CHARS = 8 * 1024 * 1024
MAX_NAME_CHARS = 512
MAX_CONTENT_PARTS = 1024
MAX_PROMPTS = 1024
MAX_PROMPT_TOKENS = 4 * 1024 * 1024
MAX_TEMPLATE_KWARG_CHARS = 1024
TEMPLATE_KWARGS = frozenset(
    {"enable_thinking", "thinking", "thinking_budget", "preserve_thinking", "reasoning_effort", "date_string"}
)
"""Variables that clients may pass to a chat template. Others could override the renderer's own arguments."""

_EXACT = 2.0**53
"""Below this, a float says which integer was meant."""
_UNIONS = (Union, UnionType, Annotated)
_TEXT_KEYS = ("type", "text")
Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME_CHARS)]
RequestId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT_CHARS)]


def refusal(field: str, message: str, code: str = "invalid_value") -> PydanticCustomError:
    """Return a validation error at `field`, relative to where it is raised; `message` names value and remedy."""
    return PydanticCustomError("refusal", "{message}", {"field": field, "message": message, "code": code})


def string_of(values: Mapping[str, Any], name: str, field: str) -> str:
    """Return a string of the object at `field`. Raises `PydanticCustomError` for values of other types."""
    value = values.get(name)
    if not isinstance(value, str):
        raise refusal(f"{field}.{name}", f"`{name}` must be a string, got {show(value)}.")
    return value


class RequestModel(BaseModel):
    """Base class: strict types, unknown fields ignored, null means default, known but unsupported fields refused."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, defer_build=True)
    UNSUPPORTED: ClassVar[Mapping[str, Unsupported]] = {}
    IGNORED: ClassVar[Mapping[str, str]] = {}
    """Fields that clients send and that are accepted without effect, with the reason. They change no answer, and its
    header names them."""
    _READ: ClassVar[frozenset[str]] = frozenset()
    """Names of the fields that have an effect or are refused."""

    _INTEGERS: ClassVar[frozenset[str]] = frozenset()
    """Names of the fields that are integers: JSON writes 2 also as 2.0."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        names = {each for name, field in cls.model_fields.items() for each in (name, field.alias or name)}
        cls._READ = frozenset((names - cls.IGNORED.keys()) | cls.UNSUPPORTED.keys())
        kinds = {name: _kinds_in(field.annotation) for name, field in cls.model_fields.items()}
        cls._INTEGERS = frozenset(name for name, each in kinds.items() if int in each and float not in each)

    @classmethod
    def parts(cls, path: str = "") -> Iterator[tuple[str, type[RequestModel]]]:
        """Yield this schema and those of its fields, each with the path before its fields' names."""
        yield path, cls
        for name, field in cls.model_fields.items():
            if (part := _schema_in(field.annotation)) is not None:
                yield from part.parts(f"{path}{field.alias or name}.")

    @classmethod
    def leaves(cls) -> Iterator[str]:
        """Yield the paths of all fields that have no schema of their own."""
        for path, part in cls.parts():
            for name, field in part.model_fields.items():
                if _schema_in(field.annotation) is None:
                    yield f"{path}{field.alias or name}"

    @classmethod
    def ignored(cls) -> dict[str, str]:
        """Return `IGNORED` of all parts, by path."""
        return {f"{path}{name}": reason for path, part in cls.parts() for name, reason in part.IGNORED.items()}

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        names = given.keys()
        if unknown := names - cls._READ:
            left_by(cls, unknown)
        for name in names & cls._INTEGERS:
            value = given[name]
            if value.__class__ is float and value.is_integer() and abs(value) < _EXACT:
                given[name] = int(value)
        for name in names & cls.UNSUPPORTED.keys():
            rule = cls.UNSUPPORTED[name]
            if rule.refuses(given[name]):
                raise refusal(name, f"`{name}` is not supported. {rule.remedy}", "unsupported_parameter")
        return given


def _kinds_in(kind: Any) -> set[Any]:
    """Return the types in a union, with those that are annotated."""
    within = get_args(kind)
    return {kind} if not within else set().union(*map(_kinds_in, within)) if get_origin(kind) in _UNIONS else set()


def _schema_in(kind: Any) -> type[RequestModel] | None:
    """Return the schema in an annotation, such as that of a list's items."""
    if isinstance(kind, type) and issubclass(kind, RequestModel):
        return kind
    return next((found for each in get_args(kind) if (found := _schema_in(each)) is not None), None)


def _stop_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise refusal("", f"`stop` must be a string or a list of strings, got {show(value)}.")
    return value


def _content_text(value: Any) -> Any:
    """Return a message's content as text: a string, or its text parts joined by line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refusal("", f"`content` must be a string or a list of text parts, got {show(value)}.")
    if len(value) > MAX_CONTENT_PARTS:
        raise refusal("", f"The message has {len(value)} content parts; at most {MAX_CONTENT_PARTS} are allowed.")
    return "\n".join(_part_text(index, part) for index, part in enumerate(value))


def _part_text(index: int, part: Any) -> str:
    if not isinstance(part, dict):
        raise refusal(f"[{index}]", 'Each content part must be an object such as {"type": "text", "text": "..."}.')
    kind = part.get("type")
    if kind != "text":
        raise refusal(
            f"[{index}].type",
            f'Content parts of type {show(kind)} are not supported. Send parts of type "text".',
            "unsupported_parameter",
        )
    if len(part) > len(_TEXT_KEYS):
        left_at("messages.content", part, _TEXT_KEYS)
    text = part.get("text")
    if not isinstance(text, str):
        raise refusal(f"[{index}].text", f"The text of a content part must be a string, got {show(text)}.")
    return text


def prompts_of(value: Any, name: str = "prompt") -> list[str | list[int]]:
    """Return all shapes of a completions prompt as a list of texts or token ids. `name`: name of the field."""
    if isinstance(value, str):
        prompts: list[Any] = [value]
    elif not isinstance(value, list):
        raise refusal(
            "", f"`{name}` must be a string, a list of strings, token ids or lists of them, got {show(value)}."
        )
    elif value and type(value[0]) is int:
        prompts = [value]
    else:
        prompts = value
    if not prompts:
        raise refusal("", f"`{name}` is empty. Send at least one {name}.")
    if len(prompts) > MAX_PROMPTS:
        raise refusal("", f"`{name}` has {len(prompts)} entries; at most {MAX_PROMPTS} are allowed in one request.")
    for index, prompt in enumerate(prompts):
        _check_prompt(prompt, "" if len(prompts) == 1 else f"[{index}]")
    return prompts


def _check_prompt(prompt: Any, field: str) -> None:
    if isinstance(prompt, str):
        if not prompt:
            raise refusal(field, "The prompt is empty. Send at least one character.")
        if len(prompt) > MAX_TEXT_CHARS:
            raise refusal(field, f"The prompt has {len(prompt)} characters; at most {MAX_TEXT_CHARS} are allowed.")
        return
    if not isinstance(prompt, list):
        raise refusal(field, f"A prompt must be a string or a list of token ids, got {show(prompt)}.")
    check_token_ids(prompt, field)


def check_token_ids(token_ids: list[Any], field: str) -> None:
    """Refuse anything but 1 to `MAX_PROMPT_TOKENS` non-negative int32 ids."""
    if not token_ids:
        raise refusal(field, "The list of token ids is empty. Send at least one.")
    if len(token_ids) > MAX_PROMPT_TOKENS:
        raise refusal(field, f"The prompt has {len(token_ids)} token ids; at most {MAX_PROMPT_TOKENS} are allowed.")
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < 2**31:
        return
    for index, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < 2**31:
            raise refusal(f"{field}[{index}]", f"A token id must be an integer from 0 up, got {show(token_id)}.")


def _token_ids(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise refusal("", f"`tokens` must be a list of token ids, got {show(value)}.")
    check_token_ids(value, "")
    return value


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise refusal("", f"`logit_bias` must be an object from token id to bias, got {show(value)}.")
    if len(value) > MAX_LOGIT_BIAS:
        raise refusal("", f"`logit_bias` has {len(value)} entries; at most {MAX_LOGIT_BIAS} are allowed.")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (isinstance(key, int) or (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11)):
            raise refusal("", f'The keys of `logit_bias` must be token ids such as "42", got {show(key)}.')
        biases[int(key)] = bias
    return biases


def _early_stopping(value: Any) -> bool | Literal["never"]:
    if isinstance(value, bool):
        return value
    if value == "never":
        return "never"
    raise refusal("", f'`early_stopping` must be true, false or "never", got {show(value)}.')


def _template_kwargs(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refusal("", f"`chat_template_kwargs` must be an object, got {show(value)}.")
    for key, entry in value.items():
        if key not in TEMPLATE_KWARGS:
            allowed = ", ".join(sorted(TEMPLATE_KWARGS))
            raise refusal("", f"`chat_template_kwargs` may not set {show(key)}. Allowed are: {allowed}.")
        if not isinstance(entry, str | int | float | None) or len(str(entry)[:2000]) > MAX_TEMPLATE_KWARG_CHARS:
            raise refusal(
                f".{key}", f"Send text of at most {MAX_TEMPLATE_KWARG_CHARS} characters, a number or a boolean."
            )
    return value


_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_PROMPT_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT_CHARS}
_PROMPT_TOKENS = {"type": "array", "items": _TOKEN_ID, "minItems": 1, "maxItems": MAX_PROMPT_TOKENS}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_KWARG = {"type": ["string", "number", "boolean", "null"], "maxLength": MAX_TEMPLATE_KWARG_CHARS}

# Each field declares its shapes for the OpenAPI document, which cannot be derived from a validator's code.
StopList = Annotated[list[str], BeforeValidator(_stop_list, json_schema_input_type=str | list[str])]
ContentText = Annotated[
    Text,
    BeforeValidator(_content_text),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "maxLength": MAX_TEXT_CHARS},
                {"type": "array", "items": _PART, "maxItems": MAX_CONTENT_PARTS},
            ]
        }
    ),
]
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(prompts_of),
    WithJsonSchema(
        {
            "anyOf": [
                _PROMPT_TEXT,
                _PROMPT_TOKENS,
                {"type": "array", "items": {"anyOf": [_PROMPT_TEXT, _PROMPT_TOKENS]}, "minItems": 1}
                | {"maxItems": MAX_PROMPTS},
            ]
        }
    ),
]
TokenIds = Annotated[list[int], PlainValidator(_token_ids), WithJsonSchema(_PROMPT_TOKENS)]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
EarlyStopping = Annotated[
    bool | Literal["never"], PlainValidator(_early_stopping), WithJsonSchema({"enum": [True, False, "never"]})
]
TemplateKwargs = Annotated[
    dict[str, Any],
    PlainValidator(_template_kwargs),
    WithJsonSchema(
        {
            "type": "object",
            "properties": dict.fromkeys(sorted(TEMPLATE_KWARGS), _KWARG),
            "additionalProperties": False,
        }
    ),
]
