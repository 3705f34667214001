"""A model whose tokenizer asks for unbounded time or memory harms no other model of its gateway: real processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import psutil
import pytest
from light_model import light_model
from real_cluster import TOKEN, Server, endpoint_of
from tokenizers import Tokenizer
from waiting import busy_factor, wait_until

from pagemill_engine.config import EngineConfig, ServerConfig
from pagemill_gateway.config import BatchesConfig, GatewayConfig
from pagemill_protocol.catalog import Catalog, CatalogModel

pytestmark = pytest.mark.slow

MIB = 2**20
MAX_GAP_S = 1.0
MAX_MODEL_LEN = 8192
MAX_MEMORY_BYTES = 700 * MIB
WITHOUT_RULES = """
import runpy, sys
import pagemill_api.text.tokenizer
from pagemill_api.text.rules.tokenizer_rules import Rules
pagemill_api.text.tokenizer.check_rules = lambda tokenizer: Rules(1.0, 16)
runpy.run_module("pagemill_engine.server", run_name="__main__")
"""
"""An engine that announces any tokenizer, such as one of an earlier release."""
STEP = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False, "trim_offsets": True}


def split(regex: str) -> dict[str, Any]:
    cut = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, BYTES]}


HOSTILE: dict[str, tuple[dict[str, Any], str, str]] = {
    "growth": ({"normalizer": {"type": "Sequence", "normalizers": [STEP] * 40}}, "banana", "`normalizer"),
    "steps": ({"pre_tokenizer": split("(?:a|a)*b")}, "a" * 60 + " b", "`pre_tokenizer"),
    "time": ({"pre_tokenizer": split("a*a*[bc]")}, "a" * 4000 + " b", "`pre_tokenizer"),
}
NUM_AT_ONCE = 9
"""More requests than the gateway has threads for preparing."""


def model_with(folder: Path, parts: dict[str, Any]) -> Path:
    model = folder / "changed"
    shutil.copytree(light_model(), model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(tokenizer | parts))
    return model


def engine_settings(model: str, name: str) -> bytes:
    config = EngineConfig(
        model=model, served_names=[name], num_threads=1, null_runner=True, max_model_len=MAX_MODEL_LEN
    )
    return msgspec.json.encode({"engine": config, "server": ServerConfig(port=0, control_port=0, internal_token=TOKEN)})


class EngineWithoutRules(Server):
    def __init__(self, settings: bytes, folder: Path) -> None:
        path = folder / "hostile.json"
        path.write_bytes(settings)
        self.name = "hostile"
        self._log = (folder / "hostile.log").open("w+b")
        command = [sys.executable, "-c", WITHOUT_RULES, "--settings", str(path)]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True)


@contextmanager
def asked_continuously(url: str) -> Iterator[list[float]]:
    """Ask an honest model over and over, with bodies that are prepared at once and in threads.

    Yields the times of its answers, which must all succeed.
    """
    answered, over, failed = [time.monotonic()], threading.Event(), list[str]()
    body = json.dumps({"model": "honest", "prompt": "hi", "max_tokens": 1}).encode()

    def ask() -> None:
        with httpx2.Client(base_url=url, timeout=60, headers={"Content-Type": "application/json"}) as client:
            while not over.is_set():
                for content in (body, body + b" " * 8192):
                    answer = client.post("/v1/completions", content=content)
                    if answer.status_code != 200:
                        failed.append(answer.text)
                    answered.append(time.monotonic())

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield answered
    finally:
        over.set()
        asking.join()
    assert not failed


@contextmanager
def watched_memory(pid: int) -> Iterator[list[int]]:
    """Yield the memory of a process and its children, all together, sampled until the end of the block."""
    sums, over = list[int](), threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            process = psutil.Process(pid)
            total = 0
            for each in (process, *process.children(recursive=True)):
                with suppress(psutil.Error):
                    total += each.memory_info().rss
            sums.append(total)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield sums
    finally:
        over.set()
        watching.join()


@contextmanager
def gateway_of(engines: list[Server], folder: Path) -> Iterator[Server]:
    models = [
        CatalogModel(deployment=each.name, name=each.name, engine_token=TOKEN, endpoints=[endpoint_of(each)])
        for each in engines
    ]
    config = GatewayConfig(
        port=0,
        control_port=0,
        control_token=TOKEN,
        catalog=Catalog(models=models),
        batches=BatchesConfig(directory=str(folder / "batches")),
    )
    gateway = Server("pagemill_gateway", msgspec.json.encode(config), folder, "gateway")
    with ExitStack() as stack:
        stack.callback(gateway.close)
        for engine in engines:
            engine.event("ready")
        yield gateway


@pytest.mark.sample("steps")
@pytest.mark.parametrize(("parts", "prompt", "named"), HOSTILE.values(), ids=HOSTILE.keys())
def test_others_requests_go_on_while_a_hostile_tokenizer_is_asked_for(
    parts: dict[str, Any], prompt: str, named: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        honest = Server("pagemill_engine.server", engine_settings(light_model(), "honest"), tmp_path, "honest")
        stack.callback(honest.close)
        hostile = EngineWithoutRules(engine_settings(str(model_with(tmp_path, parts)), "hostile"), tmp_path)
        stack.callback(hostile.close)
        gateway = stack.enter_context(gateway_of([honest, hostile], tmp_path))
        url = gateway.event("listening")["url"]
        client = stack.enter_context(httpx2.Client(base_url=url, timeout=60))

        def ask(route: str, prompt: str, model: str = "hostile") -> httpx2.Response:
            return client.post(route, json={"model": model, "prompt": prompt, "max_tokens": 1})

        for model in ("honest", "hostile"):
            wait_until(partial(lambda model: ask("/tokenize", "hi", model).status_code == 200, model))
        with asked_continuously(url) as answered, watched_memory(gateway.process.pid) as sums:
            with ThreadPoolExecutor(NUM_AT_ONCE) as at_once:
                routes = ["/v1/completions", *["/v1/completions", "/tokenize"] * (NUM_AT_ONCE // 2)]
                refused = list(at_once.map(lambda route: ask(route, prompt), routes))
            assert ask("/tokenize", "hi").status_code == 200, "its other texts are served"
            assert ask("/v1/completions", "hi").status_code == 200
        assert {each.status_code for each in refused} <= {400, 503}
        assert refused[0].status_code == 400
        for each in refused:
            error = each.json()["error"]
            assert "The model's tokenizer" in error["message"], error
            if each.status_code == 400:
                assert (error["code"], named in error["message"]) == ("tokenizer_error", True), error
        assert max(sums) < MAX_MEMORY_BYTES
        gaps = [after - before for before, after in pairwise(answered)]
        assert max(gaps) < MAX_GAP_S * busy_factor()


def test_a_tokenizer_with_a_lookbehind_is_served_as_the_library_has_it(tmp_path: Path) -> None:
    model = model_with(tmp_path, {"pre_tokenizer": split(r"(?<=\p{L})\p{N}+|\p{L}+?(?=\s|$)|\s+|.")})
    library = Tokenizer.from_file(str(model / "tokenizer.json"))
    with ExitStack() as stack:
        engine = Server("pagemill_engine.server", engine_settings(str(model), "behind"), tmp_path, "behind")
        stack.callback(engine.close)
        gateway = stack.enter_context(gateway_of([engine], tmp_path))
        client = stack.enter_context(httpx2.Client(base_url=gateway.event("listening")["url"], timeout=60))
        texts = ("Hello abab2 wörld 42", "a1 b22  c" * 600)
        body = {"model": "behind"}
        wait_until(lambda: client.post("/tokenize", json={**body, "prompt": "hi"}).status_code == 200)
        for text in texts:
            found = client.post("/tokenize", json={**body, "prompt": text, "add_special_tokens": False})
            ids = found.json().get("tokens") if len(library.encode(text).ids) <= MAX_MODEL_LEN else None
            assert ids is None or ids == library.encode(text, add_special_tokens=False).ids, found.text
            assert found.status_code == (400 if ids is None else 200)
        answer = client.post("/v1/completions", json={**body, "prompt": texts[0], "max_tokens": 4})
        assert answer.json()["usage"]["completion_tokens"] == 4
        chat = {**body, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
        assert client.post("/v1/chat/completions", json=chat).text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(("parts", "_", "named"), [HOSTILE["growth"], HOSTILE["steps"]], ids=["growth", "steps"])
def test_an_engine_of_this_release_ends_with_a_condition_that_names_the_tokenizer(
    parts: dict[str, Any], _: str, named: str, tmp_path: Path
) -> None:
    settings = engine_settings(str(model_with(tmp_path, parts)), "hostile")
    (tmp_path / "settings.json").write_bytes(settings)
    ended = subprocess.run(
        [sys.executable, "-m", "pagemill_engine.server", "--settings", str(tmp_path / "settings.json")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=120,
    )
    termination = json.loads(ended.stderr.splitlines()[-1])
    assert (ended.returncode, termination["reason"]) == (1, "ModelUnreadable")
    assert "the model's tokenizer cannot be used" in termination["message"]
    assert named in termination["message"]
