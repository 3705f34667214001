"""`pagemill why`: recorded decisions as text and as JSON, their replay, and errors if there are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result
from scaling_world import LENGTHS, Scaled, engines
from typer.testing import CliRunner

from pagemill.columns import columns
from pagemill.main import app
from pagemill_operator.autoscaler.records import Record, decode_record, encode_record
from pagemill_operator.autoscaler.settings import ScalingSettings, Slo
from pagemill_operator.backends.local.state_dir import OWNER_FILE, StateDir

SLO = ScalingSettings("Active", 1, 20, slo=Slo(ttft_ms=500.0, tpot_ms=40.0))


def decided() -> list[Record]:
    """Return records of a rise under an SLO, and of a gateway that is silent afterwards."""
    scaled = Scaled(SLO)
    scaled.decide(rate=30.0, active=1.0, running=7, waiting=2)
    scaled.now += 40.0
    scaled.decide(rate=30.0, num_reporting=0)
    return [decode_record(encode_record(record)) for record in scaled.records]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"".join(encode_record(record) + b"\n" for record in decided()))
    return path


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which `pagemill up` would store its state; neither it nor a cluster exists."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def why(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["why", *map(str, arguments)])


def test_each_decision_is_a_line_and_the_latest_is_shown_with_all_its_inputs(file: Path) -> None:
    result = why("d", "--file", file)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"ns/d: the last 2 decisions, recorded by {file}"
    assert lines[2].split() == ["TIME", "REPLICAS", "REASON", "WHY"]
    first, second = decided()
    assert lines[3].split()[1:5] == ["1", "->", str(first.decision.replicas), "ScaledUp"]
    assert first.decision.message in lines[3]
    assert lines[4].split()[1:3] == [str(second.decision.replicas), "SignalsMissing"]
    detail = "\n".join(lines[5:])
    for words in (
        "0 of 1 report",
        "Demand, mode Active, 1 to 20 replicas",
        "30.00 requests/s over 60 s",
        "a cold start takes 30 s",
        "mean 512 + 197 tokens",
    ):
        assert words in detail
    assert "missing" in detail
    assert second.decision.missing[0] in detail
    for candidate in second.decision.candidates:
        assert any(line.split()[:1] == [str(candidate.replicas)] for line in lines)


@pytest.mark.parametrize("price", [None, 2.5])
def test_costs_are_shown_with_the_slo(tmp_path: Path, price: float | None) -> None:
    scaled = Scaled(msgspec.structs.replace(SLO, replica_price=price))
    scaled.decide(rate=30.0, active=1.0, running=7, waiting=2)
    (record,) = scaled.records
    path = tmp_path / "records.jsonl"
    path.write_bytes(encode_record(record) + b"\n")
    shown, after = why("d", "--file", path).stdout, record.decision.replicas
    assert f"{after} replicas: {3600 * after:,} pod-seconds/h" in shown
    head, *rows = shown[shown.index("REPLICAS  REQUESTS/S") :].splitlines()
    assert ("COST/H" in head.split()) == (price is not None)
    for row, candidate in zip(rows, record.decision.candidates, strict=True):
        assert f"{3600 * candidate.replicas:,}" in row.split()
        assert row.split()[1:3] == [f"{candidate.requests_per_s:.2f}", f"P{100 * candidate.share:.4g}"]
        assert (f"{2.5 * candidate.replicas:.2f}" in row.split()) == (price is not None)
    (costs,) = json.loads(why("d", "--file", path, "-o", "json").stdout)["costs"]
    assert costs["after"] == {"pod_seconds": 3600 * after, "money": None if price is None else price * after}


def test_only_the_latest_decisions_are_shown(file: Path) -> None:
    result = why("d", "--file", file, "--last", 1)
    assert "ScaledUp" not in result.stdout
    assert "the last 1 decision, recorded by" in result.stdout


def test_the_json_output_contains_complete_records_that_can_be_read_again(file: Path, tmp_path: Path) -> None:
    result = why("d", "--file", file, "-o", "json", "--replay")
    assert result.exit_code == 0
    body = json.loads(result.stdout)
    assert body["deployment"] == "ns/d"
    assert [decode_record(json.dumps(each).encode()) for each in body["records"]] == decided()
    assert [each["same"] for each in body["replays"]] == [True, True]
    kept = tmp_path / "kept.json"
    kept.write_text(result.stdout)
    assert "SignalsMissing" in why("d", "--file", kept).stdout


def test_a_replay_gives_the_recorded_choice_or_reports_the_difference(file: Path, tmp_path: Path) -> None:
    assert why("d", "--file", file, "--replay").stdout.count(" same ") == 2
    first, second = decided()
    other = msgspec.structs.replace(second, decision=msgspec.structs.replace(second.decision, replicas=1))
    forged = tmp_path / "forged.jsonl"
    forged.write_bytes(encode_record(first) + b"\n" + encode_record(other) + b"\n")
    result = why("d", "--file", forged, "--replay")
    assert result.exit_code == 1
    assert f"differs: {second.decision.replicas} replicas, SignalsMissing" in result.stdout
    assert why("d", "--file", forged).exit_code == 0, "no prediction was needed"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no decision about d; it has decisions about nothing"),
        (
            encode_record(decided()[0]).replace(b"ns/d", b"ns/other"),
            "has no decision about d; it has decisions about ns/other",
        ),
        (b"\n{}\n", ":2: is not a record of a decision: Object missing required field `key`"),
        (b"what?", ":1: is not a record of a decision: JSON is malformed"),
        (b"\xff\xfe", "is not UTF-8 text (byte 0)"),
    ],
    ids=["empty", "another", "no record", "no JSON", "no text"],
)
def test_a_file_without_such_records_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(content)
    result = why("d", "--file", path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {path}")
    assert words in result.stderr
    assert result.stdout == ""


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in why("d", "--file", tmp_path / "none").stderr


def test_a_name_in_two_namespaces_requires_the_namespace(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    here = encode_record(decided()[0])
    path.write_bytes(here + b"\n" + here.replace(b"ns/d", b"prod/d") + b"\n")
    assert "in several namespaces: ns/d, prod/d; choose one with --namespace" in why("d", "--file", path).stderr
    assert why("d", "--file", path, "-n", "prod").stdout.startswith("prod/d: the last 1 decision")


def test_without_up_and_cluster_the_error_says_what_to_do(alone: Path) -> None:
    result = why("d", "--kubeconfig", alone / "none")
    assert result.exit_code == 2
    assert "no cluster is configured here" in result.stderr
    assert "--kubeconfig" in result.stderr


def test_the_records_of_a_running_up_are_read_from_its_folder(alone: Path) -> None:
    folder = StateDir(alone)
    try:
        folder.write_records(encode_record(record) for record in decided())
        result = why("d", "-o", "json")
        assert result.exit_code == 0, result.output
        pid = json.loads((folder.path / OWNER_FILE).read_text())["pid"]
        assert json.loads(result.stdout)["recordedBy"] == f"`pagemill up` (process {pid})"
        (folder.path / "scaling.jsonl").write_text("{}\n")
        assert "has records that this version cannot read" in why("d").stderr
    finally:
        folder.remove()


def test_an_unknown_name_lists_those_that_are_served(alone: Path) -> None:
    state = StateDir(alone)
    state.write_records(encode_record(record) for record in decided())
    state.write_targets([{"targets": ["127.0.0.1:1"], "labels": {"pod": "p", "variant": "default/chat"}}])
    try:
        result = why("nope")
        assert result.exit_code == 2
        assert "serves no nope; it serves default/chat, ns/d" in result.stderr
    finally:
        state.remove()


def test_text_of_a_record_cannot_control_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(encode_record(decided()[0]).replace(b'"message":"', rb'"message":"\u001b[2J'))
    result = why("d", "--file", path)
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("truth", ["unknown", "stale"])
def test_unknown_values_are_shown_as_unknown(tmp_path: Path, truth: str) -> None:
    scaled = Scaled(SLO)
    scaled.decide(engines=engines(1, truth=truth, age_s=7.0), lengths=msgspec.structs.replace(LENGTHS, truth=truth))
    path = tmp_path / "records.jsonl"
    path.write_bytes(encode_record(scaled.records[0]))
    shown = why("d", "--file", path).stdout
    assert f"the engines' reports are {truth}" in shown
    assert ("7 s old" in shown) == (truth == "stale")


def test_columns_are_aligned_and_lines_have_no_trailing_spaces() -> None:
    make: Callable[..., list[str]] = columns
    assert make([["A", "LONG", "Z"], ["long", "b", "c d"], ["x", "y", ""]]) == [
        "A     LONG  Z",
        "long  b     c d",
        "x     y",
    ]


def test_a_running_up_without_decisions_is_found(alone: Path) -> None:
    state = StateDir(alone)
    state.write_targets([{"targets": ["127.0.0.1:1"], "labels": {"pod": "p", "variant": "default/chat"}}])
    try:
        result = why("chat")
    finally:
        state.remove()
    assert result.exit_code == 2
    assert "serves chat but has made no scaling decision" in result.stderr
