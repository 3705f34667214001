"""TGI's API (`POST /`, `/generate`, `/generate_stream`; `GET /info`): completions whose model need not be named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

import orjson

from pagemill_api.dialects.pages import Page, PageRequest
from pagemill_api.dialects.text_generation import render
from pagemill_api.dialects.text_generation.request import TgiRequest
from pagemill_api.dialects.translation import Renamed, TranslatedCompletion, TranslatedDialect, as_request
from pagemill_api.dialects.transport import NO_REQUEST, RequestInfo, Transport
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.schemas import CompletionRequest
from pagemill_protocol.errors import invalid_field
from pagemill_protocol.ids import new_id
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import MAX_STOP_STRINGS

RENAMED: Sequence[Renamed] = (
    ("`prompt", "`inputs"),
    ("max_tokens", "max_new_tokens"),
    ("truncate_prompt_tokens", "truncate"),
    ("guided_json", "grammar.value"),
    ("guided_regex", "grammar.value"),
)


class TgiDialect(TranslatedDialect):
    name = "tgi"
    path = "/generate"
    alias_paths = ("/generate_stream", "/")
    operation = "text_completion"
    prompt_field = "inputs"
    transport = Transport(may_omit_model=True)
    error_body = staticmethod(render.error_body)
    error_event = staticmethod(render.error_event)

    def new_request_id(self) -> str:
        return f"tgi-{new_id()}"

    def parse(self, raw: bytes, info: RequestInfo = NO_REQUEST) -> TgiBody:
        request = parse_body(raw, TgiRequest)
        stream = info.path == "/generate_stream" or (request.stream and info.path != "/generate")
        completion = as_request(
            partial(request.for_completion, info.only_model, stream=stream), RENAMED, CompletionRequest
        )
        return TgiBody(completion, self.name, request, in_list=info.path == "/")

    def renderer(self, request: GenerateRequest, system_fingerprint: str | None) -> render.TgiRenderer:
        return render.TgiRenderer(request)


class TgiBody(TranslatedCompletion):
    def __init__(self, fields: CompletionRequest, dialect: str, request: TgiRequest, *, in_list: bool) -> None:
        parameters = request.parameters
        answer = {
            "in_list": in_list,
            "details": request.has_details,
            "prefill": parameters.decoder_input_details,
            "top": parameters.top_n_tokens > 0,
            "full_text": request.inputs if parameters.return_full_text else "",
        }
        super().__init__(fields, dialect, RENAMED, json.dumps({name: each for name, each in answer.items() if each}))


def _info(request: PageRequest) -> bytes:
    models = {card.root or card.id: card for card in reversed(request.cards) if card.parent is None and not card.pools}
    if len(models) != 1:
        raise invalid_field("model", f"{len(models)} models are served here, and /info describes one. Use /v1/models.")
    (card,) = models.values()
    max_tokens = card.max_model_len
    return orjson.dumps(
        {
            "model_id": card.id,
            "model_sha": None,
            "model_pipeline_tag": "text-generation",
            "max_best_of": 1,
            "max_stop_sequences": MAX_STOP_STRINGS,
            "max_input_tokens": max_tokens and max_tokens - 1,
            "max_total_tokens": max_tokens,
            "max_client_batch_size": 1,
            "router": "pagemill",
            "version": request.version,
            "sha": None,
            "docker_label": None,
        }
    )


INFO = Page("/info", _info, render.error_body)
