"""Plans as Kubernetes objects.

`render` turns a plan into manifests and `observe` objects into what is known of it, both pure; `snapshot` is what they
and the controller share.
"""
