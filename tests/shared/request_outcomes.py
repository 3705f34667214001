"""The outcome of a client's body: the engine requests that it becomes, and the answer that is rendered for them.

Tokens and text of the answer are fixed. Two bodies with equal outcomes cannot get different answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from pagemill_api.answers.events import Content
from pagemill_api.dialects.base import Dialect, FinishedChoice, Piece, Preparation, PromptReport
from pagemill_api.dialects.transport import RequestInfo
from pagemill_api.openai import prepare
from pagemill_api.openai.logprobs import PositionLogprobs, TokenLogprob
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.json_pieces import pieces_of
from pagemill_protocol.request.generate import GenerateRequest, Usage
from pagemill_protocol.request.pooling import PoolingSpec
from pagemill_protocol.tokenizer_bundle import TokenizerBundle

TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools }}{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ m['name'] }}{{ m['tool_calls'] }}"
    "{{ m['tool_call_id'] }}{{ m['reasoning_content'] }}{% endfor %}"
    "{{ enable_thinking }}{{ reasoning_effort }}{{ verbosity }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{# </think> #}"
)
"""Shows everything that a template can get from a request."""
SPECIAL = ("<s>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
EMBEDS = PoolingSpec(task="embed", method="cls", size=4, dimensions=[], prompts={"query": "query: "})
SCORES = PoolingSpec(task="score", method="cls", size=1)
USAGE = Usage(3, 2)
Changes = dict[str, Any]
Cases = dict[str, Changes | tuple[Changes, Changes]]
"""Field -> the changes that set it to another value, perhaps after changes that it needs."""
EXTENSIONS: Cases = {
    "seed": {"seed": 3},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "min_tokens": {"min_tokens": 2},
    "ignore_eos": {"ignore_eos": True},
    "priority": {"priority": 5},
}
"""Of `SamplingExtensions`."""
PENALTIES: Cases = {
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
}
_TIMES = re.compile(rb'"\w+_duration":\d+')


def tokenizer_of(pooling: PoolingSpec | None = None) -> Tokenizer:
    """Return a tokenizer of one token per byte that begins with a special token and knows the middle of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*SPECIAL])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[("<s>", 256)]
    )
    bundle = TokenizerBundle(
        tokenizer_json=backend.to_str(),
        chat_template=TEMPLATE,
        eos_token_ids=[0],
        vocab_size=256 + len(SPECIAL),
        pooling=pooling,
    )
    return Tokenizer(bundle)


def outcome(dialect: Dialect, body: Mapping[str, Any], info: RequestInfo, tokenizer: Tokenizer) -> list[Any]:
    """Return the engine requests of a body, without what only their answers need, and the answers."""
    parsed = dialect.parse(json.dumps(body).encode(), info)
    sampling = prepare.within_vocabulary(parsed.sampling(), tokenizer)
    requests = parsed.prepare(tokenizer, Preparation(5000, "id-1", 7), sampling, None)
    bodies = [_answer(dialect, request) for request in requests]
    answers = bodies if len(bodies) == 1 or requests[0].stream else [b"".join(pieces_of(dialect.merge_bodies(bodies)))]
    without = [msgspec.structs.replace(request, client_fields="") for request in requests]
    return [without, [(_TIMES.sub(b"", each), dialect.transport.body_headers(each)) for each in answers]]


def _answer(dialect: Dialect, request: GenerateRequest) -> bytes:
    renderer = dialect.renderer(request, None)
    events = None if request.answer_format is None else [Content(" text")]
    positions, token_ids = _positions(request), [5, 6] if request.return_token_ids else None
    prompt = PromptReport(request.prompt_token_ids if request.return_token_ids else None)
    if request.stream:
        piece = Piece(0, " text", True, "length", positions, USAGE, events, token_ids=token_ids, prompt=prompt)
        return renderer.chunk(piece) + renderer.end(USAGE)
    pooled = np.arange(request.prompt_index, request.prompt_index + 4, dtype="<f4").tobytes()
    choice = FinishedChoice(0, " text", "length", None, events, None, token_ids, prompt, pooled=pooled)
    if positions is not None:
        num_echoed = 0 if request.prompt_text is None else len(request.prompt_token_ids)
        own, echoed = (renderer.collected_logprobs(of_prompt=of_prompt) for of_prompt in (False, True))
        assert own is not None
        assert echoed is not None
        echoed.add(positions[:num_echoed])
        own.add(positions[num_echoed:])
        prompt = prompt._replace(echoed=echoed if num_echoed else None)
        choice = choice._replace(logprobs=own, prompt=prompt)
    return b"".join(pieces_of(renderer.body([choice], USAGE)))


def _positions(request: GenerateRequest) -> list[PositionLogprobs] | None:
    if request.sampling.logprobs is None:
        return None
    num_tokens = 2 if request.prompt_text is None else 2 + len(request.prompt_token_ids)
    entry = TokenLogprob("t", b"t", -0.5, 5)
    return [PositionLogprobs(entry, [entry] * request.sampling.logprobs) for _ in range(num_tokens)]


def merged(body: Mapping[str, Any], changes: Mapping[str, Any]) -> Changes:
    both = {**body, **changes}
    nested = [name for name in body.keys() & changes.keys() if isinstance(body[name], dict)]
    return both | {name: merged(body[name], changes[name]) for name in nested}


def bodies_of(body: Changes, case: Changes | tuple[Changes, Changes]) -> tuple[Changes, Changes]:
    before, changes = case if isinstance(case, tuple) else ({}, case)
    return merged(body, before), merged(merged(body, before), changes)


def tried(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except PagemillError as error:
        return error


def check_field(field: str, plain: Any, changed: Any) -> None:
    """Check that a case changed the outcome, or was refused at its field."""
    if isinstance(changed, PagemillError):
        place = (changed.param or "").split(".")[0].split("[")[0]
        assert place in (field.split(".")[0], "text_input"), f"{field}: {changed} at {changed.param}"
    else:
        assert changed != plain, f"{field} has no effect"
