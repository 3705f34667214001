"""The commands of docs/how-to/serve-adapters.md for one server, in their order."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from byte_bundle import byte_tokenizer
from peft_adapters import write_adapter, write_base
from waiting import START_LIMIT_S, WAIT_LIMIT_S, wait_until

from pagemill_operator.backends.local.ports import free_port

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "serve-adapters.md").read_text()
COMMANDS = [
    command
    for command in re.findall(r"```sh\n(.*?)\n```", PAGE, re.DOTALL)
    if command.startswith((".venv/bin/pagemill serve", "curl http://127.0.0.1:8000"))
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "path" / "to"
    base = write_base("llama", path / "model")
    byte_tokenizer([]).save(str(base.folder / "tokenizer.json"))
    for seed, name in enumerate(("support", "sales")):
        write_adapter(base, path / name, seed, target_modules=["q_proj"])
    return tmp_path


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    port, control_port = free_port(), free_port()
    serve = COMMANDS[0].replace(".venv/bin/pagemill", f"exec {Path(sys.executable).parent}/pagemill")
    serve += f" --adapters-file adapters.json --port {port} --control-port {control_port} --kv-cache-memory 16Mi"
    (folder / "adapters.json").write_text("{}")
    process = subprocess.Popen(["bash", "-c", serve], cwd=folder, stdin=subprocess.DEVNULL)

    def is_ready() -> bool:
        assert process.poll() is None, "the server exited"
        try:
            return httpx2.get(f"http://127.0.0.1:{control_port}/readyz").status_code == 200
        except httpx2.TransportError:
            return False

    try:
        wait_until(is_ready, limit_s=START_LIMIT_S, every_s=0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(WAIT_LIMIT_S)


@pytest.mark.slow
def test_every_command_does_what_the_page_says(url: str, folder: Path) -> None:
    def names() -> list[str]:
        return [each["id"] for each in httpx2.get(f"{url}/v1/models").json()["data"]]

    answers = []
    for command in COMMANDS[1:]:
        at_server = command.replace("http://127.0.0.1:8000", url)
        done = subprocess.run(["bash", "-c", at_server], capture_output=True, cwd=folder, env=dict(os.environ))
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout.decode())
    completion, models, loaded, unloaded = answers
    assert json.loads(completion)["model"] == "support"
    assert 1 <= json.loads(completion)["usage"]["completion_tokens"] <= 8  # drawn, so that any may be the end
    cards = json.loads(models)["data"]
    assert [(each["id"], each["parent"]) for each in cards] == [("base", None), ("support", "base")]
    assert (loaded, unloaded) == (
        "Success: LoRA adapter 'sales' added successfully.",
        "Success: LoRA adapter 'sales' removed successfully.",
    )
    (listed,) = re.findall(r"```json\n(.*?)\n```", PAGE, re.DOTALL)[:1]
    (folder / "adapters.json").write_text(listed)
    wait_until(lambda: names() == ["base", "support", "sales"], limit_s=WAIT_LIMIT_S, every_s=0.1)
