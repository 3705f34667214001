"""Every metric of the operator: names that controller-runtime's dashboards use, and a few of its own. Data only."""

from __future__ import annotations

from pagemill_operator.backends.deployment_metrics import DEPLOYMENT_METRICS
from pagemill_protocol.metrics import MetricSpec

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_READY_SECONDS = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_START_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

RECONCILES = MetricSpec(
    "controller_runtime_reconcile",
    "counter",
    "Finished reconciles by result: success, requeue (reconciled again soon) or error.",
    ("controller", "result"),
)
RECONCILE_ERRORS = MetricSpec(
    "controller_runtime_reconcile_errors", "counter", "Reconciles that failed and are retried.", ("controller",)
)
RECONCILE_SECONDS = MetricSpec(
    "controller_runtime_reconcile_time_seconds", "histogram", "Duration of a reconcile.", ("controller",), _SECONDS
)
DEPTH = MetricSpec("workqueue_depth", "gauge", "Deployments that are due for a reconcile.", ("name",))
ADDS = MetricSpec("workqueue_adds", "counter", "Deployments that were put into the queue.", ("name",))
RETRIES = MetricSpec("workqueue_retries", "counter", "Deployments that were put back after a failure.", ("name",))
QUEUE_SECONDS = MetricSpec(
    "workqueue_queue_duration_seconds",
    "histogram",
    "How long a due deployment waited for a worker.",
    ("name",),
    _SECONDS,
)
WORK_SECONDS = MetricSpec(
    "workqueue_work_duration_seconds", "histogram", "How long a worker reconciled a deployment.", ("name",), _SECONDS
)
REQUESTS = MetricSpec(
    "rest_client_requests",
    "counter",
    "Requests to the API server by code (an HTTP status, error or timeout) and method.",
    ("code", "method"),
)
LEADS = MetricSpec("leader_election_master_status", "gauge", "1 for the operator that leads, else 0.", ("name",))
DEPLOYMENTS = MetricSpec("pagemill_operator_deployments", "gauge", "LLMDeployments that are served.")
WRITES = MetricSpec("pagemill_operator_writes", "counter", "Objects written, by kind and verb.", ("kind", "verb"))
READY_SECONDS = MetricSpec(
    "pagemill_operator_ready_duration_seconds",
    "histogram",
    "Time until a deployment is ready, from its creation or from when it last stopped being ready.",
    (),
    _READY_SECONDS,
)
COLD_START_SECONDS = MetricSpec(
    "pagemill_cold_start_phase_seconds",
    "histogram",
    "Starts of engine pods by phase: schedule (until the pod has a node), pull (until its container runs), boot (until "
    "the engine reads the model, and until the kubelet sees it ready), load, warm, first_token; total is the sum of "
    "them. For pods that slept: wake, from the call until a token was generated again.",
    ("phase",),
    _START_SECONDS,
)
WATCH_AGE_SECONDS = MetricSpec(
    "pagemill_operator_watch_age_seconds",
    "gauge",
    "Time since the quietest watch of a kind last received anything, bookmarks included.",
    ("resource",),
)
LOOP_LAG_SECONDS = MetricSpec(
    "pagemill_operator_loop_lag_seconds", "gauge", "How late the event loop's latest iteration was."
)
OPERATOR_METRICS = [
    RECONCILES,
    RECONCILE_ERRORS,
    RECONCILE_SECONDS,
    DEPTH,
    ADDS,
    RETRIES,
    QUEUE_SECONDS,
    WORK_SECONDS,
    REQUESTS,
    LEADS,
    DEPLOYMENTS,
    WRITES,
    READY_SECONDS,
    COLD_START_SECONDS,
    WATCH_AGE_SECONDS,
    LOOP_LAG_SECONDS,
    *DEPLOYMENT_METRICS,
]
