"""The Kubernetes backend: plans as Kubernetes objects.

`render` turns a plan into manifests and `observe` turns objects into an observation; both are pure. `snapshot` defines
the types that they share with the controller.
"""
