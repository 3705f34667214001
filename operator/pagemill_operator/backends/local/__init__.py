"""The local backend: plans as processes on this machine, engines and one gateway in front of them.

The entry point is `backend.LocalBackend`. `supervisor` keeps one process running and reports why it is not ready;
`replicas` and `gateway` define what to run; `child`, `ports`, `state_dir` and `machine` deal with the machine.
"""

from pagemill_operator.backends.local.backend import LocalBackend
from pagemill_operator.backends.local.ports import PortInUse
from pagemill_operator.backends.local.settings import LocalSettings

__all__ = ["LocalBackend", "LocalSettings", "PortInUse"]
