"""The running operator: caches, queue, reconcile, leadership and what it tells about itself.

`operator.Operator` is the door. Objects come in through `handlers` (kopf) into `cache`; `queue` says whose turn it is;
`reconcile` compares wanted with found through the Kubernetes backend. Decisions are pure and lie elsewhere: `plan`,
`backends.kubernetes.render` and `observe`, `status`.
"""
