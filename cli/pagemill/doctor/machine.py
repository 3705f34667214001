"""Checks of this machine: GPUs and driver, programs for dashboards, and every running `pagemill up`."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pagemill.doctor.findings import CheckResult, ok
from pagemill.top.sources import local_targets
from pagemill_operator.backends.local import LocalSettings
from pagemill_operator.backends.local.state_dir import ScrapeTarget, running
from pagemill_protocol import metrics

QUERY = ("--query-gpu=name,driver_version", "--format=csv,noheader")
TIMEOUT_S = 10.0
OPERATOR_JOB = "pagemill-operator"
WHERE_TO_GET = {
    "prometheus": "Debian: `apt-get install prometheus`; else https://prometheus.io/download",
    "grafana": "https://grafana.com/grafana/download",
}


async def look_at_machine(settings: LocalSettings) -> list[CheckResult]:
    found = [ok("version", f"pagemill {version('pagemill')}"), gpus(settings), *programs(settings)]
    backends = running(settings.runtime_folder)
    if not backends:
        start = "start one with `pagemill up -f FILE`, or name a cluster with --context"
        return [*found, CheckResult("note", "pagemill up", "is not running on this machine", start)]
    processes = ", ".join(str(each.pid) for each in backends)
    found.append(ok("pagemill up", f"is running (process {processes})"))
    targets = local_targets(settings.runtime_folder)
    texts = await asyncio.gather(*(asyncio.to_thread(_scrape, target) for target in targets))
    for target, text in zip(targets, texts, strict=True):
        if "pod" in target["labels"]:
            found += engine(target, text)
        elif target["labels"].get("job") == OPERATOR_JOB:
            found += own_metrics(target, text)
        else:
            found += gateway(text, _gateway_name(target, targets))
    return found


def gpus(settings: LocalSettings) -> CheckResult:
    """Check the GPUs that engines would use, with `nvidia-smi`."""
    program = shutil.which("nvidia-smi", path=settings.environment.get("PATH"))
    if program is None:
        if not settings.gpus:
            return ok("GPUs", "none: engines compute on the CPU")
        return CheckResult(
            "error",
            "GPUs",
            f"{len(settings.gpus)} devices, but nvidia-smi is not on the PATH",
            "install NVIDIA's driver with its tools",
        )
    try:
        shown = subprocess.run([program, *QUERY], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return CheckResult("error", "GPUs", f"nvidia-smi does not respond: {error}", "see `dmesg`; reload the driver")
    if shown.returncode:
        words = " ".join((shown.stdout + shown.stderr).split())[:200]
        return CheckResult(
            "error", "GPUs", f"nvidia-smi fails: {words}", "install the driver for this kernel, and reboot"
        )
    devices = [" driver ".join(part.strip() for part in line.split(",")) for line in shown.stdout.splitlines()]
    return ok("GPUs", "; ".join(devices))


def programs(settings: LocalSettings) -> Iterator[CheckResult]:
    """Check for the programs that `pagemill up --dashboards` starts."""
    path = settings.environment.get("PATH")
    for name, others in (("prometheus", ()), ("grafana", ("grafana-server",))):
        found = next(filter(None, (shutil.which(each, path=path) for each in (name, *others))), None)
        missing = "is not on the PATH; `pagemill up --dashboards` cannot start it"
        yield ok(name, found) if found else CheckResult("note", name, missing, f"install it: {WHERE_TO_GET[name]}")


def engine(target: ScrapeTarget, text: str) -> Iterator[CheckResult]:
    name = target["labels"]["pod"]
    if not text:
        yield CheckResult("error", name, f"{target['targets'][0]} serves no metrics", "see the output of `pagemill up`")
        return
    samples = _samples(text)
    if _value(samples, metrics.ENGINE_READY.name):
        yield ok(name, f"ready, {_value(samples, metrics.KV_CACHE_USAGE.name):.0%} of the KV cache used")
    elif not _value(samples, metrics.ENGINE_SLEEPING.name):
        yield CheckResult("note", name, "is not ready", "wait; the output of `pagemill up` shows the reason")
    versions = {each.labels["version"] for each in samples if each.name == metrics.ENGINE_INFO.name}
    for other in versions - {version("pagemill-engine")}:
        message = f"has version {other}, but this command has {version('pagemill-engine')}"
        yield CheckResult("error", name, message, "restart `pagemill up`")


def _gateway_name(target: ScrapeTarget, targets: list[ScrapeTarget]) -> str:
    """Return `gateway`, with its control port where several `pagemill up` run."""
    is_only = sum("pod" not in each["labels"] and each["labels"].get("job") != OPERATOR_JOB for each in targets) == 1
    return "gateway" if is_only else f"gateway {target['targets'][0]}"


def own_metrics(target: ScrapeTarget, text: str) -> Iterator[CheckResult]:
    """Check the metrics that rules need for objectives and limits; a Prometheus of yours must scrape them, too."""
    address = target["targets"][0]
    if text:
        yield ok(f"metrics of deployments {address}", "are served")
        return
    remedy = "restart `pagemill up`; without them, rules have no objectives and no maximum of replicas"
    yield CheckResult("error", f"metrics of deployments {address}", "are not served", remedy)


def gateway(text: str, name: str = "gateway") -> Iterator[CheckResult]:
    samples = _samples(text)
    if not _value(samples, metrics.GATEWAY_READY.name):
        yield CheckResult("error", name, "accepts no requests", "see the output of `pagemill up`")
        return
    yield ok(name, "ready")
    redis = [each.value for each in samples if each.name == metrics.GATEWAY_REDIS_UP.name]
    if not redis:
        yield ok("Redis", "is not configured: the gateway counts limits alone")
    elif redis[0]:
        yield ok("Redis", "is reachable")
    else:
        yield CheckResult(
            "error", "Redis", "does not respond to the gateway", "start it, or correct `redis.url` in the settings"
        )
    if _value(samples, metrics.GATEWAY_KEYS_FILE_VALID.name, 1.0) == 0:
        yield CheckResult("error", "API keys", "the file is invalid", "correct the line that the gateway's log names")


def _scrape(target: ScrapeTarget) -> str:
    import urllib.request

    try:
        with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=TIMEOUT_S) as response:
            return str(response.read().decode("utf-8", "replace"))
    except OSError:
        return ""


def _samples(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def _value(samples: list[Sample], name: str, missing: float = 0.0) -> float:
    return next((each.value for each in samples if each.name == name), missing)
