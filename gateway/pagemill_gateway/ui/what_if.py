"""Predicts the latencies of other replicas, rates and lengths, for the page `/ui`.

The prediction is the one by which the autoscaler decides and `pagemill plan` plans (`pagemill_protocol.report`), from
the step times that this gateway's engines report now. What is not asked for is as it was measured.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import orjson

from pagemill_gateway.ports import WhatIf
from pagemill_protocol.errors import PagemillError, invalid_field, show
from pagemill_protocol.report.load import DeploymentLoad
from pagemill_protocol.report.prediction import OfferedLoad, Prediction, Predictor
from pagemill_protocol.report.shape import shape_of
from pagemill_routing.brain.reading import Reader

NEIGHBOURS = range(-1, 3)
"""The numbers of replicas that are shown besides the asked one, as differences."""
PRECISION = 0.05
"""The relative precision of the most requests per second."""
USUAL = WhatIf("", 1, 1.0, 512, 0, 128)
"""What is assumed where nothing was measured yet."""


async def answer_what_if(reader: Reader, question: WhatIf) -> bytes:
    """Return the answer as JSON. Raises `PagemillError` 404 or 400."""
    deployment = reader.registry.deployments.get(question.deployment)
    load = next((each for each in reader.load() if each.key == question.deployment), None)
    if deployment is None or load is None:
        known = ", ".join(reader.registry.deployments) or "none"
        raise PagemillError(
            f"deployment: {show(question.deployment)} is not known. Ask for one of: {known}.",
            status=404,
            param="deployment",
            code="deployment_not_found",
        )
    now = measured(load)
    asked = now._replace(**{name: value for name, value in question._asdict().items() if value is not None})
    _check(asked, min((each.max_model_len for each in deployment.records if each.max_model_len > 0), default=0))
    # In a thread, because the search for the highest rates takes longer than the event loop may be kept.
    rows, unknown = await asyncio.to_thread(_predict, load, asked)
    return orjson.dumps({"asked": asked._asdict(), "now": now._asdict(), "unknown": unknown, "rows": rows})


def measured(load: DeploymentLoad) -> WhatIf:
    """Return the deployment as it is now."""
    lengths, usual = load.lengths, USUAL
    prompt, computed = lengths.prompt.mean(), lengths.computed.mean()
    cached = max(0.0, prompt - computed) if prompt is not None and computed is not None else 0.0
    return WhatIf(
        load.key,
        load.pods.ready or usual.replicas,
        round(load.arrivals.requests_per_s, 3) or usual.requests_per_s,
        usual.prompt_tokens if prompt is None else max(1, round(prompt)),
        round(cached),
        usual.output_tokens if (output := lengths.output.mean()) is None else max(1, round(output)),
    )


def _check(asked: WhatIf, max_model_len: int) -> None:
    """Raise `PagemillError` 400 for lengths that no request can have."""
    prompt, cached, output = asked.prompt_tokens or 0, asked.cached_tokens or 0, asked.output_tokens or 0
    if cached >= prompt:
        raise invalid_field(
            "cached_tokens", f"cached_tokens: {cached} must be less than the {prompt} tokens of the prompt."
        )
    if 0 < max_model_len < prompt + output:
        raise invalid_field(
            "prompt_tokens",
            f"prompt_tokens and output_tokens: {prompt} + {output} tokens are more than the model takes. Ask for at "
            f"most {max_model_len} together.",
        )


def _predict(load: DeploymentLoad, asked: WhatIf) -> tuple[list[dict[str, Any]], str]:
    """Return a row for each number of replicas, or why nothing is known."""
    shape = shape_of(load.engines)
    if shape is None:
        return [], "No engine reports its size and speed now. Wait until one is ready, or use `pagemill plan`."
    try:
        predictor = Predictor(shape, asked.percentile / 100)
    except ValueError:
        return [], "The engines report impossible step times. Restart them."
    if not predictor.known:
        return [], "The engines have measured no step times yet. Send a request, and ask again."
    prompt, replicas = asked.prompt_tokens or 0, asked.replicas or 0
    computed = max(1, prompt - (asked.cached_tokens or 0))
    offered = OfferedLoad(asked.requests_per_s or 0.0, prompt, computed, computed, asked.output_tokens or 0)
    numbers = [number for difference in NEIGHBOURS if (number := replicas + difference) > 0]
    return [_row(predictor, offered, number) for number in numbers], ""


def _row(predictor: Predictor, offered: OfferedLoad, replicas: int) -> dict[str, Any]:
    found = predictor.predict(offered, replicas)
    return {
        "replicas": replicas,
        "ttft_ms": round(found.ttft_ms, 1) if math.isfinite(found.ttft_ms) else None,
        "tpot_ms": round(found.tpot_ms, 2) if math.isfinite(found.tpot_ms) else None,
        "limit": found.limit,
        "most_requests_per_s": round(predictor.highest_rate(offered, replicas, _is_served, PRECISION), 3),
    }


def _is_served(prediction: Prediction) -> bool:
    return math.isfinite(prediction.ttft_ms) and math.isfinite(prediction.tpot_ms)
