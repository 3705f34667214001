"""The running operator: caches, queue, reconciles, leadership, metrics and health.

The entry point is `operator.Operator`; `leader` is the work of the leading process. `handlers` (kopf) put objects into
`cache`; `queue` holds the deployments that are due; `reconcile` compares wanted with found objects through the
Kubernetes backend. Decisions are pure functions elsewhere: `plan`, `autoscaler`, `status`, and `render` and `observe`
in `backends.kubernetes`.
"""
