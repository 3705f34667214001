"""The running operator: caches, queue, reconcile, leadership, metrics and health.

`operator.Operator` is the entry point, and `leader` what the leading process does. Objects come in through `handlers`
(kopf) into `cache`; `queue` has the deployments that are due; `reconcile` compares wanted with found through the
Kubernetes backend. Decisions are pure and lie elsewhere: `plan`, `autoscaler`, `status`, and `render` and `observe` in
`backends.kubernetes`.
"""
