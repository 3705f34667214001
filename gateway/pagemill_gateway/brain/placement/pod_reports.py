"""Converts an engine's state frame to the report that routing uses."""

from __future__ import annotations

import logging

from pagemill_gateway.routing.report import PodReport
from pagemill_gateway.routing.step_time_snapshot import take_snapshot
from pagemill_protocol.state import StateFrame, StepTimeParams
from pagemill_protocol.step_time import StepTimeModel

logger = logging.getLogger("pagemill.gateway.brain")


def read_report(frame: StateFrame, before: PodReport | None, params_before: StepTimeParams | None) -> PodReport:
    """Return the report of a frame. The step-time model of `before` is reused if its parameters are the same."""
    load = frame.load
    is_same = frame.step_time is params_before or frame.step_time == params_before
    model = _model_of(before) if is_same else _model(frame.step_time)
    return PodReport(
        block_size=max(1, frame.block_size),
        max_step_tokens=frame.max_num_batched_tokens,
        max_num_seqs=frame.max_num_seqs,
        num_running=load.num_requests_running,
        num_waiting=load.num_requests_waiting,
        num_tokens_running=load.num_tokens_running,
        num_tokens_waiting=load.num_tokens_waiting,
        num_blocks_total=load.num_blocks_total,
        num_blocks_available=load.num_blocks_free + load.num_blocks_evictable,
        num_blocks_active=load.num_blocks_active,
        step_time=take_snapshot(model, frame.max_num_batched_tokens, load.num_requests_running, load.num_tokens_running)
        if model is not None
        else None,
        num_low_priority=load.num_low_priority_requests,
    )


def with_own_counts(report: PodReport, num_running: int) -> PodReport:
    """Return a stale report's limits with this gateway's own counts as its load."""
    model = _model_of(report)
    return report._replace(
        step_time=take_snapshot(model, report.max_step_tokens, num_running, 0) if model is not None else None,
        num_running=num_running,
        num_waiting=0,
        num_tokens_running=0,
        num_tokens_waiting=0,
        num_blocks_total=0,
        num_blocks_available=0,
        num_blocks_active=0,
        num_low_priority=0,
    )


def _model_of(report: PodReport | None) -> StepTimeModel | None:
    return report.step_time.model if report is not None and report.step_time is not None else None


def _model(params: StepTimeParams) -> StepTimeModel | None:
    """Return the step-time model; `None` if the engine has not measured any step or the parameters are invalid."""
    try:
        model = StepTimeModel.from_params(params)
    except ValueError as error:
        logger.warning("an engine's step time cannot be used: %s", error)
        return None
    return model if model.known else None
