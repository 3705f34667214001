"""A client request for vectors as several engine requests, and their answers as one body.

Every text, or pair of texts, is a separate request, so that engines share them as they share prompts. Each is answered
with a `Part`, in JSON where there are several; `finish` makes the client's body from all parts, in a gateway or an
engine.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pagemill_api.answers.events import Event
from pagemill_api.dialects.base import (
    AnswerRenderer,
    ChoiceEnd,
    Dialect,
    FinishedChoice,
    ParsedBody,
    Piece,
    Preparation,
)
from pagemill_api.dialects.transport import NO_REQUEST, SSE, RequestInfo
from pagemill_api.dialects.vectors.request import VectorRequest
from pagemill_api.dialects.vectors.texts import TextEncoder
from pagemill_api.openai import render
from pagemill_api.openai.prepare import MAX_TOKENS_OF_SEVERAL
from pagemill_api.openai.schemas import SamplingFields
from pagemill_protocol.errors import PagemillError, error_body, invalid_field
from pagemill_protocol.ids import new_id
from pagemill_protocol.request.generate import GenerateRequest, Usage
from pagemill_protocol.request.pooling import PoolingParams, PoolingSpec, Similarity, check_task
from pagemill_protocol.request.sampling import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pagemill_api.text.tokenizer import Tokenizer

POOLED = SamplingParams(max_tokens=1, temperature=0.0)


class PartRequest(msgspec.Struct, frozen=True):
    """One engine request of a client request."""

    token_ids: list[int]
    params: PoolingParams
    fields: dict[str, Any] = {}
    """Values that `finish` needs."""


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to one engine request."""

    index: int
    values: bytes
    """float32, little-endian."""
    prompt_tokens: int
    id: str
    model: str
    created: int
    fields: dict[str, Any] = {}

    @property
    def vector(self) -> NDArray[np.float32]:
        import numpy as np

        return np.frombuffer(self.values, dtype="<f4")


class _Fields(msgspec.Struct, frozen=True):
    """Values that an engine request carries for its answer."""

    several: bool
    fields: dict[str, Any]


_fields_encoder = msgspec.json.Encoder()
_fields_decoder = msgspec.json.Decoder(_Fields)
_part_decoder = msgspec.json.Decoder(Part)


class VectorDialect(Dialect):
    """Base class of the three routes. A subclass parses bodies and finishes answers."""

    transport = SSE
    operation = "embeddings"
    id_prefix: str

    @abstractmethod
    def parse(self, raw: bytes, info: RequestInfo = NO_REQUEST) -> VectorBody: ...

    @abstractmethod
    def finish(self, parts: Sequence[Part]) -> Iterator[bytes]:
        """Yield the pieces of the client's body; `parts`: in order."""

    def new_request_id(self) -> str:
        return f"{self.id_prefix}-{new_id()}"

    def renderer(self, request: GenerateRequest, system_fingerprint: str | None) -> PartRenderer:
        return PartRenderer(self, request)

    def error_body(self, error: PagemillError) -> bytes:
        return error_body(error)

    def error_event(self, error: PagemillError) -> bytes:
        return render.sse_error(error)

    def merged_end(self, request: GenerateRequest, usage: Usage) -> bytes:
        """Return nothing, since answers are not streamed."""
        return b""

    def merge_bodies(self, bodies: Sequence[bytes]) -> Iterator[bytes]:
        parts: list[Part] = []
        for body in bodies:
            parts.append(_part_decoder.decode(body))
            yield b""
        yield from self.finish(sorted(parts, key=lambda part: part.index))


