"""Adapters on this machine: a real gateway and a real engine, and the files that `pagemill up -f` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from byte_bundle import byte_tokenizer
from peft_adapters import write_adapter, write_base
from waiting import eventually

from pagemill.up.loading import LoadResult, describe_changes, load_files

PROMPT = [97, 98, 99, 100]
TEMPLATE = "{{ messages[-1].content }}"


def load(folder: Path, base: Path, listed: dict[str, str], **resources: str) -> LoadResult:
    """Load a file with a deployment that lists adapters, and LoRAAdapters beside it, by name and source."""
    adapters = [{"name": name, "source": f"file://{source}", "pinned": True} for name, source in listed.items()]
    engine = {"lora": {"maxLoras": 2, "maxLoraRank": 8}, "dtype": "float32", "extraArgs": ["--num-kv-blocks=64"]}
    model = {"source": f"file://{base}", "adapters": adapters, "chatTemplate": TEMPLATE}
    documents: list[dict[str, Any]] = [
        {"kind": "LLMDeployment", "metadata": {"name": "base"}, "spec": {"model": model, "engine": engine}}
    ]
    for name, source in resources.items():
        spec = {"deployment": "base", "source": f"file://{source}"}
        documents.append({"kind": "LoRAAdapter", "metadata": {"name": name}, "spec": spec})
    file = folder / "up.yaml"
    file.write_text(yaml.safe_dump_all({"apiVersion": "pagemill.dev/v1beta1", **each} for each in documents))
    return load_files([file])


@pytest.mark.slow
async def test_adapters_come_and_go_at_a_running_engine_behind_the_gateway(machine: Any, tmp_path: Path) -> None:
    base = write_base("llama", tmp_path / "base")
    byte_tokenizer([]).save(str(base.folder / "tokenizer.json"))
    one, two = (
        write_adapter(base, tmp_path / name, seed, target_modules=["q_proj", "v_proj"])
        for seed, name in enumerate(("one", "two"), 1)
    )
    loaded = load(tmp_path, base.folder, {"one": str(one.folder)})
    assert loaded.findings == []
    await machine.backend.apply(loaded.plans)
    await machine.until_ready(*loaded.plans)
    async with aiohttp.ClientSession(machine.backend.base_url) as session:

        async def tokens(model: str) -> list[int] | int:
            body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            async with session.post("/v1/completions", json={**body, "return_token_ids": True}) as answer:
                content = await answer.json()
                return content["choices"][0]["token_ids"] if answer.status == 200 else answer.status

        assert await tokens("one") == one.greedy(PROMPT, 4)[0], "a pinned adapter is loaded before a replica is ready"
        pids = machine.pids(loaded.plans[0])
        more = load(tmp_path, base.folder, {"one": str(one.folder)}, two=str(two.folder))
        assert describe_changes(loaded.loaded, more.loaded) == ["base: adapters: one -> one, two"]
        await machine.backend.apply(more.plans)

        async def is_unknown() -> bool:
            return await tokens("two") == 404

        async def is_named() -> bool:
            return not await is_unknown()

        await eventually(is_named, every_s=0.05)
        assert await tokens("two") == two.greedy(PROMPT, 4)[0], "a request waits for an adapter that is being loaded"
        async with session.get("/v1/models") as answer:
            cards = {each["id"]: (each["parent"], each["root"]) for each in (await answer.json())["data"]}
        assert cards == {
            "base": (None, "base"),
            "one": ("base", f"file://{one.folder}"),
            "two": ("base", f"file://{two.folder}"),
        }
        await machine.backend.apply(loaded.plans)
        await eventually(is_unknown, every_s=0.05)
        assert machine.pids(loaded.plans[0]) == pids, "no engine was replaced"


def test_adapters_of_files_are_placed_or_refused_by_field(tmp_path: Path) -> None:
    base = write_base("llama", tmp_path / "base").folder
    conflicting = load(tmp_path, base, {"one": "/a"}, one="/b", two="/c")
    assert [(each.field, each.message) for each in conflicting.findings] == [
        ("spec.name", "spec.model.adapters of default/base has the name one already and is older; choose another name")
    ]
    assert [each.name for each in conflicting.plans[0].adapters] == ["one", "two"]
    assert [each.source for each in conflicting.plans[0].adapters] == ["file:///a", "file:///c"]
    named = load(tmp_path, base, {"base": "/a"})
    assert [each.field for each in named.findings] == ["spec.model.adapters"]
    lost = tmp_path / "lost.yaml"
    lost.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "pagemill.dev/v1beta1",
                "kind": "LoRAAdapter",
                "metadata": {"name": "a"},
                "spec": {"deployment": "gone", "source": "file:///a"},
            }
        )
    )
    (finding,) = load_files([lost]).findings
    assert finding.field == "spec.deployment"
    assert "no file has the LLMDeployment default/gone" in finding.message
