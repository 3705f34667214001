"""Every panel's number is the client's own count: one recorded overload, loaded into a real Prometheus.

`bench/overload.py` makes the recording, `overload.json`. Recorded series are replaced by their rules' expressions, and
all windows by the length of the recording, so that a rate times that length is a count.
"""

from __future__ import annotations

import bisect
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus import Prometheus, prometheus, promtool

from observability import rules
from observability.dashboards import all_pages, operator
from pagemill_gateway.metrics.beginnings import FAILURES
from pagemill_protocol.report.outcomes import BURNING, NO_CAPACITY, OUTCOMES

RECORDING: dict[str, Any] = json.loads(Path(__file__).with_name("overload.json").read_text("utf-8"))
CLIENT: dict[str, int] = RECORDING["client"]
SERIES: dict[str, str] = RECORDING["series"]
BEGIN_S = 1_700_000_000
STEP_S = int(RECORDING["interval_s"])
TTFT_S, SECONDS = RECORDING["ttft_s"], RECORDING["seconds"]
PROMPT, COMPLETION = RECORDING["prompt_tokens"], RECORDING["completion_tokens"]
TOLERANCE = 0.05
PRICE = 2.5
"""`spec.cost.hour` of the recorded deployment."""
FAILED = sum(CLIENT.get(outcome, 0) for outcome in BURNING)
COUNTED = FAILED + CLIENT["completed"]
RECORDED = re.compile(r"([a-z_]+:pagemill_[a-z0-9_]+:[a-z0-9_]+)(\{[^}]*\})?(\[[^\]]*\])?( offset \w+)?")
WINDOW = re.compile(r"\[(?:\d+[mhd]|\$__rate_interval)\]")


def values_of(notation: str) -> Iterator[float | None]:
    for each in notation.split():
        text, _, times = each.partition("x")
        yield from [None if text == "_" else float(text)] * (int(times or 0) + (text != "_" or not times))


RANK_S = {"0": 0.1, "1": 0.25}
"""Seconds that each of two ranks computes in a second: `overload.json` has one process, so these are added."""
STEPS_PER_S = 20.0
ENGINE = 'instance="0",job="pagemill-engine",model_name="busy"'
NUM_SAMPLES = max(len([*values_of(each)]) for each in SERIES.values())
LENGTH_S = (NUM_SAMPLES - 1) * STEP_S + 1
"""A window of this length has all samples, and next to nothing is extrapolated."""
END_S = BEGIN_S + (NUM_SAMPLES - 1) * STEP_S


def inlined(expression: str) -> str:
    """Return the expression with the rules' expressions in place of recorded series."""

    def replace(found: re.Match[str]) -> str:
        name, matchers, window, offset = found.groups()
        asked = dict(re.findall(r'(\w+)="([^"$]+)"', matchers or ""))
        parts = []
        for rule in (each for group in rules.recording_groups().values() for each in group if each.record == name):
            if asked.items() <= rule.labels.items():
                expr = inlined(rule.expr)
                for label, value in rule.labels.items():
                    expr = f'label_replace({expr}, "{label}", "{value}", "", "")'
                parts.append(expr)
        if offset:
            return f"last_over_time(({' or '.join(parts)})[{STEP_S}s:{STEP_S}s]{offset})"
        return f"({' or '.join(parts)})" + (f"[{LENGTH_S}s:{STEP_S}s]" if window else "")

    return RECORDED.sub(replace, expression)


def as_asked(expression: str) -> str:
    expression = WINDOW.sub(f"[{LENGTH_S}s]", inlined(expression))
    return re.sub(r"\$(job|instance|model)", ".+", expression)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("recorded")
    lines = [
        f"{name} {value:.10g} {BEGIN_S + number * STEP_S}"
        for name, notation in SERIES.items()
        for number, value in enumerate(values_of(notation))
        if value is not None
    ]
    rising = {f'pagemill_engine_rank_compute_seconds_total{{{ENGINE},rank="{rank}"}}': s for rank, s in RANK_S.items()}
    lines += [
        f"{name} {rate * number * STEP_S:.10g} {BEGIN_S + number * STEP_S}"
        for name, rate in [*rising.items(), (f"pagemill_engine_step_seconds_count{{{ENGINE}}}", STEPS_PER_S)]
        for number in range(NUM_SAMPLES)
    ]
    (folder / "recording.txt").write_text("\n".join([*lines, "# EOF", ""]))
    done = promtool("tsdb", "create-blocks-from", "openmetrics", folder / "recording.txt", folder / "data")
    assert done.returncode == 0, done.stdout + done.stderr
    no_rules = folder / "rules.yaml"
    no_rules.write_text(yaml.safe_dump({"groups": []}))
    with prometheus(folder, [], no_rules) as server:
        yield server


