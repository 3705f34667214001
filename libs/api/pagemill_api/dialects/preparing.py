"""From a parsed body to engine requests, once the model is known: what gateways and engines' servers both do, in order.

Between these steps a gateway waits for an engine and chooses threads; a server does all of them in one thread. Neither
the deployment nor the caller is known here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from pagemill_api.dialects.base import Dialect, ParsedBody, Preparation, unread_fields
from pagemill_api.openai.prepare import within_vocabulary
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.request.answer_format import ParserSettings
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams


class Prepared(NamedTuple):
    requests: list[GenerateRequest]
    """One per prompt."""
    unread_fields: list[str]
    """The client's names of fields without effect."""


def sampling_for(body: ParsedBody, tokenizer: Tokenizer, checked: SamplingParams | None = None) -> SamplingParams:
    """Return the sampling parameters with the model's defaults, within its vocabulary. Raises `PagemillError` 400.

    `checked`: the result of `body.sampling()`, if it was called.
    """
    body.check_kind(tokenizer)
    defaults = tokenizer.bundle.sampling_defaults
    sampling = body.sampling(defaults) if checked is None or defaults else checked
    return within_vocabulary(sampling, tokenizer)


def preparation_now(
    dialect: Dialect, max_model_len: int, cache_salt: str, parsers: ParserSettings, max_answer_values: int
) -> Preparation:
    """Return the values that the server adds to a body that arrives now."""
    request_id, created_unix_s = dialect.new_request_id(), int(time.time())
    return Preparation(max_model_len, request_id, created_unix_s, cache_salt, parsers, max_answer_values)


def prepared(
    body: ParsedBody,
    tokenizer: Tokenizer,
    preparation: Preparation,
    sampling: SamplingParams,
    text: str | None,
    new_seed: Callable[[], int],
) -> Prepared:
    """Return the engine requests of a body. Raises `PagemillError` 400.

    `sampling`, `preparation`: results of the functions above; `text`: that of `render_inline`. Requests to which the
    client gave no seed get one of `new_seed`: another engine can then continue them, and equal prompts of one body get
    different answers.
    """
    requests = body.prepare(tokenizer, preparation, sampling, text)
    for at, request in enumerate(requests):
        if request.sampling.seed is None:
            seeded = msgspec.structs.replace(request.sampling, seed=new_seed())
            requests[at] = msgspec.structs.replace(request, sampling=seeded)
    return Prepared(requests, unread_fields(body, tokenizer, preparation.parsers))
