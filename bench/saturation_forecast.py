"""Measures the error of the forecast minutes until saturation: the recording rule itself, on a real Prometheus.

Each ramp is a simulated fleet whose load grows: requests arrive at random, hold KV cache while they run, and their rate
rises linearly, doubles every 50 to 200 minutes, or rises after an hour of constant load. Prometheus gets what the rule
`KV_USED` would have recorded, and evaluates the chart's rule `SATURATION`. The truth is when the expected use, without
the noise of single requests, exceeds the share at which requests wait. The error covers all forecasts of 5 to 120
minutes, relative to the truth. Exits with 1 unless the median is under 20 %.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from report import ROOT, emit, median

from pagemill_operator.backends.local.ports import free_port

sys.path.insert(0, str(ROOT / "charts"))
from observability import rules

GOAL = 0.2
STEP_S = 30
HOURS = 5.0
WARM_S = 30 * 60
"""Seconds after which forecasts count, though the rule's windows are longer."""
HELD_S = 60.0
"""Mean seconds that a request holds its KV cache."""
REPLICAS = 8
REQUESTS_OF_A_REPLICA = (64, 256)
"""Average requests that fill a replica's KV cache: the fewer, the more the use varies by chance."""
SHORTEST_S, LONGEST_S = 5 * 60, 120 * 60
START_LIMIT_S = 60.0
LOAD_AT_START = 0.3

Shape = Callable[[float, float], float]
"""(seconds since the start, speed) -> expected share of all replicas' KV cache in use."""
SHAPES: dict[str, Shape] = {
    "linear": lambda at_s, speed: LOAD_AT_START + speed * at_s / 3600,
    "doubling": lambda at_s, speed: LOAD_AT_START * 2 ** (speed * at_s / 1800),
    "level, then linear": lambda at_s, speed: LOAD_AT_START + speed * max(0.0, at_s - 3600) / 3600,
}


class Ramp(NamedTuple):
    name: str
    kind: tuple[int, str]
    """Requests per replica, shape."""
    used: list[float]
    """Use in units of one replica's cache, every `STEP_S`."""
    saturated_at_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ramps", type=int, default=20, help="number of ramps of each shape")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    source = random.Random(args.seed)
    kinds = [(size, shape) for size in REQUESTS_OF_A_REPLICA for shape in SHAPES]
    ramps = [make_ramp(index, size, shape, source) for size, shape in kinds for index in range(args.ramps)]
    with tempfile.TemporaryDirectory() as name, prometheus(Path(name), ramps) as (url, start_s):
        errors = {kind: list(errors_of(url, start_s, [each for each in ramps if each.kind == kind])) for kind in kinds}
    for size in REQUESTS_OF_A_REPLICA:
        errors[size, "all"] = [each for shape in SHAPES for each in errors[size, shape]]
    rows = [[f"{size} requests, {shape}", len(each), *_figures(each)] for (size, shape), each in sorted(errors.items())]
    result = {str(row[0]): dict(zip(("forecasts", "median", "p90"), row[1:], strict=True)) for row in rows}
    emit("saturation_forecast", ["ramps", "forecasts", "median error", "p90"], rows, result)
    missed = [size for size in REQUESTS_OF_A_REPLICA if _median_size(errors[size, "all"]) >= GOAL]
    if missed:
        raise SystemExit(f"the median error is not under {GOAL:.0%} with {missed} requests a replica")


def make_ramp(index: int, num_requests: int, shape: str, source: random.Random) -> Ramp:
    """Simulate arrivals in steps of a second; each request has its own size and holds its cache for an exponential
    time.
    """
    expected, speed = SHAPES[shape], source.uniform(0.15, 0.6)
    capacity = REPLICAS * num_requests
    ends: dict[int, float] = {}
    held, used, saturated_at_s = 0.0, [], math.inf
    for at_s in range(int(-5 * HELD_S), int(HOURS * 3600)):
        held -= ends.pop(at_s, 0.0)
        share = expected(max(0, at_s), speed)
        if share >= rules.SATURATED:
            saturated_at_s = at_s
            break
        for _ in range(_poisson(share * capacity / HELD_S, source)):
            size = source.lognormvariate(-0.5, 1.0) / num_requests
            held += size
            end = at_s + 1 + int(source.expovariate(1 / HELD_S))
            ends[end] = ends.get(end, 0.0) + size
        if at_s >= 0 and at_s % STEP_S == 0:
            used.append(held)
    return Ramp(f"{shape} {num_requests} {index}", (num_requests, shape), used, saturated_at_s)


