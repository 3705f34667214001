"""The scaling table: the order of its cells, repetition, and its goals."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import scaling_table
from scaling_bounds import KINDS
from scaling_goals import Point, Result, render, results_of


def figures(share: float, pod_seconds: float, flaps: int = 0, refused: int = 0) -> dict[str, Any]:
    return {
        "slo_attained": share,
        "pod_seconds": pod_seconds,
        "num_flaps": flaps,
        "num_refused": refused,
        "num_requests": 1000,
    }


def line(found: dict[str, dict[str, Any]], frontier: list[tuple[int, float]] | None = None) -> dict[str, Any]:
    cell = {"kind": "ramp", "load": "light", "cold_start_s": 60.0, "seed": 1}
    return {**cell, "figures": found, "frontier": frontier or [], "held": {"1": 2.5}}


BOUNDS = {"informed": figures(0.99, 1000.0), "clairvoyant": figures(0.99, 900.0)}


def test_light_and_medium_loads_with_short_starts_come_first() -> None:
    cells = scaling_table.cells((1, 2))
    assert len(cells) == len(set(cells)) == len(KINDS) * 3 * 3 * 2
    cheap = [each for each in cells if each.load != "heavy" and each.cold_start_s <= 60]
    assert cells[: len(cheap)] == cheap
    assert [each.seed for each in cheap] == sorted(each.seed for each in cheap)


def test_finished_cells_are_repeated_only_on_request(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(line(dict(BOUNDS))) + "\n" + '{"kind": "ra')
    lines = scaling_table.read(results)
    assert len(lines) == 1, "a truncated line must not count as a result"

    def runs(**names: list[str]) -> list[tuple[float, list[str]]]:
        asked = {"again": [], "missing": [], "policies": ["hpa"], **names}
        args = argparse.Namespace(seeds=[1], kinds=["ramp"], loads=["light"], cold_starts=[10.0, 60.0], **asked)
        return [(cell.cold_start_s, found) for cell, found in scaling_table.runs(lines, args)]

    assert runs() == [(10.0, ["hpa"])]
    assert runs(again=["pagemill"]) == [(60.0, ["pagemill"])]
    assert runs(missing=["wva", "informed"]) == [(60.0, ["wva"])]
    assert runs(missing=["informed"]) == []
    assert scaling_table.known_capacity(lines)["ramp"] == {1: 2.5}


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "bounds"), [(0, {"informed"}), (1, {"informed", "clairvoyant"})])
def test_a_cell_is_simulated_and_shown(changes: int, bounds: set[str]) -> None:
    cell = scaling_table.Cell("retrieval", "light", 10.0, 1)
    found = scaling_table.simulate(cell, ["pagemill", "wva"], changes, {})
    assert set(found["figures"]) == {*bounds, "pagemill", "wva"}
    assert found["held"]
    known = json.loads(json.dumps(found))
    text = render(results_of([known]))
    assert "| retrieval, light | 1 |" in text
    assert "Of 1 cells" in text


def test_the_latest_figures_of_a_policy_are_used() -> None:
    lines = [line({**BOUNDS, "pagemill": figures(0.9, 2000.0)}), line({"pagemill": figures(0.99, 1000.0)})]
    (result,) = results_of(lines)
    assert result.points["pagemill"] == Point(0.99, 1000.0)
    assert result.misses() == []


def test_a_point_that_the_search_did_not_find_also_counts_for_the_clairvoyant() -> None:
    (result,) = results_of([line({**BOUNDS, "pagemill": figures(0.99, 800.0)}, [(10, 900.0), (5, 1200.0)])])
    assert result.points["clairvoyant"].pod_seconds == 800.0
    (result,) = results_of([line({**BOUNDS, "pagemill": figures(0.5, 10.0)}, [(10, 900.0)])])
    assert result.points["clairvoyant"].pod_seconds == 900.0, "at such a share there is none"


@pytest.mark.parametrize(
    ("ours", "says"),
    [
        (figures(0.99, 1100.0), []),
        (figures(0.99, 1200.0), ["1.20 times the pod-seconds of informed"]),
        (figures(0.98, 1000.0), ["1.0 points below informed"]),
        (figures(0.99, 1060.0, refused=2), ["1.06 times the cheapest rival of that share", "2 refused"]),
    ],
)
def test_missed_goals_are_named(ours: dict[str, Any], says: list[str]) -> None:
    rivals = {"wva": figures(0.995, 1000.0)} if len(says) > 1 else {}
    (result,) = results_of([line({**BOUNDS, **rivals, "pagemill": ours})])
    assert result.misses() == says


def test_if_the_slo_cannot_be_met_only_rivals_are_compared() -> None:
    points = {"informed": Point(0.8, 1000.0), "pagemill": Point(0.7, 3000.0)}
    assert Result("burst", "heavy", 60.0, 1, points).misses() == []
