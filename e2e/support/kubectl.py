"""Runs kubectl for the tests: the real program, one context, output as text or as parsed JSON.

It does not depend on Pagemill; `deployments` adds the helpers for LLMDeployments.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, replace
from typing import Any

REQUEST_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Kubectl:
    """kubectl for one cluster; `ok` and `json` fail the test if kubectl fails."""

    binary: str
    kubeconfig: str
    context: str = ""
    namespace: str = ""

    def within(self, namespace: str) -> Kubectl:
        """Return a kubectl for another namespace of the same cluster."""
        return replace(self, namespace=namespace)

    def argv(self, *arguments: str) -> list[str]:
        where = ["--kubeconfig", self.kubeconfig]
        where += ["--context", self.context] if self.context else []
        where += ["--namespace", self.namespace] if self.namespace else []
        return [self.binary, *where, *arguments]

    def run(
        self, *arguments: str, stdin: object = None, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        text = stdin if isinstance(stdin, str | None) else json.dumps(stdin)
        return subprocess.run(self.argv(*arguments), input=text, capture_output=True, text=True, timeout=timeout_s)

    def ok(self, *arguments: str, stdin: object = None, timeout_s: float = REQUEST_TIMEOUT_S) -> str:
        done = self.run(*arguments, stdin=stdin, timeout_s=timeout_s)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}{done.stdout[-2000:]}"
        return done.stdout

    def json(self, *arguments: str, stdin: object = None) -> Any:
        return json.loads(self.ok(*arguments, "-o", "json", stdin=stdin))

    def items(self, kinds: str, *arguments: str) -> list[dict[str, Any]]:
        """Return the objects of these kinds, such as `"pods"` or `"secrets,configmaps"`."""
        found: list[dict[str, Any]] = self.json("get", kinds, *arguments)["items"]
        return found

    def apply(self, *documents: object) -> None:
        """Create or change objects as their owner would, with validation of all fields."""
        listed = {"apiVersion": "v1", "kind": "List", "items": list(documents)}
        self.ok("apply", "--validate=strict", "-f", "-", stdin=listed)

    def wait(self, target: str, condition: str, timeout_s: float = 120) -> None:
        """Run `kubectl wait --for=CONDITION TARGET`: `condition=Ready`, `delete`, `jsonpath={.a}=b` or `create`."""
        arguments = ["wait", f"--for={condition}", f"--timeout={timeout_s:.0f}s", *target.split()]
        done = self.run(*arguments, timeout_s=timeout_s + REQUEST_TIMEOUT_S)
        gone = condition == "delete" and "NotFound" in done.stderr
        assert done.returncode == 0 or gone, f"kubectl {' '.join(arguments)}: {done.stderr}"

    def delete(self, target: str, *arguments: str, timeout_s: float = 120) -> None:
        """Delete the objects and wait until they are gone."""
        self.ok("delete", *target.split(), *arguments, f"--timeout={timeout_s:.0f}s", timeout_s=timeout_s + 30)

    def evict(self, pod: str) -> subprocess.CompletedProcess[str]:
        """Ask the Eviction API, as a node's drain does; a disruption budget may refuse."""
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"
        return self.run("create", "--raw", path, "-f", "-", stdin=eviction)
