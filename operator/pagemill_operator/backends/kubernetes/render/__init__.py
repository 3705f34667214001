"""A plan as Kubernetes objects, a pure function: no clock, no disk, no network, no cluster library.

`children.render_children` is the door. Equal input gives equal manifests, so a new version of the operator that renders
the same restarts nothing. Neighbours: `plan` decides what runs, the controller applies what stands here.
"""

from pagemill_operator.backends.kubernetes.render.children import render_children
from pagemill_operator.backends.kubernetes.render.config import render_tokens
from pagemill_operator.backends.kubernetes.render.loader import loader_name

__all__ = ["loader_name", "render_children", "render_tokens"]