class Asked:
    """The numbers of a panel, by the values of their labels besides the model's."""

    def __init__(self, server: Prometheus, title: str) -> None:
        panel = PANELS[title]
        self.numbers: list[dict[str, float]] = []
        for expression, _ in panel.targets:
            found = server.get("query", query=as_asked(expression), time=str(END_S))["result"]
            named = Counter[str]()
            for each in found:  # requests of an unknown model count, too
                labels = (value for label, value in sorted(each["metric"].items()) if not label.startswith("model"))
                named[" ".join(labels)] += float(each["value"][1])
            self.numbers.append(dict(named))


PANELS = {panel.title: panel for page in all_pages() for row in page.rows.values() for panel in row}
RATE = 1 / LENGTH_S
LATE = sum(each > 2.5 for each in TTFT_S)
NUM_STREAMS_WITHOUT = RECORDING["streams_without_first_token"]
TENANTS: dict[str, int] = RECORDING["tenants"]
TOKENS: dict[str, int] = RECORDING["tokens"]
CODES: dict[str, int] = RECORDING["codes"]
FAILED_OF_A = sum(TENANTS.get(f"{outcome} a", 0) for outcome in BURNING)
ONE = {"default/busy": 1.0}
NEEDED = {"0m": 1.0, "30m": 1.0, "5m": 1.0}
Known = dict[str, float | None]
CLIENTS: dict[str, list[Known]] = {
    "Requests": [{each.name: CLIENT.get(each.name, 0) * RATE for each in OUTCOMES}],
    "Requests by tenant": [
        {name: TENANTS.get(name, 0) * RATE for each in OUTCOMES for name in (f"{each.name} a", f"{each.name} b")}
    ],
    # Deadlines that passed at an engine are no refusals.
    "Refused": [
        dict.fromkeys(NO_CAPACITY, 0.0)
        | {code: count * RATE for code, count in CODES.items()}
        | {"deadline_exceeded": None}
    ],
    "Limited tenants": [{"requests b": RECORDING["limited"] * RATE}],
    "Tokens by tenant": [
        {
            f"{kind} {each}": TOKENS.get(f"{kind} {each}", 0) * RATE
            for kind in ("completion", "prompt")
            for each in "-ab"
        }
    ],
    "Tokens per second": [{"": PROMPT * RATE}, {"": COMPLETION * RATE}],
    "Ended requests": [{"abort": None, "error": 0.0, "length": CLIENT["completed"] * RATE, "stop": 0.0}],
    "Attempts at engines": [dict.fromkeys(FAILURES, 0.0) | {"served": CLIENT["completed"] * RATE}],
    "Predicted prefix hits": [{"exact": CLIENT["completed"] * RATE, "over": 0.0, "under": 0.0}],
    "Prefix cache hits": [{"": (TOKENS["cached a"] + TOKENS["cached b"]) / PROMPT}],
    "End of waiting": [
        {
            "deadline": (CODES.get("deadline_exceeded", 0) + CODES.get("deadline_unreachable", 0)) * RATE,
            "failed": 0.0,
            "full": CODES["queue_full"] * RATE,
            "left": None,
            "served": None,
            "shed": None,
            "timeout": CODES["server_is_overloaded"] * RATE,
        }
    ],
    "Tokens served": [{"": (PROMPT + COMPLETION) * RATE}],
    "Goodput": [{"": (len(TTFT_S) - LATE) * RATE}],
    "Cost per hour": [{"": PRICE}],
    "Cost of headroom": [{"": PRICE}],
    "Cost by tenant": [
        {
            "-": 0.0,
            **{
                each: PRICE * (TOKENS[f"prompt {each}"] + TOKENS[f"completion {each}"]) / (PROMPT + COMPLETION)
                for each in "ab"
            },
        }
    ],
    "Cost of a million tokens": [{"": 1e6 * PRICE / 3600 / ((PROMPT + COMPLETION) * RATE)}],
    "Error budget burn": [
        {
            "availability": FAILED / COUNTED / 0.005,
            "first_token": (LATE + NUM_STREAMS_WITHOUT) / (len(TTFT_S) + NUM_STREAMS_WITHOUT) / 0.05,
        }
    ],
    "Error budget burn of tenants": [{"a": FAILED_OF_A / (FAILED_OF_A + TENANTS["completed a"]) / 0.01}],
    # All requests have ended.
    "In flight": [{"": 0.0}],
    "Waiting": [{"": 0.0}],
    "Waiting in gateways": [{"": 0.0}],
    "Requests at engines": [{"": 0.0}, {"": 0.0}],
    "Headroom": [{"": 1.0}],
    "Headroom over time": [{"": 1.0}],
    "Use by resource": [{"kv": 0.0, "sequences": 0.0}],
    "KV cache": [{"active": 0.0, "evictable": None, "free": None}],
    "KV cache in use": [{"": 0.0}, {"": 1.0}],
    # What the deployment says: one replica on the CPU.
    "Replicas": [ONE, ONE, ONE],
    "Current spec": [ONE, ONE],
    "Decided or recommended": [ONE],
    "Engines by phase": [{"draining": 0, "ejected": 0, "ready": 1, "sleeping": 0, "stale": 0, "starting": 0}],
    "At the maximum": [{"": 1.0}],
    "Without GPUs": [{"": 0.0}],
    "GPUs held": [{"": 0.0}],
    "Replicas needed": [NEEDED, {"": 1.0}],
    "Forecast": [NEEDED],
    "Ranks of replicas": [{"0": 2.0}],
    "Time in which ranks compute": [{f"0 {rank}": seconds for rank, seconds in RANK_S.items()}],
    "Time of ranks in a step": [{f"0 {rank}": seconds / STEPS_PER_S for rank, seconds in RANK_S.items()}],
    # Nothing of the kind has happened.
    "Preemptions": [{"": 0.0}],
    "Retries, migrations and broken streams": [{"": 0.0}, {"": 0.0}, {"": 0.0}],
    "Probes for poison requests": [{"blamed": 0.0, "cleared": 0.0, "ended": 0.0, "left": 0.0}],
}
"""What clients counted, by panel, for each of its expressions; None: clients cannot know it."""
BETWEEN: dict[str, tuple[float, float]] = {
    "Minutes until saturation": (0.0, rules.MAX_FORECAST_MINUTES),  # none while the use falls
    "Minutes until saturation over time": (0.0, rules.MAX_FORECAST_MINUTES),
    "Waste": (0.0, TOLERANCE),
    "Aborted requests": (0.0, CLIENT["client_left"] * RATE),
    "Decisions": (CLIENT["completed"] * RATE, (CLIENT["completed"] + CLIENT["client_left"]) * RATE),
    "Time in the queue": (0.0, 20.0),  # no request is served after 10 s; that bucket ends at 20
}
"""The least and the most that clients allow: some have left, and what was done for them they do not know."""
MEDIANS = {"Step time": 0.051, "Time per output token": 0.051, "Tokens in a step": 4.0}
QUANTILES = {
    "Time to first token": TTFT_S,
    "First tokens, 95th percentile": TTFT_S,
    "Request time": SECONDS,
}
"""Panels of histograms, which know a value by its bucket."""
SHARES = {"First tokens, 95th percentile": (0.95,)}
EMPTY = frozenset({
    "Forecast error",  # half an hour after the beginning
    "Accepted proposals",
    "Accepted by place",
    "Gain of proposals",
    "Adapters",
    "Loads and evictions of adapters",
    "Requests by adapter",
    "Cold starts by phase, median",
    "Cold starts by phase, 95th percentile",
    *(panel.title for row in operator().rows.values() for panel in row),  # `pagemill up` has no operator
})  # fmt: skip
WITHIN = frozenset({
    "Time to first token at engines",
    "Time in the engine's queue",
    "Error of predicted first tokens",
    "Routing",
})  # fmt: skip
"""What happens within processes, which no client can count."""


