"""The OpenAPI document of a data port: every public route, its request and its answers.

It is made from the request schemas and the bounds of sampling values, so that it agrees with the checks. Engine and
gateway serve the same document, except `/metrics`: only an engine, which may be the only server, offers it to its
clients. The platform's own routes (`/internal/*`, the control port) are not included.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import orjson
from pydantic.json_schema import models_json_schema

from pagemill_api.dialects.anthropic.conversation import InputMessage, MessageOutput
from pagemill_api.dialects.anthropic.edits import Amount, ContextManagement, Edit
from pagemill_api.dialects.anthropic.message_batches import BatchedMessage, MessageBatchRequest
from pagemill_api.dialects.anthropic.request import (
    CountRequest,
    MessagesRequest,
    Metadata,
    OutputConfig,
    OutputFormat,
    Thinking,
    Tool,
)
from pagemill_api.dialects.anthropic.request import ToolChoice as AnthropicToolChoice
from pagemill_api.dialects.ollama.ollama import ShowRequest
from pagemill_api.dialects.ollama.request import Message as OllamaMessage
from pagemill_api.dialects.ollama.request import (
    OllamaCall,
    OllamaChatRequest,
    OllamaFunction,
    OllamaGenerateRequest,
    Options,
)
from pagemill_api.dialects.open_inference.request import (
    GenerateBody,
    InferBody,
    OutputParameters,
    OutputTensor,
    Tensor,
    TensorParameters,
)
from pagemill_api.dialects.openai_responses.compaction import CompactRequest
from pagemill_api.dialects.openai_responses.conversations import ConversationRequest, ItemsRequest, MetadataRequest
from pagemill_api.dialects.openai_responses.request import (
    InputTokensRequest,
    ReasoningConfig,
    ResponsesRequest,
    TextConfig,
    TextFormat,
)
from pagemill_api.dialects.openai_responses.tools import InputFormat, ResponsesTool, ToolFields
from pagemill_api.dialects.registry import LIVE_PATHS, READY_PATHS
from pagemill_api.dialects.text_generation.request import TgiGrammar, TgiParameters, TgiRequest
from pagemill_api.dialects.vectors.request import EmbeddingRequest, RerankRequest, ScoreRequest
from pagemill_api.openai.batches import BatchRequest
from pagemill_api.openai.fields import RequestModel
from pagemill_api.openai.schemas import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
)
from pagemill_api.text.template.chat_messages import MAX_TEMPLATE_KWARGS
from pagemill_protocol.request.sampling import BOUNDS, MAX_LOGIT_BIAS, MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, Bounds

OPENAPI_PATH = "/openapi.json"
Schema = dict[str, Any]

_REQUESTS: tuple[type[RequestModel], ...] = (
    *(TgiRequest, OllamaChatRequest, OllamaGenerateRequest, ShowRequest, GenerateBody, InferBody),
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    MessagesRequest,
    CountRequest,
    ResponsesRequest,
    InputTokensRequest,
    CompactRequest,
    *(ConversationRequest, ItemsRequest, MetadataRequest),
    BatchRequest,
    MessageBatchRequest,
    *(EmbeddingRequest, RerankRequest, ScoreRequest),
)
_PARTS: tuple[type[RequestModel], ...] = (
    *(ChatMessage, StreamOptions),
    *(InputMessage, MessageOutput, Tool, AnthropicToolChoice, Thinking, OutputFormat, OutputConfig, Metadata),
    *(ContextManagement, Edit, Amount, BatchedMessage),
    *(
        TgiGrammar,
        TgiParameters,
        Options,
        OllamaFunction,
        OllamaCall,
        OllamaMessage,
        Tensor,
        TensorParameters,
        OutputTensor,
        OutputParameters,
    ),
    *(ResponsesTool, ToolFields, InputFormat, TextFormat, TextConfig, ReasoningConfig),
)


def request_schemas() -> tuple[type[RequestModel], ...]:
    """Return the schemas of all bodies that clients send."""
    return _REQUESTS


def _bounds_schema(bounds: Bounds) -> Schema:
    lowest = "exclusiveMinimum" if bounds.excludes_low else "minimum"
    return {lowest: bounds.low, "maximum": bounds.high}


_CHECKED_LATER: Mapping[str, Schema] = {
    **{name: _bounds_schema(bounds) for name, bounds in BOUNDS.items()},
    "max_completion_tokens": _bounds_schema(BOUNDS["max_tokens"]),
    "max_output_tokens": _bounds_schema(BOUNDS["max_tokens"]),
    "top_p": {"minimum": 0, "maximum": BOUNDS["top_p"].high},
    "logit_bias": {"maxProperties": MAX_LOGIT_BIAS},
    "chat_template_kwargs": {"maxProperties": MAX_TEMPLATE_KWARGS},
}
"""Bounds that are checked after the schemas, by field."""
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "error", "description": "On `/v1/messages` only."},
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field at fault, dotted."},
                "code": {"type": ["string", "null"]},
            },
        },
    },
}
_PLAIN_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {"type": "string"},
        "error_type": {"type": "string", "description": "Only in TGI's dialect."},
    },
}
_USAGE: Schema = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"],
}


@cache
def document(title: str, version: str, *, with_metrics: bool = False, with_stores: bool = False) -> bytes:
    """Return the document as JSON.

    `with_metrics`: for a data port that has `/metrics`. `with_stores`: for a gateway, which stores responses, files and
    batches.
    """
    metrics = {"/metrics": {"get": _shows("text/plain")}} if with_metrics else {}
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {"title": title, "version": version},
            "paths": {**_paths(), **metrics, **(_stored_paths() if with_stores else {})},
            "components": {
                "schemas": {**_request_schemas(), "Error": _ERROR, "PlainError": _PLAIN_ERROR},
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _paths() -> Schema:
    return {
        "/v1/chat/completions": {"post": _generates(ChatCompletionRequest, "chat.completion")},
        "/v1/completions": {"post": _generates(CompletionRequest, "text_completion")},
        "/v1/messages": {"post": _streams(MessagesRequest, _message())},
        "/v1/messages/count_tokens": {"post": _takes(CountRequest, _answers(_object("input_tokens")))},
        "/v1/responses": {"post": _streams(ResponsesRequest, _object("id", "object", "output", "status", "usage"))},
        "/v1/responses/compact": {"post": _takes(CompactRequest, _answers(_object("id", "object", "output", "usage")))},
        "/v1/responses/input_tokens": {"post": _takes(InputTokensRequest, _answers(_object("input_tokens")))},
        "/v1/embeddings": {"post": _takes(EmbeddingRequest, _answers(_vectors()))},
        "/v1/score": {"post": _takes(ScoreRequest, _answers(_vectors()))},
        "/v1/rerank": {"post": _takes(RerankRequest, _answers(_object("id", "model", "results", "usage")))},
        "/v1/models": {"get": _answers(_object("object", "data"))},
        "/v1/models/{model}": {"get": {**_answers(_object("id", "object")), "parameters": [_in_path("model")]}},
        "/tokenize": {"post": _takes(TokenizeRequest, _answers(_object("count", "max_model_len", "tokens")))},
        "/detokenize": {"post": _takes(DetokenizeRequest, _answers(_object("prompt")))},
        **_plain_paths(),
        "/health": {"get": _probe()},
        "/livez": {"get": _public(_answers(_object(), unready=True))},
        "/readyz": {"get": _public(_answers(_object(), unready=True))},
        "/ping": {"get": _probe()},
        "/version": {"get": _public(_answers(_object("version")))},
        "/load": {"get": _answers(_object("server_load"))},
        "/server_info": {"get": _answers(_object("version", "models"))},
        "/docs": {"get": _public(_shows("text/html"))},
        OPENAPI_PATH: {"get": _public(_answers(_object("openapi")))},
    }


def _stored_paths() -> Schema:
    listing, deleted = _answers(_object("object", "data", "has_more")), _answers(_object("id", "deleted"))
    file, batch, found = _answers(_object("id", "bytes")), _answers(_object("id", "status")), _answers(_object("id"))
    page, messages = _answers(_object("data", "has_more")), _answers(_object("id", "processing_status"))
    form = {"type": "object", "required": ["file", "purpose"], "properties": {"purpose": {"const": "batch"}}}
    upload = {**file, "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}
    by_id = {
        "/v1/responses/{id}": {"get": found, "delete": deleted},
        "/v1/responses/{id}/cancel": {"post": found},
        "/v1/responses/{id}/input_items": {"get": listing},
        "/v1/conversations/{id}": {"get": found, "post": _takes(MetadataRequest, found), "delete": deleted},
        "/v1/conversations/{id}/items": {"get": listing, "post": _takes(ItemsRequest, listing)},
        "/v1/files/{id}": {"get": file, "delete": deleted},
        "/v1/files/{id}/content": {"get": _shows("application/octet-stream")},
        "/v1/batches/{id}": {"get": batch},
        "/v1/batches/{id}/cancel": {"post": batch},
        "/v1/messages/batches/{id}": {"get": messages, "delete": found},
        "/v1/messages/batches/{id}/cancel": {"post": messages},
        "/v1/messages/batches/{id}/results": {"get": _shows("application/x-jsonl")},
    }
    item = {"parameters": [_in_path("id"), _in_path("item")]}
    return {
        "/v1/conversations": {"post": _takes(ConversationRequest, found)},
        "/v1/conversations/{id}/items/{item}": {"get": {**found, **item}, "delete": {**found, **item}},
        "/v1/files": {"get": listing, "post": upload},
        "/v1/batches": {"get": listing, "post": _takes(BatchRequest, batch)},
        "/v1/messages/batches": {"get": page, "post": _takes(MessageBatchRequest, messages)},
        **{path: {method: _named(each) for method, each in methods.items()} for path, methods in by_id.items()},
    }


def _plain_paths() -> Schema:
    """Return the paths of dialects whose errors are a plain text."""
    model = _in_path("model")
    model["schema"]["pattern"] = r"^[^\s/]+$"  # names with slashes work too, which OpenAPI paths cannot express
    inference, named = "/v2/models/{model}", {"parameters": [model]}
    text = _object("text_output", "model_name", "model_version")
    paths = {
        "/": {"post": _streams(TgiRequest, {}), "get": _public(_shows("text/plain"))},
        "/generate": {"post": _takes(TgiRequest, _answers(_object("generated_text")))},
        "/generate_stream": {"post": _events(TgiRequest)},
        "/info": {"get": _answers(_object("model_id", "max_total_tokens"))},
        "/api/chat": {"post": _lines(OllamaChatRequest, "message")},
        "/api/generate": {"post": _lines(OllamaGenerateRequest, "response")},
        "/api/show": {"post": _takes(ShowRequest, _answers(_object("details", "model_info", "capabilities")))},
        "/api/tags": {"get": _answers(_object("models"))},
        "/api/ps": {"get": _answers(_object("models"))},
        "/api/version": {"get": _answers(_object("version"))},
        "/v2": {"get": _answers(_object("name", "version", "extensions"))},
        inference: {"get": {**_answers(_object("name", "versions", "inputs", "outputs")), **named}},
        f"{inference}/ready": {"get": {**_answers(_object()), **named}},
        f"{inference}/config": {"get": {**_answers(_object("name", "input", "output")), **named}},
        f"{inference}/infer": {"post": {**_takes(InferBody, _answers(_object("outputs"))), **named}},
        f"{inference}/generate": {"post": {**_takes(GenerateBody, _answers(text)), **named}},
        f"{inference}/generate_stream": {"post": {**_events(GenerateBody), **named}},
    }
    for operations in paths.values():
        for operation in operations.values():
            content = {"application/json": {"schema": {"$ref": "#/components/schemas/PlainError"}}}
            operation["responses"]["default"]["content"] = content
    probes = {path: {"get": _public(_answers(_object(), unready=True))} for path in (*LIVE_PATHS, *READY_PATHS)}
    return {**paths, **probes}


def _lines(schema: type[RequestModel], *required: str) -> Schema:
    """Return an operation whose answer may be a stream of JSON lines."""
    operation = _takes(schema, _answers(_object("model", "created_at", "done", *required)))
    operation["responses"]["200"]["content"]["application/x-ndjson"] = {}
    return operation


def _events(schema: type[RequestModel]) -> Schema:
    """Return an operation whose answer is always a stream."""
    operation = _takes(schema, _answers(_object()))
    operation["responses"]["200"]["content"] = {"text/event-stream": {}}
    return operation


def _generates(schema: type[RequestModel], kind: str) -> Schema:
    body = _object("id", "object", "created", "model", "choices", "usage")
    body["properties"] = {"object": {"const": kind}, "usage": _USAGE, "choices": {"type": "array"}}
    return _streams(schema, body)


def _vectors() -> Schema:
    body = _object("id", "object", "created", "model", "data", "usage")
    body["properties"] = {"object": {"const": "list"}, "data": {"type": "array"}}
    return body


def _message() -> Schema:
    body = _object("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage")
    body["properties"] = {"type": {"const": "message"}, "content": {"type": "array"}}
    return body


def _streams(schema: type[RequestModel], body: Schema) -> Schema:
    operation = _takes(schema, _answers(body))
    operation["responses"]["200"]["content"]["text/event-stream"] = {}
    return operation


def _takes(schema: type[RequestModel], operation: Schema) -> Schema:
    reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
    return {**operation, "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def _answers(body: Schema, *, unready: bool = False) -> Schema:
    responses: Schema = {
        "200": {"description": "The answer.", "content": {"application/json": {"schema": body}}},
        "default": {
            "description": "A refusal or a failure.",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        },
    }
    if unready:
        responses["503"] = {"description": "Not ready.", "content": {"application/json": {"schema": _object()}}}
    return {"responses": responses, "security": [{"key": []}, {}]}


def _public(operation: Schema) -> Schema:
    return {**operation, "security": []}


def _shows(media_type: str) -> Schema:
    operation = _answers(_object())
    operation["responses"]["200"]["content"] = {media_type: {"schema": {"type": "string"}}}
    return operation


def _probe() -> Schema:
    return {"responses": {"200": {"description": "Ready."}, "503": {"description": "Not ready."}}, "security": []}


def _object(*required: str) -> Schema:
    return {"type": "object", "required": list(required)} if required else {"type": "object"}


def _named(operation: Schema) -> Schema:
    return {**operation, "parameters": [_in_path("id")]}


def _in_path(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _request_schemas() -> Schema:
    models: tuple[type[RequestModel], ...] = (*_REQUESTS, *_PARTS)
    _, generated = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    schemas: Schema = generated["$defs"]
    for model in models:
        schema = schemas[model.__name__]
        schema["properties"] = {**_refused(model), **_ignored(model, schema), **_accepted(schema)}
    return schemas


def _accepted(schema: Schema) -> Schema:
    """Return the fields of a schema with the bounds that are checked later; null selects the default of fields with
    one."""
    fields: Schema = {}
    for name, field in schema["properties"].items():
        bounded = _with_bounds(name, field)
        nullable = name not in schema.get("required", []) and not _takes_null(bounded)
        fields[name] = {"anyOf": [bounded, {"type": "null"}]} if nullable else bounded
    return fields


def _with_bounds(name: str, field: Schema) -> Schema:
    if name == "stop":
        text = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_CHARS}
        return {"anyOf": [text, {"type": "array", "items": text, "maxItems": MAX_STOP_STRINGS}]}
    bounds = _CHECKED_LATER.get(name)
    if bounds is None:
        return field
    if "anyOf" in field:
        return {**field, "anyOf": [each if _takes_null(each) else {**each, **bounds} for each in field["anyOf"]]}
    return {**field, **bounds}


def _takes_null(schema: Schema) -> bool:
    return schema.get("type") == "null" or any(_takes_null(each) for each in schema.get("anyOf", ()))


def _refused(model: type[RequestModel]) -> Schema:
    """Return the fields of other servers that are refused, with the values that have no effect and are accepted."""
    return {
        name: {"enum": [*rule.harmless, None], "description": f"Not supported. {rule.remedy}"}
        for name, rule in model.UNSUPPORTED.items()
    }


def _ignored(model: type[RequestModel], schema: Schema) -> Schema:
    """Return the fields that are accepted without effect and that the schema does not check."""
    names = [name for name in model.IGNORED if name.isidentifier() and name not in schema["properties"]]
    return {name: {"description": f"Without effect: {model.IGNORED[name]}."} for name in names}
