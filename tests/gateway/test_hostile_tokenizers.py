"""A model whose tokenizer asks for unbounded time or memory harms no other model of its gateway: real processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import psutil
import pytest
from light_model import light_model
from real_cluster import TOKEN, Server, endpoint_of
from waiting import busy_factor, wait_until

from pagemill_engine.config import EngineConfig, ServerConfig
from pagemill_gateway.config import BatchesConfig, GatewayConfig
from pagemill_protocol.catalog import Catalog, CatalogModel

MIB = 2**20
MAX_GAP_S = 1.0
MAX_MEMORY_BYTES = 700 * MIB
WITHOUT_RULES = """
import runpy, sys
import pagemill_api.text.tokenizer
pagemill_api.text.tokenizer.check_rules = lambda tokenizer: 1.0
runpy.run_module("pagemill_engine.server", run_name="__main__")
"""
"""An engine that announces any tokenizer, such as one of an earlier release."""
STEP = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
SLOW = {"type": "Split", "pattern": {"Regex": "(?:a|a)*b"}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False, "trim_offsets": True}
HOSTILE: dict[str, tuple[dict[str, Any], str, str]] = {
    "growth": ({"normalizer": {"type": "Sequence", "normalizers": [STEP] * 24}}, "banana", "`normalizer`"),
    "time": ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SLOW, BYTES]}}, "a" * 60, "`pre_tokenizer"),
}


def hostile_model(folder: Path, parts: dict[str, Any]) -> Path:
    model = folder / "hostile"
    shutil.copytree(light_model(), model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(tokenizer | parts))
    return model


def engine_settings(model: str, name: str) -> bytes:
    config = EngineConfig(model=model, served_names=[name], num_threads=1, null_runner=True, max_model_len=1024)
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
    """Ask an honest model over and over; yield the times of its answers, which must all succeed."""
    answered, over, failed = [time.monotonic()], threading.Event(), list[str]()

    def ask() -> None:
        with httpx2.Client(base_url=url, timeout=60) as client:
            while not over.is_set():
                answer = client.post("/v1/completions", json={"model": "honest", "prompt": "hi", "max_tokens": 1})
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


def memory_of(pid: int) -> int:
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return max(each.memory_info().rss for each in processes)


@pytest.mark.parametrize(("parts", "prompt", "named"), HOSTILE.values(), ids=HOSTILE.keys())
def test_others_requests_go_on_while_a_hostile_tokenizer_is_asked_for(
    parts: dict[str, Any], prompt: str, named: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        honest = Server("pagemill_engine.server", engine_settings(light_model(), "honest"), tmp_path, "honest")
        stack.callback(honest.close)
        hostile = EngineWithoutRules(engine_settings(str(hostile_model(tmp_path, parts)), "hostile"), tmp_path)
        stack.callback(hostile.close)
        models = [
            CatalogModel(deployment=each.name, name=each.name, engine_token=TOKEN, endpoints=[endpoint_of(each)])
            for each in (honest, hostile)
        ]
        config = GatewayConfig(
            port=0,
            control_port=0,
            control_token=TOKEN,
            catalog=Catalog(models=models),
            batches=BatchesConfig(directory=str(tmp_path / "batches")),
        )
        gateway = Server("pagemill_gateway", msgspec.json.encode(config), tmp_path, "gateway")
        stack.callback(gateway.close)
        url = gateway.event("listening")["url"]
        for engine in (honest, hostile):
            engine.event("ready")
        with httpx2.Client(base_url=url, timeout=60) as client:
            wait_until(lambda: client.post("/tokenize", json={"model": "honest", "prompt": "hi"}).status_code == 200)
            with asked_continuously(url) as answered:
                for route in ("/v1/completions", "/tokenize", "/v1/completions"):
                    refused = client.post(route, json={"model": "hostile", "prompt": prompt, "max_tokens": 1})
                    assert refused.status_code == 503, refused.text
                    error = refused.json()["error"]
                    assert "tokenizer" in error["message"], error
                    assert named in error["message"], error
                assert memory_of(gateway.process.pid) < MAX_MEMORY_BYTES
        gaps = [after - before for before, after in pairwise(answered)]
        assert max(gaps) < MAX_GAP_S * busy_factor()


@pytest.mark.parametrize(("parts", "_", "named"), HOSTILE.values(), ids=HOSTILE.keys())
def test_an_engine_of_this_release_ends_with_a_condition_that_names_the_tokenizer(
    parts: dict[str, Any], _: str, named: str, tmp_path: Path
) -> None:
    settings = engine_settings(str(hostile_model(tmp_path, parts)), "hostile")
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
