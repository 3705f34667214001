"""`LLM` and `AsyncLLM` load a model of several files during its download, or report the error of the download."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from arriving_models import FILES, Origin, damage, from_registry, weight_bytes, write_sharded_model
from waiting import wait_until

from pagemill import LLM, AsyncLLM, SamplingParams
from pagemill_execution.weights.files import WeightFiles
from pagemill_models.sources import SourceError
from pagemill_models.sources.store.part import PartFile

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SETTINGS: dict[str, Any] = {"max_model_len": 64, "num_kv_blocks": 16, "dtype": "float32", "num_threads": 1}
PROMPT = "hello there"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_sharded_model(folder)
    return folder


@pytest.fixture
def origin(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Origin]:
    """Return an origin without delays."""
    with from_registry(folder, tmp_path, monkeypatch) as origin:
        origin.proxy.bytes_per_s = float("inf")
        yield origin


def text_of(model: str) -> str:
    with LLM(model, **SETTINGS) as llm:
        return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].text


def published(origin: Origin) -> list[Path]:
    return list(origin.cache.glob("[!.]*/config.json"))


@pytest.mark.slow
def test_weights_are_read_while_the_rest_is_downloaded(
    origin: Origin, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    fill = WeightFiles.fill

    def first_fill(files: WeightFiles, *arguments: Any) -> None:
        if not sent:
            sent.append(origin.proxy.sent_bytes)
            origin.proxy.bytes_per_s = float("inf")
        fill(files, *arguments)

    monkeypatch.setattr(WeightFiles, "fill", first_fill)
    origin.proxy.bytes_per_s = 50_000
    text = text_of(origin.source)
    assert sent[0] < weight_bytes(folder)
    assert not list((origin.cache / ".partial").iterdir())
    wait_until(lambda: bool(published(origin)))
    assert text == text_of(str(folder))


def test_a_wrong_digest_is_an_error_of_the_download_and_only_that_file_is_downloaded_again(
    origin: Origin, folder: Path
) -> None:
    mend = damage(origin.server, folder, FILES[2])
    with pytest.raises(SourceError, match=f"`{FILES[2]}` arrived damaged") as refused:
        text_of(origin.source)
    assert refused.value.reason == "ModelCorrupt"
    assert not published(origin)
    mend()
    before = origin.proxy.sent_bytes
    assert text_of(origin.source) == text_of(str(folder))
    assert origin.proxy.sent_bytes - before < weight_bytes(folder)


def test_a_disk_that_becomes_full_during_the_download_is_reported(
    origin: Origin, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = PartFile.write

    def full(part: PartFile, data: Any) -> int:
        if FILES[3] in str(part.name) and part.num_bytes > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(part, data)

    monkeypatch.setattr(PartFile, "write", full)
    with pytest.raises(SourceError, match="space") as refused:
        text_of(origin.source)
    assert refused.value.reason == "DiskFull"
    assert not published(origin)


def test_a_download_that_is_interrupted_is_resumed(origin: Origin, folder: Path) -> None:
    origin.server.cuts = [200_000] * 3
    assert text_of(origin.source) == text_of(str(folder))
    assert origin.server.cuts == []
    assert origin.proxy.sent_bytes < weight_bytes(folder) * 1.3


async def test_async_llm_loads_available_files_and_reports_why_others_are_missing(origin: Origin, folder: Path) -> None:
    mend = damage(origin.server, folder, FILES[-1])
    async with AsyncLLM(origin.source, **SETTINGS) as llm:
        with pytest.raises(SourceError, match=f"`{FILES[-1]}` arrived damaged"):
            await llm.check_health()
    mend()
    async with AsyncLLM(origin.source, **SETTINGS) as llm:
        outputs = [output async for output in llm.generate(PROMPT, GREEDY)]
    assert outputs[-1].outputs[0].text == text_of(str(folder))
    assert not list((origin.cache / ".partial").iterdir())
