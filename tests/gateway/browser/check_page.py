"""The page `/ui` in Debian's Chromium: every view with real engines, faults while one looks, hostile texts, the
keyboard alone, accessibility, and a hundred engines. `make browser` runs it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import msgspec
import pytest
from real_cluster import TOKEN, endpoint_of

from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.report.scaling import ScalingDecision, ScalingGoal, ScalingReport
from pagemill_protocol.report.state import EngineLoad
from pagemill_protocol.versions import protocol_headers
from pagemill_servers.auth import hash_key

VIEWS = ("fleet", "load", "scaling", "what-if", "requests", "keys", "playground")
SCRIPTS = (
    "<img src=x onerror=alert(1)>",
    "<script>alert(2)</script>",
    '"><svg onload=alert(3)>',
    "javascript:alert(4)",
    "{{constructor.constructor('alert(5)')()}}",
)
HOSTILE = " ".join(SCRIPTS)
ADMIN = "admin-key"


def catalog_of(real: Any) -> Catalog:
    """Return a catalogue with the real engine, whose answers have no reasoning to be separated from their text."""
    endpoints = [endpoint_of(each) for each in real.engines]
    return Catalog(models=[CatalogModel(deployment="d", name="smol", engine_token=TOKEN, endpoints=endpoints)])


async def tell_decision(gateway: Any, **fields: Any) -> None:
    """Report a scaling decision to the gateway, as the operator does."""
    defaults = {"key": "default/d", "time": "2026-11-29T10:00:00Z", "replicas_before": 1, "replicas": 2}
    goals = [ScalingGoal(name="slo", needed=2, reason=fields.get("message", ""))]
    decision = ScalingDecision(**{**defaults, "reason": "ScaledUp", "goals": goals, **fields})
    headers = {"Authorization": f"Bearer {gateway.gateway.control.config.control_token}", **protocol_headers()}
    url, body = f"{gateway.control_url}/internal/scaling", msgspec.json.encode(ScalingReport(decisions=[decision]))
    async with gateway.session.post(url, data=body, headers=headers) as response:
        assert response.status == 200


async def injected(looker: Any) -> int:
    """Return how many elements a text of ours has become."""
    return int(await looker.page.locator("main img, main svg, main script, header img, header svg").count())


async def chat(looker: Any, text: str) -> None:
    """Send a message, and wait for the end of the answer."""
    await looker.page.get_by_label("Message", exact=True).fill(text)
    await looker.page.get_by_role("button", name="Send").click()
    await looker.sees("in all", "[role=status]")


def decimal(value: float, digits: int) -> str:
    """Return a number as the page writes it."""
    rounded = Decimal(str(value)).quantize(Decimal(10) ** -digits, ROUND_HALF_UP)
    return f"{rounded:,f}".rstrip("0").rstrip(".") if digits else f"{rounded:,f}"


def shown_ms(value: float | None, digits: int) -> str:
    return "without bound" if value is None else f"{decimal(value, digits)} ms"


async def test_every_view_shows_real_engines(real, look) -> None:
    looker = await look()
    await looker.open(real.url)
    await looker.sees("Live")
    await looker.sees("engine-0")
    await looker.sees("ready", ".tile")
    await looker.page.get_by_role("link", name="Playground").click()
    await looker.page.get_by_label("Model", exact=True).select_option("smol")
    await looker.page.get_by_label("Most tokens of the answer").fill("8")
    await looker.page.get_by_label("Show log probabilities").check()
    await chat(looker, "Say hello")
    await looker.sees("8 tokens")
    await looker.page.locator(".tokens button").nth(2).focus()
    await looker.sees("Candidates:")
    await looker.page.get_by_role("link", name="Requests").click()
    await looker.page.locator("summary").first.click()
    await looker.sees("Compared engines")
    await looker.page.get_by_role("link", name="Load").click()
    await looker.sees("free share of slots and KV: ")
    await looker.page.locator("canvas").first.wait_for()
    await looker.page.get_by_role("link", name="Keys").click()
    await looker.sees("The gateway needs no keys")
    await looker.page.get_by_role("link", name="Playground").click()
    await looker.sees("Say hello")  # the conversation is kept


async def test_the_playground_sends_what_is_chosen(real, gateways, look) -> None:
    gateway = await gateways(wait=False, catalog=catalog_of(real))
    looker = await look()
    await looker.open(gateway.url)
    await looker.has_ready(1)
    await looker.page.get_by_role("link", name="Playground").click()
    field = looker.page.get_by_label
    await field("Model", exact=True).select_option("smol")
    await field("Form of the answer").select_option("json_schema")
    await field("JSON Schema").fill(
        '{"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": false}'
    )
    await field("Temperature").fill("0")
    await field("Most tokens of the answer").fill("40")
    await chat(looker, "Which number?")
    answer = await looker.page.locator(".message").nth(1).locator("div").first.inner_text()
    assert json.loads(answer) == {"n": 7}
    await field("JSON Schema").fill("{")
    await field("Message", exact=True).fill("again")
    await looker.page.get_by_role("button", name="Send").click()
    await looker.sees("Write JSON, or empty the field.")
    await field("Form of the answer").select_option("text")
    await field("Tools (JSON").fill(
        json.dumps([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])
    )
    async with looker.page.expect_request("**/v1/chat/completions") as sent:
        await looker.page.get_by_role("button", name="Send").click()
    body = json.loads((await sent.value).post_data)
    assert body["tools"][0]["function"]["name"] == "f"
    assert body["messages"][-1] == {"role": "user", "content": "again"}
    assert body["stream"]


async def test_the_request_as_curl_and_in_python_is_the_same_request(real, gateways, look) -> None:
    gateway = await gateways(wait=False, catalog=catalog_of(real))
    looker = await look()
    await looker.open(gateway.url)
    await looker.has_ready(1)
    await looker.page.get_by_role("link", name="Playground").click()
    field = looker.page.get_by_label
    await field("Model", exact=True).select_option("smol")
    await field("Temperature").fill("0")
    await field("Most tokens of the answer").fill("6")
    await field("Seed").fill("1")
    text = "It's $HOME `id` \"quoted\" \\ ünïcode 😀\n'''"
    await field("Message", exact=True).fill(text)
    shown = {
        name: await looker.page.get_by_label(label).text_content()
        for name, label in (("curl", "The request as curl"), ("python", "The request in Python"))
    }

    async def run(*argv: str) -> str:
        done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, check=True)
        return done.stdout

    # All but the first find the prompt in the cache, with which sums are rounded differently.
    await run("bash", "-c", shown["curl"])
    await chat(looker, text)
    answer = await looker.page.locator(".message").nth(1).locator("div").first.text_content()
    assert answer
    curl = await run("bash", "-c", shown["curl"])
    chunks = [json.loads(line[6:]) for line in curl.splitlines() if line.startswith("data: {")]
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks if each["choices"]) == answer
    assert (await run(sys.executable, "-c", shown["python"])).strip() == answer.strip()


async def test_a_conversation_goes_on_with_the_result_of_a_tool(real, gateways, look) -> None:
    gateway = await gateways(wait=False, catalog=catalog_of(real))
    looker = await look()
    await looker.open(gateway.url)
    await looker.has_ready(1)
    await looker.page.get_by_role("link", name="Playground").click()
    field = looker.page.get_by_label
    await field("Model", exact=True).select_option("smol")
    await field("Temperature").fill("0")
    await field("Most tokens of the answer").fill("40")
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    function = {"name": "weather", "parameters": {**parameters, "additionalProperties": False}}
    await field("Tools (JSON").fill(json.dumps([{"type": "function", "function": function}]))
    await field("Call tools").select_option("required")
    await chat(looker, "What is the weather in Rome?")
    await field("Result of weather(").fill(HOSTILE)
    await field("Call tools").select_option("none")
    async with looker.page.expect_request("**/v1/chat/completions") as sent:
        await looker.page.get_by_role("button", name="Send").click()
    *_, question, called, result = json.loads((await sent.value).post_data)["messages"]
    assert question["content"] == "What is the weather in Rome?"
    (call,) = called["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Rome"})
    assert result == {"role": "tool", "tool_call_id": call["id"], "content": HOSTILE}
    await looker.sees("Result of weather", ".message h3")
    assert HOSTILE in await looker.page.locator(".message").nth(2).inner_text()
    await looker.page.locator(".message").nth(3).wait_for()
    await looker.sees("in all", "[role=status]")
    assert await injected(looker) == 0
    python = await looker.page.get_by_label("The request in Python").text_content()
    assert "tool_call_id" in python, "the next request has the whole conversation"


async def test_the_what_if_predicts_from_what_engines_measure(real, gateways, look) -> None:
    gateway = await gateways(wait=False, catalog=catalog_of(real))
    looker = await look()
    await looker.open(gateway.url)
    await looker.has_ready(1)
    await looker.page.get_by_role("link", name="What if").click()
    await looker.sees("Predicted latencies")
    await looker.page.get_by_label("Requests per second").fill("0.02")
    async with looker.page.expect_response("**/ui/what-if?*replicas=3&requests_per_s=0.02*") as answered:
        await looker.page.get_by_label("Replicas").fill("3")
    answer = await (await answered.value).json()
    await looker.sees("3 (asked)", "td")
    shown = [each.split("\t") for each in await looker.page.locator("tbody tr").all_inner_texts()]
    assert [[each[0].removesuffix(" (asked)"), *each[1:4]] for each in shown] == [
        [
            str(row["replicas"]),
            shown_ms(row["ttft_ms"], 0),
            shown_ms(row["tpot_ms"], 1),
            decimal(row["most_requests_per_s"], 2),
        ]
        for row in answer["rows"]
    ]
    (asked,) = (row for row in answer["rows"] if row["replicas"] == 3)
    assert None not in asked.values()
    await looker.sees(f"3 replicas at {decimal(answer['asked']['requests_per_s'], 2)} requests/s: ", "[role=status]")
    await looker.sees(f"first token within {shown_ms(asked['ttft_ms'], 0)}, ", "[role=status]")
    await looker.sees(f"Now: {answer['now']['replicas']} ready, ")
    await looker.page.get_by_label("Requests per second").fill("100000")
    await looker.sees("without bound", "td")
    await looker.page.get_by_label("Tokens of a prompt").fill("100000")
    await looker.sees("more than the model takes", ".error")
    await looker.page.get_by_role("button", name="As it is now").click()
    await looker.sees("1 (asked)", "td")


async def test_scaling_decisions_are_shown_as_they_come(engines, gateways, look) -> None:
    gateway = await gateways(*engines)
    looker = await look(timezone_id="Asia/Tokyo")
    await looker.open(gateway.url, "scaling")
    await looker.sees("has reported no decision yet")
    goals = [ScalingGoal(name="slo", needed=5, reason="3.00 requests/s need 5"), ScalingGoal(name="kv", needed=4)]
    await tell_decision(
        gateway, replicas_before=3, replicas=5, policy="headroom", message="the load needs 5", goals=goals
    )
    await looker.sees("29/11/2026, 19:00:00 default/d: 3 → 5 replicas, ScaledUp. the load needs 5", "summary")
    later = {"time": "2026-11-29T10:00:09Z", "mode": "Advisory", "reason": "WithinTolerance", "message": "enough"}
    await tell_decision(gateway, replicas_before=5, replicas=5, **later)
    await looker.sees("default/d: stays at 5, WithinTolerance (Advisory: not carried out). enough", "summary")
    summaries = looker.page.locator("summary")
    assert ["stays" in each for each in await summaries.all_inner_texts()] == [True, False], "the newest comes first"
    await summaries.nth(1).focus()
    await looker.page.keyboard.press("Enter")
    await looker.sees("What each target asked for", "details[open]")
    await looker.sees("Policy headroom.", "details[open]")
    rows = looker.page.locator("details[open] tbody tr")
    assert await rows.all_inner_texts() == ["slo\t5\t3.00 requests/s need 5", "kv\t4\t–"]


async def test_the_use_of_a_limit_is_shown_while_it_grows(engines, gateways, look) -> None:
    limits = ("tenant=acme requests_per_minute=1000 concurrency=4", "tenant=beta models=tiny requests_per_minute=5")
    keys = [f"{hash_key(key)} {each}" for key, each in zip(("user", "other"), limits, strict=True)]
    gateway = await gateways(*engines, api_keys=[f"{hash_key(ADMIN)} role=admin", *keys])
    looker = await look()
    await looker.open(gateway.url, "keys")
    await looker.page.get_by_label("API key").fill(ADMIN)
    await looker.page.keyboard.press("Enter")
    await looker.sees("requests per minute: 0 of 1,000", "td")
    assert (await gateway.chat(headers={"Authorization": "Bearer user"})).status == 200
    await looker.sees("requests per minute: 1 of 1,000 (0 %)", "td")
    admin, acme, beta = (each.split("\t") for each in await looker.page.locator("tbody tr").all_inner_texts())
    assert (admin[0], admin[2], admin[5]) == (f"key {hash_key(ADMIN)[:8]}", "none", "admin")
    assert (acme[0], acme[1], acme[5]) == ("acme", "all", "–")
    assert acme[2].split("\n")[1:3] == ["requests per minute: 1 of 1,000 (0 %)", "sequences at once: 0 of 4 (0 %)"]
    assert (beta[0], beta[1], beta[2].strip()) == ("beta", "tiny", "requests per minute: 0 of 5 (0 %)")
    meters = await looker.page.locator("meter").evaluate_all("all => all.map(each => [each.value, each.max])")
    assert meters == [[1, 1000], [0, 4], [0, 5]]


async def test_an_engine_that_dies_while_one_looks_is_shown(start_cluster, look) -> None:
    cluster = await asyncio.to_thread(start_cluster, 2, null_runner=True)
    looker = await look()
    await looker.open(cluster.url)
    ready = looker.page.locator(".tile[data-phase=ready]")
    await looker.has_ready(2)
    await asyncio.to_thread(cluster.engines[1].kill)
    await looker.page.locator(".tile[data-bad]").wait_for()
    assert await ready.count() == 1
    assert "engine-1" in await looker.page.locator(".tile[data-bad]").inner_text()


async def test_a_restart_of_the_gateway_is_shown_and_the_page_goes_on(engines, gateways, look, forwarder) -> None:
    first = await gateways(*engines)
    forwarder.target = first.url
    looker = await look()
    await looker.open(forwarder.url)
    await looker.sees("Live")
    forwarder.target = "http://127.0.0.1:9"
    forwarder.cut_off()
    await looker.sees("The connection to the gateway was lost at")
    second = await gateways(*engines[:2])
    second.gateway.control.started_unix_s += 60  # as if it had been started a minute later
    forwarder.target = second.url
    await looker.sees("The gateway was restarted at")
    await looker.sees("Live")
    await looker.has_ready(2)


async def test_hostile_texts_stay_texts(engines, gateways, fake, look) -> None:
    engine = engines[0]
    engine.name = HOSTILE
    engine.behaviour = fake.says(HOSTILE, *SCRIPTS)
    endpoint = Endpoint(id=HOSTILE, data_url=engine.url, control_url=engine.url)
    model = CatalogModel(
        namespace=SCRIPTS[0],
        deployment=SCRIPTS[1],
        name=HOSTILE,
        aliases=list(SCRIPTS),
        engine_token=fake.TOKEN,
        endpoints=[endpoint],
    )
    gateway = await gateways(engine, catalog=Catalog(models=[model]))
    looker = await look()
    await looker.open(gateway.url)
    await looker.sees(HOSTILE, "h2")
    await looker.sees(HOSTILE, ".tile h3")
    assert await injected(looker) == 0
    await looker.page.get_by_role("link", name="Playground").click()
    await looker.page.get_by_label("Model", exact=True).select_option(HOSTILE)
    await chat(looker, HOSTILE)
    assert await looker.page.locator(".message").nth(1).locator("div").first.text_content() == HOSTILE + "".join(
        SCRIPTS
    )
    engine.behaviour = fake.refuses(400, message=HOSTILE)
    await looker.page.get_by_label("Message", exact=True).fill("again")
    await looker.page.get_by_role("button", name="Send").click()
    await looker.sees(f"Error: {HOSTILE}", ".message .error")
    for view in ("Requests", "Load"):
        await looker.page.get_by_role("link", name=view).click()
        await looker.sees(SCRIPTS[1], "main")
    await tell_decision(gateway, key=SCRIPTS[1], time=HOSTILE, mode=HOSTILE, policy=HOSTILE, message=HOSTILE)
    await looker.page.get_by_role("link", name="Scaling").click()
    await looker.sees(HOSTILE, "summary")
    await looker.page.locator("summary").first.click()
    await looker.sees(HOSTILE, "td")
    await looker.page.get_by_role("link", name="What if").click()
    await looker.sees("Now: ", "main")
    assert SCRIPTS[1] in await looker.page.get_by_label("Deployment").inner_text()
    assert await injected(looker) == 0


async def test_hostile_names_in_keys_stay_texts(gateways, look) -> None:
    hostile = "<img/src/onerror>"
    keys = [
        f"{hash_key(ADMIN)} role=admin",
        f"{hash_key('user')} tenant=acme models={hostile} tokens_per_minute@{hostile}=5",
    ]
    gateway = await gateways(wait=False, api_keys=keys)
    looker = await look()
    await looker.open(gateway.url, "keys")
    await looker.sees("A key is needed")
    await looker.page.get_by_label("API key").fill("wrong")
    await looker.page.keyboard.press("Enter")
    await looker.sees("A key is needed")
    await looker.page.get_by_label("API key").fill(ADMIN)
    await looker.page.keyboard.press("Enter")
    await looker.sees(hostile, "td")
    await looker.sees(f"tokens per minute of {hostile}: 0 of 5", "td")
    await looker.sees("admin", "td")
    assert await injected(looker) == 0
    assert ADMIN not in await looker.page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
    )


async def test_the_keyboard_suffices(engines, gateways, look) -> None:
    gateway = await gateways(*engines)
    looker = await look()
    await looker.open(gateway.url)
    await looker.sees("Live")
    press = looker.page.keyboard.press

    async def tab_to(name: str) -> None:
        """Press Tab until the element with this text or label has the focus."""
        for _ in range(60):
            await press("Tab")
            focused = await looker.page.evaluate(
                "(each => each.labels?.[0]?.textContent || each.textContent)(document.activeElement)"
            )
            if focused.strip() == name:
                outline = await looker.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert outline == "solid"
                return
        raise AssertionError(f"Tab does not reach {name}")

    await tab_to("Scaling")
    await press("Enter")
    await looker.sees("Scaling decisions, and why", "h2")
    await tab_to("What if")
    await press("Enter")
    await tab_to("Replicas")
    await press("Control+A")
    async with looker.page.expect_request("**/ui/what-if?*replicas=7*"):
        await looker.page.keyboard.type("7")
    await tab_to("As it is now")
    await looker.page.evaluate("document.body.tabIndex = -1, document.body.focus()")
    await tab_to("Playground")
    await press("Enter")
    await tab_to("Message")
    await looker.page.keyboard.type("hi")
    await tab_to("Send")
    await press("Enter")
    await looker.sees("in all", "[role=status]")
    assert (await looker.page.locator(".message").nth(1).locator("div").first.text_content()) == "hello world"
    await tab_to("The same request in Python")
    await press("Enter")
    await looker.sees("from openai import OpenAI")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_in_any_view(engines, gateways, look, axe, scheme) -> None:
    gateway = await gateways(*engines)
    await engines[0].push_state(load=EngineLoad(num_kv_bytes_total=10, num_kv_bytes_active=4, num_requests_running=1))
    assert (await gateway.chat()).status == 200
    await tell_decision(gateway, message="3.00 requests/s need 2 replicas")
    looker = await look(color_scheme=scheme)
    await looker.open(gateway.url)
    await looker.sees("Live")
    for view in VIEWS:
        await looker.page.evaluate(f"location.hash = '{view}'")
        await looker.page.locator("main h2").first.wait_for()
        if view == "playground":
            await chat(looker, "hi")
        if view == "what-if":
            await looker.sees("Now: ", "main")
        if view in ("requests", "scaling"):
            await looker.page.locator("summary").first.click()
        await looker.page.evaluate(axe)
        found = await looker.page.evaluate(
            "axe.run().then(found => found.violations.map(each => [each.id, each.nodes.map(node => node.html)]))"
        )
        assert found == [], view


async def test_a_hundred_engines_are_shown_and_updated(engines, gateways, fake, look) -> None:
    hundred = [*engines, *[await fake.Engine(f"more-{number}").start() for number in range(97)]]
    try:
        gateway = await gateways(*hundred)
        looker = await look()
        await looker.open(gateway.url)
        await looker.has_ready(100)
        await hundred[-1].push_state(load=EngineLoad(num_requests_running=77, step_ms=10.0))
        await looker.sees("77", ".tile")
        await looker.sees("Engines ready: 100 of 100")
    finally:
        for engine in hundred[3:]:
            await engine.kill()
