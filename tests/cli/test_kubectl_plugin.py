"""`kubectl pagemill` runs the command for the current cluster; `chat` and `bench` get a forwarded port of the gateway.

`kubectl` and `pagemill` are small scripts here: one says what a cluster would, the other what it was given.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from waiting import WAIT_LIMIT_S, wait_until

PLUGIN = Path(__file__).resolve().parents[2] / "cli" / "kubectl-pagemill"
KUBECTL = """#!/usr/bin/env bash
case "$1" in
  config) echo the-context ;;
  get) printf '%b' "$GATEWAYS" ;;
  port-forward)
    echo "$@" > forwarded
    [[ -z ${REFUSES:-} ]] || { echo "error: $REFUSES" >&2; exit 1; }
    echo $$ > forwarding
    echo "Forwarding from 127.0.0.1:45678 -> 8080"
    exec sleep 600 ;;
esac
"""
PAGEMILL = '#!/usr/bin/env bash\necho "pagemill $*"\n'


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    for name, text in (("kubectl", KUBECTL), ("pagemill", PAGEMILL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run(programs: Path, *arguments: str, gateways: str = "ns gateway\\n", **variables: str) -> tuple[int, str, str]:
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "GATEWAYS": gateways, **variables}
    done = subprocess.run(
        ["bash", str(PLUGIN), *arguments],
        cwd=programs,
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
    )
    return done.returncode, done.stdout, done.stderr


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("command", ["top", "why", "doctor"])
def test_a_command_that_reads_the_cluster_gets_the_current_context(programs: Path, command: str) -> None:
    assert run(programs, command, "a") == (0, f"pagemill {command} a --context the-context\n", "")
    assert run(programs, command, "--context", "other") == (0, f"pagemill {command} --context other\n", "")


@pytest.mark.parametrize("command", ["chat", "bench"])
def test_a_command_that_sends_requests_gets_a_port_of_the_gateway_until_it_ends(programs: Path, command: str) -> None:
    assert run(programs, command, "--model", "m") == (
        0,
        f"pagemill {command} --model m --url http://127.0.0.1:45678\n",
        "",
    )
    forwarded = (programs / "forwarded").read_text().split()
    assert forwarded == ["port-forward", "--address", "127.0.0.1", "--namespace", "ns", "service/gateway", ":http"]
    pid = int((programs / "forwarding").read_text())
    wait_until(lambda: is_gone(pid))


def test_of_several_gateways_one_is_chosen_by_its_namespace(programs: Path) -> None:
    two = "one gateway\\ntwo other\\n"
    code, _, message = run(programs, "chat", gateways=two)
    assert (code, "several gateways run: set PAGEMILL_NAMESPACE to one of: one gateway, two other" in message) == (
        1,
        True,
    )
    assert run(programs, "chat", gateways=two, PAGEMILL_NAMESPACE="two")[0] == 0
    assert "service/other" in (programs / "forwarded").read_text()


def test_a_cluster_without_a_gateway_and_a_refused_port_are_errors_with_the_remedy(programs: Path) -> None:
    code, _, message = run(programs, "chat", gateways="")
    assert (code, "no gateway runs in this cluster; install the chart" in message) == (1, True)
    code, _, message = run(programs, "chat", REFUSES="pods are forbidden")
    assert (code, "cannot be reached: error: pods are forbidden" in message) == (1, True)


def test_without_the_command_the_installation_is_named(programs: Path) -> None:
    (programs / "pagemill").unlink()
    code, _, message = run(programs, "top", PATH=f"{programs}:/usr/bin:/bin")
    assert (code, "pip install pagemill" in message) == (1, True)


def test_other_commands_are_passed_on_and_help_lists_what_is_for_clusters(programs: Path) -> None:
    assert run(programs, "version")[1] == "pagemill version\n"
    assert "top | why NAME | doctor | chat | bench" in run(programs)[1]
