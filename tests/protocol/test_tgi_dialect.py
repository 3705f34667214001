"""TGI's API: the completion that a body is translated to, and the events, details and errors of answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_api.answers.events import Content
from pagemill_api.dialects.base import FinishedChoice, Piece, PromptReport
from pagemill_api.dialects.pages import PageRequest
from pagemill_api.dialects.text_generation.render import TgiTokens
from pagemill_api.dialects.text_generation.tgi import INFO, TgiDialect
from pagemill_api.dialects.transport import RequestInfo
from pagemill_api.openai.logprobs import PositionLogprobs, TokenLogprob
from pagemill_api.openai.render import ModelCard
from pagemill_api.openai.schemas import CompletionRequest
from pagemill_protocol.errors import PagemillError, model_not_found, unavailable
from pagemill_protocol.request.generate import FinishReason, GenerateRequest, Usage
from pagemill_protocol.request.sampling import SamplingParams

DIALECT = TgiDialect()
ONLY = RequestInfo("/generate", only_model="m")


def parse(place: RequestInfo = ONLY, *, stream: bool = False, **parameters: Any) -> CompletionRequest:
    body = {"inputs": "Once", "stream": stream, "parameters": parameters}
    parsed = DIALECT.parse(json.dumps(body).encode(), place)
    parsed.sampling()
    parsed.check_form()
    return parsed.fields


def refused(place: RequestInfo = ONLY, **parameters: Any) -> PagemillError:
    with pytest.raises(PagemillError) as caught:
        parse(place, **parameters)
    assert caught.value.status == 400
    return caught.value


def request(**asked: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="tgi-1",
        model="m",
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(seed=5),
        dialect="tgi",
        client_fields=json.dumps(asked),
    )


def position(text: str, token_id: int = 9) -> PositionLogprobs:
    return PositionLogprobs(TokenLogprob(text, text.encode(), -0.5, token_id), [])


def piece(texts: Sequence[str], text: str, number: int, reason: FinishReason | None, stop: str | None = None) -> Piece:
    """Return a piece of an answer; `number` is the number of tokens so far."""
    positions = [position(each, token_id) for token_id, each in enumerate(texts, number - len(texts))]
    return Piece(0, text, number == 1, reason, positions, Usage(2, number), stop_reason=stop)


def events_of(raw: bytes) -> list[dict[str, Any]]:
    assert raw.endswith(b"\n\n")
    return [json.loads(event.removeprefix(b"data:")) for event in raw.split(b"\n\n")[:-1]]


def test_parameters_are_translated_to_completion_fields() -> None:
    fields = parse(do_sample=True, top_k=4, top_p=0.9, seed=3, stop=["END"], repetition_penalty=1.2, details=True)
    assert (fields.model, fields.prompt, fields.max_tokens, fields.temperature) == ("m", ["Once"], 100, 1.0)
    assert (fields.top_k, fields.top_p, fields.seed, fields.stop) == (4, 0.9, 3, ["END"])
    assert (fields.logprobs, fields.include_stop_str_in_output, fields.stream) == (0, True, False)


def test_without_sampling_parameters_decoding_is_greedy() -> None:
    assert parse().temperature == 0.0
    assert parse(temperature=0.3).temperature == 0.3
    assert parse(top_p=0.9).temperature == 1.0


def test_the_path_selects_streaming_and_on_the_root_the_body_does() -> None:
    assert parse(RequestInfo("/generate_stream", only_model="m")).stream
    assert not parse(RequestInfo("/generate", only_model="m"), stream=True).stream
    assert parse(RequestInfo("/", only_model="m"), stream=True).stream


def test_a_model_must_be_named_if_several_are_served() -> None:
    error = refused(RequestInfo("/generate"))
    assert "field `model`" in error.message
    named = DIALECT.parse(b'{"inputs": "x", "model": "other"}', RequestInfo("/generate"))
    assert named.fields.model == "other"


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"typical_p": 0.5}, "`typical_p` is not supported"),
        ({"watermark": True}, "`watermark` is not supported"),
        ({"best_of": 2}, "`best_of` is not supported"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be an integer of at least 1"),
        ({"truncate": 0}, "`parameters.truncate` must be at least 1"),
        ({"top_n_tokens": -1}, "`parameters.top_n_tokens`"),
        ({"grammar": {"type": "lark", "value": ""}}, "`parameters.grammar.type`"),
        ({"grammar": {"type": "regex", "value": {}}}, "grammar.value"),
        ({"grammar": {"type": "json", "value": {"type": 7}}}, "grammar.value"),
    ],
)
def test_an_invalid_parameter_is_named(parameters: dict[str, Any], named: str) -> None:
    assert named in refused(**parameters).message


def test_details_of_the_prompt_cannot_be_streamed() -> None:
    error = refused(RequestInfo("/generate_stream", only_model="m"), decoder_input_details=True)
    assert error.param == "parameters.decoder_input_details"


@given(st.lists(st.tuples(st.text(min_size=1, max_size=3), st.booleans()), min_size=1, max_size=8), st.booleans())
def test_any_chunking_gives_the_same_tokens_and_the_same_end(
    drawn: list[tuple[str, bool]], ends_by_token: bool
) -> None:
    """The booleans say whether a piece ends behind the token."""
    texts = [text for text, _ in drawn]
    renderer = DIALECT.renderer(request(details=True), None)
    raw, begin = b"", 0
    cuts = [at for at, (_, cut) in enumerate(drawn, 1) if cut or at == len(drawn)]
    for cut in cuts:
        own, last = texts[begin:cut], cut == len(texts)
        text = "".join(own[:-1] if last and ends_by_token else own)
        reason: FinishReason | None = ("stop" if ends_by_token else "length") if last else None
        raw += renderer.chunk(piece(own, text, cut, reason))
        begin = cut
    events = events_of(raw + renderer.end(Usage(2, len(texts))))
    assert [each["token"]["id"] for each in events] == list(range(len(texts)))
    assert [each["index"] for each in events] == list(range(1, len(texts) + 1))
    assert [each["token"]["text"] for each in events] == texts
    assert [each["token"]["special"] for each in events] == [False] * (len(texts) - 1) + [ends_by_token]
    assert all(each["generated_text"] is None for each in events[:-1])
    assert events[-1]["generated_text"] == "".join(texts[:-1] if ends_by_token else texts)
    end = {"finish_reason": "eos_token" if ends_by_token else "length", "generated_tokens": len(texts), "seed": 5}
    assert events[-1]["details"] == {**end, "input_length": 2}


def test_held_back_text_comes_with_the_token_that_completes_it() -> None:
    renderer = DIALECT.renderer(request(), None)
    raw = renderer.chunk(piece(["\ufffd"], "", 1, None)) + renderer.chunk(piece(["\ufffd"], "é", 2, "length"))
    assert [each["token"]["text"] for each in events_of(raw)] == ["", "é"]
    assert events_of(raw)[-1]["details"] is None


def test_a_continued_stream_ends_with_the_whole_text() -> None:
    renderer = DIALECT.renderer(request(full_text="Once"), None)
    renderer.resume(0, [Content(" upon")], None)
    (event,) = events_of(renderer.chunk(piece([" a"], " a", 2, "stop", "a")))
    assert (event["index"], event["generated_text"]) == (2, "Once upon a")


def test_an_answer_has_its_prompt_tokens_and_top_tokens() -> None:
    top = PositionLogprobs(position("a").chosen, [position("b", 7).chosen])
    positions = [position("x", 1), position("y", 2), top, position("</s>", 0)]
    renderer = DIALECT.renderer(request(details=True, prefill=True, top=True, in_list=True), None)
    prefill, generated = TgiTokens(of_prompt=True), TgiTokens()
    prefill.add(positions[:2])
    for each in positions[2:]:
        generated.add([each])
    choice = FinishedChoice(0, "a", "stop", generated, prompt=PromptReport(echoed=prefill))
    (answer,) = json.loads(b"".join(renderer.body([choice], Usage(2, 2))))
    details = answer["details"]
    assert answer["generated_text"] == "a"
    assert [each["id"] for each in details["prefill"]] == [1, 2]
    assert [(each["text"], each["special"]) for each in details["tokens"]] == [("a", False), ("</s>", True)]
    assert [[each["id"] for each in tokens] for tokens in details["top_tokens"]] == [[7], []]
    assert details["finish_reason"] == "eos_token"


def test_an_answer_without_details_is_only_text() -> None:
    body = DIALECT.renderer(request(), None).body([FinishedChoice(0, "a", "length", None)], Usage(2, 1))
    assert json.loads(b"".join(body)) == {"generated_text": "a"}


def test_errors_have_tgis_format_and_types() -> None:
    bad = PagemillError("Wrong.", param="inputs")
    assert json.loads(DIALECT.error_body(bad)) == {"error": "Wrong.", "error_type": "validation"}
    kinds = [model_not_found("x", []), unavailable("Later."), PagemillError("Broken.", status=500)]
    assert [json.loads(DIALECT.error_body(each))["error_type"] for each in kinds] == [
        "model_not_found",
        "overloaded",
        "generation",
    ]
    assert events_of(DIALECT.error_event(bad)) == [json.loads(DIALECT.error_body(bad))]


def test_info_describes_the_only_model() -> None:
    card = ModelCard("m", 1, max_model_len=64)
    asked = PageRequest([card, card._replace(id="alias", root="m")], ONLY, b"", "1.2")
    info = json.loads(INFO.body(asked))
    assert (info["model_id"], info["max_total_tokens"], info["version"]) == ("m", 64, "1.2")
    with pytest.raises(PagemillError, match="2 models are served"):
        INFO.body(asked._replace(cards=[card, ModelCard("other", 1)]))
    beside = asked._replace(cards=[card, ModelCard("encoder", 1, pools=True)])
    assert json.loads(INFO.body(beside))["model_id"] == "m", "TGI's routes serve models that answer with text"
