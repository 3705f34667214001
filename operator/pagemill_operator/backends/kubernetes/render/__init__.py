"""Renders a plan as Kubernetes objects. Pure functions: no clock, disk, network or cluster library.

The entry point is `children.render_children`. Equal input gives equal manifests, so a new operator version that renders
the same manifests restarts nothing. `plan` decides what runs; the controller applies what is rendered here.
"""

from pagemill_operator.backends.kubernetes.render.children import render_children
from pagemill_operator.backends.kubernetes.render.config import render_tokens
from pagemill_operator.backends.kubernetes.render.loader import loader_name

__all__ = ["loader_name", "render_children", "render_tokens"]
