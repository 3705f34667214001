"""Forwards a local port to a Service of another cluster with `kubectl port-forward`, for as long as its pod answers."""

from __future__ import annotations

import atexit
import subprocess
import urllib.error
import urllib.request

from support.kubectl import Kubectl

_open: dict[tuple[str, str], tuple[subprocess.Popen[str], str]] = {}


def forwarded(kubectl: Kubectl, target: str) -> str:
    """Return the URL of `target`'s port 80 on this machine."""
    key = (kubectl.namespace, target)
    known = _open.get(key)
    if known is not None and known[0].poll() is None and _answers(known[1]):
        return known[1]
    if known is not None:
        known[0].kill()
    argv = kubectl.argv("port-forward", "--address=127.0.0.1", target, ":80")
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    atexit.register(process.kill)
    assert process.stdout is not None
    line = process.stdout.readline()  # The line is, for example: Forwarding from 127.0.0.1:40321 -> 8080
    assert line.startswith("Forwarding from"), f"kubectl port-forward {target}: {line}"
    url = f"http://{line.split()[2]}"
    _open[key] = (process, url)
    return url


def _answers(url: str) -> bool:
    """Whether the port gives any answer. A forwarded port outlives its pod, for example that of an earlier release."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
