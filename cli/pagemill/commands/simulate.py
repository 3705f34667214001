"""`pagemill simulate`: a deployment's replicas under traffic on a virtual clock, scaled by its autoscaler or by others.

Parses and checks options only; `pagemill.simulation` does the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagemill.planning.options import Accelerators, File, Fit, Format, MeasureS, Model, PricesPerHour, Tpot, Ttft


def simulate(
    file: File = None,
    name: Annotated[str | None, typer.Option(help="Which LLMDeployment of the file, if it has several.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Recorded traffic: a trace of Azure or BurstGPT, or the JSON lines of a gateway's log."),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="Generated traffic: steady, ramp, step, burst, sine, diurnal, weekly, silent-nights, flash-crowd, "
            "clusters, retrieval, beside-batch or agentic, with parameters as ramp:from_rate=2,to_rate=10."
        ),
    ] = None,
    rps: Annotated[float | None, typer.Option(help="Requests per second of a workload that has one rate.")] = None,
    duration: Annotated[
        str | None, typer.Option(help="How long a workload lasts that has one duration, such as 15m.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Requests of a trace to take; the first ones.")] = None,
    speedup: Annotated[
        float | None, typer.Option(help="Divide the gaps of a trace: 2 makes twice the rate of it.")
    ] = None,
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Leave out broken lines of a trace, and count them.")
    ] = False,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="What scales: pagemill (the file's own policy), Demand, TargetTracking, kubeai, hpa, keda-epp, wva, "
            "wva-hpa, knative, dynamo, fixed, informed or clairvoyant, with parameters as fixed:replicas=4; again for "
            "several (default: pagemill)."
        ),
    ] = None,
    min_replicas: Annotated[int | None, typer.Option(min=0, help="In place of autoscaling.minReplicas.")] = None,
    max_replicas: Annotated[int | None, typer.Option(min=1, help="In place of autoscaling.maxReplicas.")] = None,
    start_replicas: Annotated[
        int | None, typer.Option(min=0, help="Ready when traffic begins (default: as few as may be).")
    ] = None,
    ttft: Ttft = None,
    tpot: Tpot = None,
    cold_start: Annotated[
        str | None,
        typer.Option(help="What a start takes: 45s, or schedule=1s,pull=4s,load=30s,warm=5s (the default)."),
    ] = None,
    crash_mean: Annotated[
        str | None, typer.Option(help="Mean time until a pod crashes, such as 6h (default: none does).")
    ] = None,
    accelerator: Accelerators = None,
    price_per_hour: PricesPerHour = None,
    fit: Fit = None,
    model: Model = None,
    measure_s: MeasureS = 10.0,
    fast: Annotated[
        bool,
        typer.Option(
            "--fast", help="Fast-forward between decisions: an hour of a hundred pods in minutes, within 3 %."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of traffic, starts and crashes: the same one gives the same figures.")] = 0,
    report: Annotated[
        Path | None, typer.Option(help="Folder for a page with plots, and the plots as PNG where matplotlib is there.")
    ] = None,
    format: Format = "table",
) -> None:
    """Simulate a deployment's scaling under traffic, on a virtual clock."""
    from pagemill.planning.choosing import load_one, slo_of, subjects_of, tell
    from pagemill.planning.errors import PlanError
    from pagemill.planning.prices import price_of, prices_of
    from pagemill.planning.replica import Means, engine_config, replica_of
    from pagemill.printable import printable
    from pagemill.simulation.fleet import Asked, bounds_of, fleet_of
    from pagemill.simulation.policies import Offered, own_slo, policies_of
    from pagemill.simulation.running import report_folder, run
    from pagemill.simulation.table import Simulated, as_json, as_table
    from pagemill.simulation.traffic import Traffic, usual_lengths, workload_of
    from pagemill_simulator.fleet.figures import figures_of

    try:
        loaded = load_one(file, name, model)
        found, section = loaded.plan, loaded.deployment.spec.autoscaling
        asked = Asked(min_replicas, max_replicas, start_replicas, cold_start, crash_mean)
        bounds = bounds_of(loaded, asked)
        slo = slo_of(own_slo(section), ttft, tpot, None)
        traffic, generator = workload_of(Traffic(trace, workload, rps, duration, limit, speedup, skip_broken), seed)
        prices = prices_of(price_per_hour or [])
        subjects = subjects_of([(model, loaded)], accelerator or [], fit)
        simulated = []
        for subject in subjects:
            means = Means(fit, subject.accelerator, model, measure_s, tell)
            config = engine_config(found, means)
            replica = replica_of(found, means, *usual_lengths(traffic, config.max_model_len))
            settings = fleet_of(found, config, replica, bounds, slo, asked, seed)
            offered = Offered(traffic, generator, replica.shape)
            policies = policies_of(policy or [], section, settings, slo, offered)
            folder = report_folder(report, subject.device, len(subjects))
            figures = [
                figures_of(each, slo_ttft_ms=slo.ttft_ms, slo_tpot_ms=slo.tpot_ms)
                for each in run(traffic, settings, policies, folder, fast=fast)
            ]
            simulated.append(Simulated(replica, settings, figures, price_of(subject, prices)))
    except PlanError as error:
        typer.echo(printable(f"error: {error}"), err=True)
        raise typer.Exit(2) from None
    show = as_json if format == "json" else as_table
    typer.echo(show(found, traffic, slo, simulated))
