"""The engine's HTTP process with a simulated device: invalid input, disconnects, and the routes for gateways."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
from link_client import LinkAnswer, LinkClient, generate
from waiting import WAIT_LIMIT_S, wait_until

from pagemill_protocol.frames import FrameDecoder, StateDecoder
from pagemill_protocol.link import RecordKind
from pagemill_protocol.report.state import StateFrame
from pagemill_protocol.request.generate import ChoiceResume, FrameMeta, GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams
from pagemill_protocol.tokenizer_bundle import TokenizerBundle

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def client(null_server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=null_server.url, timeout=WAIT_LIMIT_S) as client:
        yield client


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}


def metric(client: httpx.Client, name: str) -> float:
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name + "{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def generate_request(request_id: str, **fields: Any) -> GenerateRequest:
    defaults: dict[str, Any] = {
        "prompt_token_ids": list(range(10, 40)),
        "sampling": SamplingParams(max_tokens=5, seed=1, ignore_eos=True),
        "stream": True,
    }
    return GenerateRequest(request_id=request_id, model=MODEL, **{**defaults, **fields})


def generate_at(server: Any, request: GenerateRequest) -> LinkAnswer:
    return generate(server.url, request, server.auth)


def frames_of(answer: LinkAnswer) -> list[tuple[FrameMeta, bytes]]:
    assert answer.status == 200, answer
    return answer.frames


def text_of(frames: list[tuple[FrameMeta, bytes]]) -> str:
    payload = b"".join(payload for _, payload in frames).decode()
    events = [json.loads(event[6:]) for event in payload.split("\n\n") if event and event != "data: [DONE]"]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"])


# -- invalid input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "status", "param"),
    [
        (json.dumps(chat(temperature=float("nan"))).encode(), 400, "temperature"),
        (json.dumps(chat(temperature=9)).encode(), 400, "temperature"),
        (json.dumps(chat(messages=[{"role": "user", "content": "word " * 5000}])).encode(), 400, "messages"),
        (json.dumps(chat(max_tokens=100_000)).encode(), 400, "max_tokens"),
        (json.dumps(chat(n=0)).encode(), 400, "n"),
        (json.dumps(chat(n=10**9)).encode(), 400, "n"),
        (json.dumps(chat(n=3, best_of=2)).encode(), 400, "best_of"),
        (json.dumps(chat(use_beam_search=True, stream=True)).encode(), 400, "stream"),
        (json.dumps(chat(use_beam_search=True, n=128, max_tokens=1000)).encode(), 400, "beam_width"),
        (json.dumps(chat(messages=[])).encode(), 400, "messages"),
        (json.dumps(chat(model="other")).encode(), 404, "model"),
        (json.dumps({"model": MODEL}).encode(), 400, "messages"),
        (b'{"model": "\xff\xfe"', 400, "model"),
        (b"{", 400, None),
        (b"", 400, None),
        (b"[]", 400, None),
        (b'{"a":' * 2000, 400, None),
    ],
)
def test_an_invalid_request_is_refused_by_field_and_others_continue(
    client: httpx.Client, raw: bytes, status: int, param: str | None
) -> None:
    response = client.post("/v1/chat/completions", content=raw, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == status
    assert param in (None, error["param"])
    assert error["message"]
    assert client.post("/v1/chat/completions", json=chat()).status_code == 200


def test_a_beam_search_and_best_of_return_n_choices(client: httpx.Client) -> None:
    for fields in ({"use_beam_search": True, "beam_width": 5}, {"best_of": 5, "temperature": 1.0}):
        body = {"model": MODEL, "prompt": ["a b", "c"], "n": 2, "max_tokens": 3, "ignore_eos": True, **fields}
        answer = client.post("/v1/completions", json=body).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 4
        generated = 2 * 5 * 3 if "best_of" in fields else 2 * 2 * 3
        assert answer["usage"]["completion_tokens"] == generated


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling": SamplingParams(use_beam_search=True)}, "stream"),
        ({"sampling": SamplingParams(n=2, best_of=3)}, "stream"),
        (
            {"sampling": SamplingParams(use_beam_search=True), "stream": False, "resume": [ChoiceResume(0, [1], 0)]},
            "resume",
        ),
    ],
)
def test_best_of_answers_are_neither_streamed_nor_continued(
    client: httpx.Client, null_server: Any, fields: dict[str, Any], param: str
) -> None:
    response = generate_at(null_server, generate_request("whole", **fields))
    assert (response.status, response.error()["param"]) == (400, param)


def test_a_body_of_ten_megabytes_gets_413(client: httpx.Client) -> None:
    response = client.post("/v1/completions", content=b"x" * 10_000_000)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    assert client.get("/health").status_code == 200


def test_endless_headers_get_431(client: httpx.Client) -> None:
    response = client.get("/v1/models", headers={"x-filler": "y" * 100_000})
    assert response.status_code == 431


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_names_the_fields_that_the_chat_template_does_not_read(client: httpx.Client, stream: bool) -> None:
    answer = client.post("/v1/chat/completions", json=chat(verbosity="low", reasoning_effort="low", stream=stream))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-pagemill-unread-fields"] == "reasoning_effort, verbosity"
    plain = client.post("/v1/chat/completions", json=chat(stream=stream))
    assert "x-pagemill-unread-fields" not in plain.headers


def test_unknown_routes_and_methods_get_openais_error_format(client: httpx.Client) -> None:
    assert client.get("/v3/nothing").json()["error"]["code"] == "not_found"
    assert client.get("/v1/chat/completions").status_code == 405
    assert client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_every_answer_has_a_request_id_and_a_clients_id_is_kept(client: httpx.Client) -> None:
    assert client.get("/v1/models", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert len(client.get("/v1/models").headers["x-request-id"]) >= 16


# -- answers -----------------------------------------------------------------------------------------------------------


def test_tokenize_and_detokenize_are_inverse(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"model": MODEL, "prompt": "Größe 😀"}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 4096
    assert client.post("/detokenize", json={"model": MODEL, "tokens": tokens["tokens"]}).json()["prompt"] == "Größe 😀"


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_get_one_answer(client: httpx.Client, stream: bool) -> None:
    body = {"model": MODEL, "prompt": ["a b", "c d e"], "n": 2, "max_tokens": 3, "ignore_eos": True, "stream": stream}
    if not stream:
        answer = client.post("/v1/completions", json=body).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["usage"]["completion_tokens"] == 12
        return
    response = client.post("/v1/completions", json={**body, "stream_options": {"include_usage": True}})
    assert response.text.count("data: [DONE]\n\n") == 1
    assert response.text.endswith("data: [DONE]\n\n")
    chunks = [json.loads(event[6:]) for event in response.text.split("\n\n")[:-2]]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0, 1, 2, 3}
    usages = [chunk["usage"] for chunk in chunks if chunk["usage"]]
    assert [usage["completion_tokens"] for usage in usages] == [12]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_has_usage_in_every_chunk_if_requested(client: httpx.Client, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = chat(n=2, ignore_eos=True, stream=True, stream_options=options)
    body |= {"prompt": ["a b", "c d e"]} if path == "/v1/completions" else {}
    response = client.post(path, json=body)
    *chunks, last = [json.loads(event[6:]) for event in response.text.split("\n\n")[:-2]]
    seen: dict[int, list[int]] = {}
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        seen.setdefault(chunk["choices"][0]["index"], []).append(usage["completion_tokens"])
    assert all(counts == sorted(counts) and counts[-1] == 4 for counts in seen.values()), seen
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == len(body.get("prompt", ["one"]))
    assert last["usage"]["completion_tokens"] == 4 * len(seen)


def test_metrics_have_vllms_core_names_and_count(client: httpx.Client) -> None:
    before = metric(client, "vllm:generation_tokens_total")
    client.post("/v1/chat/completions", json=chat(ignore_eos=True))
    assert metric(client, "vllm:generation_tokens_total") == before + 4
    text = client.get("/metrics").text
    for name in ("num_requests_waiting", "cache_config_info", "time_to_first_token_seconds_count"):
        assert f"vllm:{name}" in text
    assert metric(client, "pagemill_engine_ready") == 1


# -- allowances --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_at_its_allowance_with_reason_length(
    client: httpx.Client, null_server: Any, stream: bool
) -> None:
    request = generate_request(f"allowed-{stream}", token_allowance=3, stream=stream)
    frames = frames_of(generate_at(null_server, request))
    assert frames[-1][0].usage is not None
    assert frames[-1][0].usage.completion_tokens == 3
    assert "length" in [meta.finish_reason for meta, _ in frames]


@pytest.mark.slow
def test_an_allowance_is_raised_while_the_answer_streams(null_server: Any) -> None:
    num_tokens, allowed, most = 0, 100, 900
    sampling = SamplingParams(max_tokens=most, seed=1, ignore_eos=True)
    with closing(LinkClient(null_server.url, null_server.auth)) as link:
        link.send(1, generate_request("raised", sampling=sampling, token_allowance=allowed))
        decoder, num_read = FrameDecoder(), 0
        while RecordKind.END not in link.kinds(1):
            link.read_some()
            data = link.data(1)
            for meta, _ in decoder.feed(data[num_read:]):
                num_tokens += len(meta.token_ids)
            num_read = len(data)
            if num_tokens > allowed - 90 and allowed < most:
                allowed += 400
                link.send_number(RecordKind.ALLOWANCE, 1, allowed)
        assert num_tokens == most
        link.send_number(RecordKind.ALLOWANCE, 1, 5)  # the answer has ended
        link.send(2, generate_request("next"))
        link.read_until(2)
        assert link.frames(2)[-1][0].last


def test_a_timeout_that_only_gateways_enforce_is_refused(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json=chat(), headers={"x-request-timeout-s": "0.5"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-timeout-s")
    assert "`pagemill gateway`" in answer.json()["error"]["message"]


# -- disconnects -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_the_blocks_of_a_client_that_leaves_are_freed_at_once(
    client: httpx.Client, null_server: Any, stream: bool
) -> None:
    wait_until(lambda: metric(client, "vllm:kv_cache_usage_perc") == 0)
    aborted = metric(client, "pagemill_engine_requests_aborted_total")
    ended, latencies = ended_by(client, "abort"), metric(client, "vllm:e2e_request_latency_seconds_count")
    body = chat(max_tokens=3000, ignore_eos=True, stream=stream)
    leaving = httpx.Client(base_url=null_server.url, timeout=httpx.Timeout(20, read=0.3))

    def leave() -> None:
        if not stream:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post("/v1/chat/completions", json=body)
        else:
            with leaving.stream("POST", "/v1/chat/completions", json=body) as response:
                next(response.iter_raw())
        leaving.close()

    leaver = threading.Thread(target=leave)
    leaver.start()
    wait_until(lambda: metric(client, "vllm:kv_cache_usage_perc") > 0 or not leaver.is_alive())
    leaver.join()
    wait_until(lambda: metric(client, "vllm:num_requests_running") == 0)
    assert metric(client, "vllm:kv_cache_usage_perc") == 0
    assert metric(client, "pagemill_engine_requests_aborted_total") == aborted + 1
    assert ended_by(client, "abort") == ended + 1
    assert metric(client, "vllm:e2e_request_latency_seconds_count") == latencies + 1


def ended_by(client: httpx.Client, reason: str) -> float:
    text = client.get("/metrics").text
    found = re.search(rf'^vllm:request_success_total\{{.*finished_reason="{reason}".*\}} (\S+)$', text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_a_request_with_several_choices_is_one_request(client: httpx.Client) -> None:
    ended = ended_by(client, "length")
    body = {"model": MODEL, "prompt": "x", "n": 3, "max_tokens": 2, "ignore_eos": True}
    assert client.post("/v1/completions", json=body).status_code == 200
    wait_until(lambda: ended_by(client, "length") == ended + 1)


def test_a_stop_string_also_ends_the_choice_in_the_engine(client: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "x", "seed": 5, "ignore_eos": True}
    whole = client.post("/v1/completions", json={**body, "max_tokens": 40}).json()["choices"][0]["text"]
    stop = whole[60:64]
    wait_until(lambda: metric(client, "vllm:num_requests_running") == 0)
    before = metric(client, "vllm:generation_tokens_total")
    cut = client.post("/v1/completions", json={**body, "max_tokens": 3000, "stop": stop}).json()
    assert cut["choices"][0]["text"] == whole[: whole.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] < 40
    wait_until(lambda: metric(client, "vllm:num_requests_running") == 0)
    assert metric(client, "vllm:generation_tokens_total") - before < 3000


# -- gateways ----------------------------------------------------------------------------------------------------------


def test_internal_routes_require_the_token(client: httpx.Client, null_server: Any) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert generate(null_server.url, generate_request("no"), headers).status == 401
    for path in ("/internal/state", "/internal/bundle"):
        assert httpx.get(null_server.control_url + path, timeout=WAIT_LIMIT_S).status_code == 401
    assert httpx.post(null_server.control_url + "/internal/drain", timeout=WAIT_LIMIT_S).status_code == 401


def test_generate_streams_frames_whose_metadata_covers_all_tokens(client: httpx.Client, null_server: Any) -> None:
    frames = frames_of(generate_at(null_server, generate_request("frames")))
    metas = [meta for meta, _ in frames]
    assert sum(len(meta.token_ids) for meta in metas) == 5
    assert [meta.position for meta in metas[:-1]] == [1, 2, 3, 4, 5]
    assert metas[-2].num_text_chars == len(text_of(frames))
    assert metas[-2].finish_reason == "length"
    assert [meta.last for meta in metas] == [False] * 5 + [True]
    assert metas[-1].usage is not None
    assert (metas[-1].usage.prompt_tokens, metas[-1].usage.completion_tokens) == (30, 5)
    assert frames[-1][1] == b"data: [DONE]\n\n"


def test_generate_without_streaming_is_one_frame_with_the_body(client: httpx.Client, null_server: Any) -> None:
    request = generate_request("whole", stream=False, dialect="completions")
    ((meta, payload),) = frames_of(generate_at(null_server, request))
    assert meta.last
    assert json.loads(payload)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("broken_after", [1, 3, 4])
def test_a_stream_resumed_on_another_engine_continues_exactly(
    client: httpx.Client, null_server: Any, broken_after: int
) -> None:
    whole = frames_of(generate_at(null_server, generate_request(f"whole-{broken_after}")))
    delivered = whole[:broken_after]
    resume = ChoiceResume(
        index=0,
        token_ids=[token_id for meta, _ in delivered for token_id in meta.token_ids],
        num_text_chars=delivered[-1][0].num_text_chars,
    )
    request = generate_request(f"resumed-{broken_after}", resume=[resume])
    rest = frames_of(generate_at(null_server, request))
    assert text_of(delivered) + text_of(rest) == text_of(whole)
    assert [meta.position for meta, _ in rest[:-1]] == list(range(broken_after + 1, 6))
    resumed, expected = rest[-1][0].usage, whole[-1][0].usage
    # The cached tokens depend on the engine.
    assert (resumed.prompt_tokens, resumed.completion_tokens) == (expected.prompt_tokens, expected.completion_tokens)


def test_an_answer_begun_with_other_weights_is_refused(client: httpx.Client, null_server: Any) -> None:
    resume = [ChoiceResume(0, [5], 1)]
    begun = generate_at(null_server, generate_request("begun"))
    other = generate_request("other", resume=resume, weights_digest="f" * 32)
    refused = generate_at(null_server, other)
    assert (refused.status, refused.error()["code"]) == (409, "other_weights")
    same = generate_request("same", resume=resume, weights_digest=begun.weights_digest)
    assert frames_of(generate_at(null_server, same))[-1][0].last


@pytest.mark.parametrize("stream", [True, False])
def test_a_resumed_answer_that_only_lacks_its_end_gets_it(client: httpx.Client, null_server: Any, stream: bool) -> None:
    fields: dict[str, Any] = {"stream": stream, "include_usage": stream, "created_unix_s": 7, "response_id": "x"}
    whole = frames_of(generate_at(null_server, generate_request("whole", **fields)))
    tokens = [70, 71, 72, 73, 74]
    if stream:
        tokens = [token_id for meta, _ in whole for token_id in meta.token_ids]
    resume = [ChoiceResume(0, tokens, whole[-1][0].num_text_chars if stream else 0, True, "length")]
    request = generate_request("end", resume=resume, cached_tokens=whole[-1][0].usage.cached_tokens, **fields)
    ((meta, payload),) = frames_of(generate_at(null_server, request))
    assert meta.usage == whole[-1][0].usage
    if stream:
        assert payload == whole[-1][1]
    else:
        assert json.loads(payload)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt_token_ids": [10**6]}, "messages"),
        ({"prompt_token_ids": [-1]}, "messages"),
        ({"prompt_token_ids": [5] * 5000}, "messages"),
        ({"sampling": SamplingParams(temperature=-1)}, "temperature"),
        ({"resume": [ChoiceResume(3, [1], 0)]}, "resume"),
        ({"priority": 2**31}, "priority"),
        ({"priority": -(2**63)}, "priority"),
        ({"sampling": SamplingParams(n=2**31)}, "n"),
        ({"sampling": SamplingParams(n=0)}, "n"),
        ({"sampling": SamplingParams(best_of=2**62)}, "best_of"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_its_status(
    client: httpx.Client, null_server: Any, fields: dict[str, Any], param: str
) -> None:
    response = generate_at(null_server, generate_request("never", **fields))
    assert response.status == 400
    assert response.error()["param"] in (param, "prompt")


def test_garbage_is_not_a_generate_request(null_server: Any) -> None:
    for raw in (b"", b"\xc1", b"{}", msgspec.msgpack.encode({"request_id": 1})):
        assert generate(null_server.url, raw, null_server.auth).status == 400


def test_the_tokenizer_bundle_is_served_with_its_digest(null_server: Any) -> None:
    response = httpx.get(null_server.control_url + "/internal/bundle", headers=null_server.auth, timeout=WAIT_LIMIT_S)
    assert TokenizerBundle.from_bytes(response.content).digest == response.headers["x-pagemill-digest"]


def test_the_state_stream_reports_load_prefixes_and_digests(client: httpx.Client, null_server: Any) -> None:
    frames: list[StateFrame] = []
    decoder, long = StateDecoder(), SamplingParams(max_tokens=100, ignore_eos=True)
    url = null_server.control_url + "/internal/state"
    with httpx.stream("GET", url, headers=null_server.auth, timeout=WAIT_LIMIT_S) as response:
        chunks = response.iter_raw()
        frames += decoder.feed(next(chunks))
        sender = threading.Thread(
            target=generate_at,
            args=(null_server, generate_request("state", prompt_token_ids=list(range(3000, 3200)), sampling=long)),
        )
        sender.start()
        while not (
            any(frame.prefixes_added for frame in frames[1:])
            and any(frame.load.num_requests_running for frame in frames)
        ):
            frames += decoder.feed(next(chunks))
        sender.join()
    assert frames[0].snapshot
    assert frames[0].models == [MODEL]
    assert len(frames[0].digests.weights) >= 16
    assert len(frames[0].digests.tokenizer_bundle) == 64
    assert [frame.sequence for frame in frames] == list(range(frames[0].sequence, frames[0].sequence + len(frames)))
    assert max(frame.load.num_requests_running for frame in frames) == 1