def _poisson(mean: float, source: random.Random) -> int:
    """Draw by Knuth's method for means of a few requests per second, and from the normal distribution above."""
    if mean > 30:
        return max(0, round(source.gauss(mean, math.sqrt(mean))))
    limit, product, count = math.exp(-mean), source.random(), 0
    while product > limit:
        product *= source.random()
        count += 1
    return count


@contextmanager
def prometheus(folder: Path, ramps: list[Ramp]) -> Iterator[tuple[str, float]]:
    """Run a Prometheus with the ramps' series; yield its URL and the time at which the series begin."""
    for program in ("prometheus", "promtool"):
        if shutil.which(program) is None:
            raise SystemExit(f"there is no {program}: install Debian's package prometheus")
    start_s = (time.time() - HOURS * 3600 - 600) // STEP_S * STEP_S
    text = "".join(_open_metrics(ramps, start_s))
    (folder / "ramps.txt").write_text(text)
    blocks = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(folder / "ramps.txt"), str(folder / "data")]
    subprocess.run(blocks, check=True, capture_output=True)
    (folder / "prometheus.yaml").write_text("{}\n")
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        _wait_until_ready(f"http://{address}/-/ready", process, folder / "log")
        yield f"http://{address}", start_s
    finally:
        process.terminate()
        process.wait()


def _open_metrics(ramps: list[Ramp], start_s: float) -> Iterator[str]:
    """Yield the series that the three recording rules would have made of each ramp."""
    for name, values in (
        (rules.KV_USED, [ramp.used for ramp in ramps]),
        (rules.KV_USED_LOG, [[math.log(max(each, 0.001)) for each in ramp.used] for ramp in ramps]),
        (rules.CEILING, [[float(REPLICAS)] * len(ramp.used) for ramp in ramps]),
    ):
        yield f"# TYPE {name} gauge\n"
        for ramp, series in zip(ramps, values, strict=True):
            for index, value in enumerate(series):
                yield f'{name}{{model="{ramp.name}"}} {value} {start_s + index * STEP_S}\n'
    yield "# EOF\n"


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"prometheus does not start: {log.read_text()[-500:]}") from None
            time.sleep(0.1)


def errors_of(url: str, start_s: float, ramps: list[Ramp]) -> Iterator[float]:
    """Yield (forecast - truth) / truth of each forecast that was due."""
    (rule,) = [rule for rule in rules.capacity_rules() if rule.record == rules.SATURATION]
    found = {each["metric"]["model"]: each["values"] for each in _query(url, rule.expr, start_s)}
    for ramp in (each for each in ramps if each.saturated_at_s < math.inf):
        for time_s, minutes in found.get(ramp.name, []):
            left_s = ramp.saturated_at_s - (time_s - start_s)
            if time_s - start_s >= WARM_S and SHORTEST_S <= left_s <= LONGEST_S:
                yield (float(minutes) * 60 - left_s) / left_s


def _query(url: str, expression: str, start_s: float) -> list[dict[str, Any]]:
    span = {"query": expression, "start": start_s, "end": start_s + HOURS * 3600, "step": 60}
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{urllib.parse.urlencode(span)}", timeout=60) as response:
        result: list[dict[str, Any]] = json.load(response)["data"]["result"]
    return result


def _median_size(errors: list[float]) -> float:
    return median([abs(each) for each in errors])


def _figures(errors: list[float]) -> list[str]:
    sizes = sorted(abs(each) for each in errors)
    return [f"{median(sizes):.1%}", f"{sizes[int(0.9 * len(sizes))]:.1%}"] if sizes else ["", ""]


if __name__ == "__main__":
    main()