class PartRenderer(AnswerRenderer):
    def __init__(self, dialect: VectorDialect, request: GenerateRequest) -> None:
        self._dialect, self._request = dialect, request

    def resume(self, choice: int, events: Sequence[Event], end: ChoiceEnd | None) -> None:
        """No state is needed, since answers are not streamed."""

    def chunk(self, piece: Piece) -> bytes:
        return b""

    def end(self, usage: Usage) -> bytes:
        return b""

    def body(self, choices: Sequence[FinishedChoice], usage: Usage) -> list[bytes]:
        request = self._request
        carried = _fields_decoder.decode(request.client_fields)
        head = render.head(request)
        part = Part(
            index=request.prompt_index,
            values=choices[0].pooled,
            prompt_tokens=usage.prompt_tokens,
            id=head.id,
            model=head.model,
            created=head.created_unix_s,
            fields=carried.fields,
        )
        return [msgspec.json.encode(part)] if carried.several else list(self._dialect.finish([part]))


class VectorBody(ParsedBody):
    """A checked body. A subclass makes engine requests of its texts."""

    renders = False

    def __init__(self, request: VectorRequest, dialect: VectorDialect) -> None:
        self._request, self._dialect = request, dialect
        shared = {"model": request.model, "priority": request.priority, "request_id": request.request_id}
        self.fields = SamplingFields.model_validate(shared)

    @abstractmethod
    def parts(self, encoder: TextEncoder, spec: PoolingSpec) -> list[PartRequest]: ...

    def pooling_params(self, model: PoolingSpec | None) -> PoolingParams:
        """Return the pooling that the body asks for; by default the model's own task."""
        return PoolingParams("embed" if model is None else model.task)

    def check_kind(self, tokenizer: Tokenizer) -> None:
        model = tokenizer.bundle.pooling
        check_task(self.pooling_params(model), model)

    def sampling(self, defaults: Mapping[str, Any] = {}) -> SamplingParams:
        return POOLED

    def prepare(
        self, tokenizer: Tokenizer, preparation: Preparation, sampling: SamplingParams, text: str | None
    ) -> list[GenerateRequest]:
        spec = tokenizer.bundle.pooling
        assert spec is not None, "refused by `check_kind`"
        encoder = TextEncoder(tokenizer, spec, preparation.max_model_len, self._request.truncate_prompt_tokens)
        parts = self.parts(encoder, spec)
        num_tokens = sum(len(part.token_ids) for part in parts)
        if len(parts) > 1 and num_tokens > MAX_TOKENS_OF_SEVERAL:
            raise invalid_field(
                self._dialect.prompt_field,
                f"The texts have {num_tokens} tokens; at most {MAX_TOKENS_OF_SEVERAL} are allowed in one request. Send "
                "them in several requests.",
            )
        return [self._engine_request(part, index, len(parts) > 1, preparation) for index, part in enumerate(parts)]

    def _engine_request(self, part: PartRequest, index: int, several: bool, given: Preparation) -> GenerateRequest:
        named = self._request.request_id
        response_id = given.request_id if named is None else f"{self._dialect.id_prefix}-{named}"
        return GenerateRequest(
            request_id=f"{given.request_id}-{index}" if several else given.request_id,
            response_id=response_id,
            model=self._request.model,
            prompt_token_ids=part.token_ids,
            sampling=POOLED,
            pooling=part.params,
            dialect=self._dialect.name,
            client_fields=_fields_encoder.encode(_Fields(several, part.fields)).decode(),
            created_unix_s=given.created_unix_s,
            priority=self._request.priority,
            prompt_index=index,
            cache_salt=given.cache_salt,
        )


def usage_of(parts: Sequence[Part]) -> dict[str, int]:
    num_tokens = sum(part.prompt_tokens for part in parts)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def similarities(first: NDArray[np.float32], others: Sequence[NDArray[np.float32]], how: Similarity) -> list[float]:
    """Return how similar one vector is to each of the others. The cosine with a vector of zeros is 0."""
    import numpy as np

    rows = np.stack(others)
    if how in ("euclidean", "manhattan"):
        distances: list[float] = (-np.linalg.norm(rows - first, 2 if how == "euclidean" else 1, axis=1)).tolist()
        return distances
    products: NDArray[np.float32] = rows @ first
    if how == "cosine":
        lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(first)
        products = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    found: list[float] = products.tolist()
    return found
