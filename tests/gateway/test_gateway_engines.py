"""The whole data path with real engine servers: openai client, gateway process, engine processes, SIGKILL."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from byte_bundle import byte_bundle
from real_cluster import Cluster, endpoint_of, fetch
from tiny_llama import write_tiny_llama
from waiting import WAIT_LIMIT_S, wait_until

from pagemill_models.tokenizer_files.generation_defaults import GenerationDefaults
from pagemill_servers.auth import hash_key

pytestmark = pytest.mark.slow

QUESTION: list[Any] = [{"role": "user", "content": "Name the capital of France."}]


@pytest.mark.model
def test_the_real_model_gives_equal_answers_whole_streamed_and_without_the_gateway(real: Cluster) -> None:
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
def test_choices_log_probabilities_stops_and_several_prompts_reach_the_engine(real: Cluster) -> None:
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
        # The first request computes the whole prompt, and a later one only the part that is not cached. In bfloat16, a
        # multiplication of many rows gives other bits than one of few rows; two requests with the same cached tokens
        # draw the same.
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
def test_a_schema_constrains_the_answer_through_the_gateway(real: Cluster) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {**schema, "additionalProperties": False}},
    }
    with real.client() as client:
        # The deployment parses reasoning, which may precede the form and use all tokens, so it gets a budget of zero.
        unthinking = {"thinking_token_budget": 0}
        answer = client.chat.completions.create(
            model="smol", messages=QUESTION, max_tokens=60, response_format=form, extra_body=unthinking
        )
        assert list(json.loads(answer.choices[0].message.content or "")) == ["ok"]
        form["json_schema"]["schema"] = {"type": "array", "contains": {"const": 1}}
        with pytest.raises(openai.BadRequestError, match="contains"):
            client.chat.completions.create(model="smol", messages=QUESTION, response_format=form)


def test_errors_have_the_matching_exception_class(simulated: Cluster) -> None:
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
        simulated.wait(lambda endpoints: sum(endpoint["in_flight"] for endpoint in endpoints) == 1)
        stream.close()
    simulated.wait(lambda endpoints: sum(endpoint["in_flight"] for endpoint in endpoints) == 0)
    simulated.wait(lambda endpoints: sum(endpoint["load"]["num_requests_running"] for endpoint in endpoints) == 0)


def test_requests_spread_over_both_engines(simulated: Cluster) -> None:
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
    assert all(counts), "each engine must serve some requests"


def test_killing_one_engine_loses_no_answer_and_cuts_no_stream(simulated: Cluster) -> None:
    """This test runs last because it leaves only one engine."""
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
            assert num_scored == scored, "the prompt's log probabilities must arrive once, whichever engines answer"
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


def test_requests_beyond_the_kv_cache_wait_in_the_gateway(start_cluster: Callable[..., Cluster]) -> None:
    """Thirty answers of up to 100 tokens on a cache for about seven wait in the gateway, and none is preempted."""
    cluster = start_cluster(1, null_runner=True, num_kv_blocks=64)
    options: Any = {"model": "smol", "max_tokens": 100, "extra_body": {"ignore_eos": True}}
    with cluster.client() as client, ThreadPoolExecutor(30) as pool:

        def ask(number: int) -> int:
            prompt = [1 + (number * 31 + each) % 1000 for each in range(20)]
            return client.completions.create(prompt=prompt, **options).usage.completion_tokens

        assert list(pool.map(ask, range(30))) == [100] * 30
    cluster.wait(lambda endpoints: endpoints[0]["reserved_bytes"] == 0 and endpoints[0]["load"] is not None)
    assert cluster.endpoints()[0]["load"]["num_preemptions"] == 0
    metrics = fetch(cluster.control_url + "/metrics")
    assert "pagemill_gateway_upstream_attempts_total{" in metrics
    assert not re.search(r'upstream_attempts_total{[^}]*outcome="refused"[^}]*} [1-9]', metrics)
    assert int(float(metrics.split('queue_ended_total{model="smol",outcome="served"} ')[1].split()[0])) >= 5


def test_an_answer_that_is_not_read_takes_no_place_of_an_engine(start_cluster: Callable[..., Cluster]) -> None:
    """The engine has computed it; its client then reads all of it, after another request was served beside it."""
    cluster = start_cluster(1, null_runner=True, max_num_seqs=128, max_model_len=16_384, num_kv_blocks=4096)
    fields = {"model": "smol", "prompt": [20] * 15_000, "echo": True, "n": 128, "max_tokens": 1}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with unread_connection(cluster.url) as wire, cluster.client() as client:
        wire.sendall(head.encode() + b"\r\n\r\n" + body)
        assert wire.recv(1, socket.MSG_PEEK), "the answer has begun"
        cluster.wait(lambda endpoints: endpoints[0]["in_flight"] == 0)
        small: Any = {"model": "smol", "prompt": [21], "n": 2, "max_tokens": 1}
        assert client.completions.create(**small).usage.completion_tokens == 2
        answer = http.client.HTTPResponse(wire)
        answer.begin()
        assert len(json.loads(answer.read())["choices"]) == 128


@contextlib.contextmanager
def unread_connection(url: str) -> Iterator[socket.socket]:
    """Yield a connection whose receive buffer is small."""
    address = urlsplit(url)
    with socket.socket() as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.settimeout(WAIT_LIMIT_S)
        wire.connect((address.hostname, address.port))
        yield wire


def test_real_engines_end_answers_at_the_limit_of_a_key(start_cluster: Callable[..., Cluster]) -> None:
    """Answers of many kinds run concurrently: together they get all tokens of the limit, and no token more."""
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
            """Return the number of tokens that the request used."""
            kind: Any = {"extra_body": {"ignore_eos": True}, **kinds[number % len(kinds)]}
            try:
                reply = client.completions.create(model="smol", prompt=[1 + number] * 10, **kind)
            except openai.RateLimitError:
                return 0
            return int([*reply][-1].usage.total_tokens if "stream" in kind else reply.usage.total_tokens)

        assert ask(0) == 10 + 900, "the answer must exceed the first allowance and not be cut"
        used = 910 + sum(pool.map(ask, range(20)))
    assert limit - 300 < used <= limit


def test_defaults_of_model_and_deployment_apply_if_a_request_sends_none(
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
    assert len(found) == 1, "the answer must be greedy in both forms"
    assert [num_tokens for _, num_tokens in found] == [6], "neither the model's 9 nor the default of 16 applies"
    assert ask(cluster.url, 0, max_tokens=3)[1] == 3
    hot = {ask(cluster.url, seed, temperature=2.0) for seed in range(4)}
    assert len(hot) > 1, "the request's own value applies"
    assert hot == {ask(engine_url, seed, temperature=2.0) for seed in range(4)}
