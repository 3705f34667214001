"""KServe's Open Inference Protocol (v2) and Triton's generate extension: text in, text out, as fields or as tensors.

A path may name the model's version; to the routes, `/versions/1`, the only version, is the end of the model's name.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import orjson

from pagemill_api.dialects.base import AnswerRenderer
from pagemill_api.dialects.open_inference import render
from pagemill_api.dialects.open_inference.request import INPUTS, GenerateBody, InferBody
from pagemill_api.dialects.pages import Page, PageRequest
from pagemill_api.dialects.translation import TranslatedCompletion, TranslatedDialect, as_request
from pagemill_api.dialects.transport import NO_REQUEST, RequestInfo, Transport
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.render import ModelCard
from pagemill_api.openai.schemas import CompletionRequest
from pagemill_protocol.errors import invalid_field, show, unavailable
from pagemill_protocol.ids import new_id
from pagemill_protocol.request.generate import GenerateRequest

MODEL = "/v2/models/{model:text}"
"""`pagemill_api.route_names` registers the convertor `text`."""
LIVE_PATH, READY_PATH = "/v2/health/live", "/v2/health/ready"
RENAMED = (("`prompt", "`text_input"),)
HEADER_LENGTH = "inference-header-content-length"


class KserveGenerateDialect(TranslatedDialect):
    name = "kserve-generate"
    path = f"{MODEL}/generate"
    alias_paths: tuple[str, ...] = (f"{MODEL}/generate_stream",)
    operation = "text_completion"
    prompt_field = "text_input"
    error_body = staticmethod(render.error_body)
    error_event = staticmethod(render.error_event)

    def new_request_id(self) -> str:
        return f"infer-{new_id()}"

    def parse(self, raw: bytes, info: RequestInfo = NO_REQUEST) -> TranslatedCompletion:
        body = parse_body(raw, GenerateBody)
        stream = info.path.endswith("/generate_stream")

        def translate() -> dict[str, Any]:
            nonlocal body
            body = body.merged()
            return body.for_completion(_model(info), stream=stream)

        completion = as_request(translate, RENAMED, CompletionRequest)
        return TranslatedCompletion(completion, self.name, RENAMED, _repeated(body, id=body.id))

    def renderer(self, request: GenerateRequest, system_fingerprint: str | None) -> AnswerRenderer:
        return render.GenerateRenderer(request)


class KserveInferDialect(KserveGenerateDialect):
    name = "kserve-infer"
    path = f"{MODEL}/infer"
    alias_paths = ()
    transport = Transport(body_headers=render.body_headers, media_types=("application/octet-stream",))

    def parse(self, raw: bytes, info: RequestInfo = NO_REQUEST) -> TranslatedCompletion:
        length = _header_length(info.header(HEADER_LENGTH), len(raw))
        infer = parse_body(raw[:length], InferBody)
        found: list[GenerateBody] = []

        def translate() -> dict[str, Any]:
            found.append(infer.for_generate(raw[length:]))
            return found[0].for_completion(_model(info))

        completion = as_request(translate, RENAMED, CompletionRequest)
        repeated = _repeated(found[0], id=infer.id, binary=infer.binary_output, shape=infer.text_shape)
        return TranslatedCompletion(completion, self.name, RENAMED, repeated)

    def renderer(self, request: GenerateRequest, system_fingerprint: str | None) -> AnswerRenderer:
        return render.InferRenderer(request)


def _model(info: RequestInfo) -> str:
    return info.parameters["model"].removesuffix(f"/versions/{render.VERSION}")


def _repeated(body: GenerateBody, **fields: Any) -> str:
    """Return the fields of the body that the answer needs."""
    before = "" if body.exclude_input_in_output else body.text_input
    return json.dumps({name: value for name, value in {**fields, "before": before}.items() if value})


def _header_length(value: str | None, num_bytes: int) -> int:
    """Return the number of JSON bytes at the start of a body. Raises `PagemillError` 400."""
    if value is None:
        return num_bytes
    if not (value.isascii() and value.isdigit() and len(value) < 20 and int(value) <= num_bytes):
        raise invalid_field(
            HEADER_LENGTH, f"The header Inference-Header-Content-Length must be 0 to {num_bytes}, got {show(value)}."
        )
    return int(value)


def _card(request: PageRequest) -> ModelCard:
    return request.card(_model(request.info))


def _server(request: PageRequest) -> bytes:
    extensions = ["binary_tensor_data", "generate", "model_configuration", "parameters"]
    return orjson.dumps({"name": "pagemill", "version": request.version, "extensions": extensions})


def _metadata(request: PageRequest) -> bytes:
    inputs = [{"name": name, "datatype": each.datatype, "shape": [each.length]} for name, each in INPUTS.items()]
    outputs = [{"name": "text_output", "datatype": "BYTES", "shape": [1]}]
    named = {"name": _card(request).id, "versions": [render.VERSION], "platform": "pagemill"}
    return orjson.dumps({**named, "inputs": inputs, "outputs": outputs})


def _config(request: PageRequest) -> bytes:
    inputs = [
        {"name": name, "data_type": each.config_type, "dims": [each.length], "optional": name != "text_input"}
        for name, each in INPUTS.items()
    ]
    outputs = [{"name": "text_output", "data_type": "TYPE_STRING", "dims": [1]}]
    named = {"name": _card(request).id, "platform": "pagemill", "backend": "pagemill", "max_batch_size": 0}
    return orjson.dumps({**named, "input": inputs, "output": outputs})


def _ready(request: PageRequest) -> bytes:
    card = _card(request)
    if card.max_model_len is None:
        raise unavailable(f"No engine serves the model `{card.id}` now.", code="model_not_ready")
    return b"{}"


_page = partial(Page, error_body=render.error_body)
PAGES = (
    _page("/v2", _server),
    _page(f"{MODEL}/ready", _ready),
    _page(f"{MODEL}/config", _config),
    _page(MODEL, _metadata),
)
