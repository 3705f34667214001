"""`pagemill simulate`: simulates a deployment's scaling under traffic, by its own autoscaler or by others.

This module parses the options; `pagemill.simulation` does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from pagemill.command import CommandWithOptions
from pagemill.planning.options import (
    Accelerators,
    File,
    Fit,
    Format,
    MeasureS,
    Model,
    PricesPerHour,
    TokensPerDecode,
    Tpot,
    Ttft,
)


@dataclass(frozen=True)
class SimulateCommand(CommandWithOptions):
    """Simulate the scaling of a deployment under traffic, on a virtual clock."""

    file: File = None
    name: Annotated[str | None, typer.Option(help="Name of the LLMDeployment, if the file has several.")] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            help="File with recorded traffic: a trace of Azure or BurstGPT, or the JSON lines of a gateway's log."
        ),
    ] = None
    workload: Annotated[
        str | None,
        typer.Option(
            help="Generator of traffic: steady, ramp, step, burst, sine, diurnal, weekly, silent-nights, flash-crowd, "
            "clusters, retrieval, beside-batch or agentic, with parameters such as ramp:from_rate=2,to_rate=10."
        ),
    ] = None
    rps: Annotated[float | None, typer.Option(help="Requests per second, for workloads with the parameter `rate`.")] = (
        None
    )
    duration: Annotated[
        str | None,
        typer.Option(help="Duration, such as 15m, for workloads with the parameter `duration_s`."),
    ] = None
    limit: Annotated[
        int | None, typer.Option(min=1, help="Simulate only this many requests of the trace, from its start.")
    ] = None
    speedup: Annotated[
        float | None, typer.Option(help="Divide the times between the trace's requests by this: 2 doubles the rate.")
    ] = None
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Skip and count lines of the trace that cannot be read.")
    ] = False
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Scaling policy to simulate: pagemill (the file's own policy), Demand, TargetTracking, kubeai, hpa, "
            "keda-epp, wva, wva-hpa, knative, dynamo, fixed, informed or clairvoyant, with parameters such as "
            "fixed:replicas=4. May be repeated to compare several (default: pagemill)."
        ),
    ] = None
    min_replicas: Annotated[
        int | None, typer.Option(min=0, help="Minimum number of replicas (default: autoscaling.minReplicas).")
    ] = None
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of replicas (default: autoscaling.maxReplicas).")
    ] = None
    start_replicas: Annotated[
        int | None, typer.Option(min=0, help="Number of ready replicas when traffic begins (default: the minimum).")
    ] = None
    ttft: Ttft = None
    tpot: Tpot = None
    cold_start: Annotated[
        str | None,
        typer.Option(
            help="Duration of a replica's start, such as 45s, or of its phases (default: "
            "schedule=1s,pull=4s,load=30s,warm=5s)."
        ),
    ] = None
    crash_mean: Annotated[
        str | None, typer.Option(help="Mean time until a pod crashes, such as 6h (default: pods do not crash).")
    ] = None
    accelerator: Accelerators = None
    price_per_hour: PricesPerHour = None
    fit: Fit = None
    tokens_per_decode: TokensPerDecode = None
    model: Model = None
    measure_s: MeasureS = 10.0
    fast: Annotated[
        bool,
        typer.Option(
            "--fast",
            help="Approximate the steps between decisions: an hour of a hundred pods takes minutes; figures differ by "
            "up to 3 %, and by more where windows or states are evicted.",
        ),
    ] = False
    seed: Annotated[
        int, typer.Option(help="Seed for traffic, starts and crashes; the same seed gives the same figures.")
    ] = 0
    report: Annotated[
        Path | None,
        typer.Option(help="Write an HTML page with plots to this folder, and PNG files if matplotlib is installed."),
    ] = None
    format: Format = "table"

    def run(self) -> None:
        from pagemill.planning.choosing import load_one, show_progress, slo_of, subjects_of
        from pagemill.planning.errors import PlanError
        from pagemill.planning.prices import check_prices, price_of, prices_of
        from pagemill.planning.replica import ReplicaOptions, engine_config, per_decode_of, replica_of
        from pagemill.printable import printable
        from pagemill.simulation.fleet import FleetOptions, bounds_of, fleet_of
        from pagemill.simulation.policies import Offered, own_slo, policies_of
        from pagemill.simulation.running import report_folder, run
        from pagemill.simulation.table import Simulated, as_json, as_table
        from pagemill.simulation.traffic import Traffic, usual_lengths, workload_of
        from pagemill_simulator.fleet.figures import figures_of

        try:
            loaded = load_one(self.file, self.name, self.model)
            found, section = loaded.plan, loaded.deployment.spec.autoscaling
            fleet_options = FleetOptions(
                self.min_replicas, self.max_replicas, self.start_replicas, self.cold_start, self.crash_mean
            )
            bounds = bounds_of(loaded, fleet_options)
            slo = slo_of(own_slo(section), self.ttft, self.tpot, None)
            traffic, generator = workload_of(
                Traffic(self.trace, self.workload, self.rps, self.duration, self.limit, self.speedup, self.skip_broken),
                self.seed,
            )
            prices = prices_of(self.price_per_hour or [])
            subjects = subjects_of([(self.model, loaded)], self.accelerator or [], self.fit)
            check_prices(subjects, prices)
            simulated, per_decode = [], per_decode_of(self.tokens_per_decode)
            for subject in subjects:
                options = ReplicaOptions(
                    self.fit, subject.accelerator, self.model, self.measure_s, show_progress, per_decode
                )
                config = engine_config(found, options)
                replica = replica_of(found, options, *usual_lengths(traffic, config.max_model_len))
                if self.fast and replica.shape.step_time.stages > 1:
                    raise PlanError("--fast: knows no stages (pipelineParallel); leave it out")
                if self.fast and replica.shape.step_time.tokens_per_decode > 1:
                    raise PlanError("--fast: samples one token for each decode; leave it out, or --tokens-per-decode")
                settings = fleet_of(found, config, replica, bounds, slo, fleet_options, self.seed)
                offered = Offered(traffic, generator, replica.shape)
                policies = policies_of(self.policy or [], section, settings, slo, offered)
                folder = report_folder(self.report, subject.device, len(subjects))
                figures = [
                    figures_of(each, slo_ttft_ms=slo.ttft_ms, slo_tpot_ms=slo.tpot_ms)
                    for each in run(traffic, settings, policies, folder, fast=self.fast)
                ]
                simulated.append(Simulated(replica, settings, figures, price_of(subject, prices, len(replica.ranks))))
        except PlanError as error:
            typer.echo(printable(f"error: {error}"), err=True)
            raise typer.Exit(2) from None
        show = as_json if self.format == "json" else as_table
        typer.echo(show(found, traffic, slo, simulated))
