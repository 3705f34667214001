"""The figures of `pagemill bench`: goodput, comparisons, saturation, plots; and the reading of streamed answers."""

from __future__ import annotations

import io
import itertools
import json
import random
import statistics
from xml.etree import ElementTree

import pytest

from pagemill.bench.comparing import differences
from pagemill.bench.conversations import BenchConversation, BenchTurn, BenchWorkload
from pagemill.bench.exchange import read_events
from pagemill.bench.plots import as_svg, as_text, charts_of
from pagemill.bench.printing import CLEAR, ProgressLine
from pagemill.bench.results import Measured, Result
from pagemill.bench.samples import BenchRun, BenchSample, LatencyLimits, figures
from pagemill.bench.sending import Load, _beginnings
from pagemill.bench.sweeping import Point, highest_good, saturation, sweep_clients, sweep_rates

DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'


def sample(ttft_s: float, gap_s: float, num_tokens: int = 11, at_s: float = 0.0) -> BenchSample:
    gaps = [gap_s] * (num_tokens - 1)
    return BenchSample(at_s, ttft_s, ttft_s + sum(gaps), gaps, 7, num_tokens)


def drawn_run(seed: int, factor: float = 1.0) -> BenchRun:
    """Return 100 requests of one client after the other, with latencies that vary by a tenth."""
    source, at_s, samples = random.Random(seed), 0.0, []
    for _ in range(100):
        samples.append(sample(0.1 * factor * source.gauss(1, 0.1), 0.02 * factor * source.gauss(1, 0.1), at_s=at_s))
        at_s = samples[-1].end_s
    return BenchRun(samples, [], 100, at_s, 0.02)


# -- answers -----------------------------------------------------------------------------------------------------------


def event(**delta: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"


def test_an_event_comes_with_the_part_that_ends_it() -> None:
    stream = event(role="assistant") + event(content="Hel") + b": alive\n\n" + event(content="lo") + USAGE + DONE
    cut = stream.index(b"lo")
    answer = read_events([stream[:10], stream[10:cut], stream[cut:]], [1.0, 2.0, 3.0])
    assert (answer.text, list(answer.arrivals_s), answer.error) == ("Hello", [2.0, 3.0], "")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 2)


def test_the_result_is_the_same_at_every_cut() -> None:
    stream = event(reasoning_content="h\u00e9") + event(content="a\u20acb") + USAGE + DONE
    for cut in range(1, len(stream)):
        answer = read_events([stream[:cut], stream[cut:]], [1.0, 2.0])
        assert (answer.text, answer.error, len(answer.arrivals_s) in (1, 2)) == ("a\u20acb", "", True)


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (event(content="a"), "ended the stream before the answer was complete"),
        (DONE, "ended the answer without any text"),
        (b"data: nothing\n\n", "cannot be read"),
        (b'data: {"error": {"message": "Too busy."}}\n\n', "The server failed: Too busy."),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(stream: bytes, error: str) -> None:
    assert error in read_events([stream], [1.0]).error


# -- figures -----------------------------------------------------------------------------------------------------------


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    run = BenchRun([sample(0.1, 0.01), sample(0.9, 0.01), sample(0.1, 0.09)], ["refused"], 4, 10.0)
    found = figures(run, LatencyLimits(ttft=0.5, tpot=0.05))
    assert (found["goodput_requests_per_s"], found["good_share"]) == (0.1, 0.25)
    assert (found["requests"], found["failed"], found["unfinished"]) == (3, 1, 0)
    assert found["output_tokens_per_s"] == 3.3
    assert "good_share" not in figures(run, LatencyLimits())
    assert figures(run, LatencyLimits(e2e=0.5))["good_share"] == 0.25


def test_a_difference_is_certain_only_if_there_is_one() -> None:
    """Of 6 comparisons of equal servers, few intervals of 95 % miss 1; a server slower by a tenth is always found."""
    equal = [differences(drawn_run(seed), drawn_run(seed + 100)) for seed in range(6)]
    wrong = sum(each.is_certain for found in equal for each in found if each.name == "TTFT p50, ms")
    assert wrong <= 2
    for seed in range(2):
        slower = {each.name: each for each in differences(drawn_run(seed), drawn_run(seed + 100, 1.1))}
        assert slower["TTFT p50, ms"].is_certain
        assert slower["TTFT p50, ms"].low > 1
        assert slower["output tokens/s"].high < 1
        assert 0.85 < slower["output tokens/s"].ratio < 0.97


def test_too_few_requests_give_no_interval() -> None:
    few = BenchRun([sample(0.1, 0.01)] * 7, [], 7, 2.0)
    assert differences(few, few) == []


# -- sweeps ------------------------------------------------------------------------------------------------------------


class Server:
    """Answers of 100 ms, at most so many a second; those above wait."""

    def __init__(self, most_per_s: float) -> None:
        self.most_per_s = most_per_s
        self.loads: list[Load] = []

    async def measure(self, load: Load, number: int) -> BenchRun:
        self.loads.append(load)
        if load.concurrency is not None:
            rate = min(load.concurrency / 0.1, self.most_per_s)
            ttft_s = load.concurrency / rate
        else:
            assert load.rate_per_s is not None
            rate, ttft_s = min(load.rate_per_s, self.most_per_s), 0.1 if load.rate_per_s < self.most_per_s else 9.0
        return BenchRun([sample(ttft_s, 0.0, 1)] * 100, [], 100, 100 / rate)


