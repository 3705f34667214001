"""The bench of attacks: what an attack is blamed for, and that each kind has a case that `make attack` runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attack
import pytest
from attacks.cases import CASES
from attacks.honest import Figures
from attacks.site import MAX_GAP_S, MAX_PEAK_MIB, Harm
from attacks.wire import head, parsed

ROOT = Path(__file__).resolve().parents[2]
HELD = r": (`tests/\S+?\.py::test_\w+`(, )?)+$"
UNHARMED = {"gap_s": 0.1, "own_lag_s": 0.0, "num_refused": 0, "num_answers": 5, "slowest_s": 0.1, "faults": []}
PEAKS = {"gateway": 200.0, "engine-0": 150.0}


def harm(peaks: dict[str, float] = PEAKS, dead: list[str] | None = None, **seen: Any) -> list[str]:
    return Harm(peaks, UNHARMED | seen, dead or []).faults()


def test_a_site_within_the_limits_has_no_faults() -> None:
    assert harm() == []


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (harm({**PEAKS, "gateway": MAX_PEAK_MIB}), "gateway took 700 MiB"),
        (harm(dead=["engine-0"]), "engine-0 died"),
        (harm(gap_s=MAX_GAP_S), "a gap of 1.0 s"),
        (harm(num_refused=2, faults=["503 full"]), "2 of others refused: 503 full"),
        (harm(num_answers=0, slowest_s=9.0), "no request of the honest tenant was answered in 9.0 s"),
    ],
)
def test_each_harm_is_a_fault(found: list[str], fault: str) -> None:
    assert found == [fault]


def test_a_gap_in_which_the_honest_tenant_itself_was_late_is_no_fault() -> None:
    assert harm(gap_s=MAX_GAP_S + 0.2, own_lag_s=0.3) == []
    assert harm(gap_s=MAX_GAP_S + 0.4, own_lag_s=0.3) == ["a gap of 1.4 s"]


def test_the_figures_keep_the_first_faults_and_count_all() -> None:
    figures = Figures()
    for number in range(9):
        figures.refuse(str(number))
    assert (figures.num_refused, figures.faults) == (9, ["0", "1", "2", "3", "4"])


def test_every_kind_has_a_case_that_make_attack_runs() -> None:
    kinds = {each.kind for each in CASES if each.kind != "none"}
    assert len(kinds) >= 12
    assert {each.kind for each in CASES if not each.full} == kinds
    assert len({each.name for each in CASES}) == len(CASES)
    ports = {each.port for each in CASES if not each.full}
    assert ports == {"gateway data", "gateway control", "gateway tls", "engine data", "engine control"}
    assert len(attack.MODULES) >= 7


def test_the_table_of_bounds_names_a_test_for_each_bound_and_an_attack_on_each_port() -> None:
    """`test_known_flaws` checks that the tests exist."""
    _, _, section = (ROOT / "docs" / "security.md").read_text().partition("\n## Bounds\n")
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]
    assert len(rows) >= 22
    attacked = {(each.kind, each.port) for each in CASES}
    for resource, ports, kind, *bounds in rows:
        assert {(kind, port) for port in ports.split(", ")} <= attacked, resource
        assert len(bounds) == 3, resource
        assert any(bound != "-" for bound in bounds), resource
        assert all(bound == "-" or re.search(HELD, bound) for bound in bounds), resource
    assert {kind for _, _, kind, *_ in rows} >= {each.kind for each in CASES} - {"none"}


def test_an_answer_is_parsed_only_when_it_is_whole() -> None:
    whole = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\nA: b\r\n\r\n{}"
    answer = parsed(whole + b"HTTP/1.1 200")
    assert answer is not None
    assert (answer.status, answer.headers["a"], answer.body) == (401, "b", b"{}")
    assert [parsed(whole[:end]) for end in range(len(whole))] == [None] * len(whole)
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    answer = parsed(chunked)
    assert answer is not None
    assert answer.body == b"{}"


def test_a_head_has_the_key_and_the_length() -> None:
    lines = head("/v1/files", "key", length=7, fields=["A: b"]).decode().split("\r\n")
    assert lines[0] == "POST /v1/files HTTP/1.1"
    assert {"A: b", "Authorization: Bearer key", "Content-Length: 7"} < set(lines)
