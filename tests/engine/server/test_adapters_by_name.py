"""A server with adapters: each name is answered by its adapter, and names come and go while the server runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from byte_bundle import byte_tokenizer
from peft_adapters import Adapted, Base, write_adapter, write_base
from safetensors.numpy import load_file, save_file
from waiting import WAIT_LIMIT_S

from pagemill import AsyncLLM, LoRARequest, SamplingParams
from pagemill_protocol.frames import StateDecoder
from pagemill_protocol.report.adapters import AdapterSlots, AdapterStatus
from pagemill_protocol.report.state import StateFrame

PROMPT = [97, 98, 99, 100, 101, 102]
TARGETS = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
WEIGHTS = "adapter_model.safetensors"
CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4, "temperature": 0}
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abcdef", "max_tokens": 4, "temperature": 0},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "abc", "max_output_tokens": 4, "temperature": 0},
    "/v1/messages": CHAT,
    "/api/chat": {"messages": CHAT["messages"], "stream": False, "options": {"num_predict": 4, "temperature": 0}},
    "/api/generate": {"prompt": "abc", "stream": False, "options": {"num_predict": 4, "temperature": 0}},
}
TEXTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "/v1/completions": lambda body: body["choices"][0]["text"],
    "/v1/chat/completions": lambda body: body["choices"][0]["message"]["content"],
    "/v1/responses": lambda body: body["output"][0]["content"][0]["text"],
    "/v1/messages": lambda body: body["content"][0]["text"],
    "/api/chat": lambda body: body["message"]["content"],
    "/api/generate": lambda body: body["response"],
}


class World(NamedTuple):
    server: Any
    base: Base
    adapters: dict[str, Adapted]
    file: Path

    def tokens(self, model: str, num_tokens: int = 6, **fields: Any) -> list[int]:
        body = {"model": model, "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        answer = self.post("/v1/completions", {**body, "return_token_ids": True, **fields})
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    def post(self, path: str, body: dict[str, Any]) -> httpx2.Response:
        return httpx2.post(self.server.url + path, json=body, timeout=WAIT_LIMIT_S)

    def names(self) -> list[str]:
        return [each["id"] for each in httpx2.get(f"{self.server.url}/v1/models").json()["data"]]

    def list(self, *adapters: dict[str, Any]) -> None:
        self.put("adapters.json", {"adapters": list(adapters)})

    def rename(self, *names: str) -> None:
        self.put("names.json", {"names": list(names)})

    def put(self, file: str, content: dict[str, Any]) -> None:
        """Replace a file as a ConfigMap does, at once."""
        fresh = self.file.with_name("fresh.json")
        fresh.write_text(json.dumps(content))
        fresh.replace(self.file.with_name(file))

    def reported(self) -> AdapterSlots:
        return self.frame().adapters

    def frame(self) -> StateFrame:
        decoder, url = StateDecoder(), f"{self.server.control_url}/internal/state"
        with httpx2.stream("GET", url, headers=self.server.auth, timeout=WAIT_LIMIT_S) as answer:
            for data in answer.iter_raw():
                for frame in decoder.feed(data):
                    return frame
        raise AssertionError("the stream ended without a frame")

    def until(self, holds: Callable[[dict[str, AdapterStatus]], bool]) -> dict[str, AdapterStatus]:
        deadline_s = time.monotonic() + WAIT_LIMIT_S
        while True:
            known = {each.name: each for each in self.reported().known if each.reason != "NameConflict"}
            if holds(known):
                return known
            assert time.monotonic() < deadline_s, known
            time.sleep(0.05)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, start_for_module: Callable[..., Any]) -> World:
    folder = tmp_path_factory.mktemp("adapters")
    base = write_base("llama", folder / "base")
    byte_tokenizer([]).save(str(base.folder / "tokenizer.json"))
    names = {"one": 1, "two": 2, "three": 3}
    adapters = {name: write_adapter(base, folder / name, seed, **TARGETS) for name, seed in names.items()}
    file = folder / "adapters.json"
    file.write_text(json.dumps({"adapters": [{"name": "two", "source": str(folder / "two"), "pinned": True}]}))
    engine = {
        "model": str(base.folder), "served_names": ["base"], "dtype": "float32", "num_kv_blocks": 256,
        "enable_lora": True, "max_loras": 2, "adapters_file": str(file), "num_threads": 1,
        "chat_template": "{{ messages[-1].content }}",
        "lora_modules": [{"name": "one", "source": str(folder / "one")}],
    }  # fmt: skip
    (folder / "names.json").write_text(json.dumps({"names": ["base"]}))
    server = start_for_module(engine, {"enable_lora_routes": True, "names_file": str(folder / "names.json")})
    server.wait_for("ready")
    return World(server, base, adapters, file)


@pytest.mark.slow
def test_each_name_is_answered_by_its_adapter(world: World) -> None:
    assert world.tokens("base") == Adapted(world.base.folder, world.base.model).greedy(PROMPT, 6)[0]
    assert world.tokens("one") == world.adapters["one"].greedy(PROMPT, 6)[0]
    assert world.tokens("two") == world.adapters["two"].greedy(PROMPT, 6)[0]
    cards = {each["id"]: each for each in httpx2.get(f"{world.server.url}/v1/models").json()["data"]}
    assert list(cards) == ["base", "one", "two"]
    assert (cards["base"]["parent"], cards["base"]["root"]) == (None, str(world.base.folder))
    assert (cards["two"]["parent"], cards["two"]["root"]) == ("base", str(world.adapters["two"].folder))
    assert httpx2.get(f"{world.server.url}/v1/models/one").json()["parent"] == "base"
    assert httpx2.get(f"{world.server.url}/v1/models/four").status_code == 404


@pytest.mark.parametrize("path", DIALECTS)
def test_each_dialect_takes_the_name_of_an_adapter(path: str, world: World) -> None:
    texts = {}
    for name in ("base", "one", "two"):
        answer = world.post(path, {**DIALECTS[path], "model": name})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == name
        texts[name] = TEXTS[path](answer.json())
    assert len(set(texts.values())) == 3, texts


def test_reports_say_what_became_of_each_adapter(world: World) -> None:
    slots = world.reported()
    one, two = slots.known
    assert (one.name, one.state, one.source, one.pinned) == ("one", "known", str(world.adapters["one"].folder), False)
    assert (two.name, two.state, two.pinned) == ("two", "known", True)
    assert slots.num_slots == 2
    assert {one.digest, two.digest} == set(slots.resident)
    assert slots.load_ms > 0


def test_the_model_gets_other_names_while_it_runs(world: World) -> None:
    def answered(name: str) -> int:
        return world.post("/v1/completions", {"model": name, "prompt": PROMPT, "max_tokens": 1}).status_code

    def wait_for(*names: str) -> None:
        deadline_s = time.monotonic() + WAIT_LIMIT_S
        while world.frame().models != list(names):
            assert time.monotonic() < deadline_s, world.frame().models
            time.sleep(0.05)

    def counted(name: str) -> list[str]:
        metrics = httpx2.get(f"{world.server.control_url}/metrics").text
        return [line for line in metrics.splitlines() if f'model_name="{name}"' in line and "generation_tokens" in line]

    before = counted("base")
    assert before
    world.rename("fresh", "alias")
    wait_for("fresh", "alias")
    assert world.names() == ["fresh", "alias", "one", "two"]
    assert [answered(name) for name in ("fresh", "alias", "base", "one")] == [200, 200, 404, 200]
    assert httpx2.get(f"{world.server.url}/v1/models/two").json()["parent"] == "fresh"
    assert not counted("base")
    assert len(counted("fresh")) == len(before)
    world.rename("base")
    wait_for("base")
    assert world.names() == ["base", "one", "two"]


@pytest.mark.slow
def test_adapters_come_and_go_by_routes(world: World) -> None:
    folder = world.adapters["three"].folder
    loaded = world.post("/v1/load_lora_adapter", {"lora_name": "three", "lora_path": str(folder)})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'three' added successfully.")
    assert world.tokens("three") == world.adapters["three"].greedy(PROMPT, 6)[0]
    for name, why in (("three", "There is an adapter `three` already"), ("base", "is the name of the model")):
        again = world.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
        assert why in again.json()["error"]["message"]
    swapped = {"lora_name": "three", "lora_path": str(world.adapters["one"].folder), "load_inplace": True}
    assert world.post("/v1/load_lora_adapter", swapped).status_code == 200
    assert world.tokens("three") == world.tokens("one")
    assert world.post("/v1/unload_lora_adapter", {"lora_name": "three"}).status_code == 200
    assert world.names() == ["base", "one", "two"]
    assert world.post("/v1/unload_lora_adapter", {"lora_name": "three"}).status_code == 404
    gone = world.post("/v1/completions", {"model": "three", "prompt": PROMPT})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    assert world.tokens("one") == world.adapters["one"].greedy(PROMPT, 6)[0]


def test_what_cannot_be_served_is_refused_with_the_remedy(world: World, tmp_path: Path) -> None:
    def refusal(folder: Path) -> str:
        answer = world.post("/v1/load_lora_adapter", {"lora_name": "bad", "lora_path": str(folder)})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "lora_path", "adapter_refused")
        assert world.names() == ["base", "one", "two"]
        return str(error["message"])

    large = write_adapter(world.base, tmp_path / "large", r=32, target_modules=["q_proj"])
    assert "has rank 32; this engine serves ranks up to 16. Raise max_lora_rank" in refusal(large.folder)
    pickle = write_adapter(world.base, tmp_path / "pickle", target_modules=["q_proj"]).folder
    tensors = load_file(pickle / WEIGHTS)
    (pickle / WEIGHTS).rename(pickle / "adapter_model.bin")
    assert "safe_serialization=True" in refusal(pickle)
    (pickle / "adapter_model.bin").unlink()
    name = next(name for name in tensors if "lora_A" in name)
    save_file({**tensors, name: tensors[name][:, :32].copy()}, pickle / WEIGHTS)
    assert f"Tensor `{name}` has shape [8, 32]" in refusal(pickle)
    whole = (world.adapters["one"].folder / WEIGHTS).read_bytes()
    (pickle / WEIGHTS).write_bytes(whole[:-100])
    assert "adapter_model.safetensors" in refusal(pickle)
    assert "is not a folder" in refusal(tmp_path / "none")


def test_the_file_is_followed(world: World, tmp_path: Path) -> None:
    one, three = world.adapters["one"].folder, world.adapters["three"].folder
    growing = tmp_path / "growing"
    world.list(
        {"name": "three", "source": str(three)},
        {"name": "three", "source": str(one)},
        {"name": "base", "source": str(one)},
        {"name": "grows", "source": str(growing)},
    )
    known = world.until(lambda known: "three" in known and known["three"].state != "fetching" and "two" not in known)
    by_order = [each for each in world.reported().known if each.name in ("three", "base")]
    assert [(each.state, each.reason) for each in by_order] == [
        ("known", ""), ("refused", "NameConflict"), ("refused", "NameConflict"),
    ]  # fmt: skip
    assert "the first is served" in by_order[1].message
    assert known["one"].state == "known"
    assert world.tokens("three") == world.adapters["three"].greedy(PROMPT, 6)[0]
    known = world.until(lambda known: known["grows"].state == "refused")
    assert known["grows"].reason == "AdapterNotFound"
    busy = world.post("/v1/completions", {"model": "grows", "prompt": PROMPT})
    assert (busy.status_code, busy.json()["error"]["code"]) == (400, "adapter_refused")
    world.list({"name": "three", "source": str(one)})
    world.until(lambda known: known["three"].digest == known["one"].digest)
    assert world.tokens("three") == world.tokens("one")
    world.list({"name": "two", "source": str(world.adapters["two"].folder), "pinned": True})
    world.until(lambda known: known.keys() == {"one", "two"} and known["two"].state == "known")


def test_requests_of_a_removed_adapter_end_well(world: World) -> None:
    folder = world.adapters["three"].folder
    assert world.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(folder)}).status_code == 200
    expected = world.tokens("x", 240)
    body = {"model": "x", "prompt": PROMPT, "max_tokens": 240, "temperature": 0, "ignore_eos": True, "stream": True}
    got: list[int] = []
    with httpx2.stream(
        "POST", f"{world.server.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=WAIT_LIMIT_S
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                if not got:
                    assert world.post("/v1/unload_lora_adapter", {"lora_name": "x"}).status_code == 200
                got += choices[0].get("token_ids") or []
    assert got == expected
    digest = {each.digest for each in world.reported().known}
    deadline_s = time.monotonic() + WAIT_LIMIT_S
    while set(world.reported().resident) - digest:
        assert time.monotonic() < deadline_s, "the adapter stays in memory"
        time.sleep(0.05)


def test_more_adapters_than_slots_take_turns(world: World) -> None:
    folder = world.adapters["three"].folder
    assert world.post("/v1/load_lora_adapter", {"lora_name": "y", "lora_path": str(folder)}).status_code == 200
    names = ["one", "two", "y", "base"] * 3
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: world.tokens(name, 40), names))
    assert answers == [world.tokens(name, 40) for name in names]
    assert world.post("/v1/unload_lora_adapter", {"lora_name": "y"}).status_code == 200


def test_routes_of_adapters_are_absent_unless_asked_for(null_server: Any) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert httpx2.post(null_server.url + path, json={"lora_name": "a", "lora_path": "b"}).status_code == 404


async def test_async_llm_takes_adapters(world: World) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    request = LoRARequest("one", 1, str(world.adapters["one"].folder))
    async with AsyncLLM(world.base.folder, dtype="float32", num_kv_blocks=64, enable_lora=True, max_loras=2) as llm:

        async def tokens(lora_request: Any) -> list[int]:
            outputs = [
                output async for output in llm.generate({"prompt_token_ids": PROMPT}, params, lora_request=lora_request)
            ]
            return list(outputs[-1].outputs[0].token_ids)

        found = await asyncio.gather(tokens(request), tokens(None), tokens(request))
    expected = world.adapters["one"].greedy(PROMPT, 6)[0]
    assert found == [expected, world.tokens("base"), expected]
