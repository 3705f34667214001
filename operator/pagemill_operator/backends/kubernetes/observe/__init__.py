"""From raw Kubernetes objects to an observation and a status, pure: the row of the fault matrix is decided here.

`observation.observe` and `body.status_body` are the doors. Each file knows one kind of witness: pods' containers, the
scheduler, refused creations, refused applies. Neighbours: `status` makes conditions of it, the controller writes them.
"""

from pagemill_operator.backends.kubernetes.observe.body import load_wait_s, status_body
from pagemill_operator.backends.kubernetes.observe.observation import observe

__all__ = ["load_wait_s", "observe", "status_body"]
