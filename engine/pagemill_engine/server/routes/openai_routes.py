"""The data port's OpenAI routes: check, prepare, submit, answer.

`pagemill_protocol` has the schemas and does tokenizing and rendering; the engine process schedules. Refusals have the
same messages as a gateway's, because both call the same functions.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Container, Mapping
from contextlib import AbstractContextManager
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pagemill_api.dialects.base import Dialect, parsed
from pagemill_api.dialects.model_lists import card_body, error_body_for, list_body
from pagemill_api.dialects.pages import Page, PageRequest
from pagemill_api.dialects.preparing import Prepared, preparation_now, prepared, sampling_for
from pagemill_api.dialects.token_counts import TokenCount
from pagemill_api.dialects.transport import RequestInfo
from pagemill_api.openai import prepare, render
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.schemas import DetokenizeRequest, LoadAdapterRequest, UnloadAdapterRequest
from pagemill_api.openai.unread_fields import unread_headers
from pagemill_engine.output.pooled import processor_of
from pagemill_engine.server.adapters import ServedAdapters
from pagemill_engine.server.answer import Answer
from pagemill_engine.server.context import ServerContext
from pagemill_engine.server.metrics import VERSION
from pagemill_engine.server.request_memory import ArrivingBody
from pagemill_engine.server.routes.responses import JSON_CONTENT_TYPE, AnswerResponse, BodyResponse, StreamResponse
from pagemill_engine.server.routes.traces import TracedRequest, record_of
from pagemill_protocol.errors import PagemillError, invalid_field, model_not_found
from pagemill_protocol.report.adapters import WantedAdapter
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_servers.errors import with_errors
from pagemill_servers.keys.caller import Caller
from pagemill_servers.keys.scope import cache_salt
from pagemill_servers.request_middleware import TIMEOUT_HEADER, check_json_content_type, header


def generate_route(dialect: Dialect) -> Callable[[Request], Awaitable[AnswerResponse]]:
    """Return the generating route of one dialect."""

    async def generate(request: Request) -> AnswerResponse:
        context: ServerContext = request.app.state.context
        record = record_of(request.scope)
        try:
            _refuse_timeout(request)
            caller: Caller = request.state.caller
            record.tenant = caller.tenant
            with context.memory.arriving(caller.account) as body:
                raw = await _read(request, body, dialect.transport.media_types)
                work = partial(_prepare, context, dialect, raw, _request_info(request, context), caller)
                record.requests, unread = await context.off_loop(work, len(raw))
            return _answer(context, record, unread_headers(unread), caller.account)
        except PagemillError as error:
            record.error = error
            raise

    return generate


def count_route(count: TokenCount) -> Callable[[Request], Awaitable[Response]]:
    """Return a route that counts the tokens of a prompt."""

    async def route(request: Request) -> Response:
        context: ServerContext = request.app.state.context
        with _arriving(request) as body:
            raw = await _read(request, body)
            return _json(await context.off_loop(lambda: _tokenize(context, count, raw), len(raw)))

    return route


def page_route(page: Page) -> Callable[[Request], Awaitable[Response]]:
    """Return a route of a dialect that generates nothing."""

    async def route(request: Request) -> Response:
        context: ServerContext = request.app.state.context
        with _arriving(request) as body:
            raw = await _read(request, body) if page.method == "POST" else b""
            cards = [_card(context, name) for name in context.all_names]
            return _json(page.body(PageRequest(cards, _request_info(request, context), raw, VERSION)))

    return route


async def detokenize(request: Request) -> Response:
    context: ServerContext = request.app.state.context
    with _arriving(request) as body:
        raw = await _read(request, body)
        return _json(await context.off_loop(lambda: _detokenize(context, raw), len(raw)))


async def list_models(request: Request) -> Response:
    context: ServerContext = request.app.state.context
    cards = [_card(context, name) for name in context.all_names]
    return _json(list_body(cards, request.headers.get, request.query_params))


async def get_model(request: Request) -> Response:
    context: ServerContext = request.app.state.context
    name = request.path_params["name"]
    if name not in context.all_names:
        raise model_not_found(name, context.all_names)
    return _json(card_body(_card(context, name), request.headers.get))


async def load_adapter(request: Request) -> Response:
    """Serve an adapter from now on. Answers when it is known, or refused."""
    adapters = _adapters(request)
    with _arriving(request) as body:
        asked = parse_body(await _read(request, body), LoadAdapterRequest)
    wanted = WantedAdapter(name=asked.lora_name, source=asked.lora_path)
    await adapters.load(wanted, in_place=asked.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")


async def unload_adapter(request: Request) -> Response:
    """Serve an adapter no longer. Its running requests end as they would have."""
    adapters = _adapters(request)
    with _arriving(request) as body:
        asked = parse_body(await _read(request, body), UnloadAdapterRequest)
    if not adapters.unload(asked.lora_name):
        raise model_not_found(asked.lora_name, adapters.names)
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


def by_version(route: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a route of models, so that its errors have the shape of the client's API."""

    async def shaped(request: Request) -> Response:
        return await with_errors(error_body_for(request.headers.get), route)(request)

    return shaped


