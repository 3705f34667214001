"""The Lease object behind the leader election. Its requests are not fenced: renewing is what the fence is made of."""

from __future__ import annotations

from pagemill_operator.backends.kubernetes.client import ApiError, Client
from pagemill_operator.backends.kubernetes.kinds import LEASE
from pagemill_operator.controller.lease import Record


class KubernetesLease:
    def __init__(self, client: Client, namespace: str, name: str) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name

    async def read(self, timeout_s: float) -> Record | None:
        path = LEASE.path(self._namespace, self._name)
        try:
            return await self._client.request("GET", path, timeout_s=timeout_s)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def create(self, record: Record, timeout_s: float) -> Record:
        body = {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.name,
            "metadata": {"namespace": self._namespace, "name": self._name},
            **record,
        }
        return await self._client.request("POST", LEASE.path(self._namespace), body=body, timeout_s=timeout_s)

    async def replace(self, record: Record, timeout_s: float) -> Record:
        path = LEASE.path(self._namespace, self._name)
        return await self._client.request("PUT", path, body=record, timeout_s=timeout_s)