def test_every_panel_is_compared_with_what_clients_know() -> None:
    parts = [CLIENTS.keys(), BETWEEN.keys(), MEDIANS.keys(), QUANTILES.keys(), EMPTY, WITHIN]
    assert sorted(title for part in parts for title in part) == sorted(PANELS)


def test_the_outcomes_of_all_requests_are_exactly_the_clients(loaded: Prometheus) -> None:
    window = f"[{(NUM_SAMPLES - 1) * STEP_S * 1000 + 1}ms]"  # nothing is extrapolated
    query = f"round(sum by (outcome) (increase(pagemill_gateway_outcomes_total{window})))"
    found = loaded.get("query", query=query, time=str(END_S))["result"]
    counted = {each["metric"]["outcome"]: int(each["value"][1]) for each in found}
    assert counted == {each.name: CLIENT.get(each.name, 0) for each in OUTCOMES}
    assert sum(counted.values()) > 2000


@pytest.mark.parametrize("title", CLIENTS)
def test_a_panel_shows_the_clients_count(loaded: Prometheus, title: str) -> None:
    shown = Asked(loaded, title).numbers
    assert [each.keys() for each in shown] == [each.keys() for each in CLIENTS[title]]
    for found, expected in zip(shown, CLIENTS[title], strict=True):
        known = {name: value for name, value in expected.items() if value is not None}
        assert {name: found[name] for name in known} == pytest.approx(known, rel=TOLERANCE, abs=1e-9)


