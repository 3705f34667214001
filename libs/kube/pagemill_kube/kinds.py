"""A kind of object and its paths in the API."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    name: str
    """Name in manifests, such as `Deployment`."""
    group: str
    """Empty for the core group."""
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return a path such as `/apis/apps/v1/namespaces/default/deployments/chat-engine`; all namespaces without
        one."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        scope = ["namespaces", namespace] if namespace else []
        return "/".join(part for part in (root, *scope, self.plural, name, subresource) if part)
