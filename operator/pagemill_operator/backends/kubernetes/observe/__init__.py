"""Turns raw Kubernetes objects into an observation and a status. Pure functions; the reported fault is chosen here.

The entry points are `observation.observe` and `body.status_body`. Each other file reads one source: the pods'
containers, the scheduler's messages, refused creations, refused applies. `status` turns an observation into
conditions; the controller writes them.
"""

from pagemill_operator.backends.kubernetes.observe.body import status_body, status_wait_s
from pagemill_operator.backends.kubernetes.observe.observation import observe

__all__ = ["observe", "status_body", "status_wait_s"]
