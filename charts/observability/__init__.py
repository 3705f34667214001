"""Recording rules, alerts and dashboards as typed Python; `charts/generate.py` writes them into the chart's `files/`.

`promql` builds parts of expressions, `rules` and `alerts` are lists of them, and `dashboards` makes Grafana's JSON with
Grafana's own builders. Nothing here runs in a cluster.
"""