def submit(
    context: ServerContext, requests: list[GenerateRequest], *, only_bodies: bool = False, account: str = ""
) -> Answer:
    """Submit all prompts of one HTTP request to the engine, or none of them.

    `only_bodies`: as that of `Answer`. `account`: the tenant for which the memory of the prompts counts.
    """
    client, _ = context.ready_engine()
    tokenizer = context.loaded_tokenizer()
    system_fingerprint = context.system_fingerprint()
    answer = Answer(len(requests), client.unread, only_bodies=only_bodies)
    try:
        client.check_capacity(requests)
        for request in requests:
            client.submit(request, processor_of(request, tokenizer, system_fingerprint), answer, account)
    except PagemillError as error:
        context.metrics.request_refused(error)
        client.abort(answer)
        raise
    return answer


def abort(context: ServerContext, answer: Answer) -> None:
    client, _ = context.ready_engine()
    client.abort(answer)


def _refuse_timeout(request: Request) -> None:
    given = header(request.scope, TIMEOUT_HEADER)
    if given is not None:
        raise invalid_field(
            TIMEOUT_HEADER.decode(),
            f"The header x-request-timeout-s ({given[:20]!r}) is enforced by gateways, not by an engine. Send the "
            "request to a `pagemill gateway`, or remove the header.",
            code="unsupported_parameter",
        )


def _request_info(request: Request, context: ServerContext) -> RequestInfo:
    return RequestInfo(request.scope["path"], request.path_params, request.headers.get, context.names[0])


def _arriving(request: Request) -> AbstractContextManager[ArrivingBody]:
    context: ServerContext = request.app.state.context
    caller: Caller = request.state.caller
    return context.memory.arriving(caller.account)


async def _read(request: Request, body: ArrivingBody, also: Container[str] = ()) -> bytes:
    """Return the body, which must be declared as JSON or not at all.

    Forms and plain text are refused, because web pages of other origins can send them without permission.
    """
    check_json_content_type(request.scope, also)
    context: ServerContext = request.app.state.context
    return await body.read(request.scope, request.receive, context.settings.server.max_body_bytes)


def _answer(context: ServerContext, record: TracedRequest, headers: Mapping[str, str], account: str) -> AnswerResponse:
    requests = list(record.requests)
    record.answer = answer = submit(context, requests, only_bodies=not requests[0].stream, account=account)
    kind = StreamResponse if requests[0].stream else BodyResponse
    return kind(requests, answer, lambda: abort(context, answer), headers)


def _prepare(context: ServerContext, dialect: Dialect, raw: bytes, info: RequestInfo, caller: Caller) -> Prepared:
    body = parsed(dialect, raw, info)
    context.check_model(body.fields.model)
    _, ready = context.ready_engine()
    tokenizer = context.loaded_tokenizer()
    sampling = sampling_for(body, tokenizer)
    body.check_form()
    settings = context.settings.engine
    salt = cache_salt(settings.prefix_scope, settings.model, caller)
    preparation = preparation_now(
        dialect, ready.limits.max_model_len, salt, context.parsers, settings.max_answer_values
    )
    made = prepared(body, tokenizer, preparation, sampling, None, partial(_seed, context))
    digest = context.adapter_digest(body.fields.model)
    if digest is None:
        return made
    requests = [msgspec.structs.replace(each, adapter_digest=digest) for each in made.requests]
    return made._replace(requests=requests)


def _tokenize(context: ServerContext, count: TokenCount, raw: bytes) -> bytes:
    body = count.parse(raw)
    if body.model:
        context.check_model(body.model)
    tokenizer = context.loaded_tokenizer()
    _, ready = context.ready_engine()
    token_ids = prepare.tokenize(body, tokenizer, ready.limits.max_model_len, context.parsers)
    texts = [tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
    return count.body(token_ids, ready.limits.max_model_len, texts)


def _detokenize(context: ServerContext, raw: bytes) -> bytes:
    body = parse_body(raw, DetokenizeRequest)
    if body.model:
        context.check_model(body.model)
    tokenizer = context.loaded_tokenizer()
    _, ready = context.ready_engine()
    return render.detokenize_body(prepare.detokenize(body, tokenizer, ready.limits.max_model_len))


def _seed(context: ServerContext) -> int:
    """Return the seed of a request. It is drawn here, so that another engine can continue with the same randomness."""
    configured = context.settings.engine.seed
    return secrets.randbits(63) if configured is None else configured


def _adapters(request: Request) -> ServedAdapters:
    context: ServerContext = request.app.state.context
    context.ready_engine()
    assert context.adapters is not None, "the settings are refused without enable_lora"
    return context.adapters


def _card(context: ServerContext, name: str) -> render.ModelCard:
    ready = context.client.ready_info if context.client else None
    max_model_len = ready.limits.max_model_len if ready else None
    pools = ready is not None and ready.limits.pooling is not None
    adapter = None if context.adapters is None else context.adapters.get(name)
    if adapter is not None:
        status, since_unix_s = adapter
        return render.ModelCard(
            name, since_unix_s, max_model_len, root=status.source, parent=context.names[0], pools=pools
        )
    return render.ModelCard(
        name, context.created_unix_s, max_model_len, root=context.settings.engine.model, pools=pools
    )


def _json(body: bytes) -> Response:
    return Response(body, media_type=JSON_CONTENT_TYPE)