@pytest.mark.parametrize("title", BETWEEN)
def test_a_panel_shows_no_more_than_the_clients_allow(loaded: Prometheus, title: str) -> None:
    least, most = BETWEEN[title]
    for shown in Asked(loaded, title).numbers:
        for value in shown.values():
            assert least * (1 - TOLERANCE) <= value <= most * (1 + TOLERANCE)


@pytest.mark.parametrize("title", sorted(WITHIN))
def test_a_panel_of_what_happens_within_processes_has_numbers(loaded: Prometheus, title: str) -> None:
    values = [value for shown in Asked(loaded, title).numbers for value in shown.values()]
    assert values
    assert all(math.isfinite(value) and value >= 0 for value in values)


def test_panels_of_what_did_not_happen_are_empty(loaded: Prometheus) -> None:
    assert {title: found for title in EMPTY if any(found := Asked(loaded, title).numbers)} == {}


def bounds_of(title: str) -> list[float]:
    """Return the bounds of the panel's histogram."""
    (name,) = set(re.findall(r"([a-z_:]+_bucket)\b", as_asked(PANELS[title].targets[0][0])))
    return sorted({float(found[1]) for key in SERIES if (found := re.match(rf'{name}{{.*le="([^"]+)"', key))})


@pytest.mark.parametrize("title", MEDIANS)
def test_a_median_is_that_of_the_engines_steps(loaded: Prometheus, title: str) -> None:
    bounds = bounds_of(title)
    (median,) = Asked(loaded, title).numbers[0].values()
    assert bisect.bisect_left(bounds, median) == bisect.bisect_left(bounds, MEDIANS[title])


@pytest.mark.parametrize("title", QUANTILES)
def test_a_quantile_is_in_the_bucket_of_the_clients(loaded: Prometheus, title: str) -> None:
    own, bounds = sorted(QUANTILES[title]), bounds_of(title)
    for share, shown in zip(SHARES.get(title, (0.5, 0.95, 0.99)), Asked(loaded, title).numbers, strict=True):
        (estimate,) = shown.values()
        # A client sees a little more than the gateway: its value, or one 2 % below, lies in the estimate's bucket.
        # A part of the requests over their key's limit was refused at once, and is in the histogram of all requests.
        most = own[math.ceil(share * len(own)) - 1]
        with_limited = [0.0] * (RECORDING["limited"] if title == "Request time" else 0) + own
        least = 0.98 * with_limited[math.ceil(share * len(with_limited)) - 1]
        at = bisect.bisect_left(bounds, estimate)
        assert bisect.bisect_left(bounds, least) <= at <= bisect.bisect_left(bounds, most)