async def test_clients_are_doubled_until_throughput_stops_growing() -> None:
    server = Server(most_per_s=55)
    points = await sweep_clients(server.measure)
    assert [point.load.concurrency for point in points] == [1, 2, 4, 8, 16, 32]
    assert saturation(points).load.concurrency == 8
    good = highest_good(points, LatencyLimits(ttft=0.12))
    assert good is not None
    assert good.load.concurrency == 4


async def test_a_sweep_ends_where_requests_fail() -> None:
    async def measure(load: Load, number: int) -> BenchRun:
        return BenchRun([sample(0.1, 0.0)], ["busy"] if load.concurrency == 4 else [], 2, 1 / (load.concurrency or 1))

    assert len(await sweep_clients(measure)) == 3


async def test_rates_are_tried_around_the_saturation() -> None:
    points = await sweep_rates(Server(most_per_s=40).measure, burstiness=1.0)
    rates = [point.load.rate_per_s for point in points if point.load.rate_per_s]
    assert rates == [10, 20, 28, 34, 40, 46]
    good = highest_good(points, LatencyLimits(ttft=0.5))
    assert good is not None
    assert good.load.rate_per_s == 34
    assert highest_good(points, LatencyLimits(ttft=0.01)) is None


def test_arrivals_at_a_rate_have_its_mean_and_bursts_where_asked() -> None:
    """A gamma process: the standard deviation of its gaps is their mean divided by the root of the shape."""
    workload = BenchWorkload("", [])
    for burstiness, spread in ((0.25, 2.0), (1.0, 1.0), (100.0, 0.1)):
        times = list(itertools.islice(_beginnings(workload, Load(rate_per_s=4.0, burstiness=burstiness), 5), 20_001))
        gaps = [late - early for early, late in itertools.pairwise(times)]
        assert times[0] == 0.0
        assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.06)
        assert statistics.stdev(gaps) == pytest.approx(0.25 * spread, rel=0.06)
        again = _beginnings(workload, Load(rate_per_s=4.0, burstiness=burstiness), 5)
        assert list(itertools.islice(again, 9)) == times[:9]


def test_recorded_times_are_the_arrivals() -> None:
    talks = [BenchConversation([BenchTurn("a", 1)], at_s=at_s) for at_s in (0.0, 1.5, 1.6)]
    assert list(_beginnings(BenchWorkload("", talks), Load(), 0)) == [0.0, 1.5, 1.6]


def test_progress_is_one_line_on_a_terminal_and_nothing_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (True, False):
        stream = io.StringIO()
        stream.isatty = lambda shown=is_terminal: shown  # type: ignore[method-assign, misc]
        monkeypatch.setattr("sys.stderr", stream)
        show = ProgressLine("4 clients", 10)
        show(BenchRun([sample(0.1, 0.0)] * 3, ["busy"]), 2)
        show(BenchRun(), 0)
        line = f"{CLEAR}4 clients: 4 of 10 requests, 2 running, 1 failed{CLEAR}"
        assert stream.getvalue() == (line if is_terminal else "")


# -- plots -------------------------------------------------------------------------------------------------------------


def result(*loads: Load) -> Result:
    runs = [
        Measured(load.name, load.concurrency, load.rate_per_s, drawn_run(number)) for number, load in enumerate(loads)
    ]
    return Result("a <model>", "generated", LatencyLimits(ttft=0.5), runs)


@pytest.mark.parametrize(
    ("loads", "titles"),
    [
        ([Load(8)], ["Shares of latencies"]),
        ([Load(1), Load(2), Load(4)], ["Throughput by clients", "Latency by clients"]),
        (
            [Load(1), Load(2), Load(rate_per_s=1.0), Load(rate_per_s=2.0)],
            [f"{what} by {unit}" for unit in ("clients", "requests per second") for what in ("Throughput", "Latency")],
        ),
    ],
)
def test_plots_are_whole_pictures_and_fit_a_terminal(loads: list[Load], titles: list[str]) -> None:
    charts = charts_of(result(*loads))
    assert [chart.title for chart in charts] == titles
    root = ElementTree.fromstring(as_svg(charts))
    paths = [each for each in root.iter() if "line" in str(each.get("class")).split() and "legend" not in str(each)]
    assert len(paths) == 2 * sum(len(chart.lines) for chart in charts)  # each line, and its colour in the legend
    for chart in charts:
        lines = as_text(chart)
        assert max(map(len, lines[1:])) <= 80
        assert any("\u2800" < character <= "\u28ff" for line in lines for character in line)


def test_a_run_without_gaps_is_drawn_too() -> None:
    single = Result(
        "m", "s", LatencyLimits(), [Measured("1 client", 1, None, BenchRun([sample(0.1, 0.0, 1)], [], 1, 0.1))]
    )
    assert as_text(charts_of(single)[0])


def test_points_are_named_by_their_load() -> None:
    assert [load.name for load in (Load(1), Load(8), Load(rate_per_s=2.5), Load())] == [
        "1 client",
        "8 clients",
        "2.5/s",
        "recorded times",
    ]
    assert Point(Load(1), BenchRun()).run.output_tokens_per_s == 0.0
