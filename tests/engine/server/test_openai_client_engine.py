"""The real `openai` Python client with a real engine server and the embedded model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pydantic
import pytest

pytestmark = pytest.mark.model
MODEL = "SmolLM2-135M-Instruct"
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]


@pytest.fixture(scope="module")
def client(model_server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{model_server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_chat_gets_an_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=24)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_has_the_same_text_and_ends_with_usage(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_what_the_client_predicts_is_verified_and_counted(client: openai.OpenAI, model_server: Any) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 24}
    plain = client.chat.completions.create(**arguments)
    text = plain.choices[0].message.content or ""
    for content in (text, [{"type": "text", "text": text}]):
        found = client.chat.completions.create(**arguments, prediction={"type": "content", "content": content})
        assert found.choices == plain.choices
        assert found.usage is not None
        details = found.usage.completion_tokens_details
        assert details is not None
        assert 0 < (details.accepted_prediction_tokens or 0) < found.usage.completion_tokens
        assert details.rejected_prediction_tokens is not None
    assert plain.usage is not None
    assert plain.usage.completion_tokens_details is None
    other = client.chat.completions.create(**arguments, prediction={"type": "content", "content": "Lisbon, of course."})
    assert other.choices == plain.choices
    with pytest.raises(openai.BadRequestError, match=r"prediction\.type"):
        client.chat.completions.create(**arguments, prediction={"type": "text", "content": "x"})  # type: ignore[typeddict-item]


def test_a_repeated_prompt_uses_the_prefix_cache(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Remember these words: " + "apple pear plum " * 10}]
    usages = [
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1, temperature=0).usage
        for _ in range(2)
    ]
    details = [usage.prompt_tokens_details for usage in usages if usage is not None]
    assert [bool(detail.cached_tokens) for detail in details if detail is not None] == [False, True] or (
        details[1] is not None and (details[1].cached_tokens or 0) >= 64
    )


def test_a_completion_continues_and_echoes_its_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=4, echo=True
    )
    assert answer.choices[0].text.startswith("The capital of France is Paris")
    assert answer.choices[0].finish_reason == "length"


def test_four_choices_differ_and_a_seed_reproduces_them(client: openai.OpenAI) -> None:
    def sample(seed: int) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt="Once upon a time", n=4, seed=seed, temperature=1.0, max_tokens=8
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        return [choice.text for choice in answer.choices]

    first = sample(7)
    assert len(set(first)) == 4
    assert sample(7) == first
    assert sample(8) != first


def test_four_choices_are_streamed_concurrently(client: openai.OpenAI) -> None:
    texts = dict.fromkeys(range(4), "")
    reasons = {}
    stream = client.chat.completions.create(
        model=MODEL, messages=FRANCE, n=4, seed=7, max_tokens=6, stream=True, extra_body={"ignore_eos": True}
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
    assert all(texts.values())
    assert reasons == dict.fromkeys(range(4), "length")


def test_chat_logprobs_are_log_probabilities_of_the_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        assert entry.logprob <= 0
        assert [top.logprob for top in entry.top_logprobs] == sorted(top.logprob for top in entry.top_logprobs)[::-1]
        assert entry.top_logprobs[0].token == entry.token  # greedy decoding
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-5


def test_completion_logprobs_have_offsets_into_the_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=4, logprobs=2
    )
    logprobs, text = answer.choices[0].logprobs, answer.choices[0].text
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert text[offset:].startswith(token)


@pytest.mark.parametrize(
    ("prompt", "added"), [("Hi 🫠 there", {"echo": True}), ([14605, 11], {"extra_body": {"min_p": 1}})]
)
def test_offsets_are_right_beside_characters_of_several_tokens_and_special_tokens(
    client: openai.OpenAI, prompt: str | list[int], added: dict[str, Any]
) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=9, seed=1, logprobs=1, **added)
    logprobs, text = answer.choices[0].logprobs, answer.choices[0].text
    assert logprobs is not None
    found = list(zip(logprobs.tokens or [], logprobs.text_offset or [], strict=True))
    whole = [(token, offset) for token, offset in found if "�" not in token and not token.startswith("<|")]
    assert len(whole) < len(found), "the text has no token of this kind"
    for token, offset in whole:
        assert text[offset:].startswith(token)


def test_prompts_of_one_request_are_answered_as_they_would_be_alone(client: openai.OpenAI) -> None:
    def texts(prompt: str | list[str]) -> list[str]:
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, seed=7, n=2, temperature=1)
        return [choice.text for choice in answer.choices]

    alone = texts("Hi")
    assert alone[0] != alone[1]
    assert texts(["Hi", "Rome is", "Hi"]) == alone + texts("Rome is") + alone


def test_an_echo_with_logprobs_scores_the_prompt_like_prompt_logprobs(client: openai.OpenAI) -> None:
    prompt = "The capital of France is Paris"
    extra = {"prompt_logprobs": 1, "return_token_ids": True}
    for _ in range(2):  # the second time, the prompt is cached
        answer = client.completions.create(
            model=MODEL, prompt=prompt, echo=True, logprobs=1, max_tokens=0, extra_body=extra
        )
    (choice,) = answer.choices
    assert choice.text == prompt
    assert choice.logprobs is not None
    assert choice.model_extra is not None
    assert "".join(choice.logprobs.tokens or []) == prompt
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    ids, entries = choice.model_extra["prompt_token_ids"], choice.model_extra["prompt_logprobs"]
    assert choice.model_extra["token_ids"] == []
    scored = [None, *(at[str(token_id)]["logprob"] for token_id, at in zip(ids[1:], entries[1:], strict=True))]
    assert choice.logprobs.token_logprobs == scored
    assert entries[-1][str(ids[-1])]["rank"] == 1, "Paris must be the most likely answer"
    assert entries[-1][str(ids[-1])]["decoded_token"] == " Paris"


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_evaluation_reads_the_likelihood_of_a_continuation_from_an_echo(
    client: openai.OpenAI, max_tokens: int
) -> None:
    """lm-eval sends token ids of context and continuation, and reads the positions after the context."""
    capital = client.completions.create(
        model=MODEL,
        prompt="The capital of France is",
        max_tokens=1,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    extra = capital.choices[0].model_extra
    assert extra is not None
    context = extra["prompt_token_ids"]
    likely, unlikely = (
        client.completions.create(
            model=MODEL, prompt=context_and_more, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
        ).choices
        for context_and_more in ([[*context, *extra["token_ids"]], context], [[*context, context[0]]])
    )
    (answer, short), (other,) = likely, unlikely
    behind = slice(len(context), len(context) + 1)
    for choice, is_greedy in ((answer, True), (other, False)):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.top_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == len(context) + 1 + max_tokens
        (value,), (top,) = choice.logprobs.token_logprobs[behind], choice.logprobs.top_logprobs[behind]
        assert (value == max(top.values())) == is_greedy
    assert short.logprobs is not None
    assert short.logprobs.token_logprobs is not None
    assert len(short.logprobs.token_logprobs) == len(context) + max_tokens


@pytest.mark.sample("*True")
@pytest.mark.parametrize("stream", [False, True])
def test_bad_words_and_allowed_tokens_restrict_a_chat(client: openai.OpenAI, stream: bool) -> None:
    def answer(**extra: Any) -> str:
        arguments: dict[str, Any] = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 12}
        if not stream:
            return client.chat.completions.create(**arguments, extra_body=extra).choices[0].message.content or ""
        chunks = client.chat.completions.create(**arguments, extra_body=extra, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    assert "Paris" in answer()
    assert "Paris" not in answer(bad_words=["Paris"])
    assert "of France" not in answer(bad_words=["of France"])
    assert set(answer(allowed_token_ids=[1, 28])) <= {","}


def test_named_tokens_are_scored_at_each_position(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=3, logprobs=True,
        extra_body={"logprob_token_ids": [5, 28], "return_token_ids": True},
    )  # fmt: skip
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.model_extra is not None
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content or []] == [2, 2, 2]
    assert len(choice.model_extra["token_ids"]) == 3
    assert answer.model_extra is not None
    assert len(answer.model_extra["prompt_token_ids"]) > 10


@pytest.mark.sample("*True")
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, stream: bool) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "prompt": "1, 2, 3, 4, 5, 6,", "temperature": 0, "max_tokens": 40}
    whole = client.completions.create(**arguments).choices[0].text
    assert " 9," in whole
    if stream:
        chunks = list(client.completions.create(**arguments, stop=["9, 1", " 9,"], stream=True))
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        reason = chunks[-1].choices[0].finish_reason
    else:
        answer = client.completions.create(**arguments, stop=["9, 1", " 9,"])
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
        assert answer.usage is not None
        assert answer.usage.completion_tokens < 40
    assert (text, reason) == (whole[: whole.index(" 9,")], "stop")


def test_errors_have_the_clients_exception_class(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=FRANCE)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=3)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="word " * 2000)
    assert long.value.code == "context_length_exceeded"
    assert "1024" in long.value.message
    with pytest.raises(openai.BadRequestError) as forced:
        client.chat.completions.create(
            model=MODEL,
            messages=FRANCE,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
            tool_choice="required",
        )
    assert forced.value.param == "tools[0].function.parameters"


def test_internal_routes_raise_authentication_errors(model_server: Any) -> None:
    stranger = openai.OpenAI(base_url=model_server.url, api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.get("/internal/link", cast_to=object)


async def test_concurrent_clients_get_the_answers_that_they_get_alone(model_server: Any) -> None:
    import asyncio

    prompts = [f"{count} plus {count} is" for count in range(12)]
    async with openai.AsyncOpenAI(base_url=f"{model_server.url}/v1", api_key="none", max_retries=0) as client:

        async def complete(prompt: str) -> str:
            answer = await client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=6)
            return answer.choices[0].text

        together = await asyncio.gather(*(complete(prompt) for prompt in prompts))
        alone = [await complete(prompt) for prompt in prompts[:3]]
    assert list(together[:3]) == alone


@pytest.mark.sample("*True")
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_format_constrains_the_answer_to_its_schema(client: openai.OpenAI, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "people": {"type": "integer", "maximum": 9_999_999},
        },
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    arguments: dict[str, Any] = {
        "model": MODEL,
        "messages": FRANCE,
        "max_tokens": 80,
        "seed": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
    }
    if stream:
        chunks = list(client.chat.completions.create(**arguments, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        (choice,) = client.chat.completions.create(**arguments).choices
        text, reason = choice.message.content or "", choice.finish_reason
    jsonschema.validate(json.loads(text), schema)
    assert reason == "stop"


@pytest.mark.sample("*True")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "expected"), [({"stop": ["Paris"]}, "Paris"), ({"stop_token_ids": [7042]}, 7042), ({}, None)]
)
def test_the_answer_names_the_stop_condition_that_ended_it(
    client: openai.OpenAI, stream: bool, fields: Any, expected: Any
) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24, "extra_body": fields}
    for create, prompt in (
        (client.chat.completions.create, {"messages": FRANCE}),
        (client.completions.create, {"prompt": "The capital of France is"}),
    ):
        answer: Any = create(**prompt, **arguments, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert choices[-1].finish_reason == ("stop" if expected else choices[-1].finish_reason)
        assert choices[-1].stop_reason == expected
        assert not any(hasattr(choice, "stop_reason") for choice in choices[:-1])


def test_an_engine_without_a_gateway_supports_forced_calls(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"const": 1}}}}}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=FRANCE,
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "f"}},
        max_tokens=80,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "f"


class City(pydantic.BaseModel):
    name: Literal["Paris", "Rome"]
    is_capital: bool


def test_a_pydantic_model_is_parsed_from_the_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=FRANCE, response_format=City, max_tokens=80, seed=1)
    assert isinstance(answer.choices[0].message.parsed, City)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"guided_choice": ["one", "two"]}, "one|two"),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"guided_json": {"const": 5}}, "5"),
    ],
)
def test_the_forms_of_vllm_apply_in_both_dialects(client: openai.OpenAI, form: Any, expected: str) -> None:
    completion = client.completions.create(model=MODEL, prompt="Say", max_tokens=20, extra_body=form)
    assert re.fullmatch(expected, completion.choices[0].text)
    chat = client.chat.completions.create(model=MODEL, messages=FRANCE, max_tokens=20, extra_body=form)
    assert re.fullmatch(expected, chat.choices[0].message.content or "")


def test_a_response_is_returned_as_body_and_as_stream(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "input": FRANCE, "temperature": 0, "max_output_tokens": 24}
    whole = client.responses.create(**arguments)
    assert "Paris" in whole.output_text
    assert (whole.status, whole.object) == ("completed", "response")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with client.responses.stream(**arguments) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text
    assert final.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_response_is_parsed_into_the_clients_own_class(client: openai.OpenAI) -> None:
    class City(pydantic.BaseModel):
        name: Annotated[str, pydantic.Field(max_length=12)]

    parsed = client.responses.parse(model=MODEL, input=FRANCE, text_format=City, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, City)


def test_a_response_that_reaches_the_limit_is_incomplete(client: openai.OpenAI) -> None:
    goes_on = {"ignore_eos": True}  # the third token happens to end the text
    answer = client.responses.create(
        model=MODEL, input="Count from one to ninety.", max_output_tokens=3, extra_body=goes_on
    )
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    with pytest.raises(openai.BadRequestError, match="not stored"):
        client.responses.create(model=MODEL, input="And on?", previous_response_id=answer.id)
