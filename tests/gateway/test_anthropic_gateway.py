"""Anthropic's API through a gateway, with its own client where that shows more than the bytes."""

from __future__ import annotations

import pytest

HI = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [IMAGE]}
BODY = {"model": "tiny", "max_tokens": 9, "messages": [HI]}


@pytest.mark.layouts
async def test_models_have_anthropics_shape_for_anthropics_clients(engines, gateways, fake) -> None:
    import anthropic  # it takes 0.6 s, which only the worker that runs the test spends

    names = [f"name-{number:02}" for number in range(45)]
    gateway = await gateways(engines[0], catalog=fake.catalog_of(engines[0], aliases=names))
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
        page = await client.models.list(limit=2)
        assert (page.has_more, [each.id for each in page.data]) == (True, ["tiny", "name-00"])
        assert [each.id async for each in client.models.list()] == ["tiny", *names]
        before = await client.models.list(before_id="name-05", limit=2)
        assert ([each.id for each in before.data], before.has_more) == (["name-03", "name-04"], True)
        model = await client.models.retrieve("name-07")
        assert (model.type, model.id, model.max_input_tokens) == ("model", "name-07", fake.MAX_MODEL_LEN)
        assert model.created_at.year > 2020
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.models.retrieve("nope")
        assert missing.value.type == "not_found_error"
        for wrong in ({"limit": 0}, {"limit": 1001}, {"after_id": "nope"}):
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.models.list(**wrong)
            assert refused.value.body["error"]["param"] == next(iter(wrong))


@pytest.mark.layouts
async def test_the_home_page_says_that_a_server_is_there(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    assert ((await gateway.get("/")).status, (await gateway.get("/")).raw) == (200, b"Pagemill is running\n")
    async with gateway.session.head(gateway.url + "/") as response:
        assert (response.status, await response.read()) == (200, b"")
    async with gateway.session.put(gateway.url + "/") as response:
        assert {*response.headers["Allow"].split(", ")} == {"GET", "HEAD", "POST"}


@pytest.mark.layouts
async def test_what_has_no_effect_is_named_in_a_header_and_a_users_image_in_the_error(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    messages = [HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]
    for stream in (False, True):
        reply = await gateway.post("/v1/messages", {**BODY, "messages": messages, "stream": stream})
        assert (reply.status, reply.headers["x-pagemill-unread-fields"]) == (
            200,
            "messages[2].content[0].content[0]",
        )
    thinks = {"thinking": {"type": "enabled", "budget_tokens": 5}, "frequency_penalty": 1.0}
    reply = await gateway.post("/v1/messages", {**BODY, **thinks})
    named = reply.headers["x-pagemill-unread-fields"]
    assert (reply.status, named) == (200, "frequency_penalty, thinking, thinking.budget_tokens")
    reply = await gateway.post("/v1/messages", {**BODY, "messages": [HI, {"role": "user", "content": [IMAGE]}]})
    assert (reply.status, reply.json["error"]["param"]) == (400, "messages[1].content[0].type")


async def test_an_answer_beyond_the_context_is_an_error_from_which_clients_lower_their_limit(
    engines, gateways, fake
) -> None:
    gateway = await gateways(engines[0])
    reply = await gateway.post("/v1/messages", {**BODY, "max_tokens": 32000})
    assert reply.status == 400
    words = "input length and `max_tokens` exceed context limit: {} + 32000 > {}"
    assert reply.json["error"]["message"].startswith(words.format(len("<user>hi<assistant>"), fake.MAX_MODEL_LEN))


async def test_edits_of_the_context_reach_the_engine_and_its_answer(engines, gateways) -> None:
    gateway = await gateways(engines[0])
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "a long result"}
    messages = [HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
    none = {"type": "tool_uses", "value": 0}
    edit = {"type": "clear_tool_uses_20250919", "trigger": none, "keep": none}
    reply = await gateway.post(
        "/v1/messages", {**BODY, "messages": messages, "context_management": {"edits": [edit]}, "max_tokens": 4}
    )
    (applied,) = reply.json["context_management"]["applied_edits"]
    assert applied["cleared_tool_uses"] == 1
    prompt = bytes(engines[0].requests[0].prompt_token_ids)
    assert b"a long result" not in prompt
