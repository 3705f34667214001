"""Plans as processes on this machine: engines, and one gateway in front of them.

`backend.LocalBackend` is the door. `supervisor` keeps one process alive and says why it is not ready; `replicas` and
`gateway` say what to run; `child`, `ports`, `state_dir` and `cores` know the machine.
"""

from pagemill_operator.backends.local.backend import LocalBackend
from pagemill_operator.backends.local.ports import PortInUse
from pagemill_operator.backends.local.settings import LocalSettings

__all__ = ["LocalBackend", "LocalSettings", "PortInUse"]
