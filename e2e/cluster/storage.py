"""A provisioner that gives every claim of the cluster's storage class a folder of this machine.

    python3 storage.py KUBECONFIG

It does what tests need of a cloud's volume driver: it creates a PersistentVolume for a claim that names the class, and
removes volume and folder once the claim is gone. Capacity is not enforced.
"""

from __future__ import annotations

import http.client
import json
import shutil
import ssl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from layout import PROVISIONER, STORAGE_CLASS, VOLUMES

CLAIMS = "/api/v1/persistentvolumeclaims"
VOLUMES_PATH = "/api/v1/persistentvolumes"
RETRY_S = 0.5
IDLE_TIMEOUT_S = 60


class Api:
    """A client for the few API requests that the provisioner needs, with JSON bodies."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        self._address = urlsplit(cluster["server"]).netloc
        self._headers = {
            "Authorization": f"Bearer {config['users'][0]['user']['token']}",
            "Content-Type": "application/json",
        }
        self._tls = ssl.create_default_context(cafile=cluster["certificate-authority"])

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        response = self._send(method, path, body)
        return response.status, json.loads(response.read())

    def watch(self, path: str, version: str) -> Iterator[dict[str, Any]]:
        query = f"watch=true&resourceVersion={version}&timeoutSeconds={IDLE_TIMEOUT_S // 2}"
        response = self._send("GET", f"{path}?{query}", None)
        while line := response.readline():
            yield json.loads(line)

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        connection = http.client.HTTPSConnection(self._address, context=self._tls, timeout=IDLE_TIMEOUT_S)
        connection.request(method, path, None if body is None else json.dumps(body), self._headers)
        return connection.getresponse()


def main() -> None:
    api = Api(Path(sys.argv[1]))
    while True:
        try:
            _follow(api)
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
            sys.stderr.write(f"storage: {error!r}\n")  # the API server may be down: tests stop it
            sys.stderr.flush()
        time.sleep(RETRY_S)


def _follow(api: Api) -> None:
    """Process all claims, then every change until the connection ends."""
    _, listed = api.request("GET", CLAIMS)
    claims = {claim["metadata"]["uid"]: claim for claim in listed["items"]}
    for claim in claims.values():
        _provide(api, claim)
    _, volumes = api.request("GET", VOLUMES_PATH)
    for volume in volumes["items"]:
        if _is_ours(volume) and volume["spec"]["claimRef"]["uid"] not in claims:
            _remove(api, volume["metadata"]["name"])
    for event in api.watch(CLAIMS, listed["metadata"]["resourceVersion"]):
        if event["type"] in ("ADDED", "MODIFIED"):
            _provide(api, event["object"])
        elif event["type"] == "DELETED" and _is_for_us(event["object"]):
            _remove(api, _name(event["object"]))
        elif event["type"] == "ERROR":
            return


def _provide(api: Api, claim: dict[str, Any]) -> None:
    if not _is_for_us(claim) or claim["spec"].get("volumeName"):
        return
    folder = VOLUMES / _name(claim)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o777)  # pods run as any user
    status, answer = api.request("POST", VOLUMES_PATH, volume_for(claim, folder))
    if status not in (201, 409):
        raise ValueError(f"volume for {claim['metadata']['name']}: {answer.get('message')}")


def volume_for(claim: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the volume of a claim, bound to it from the start."""
    metadata, spec = claim["metadata"], claim["spec"]
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {
            "name": _name(claim),
            "annotations": {"pv.kubernetes.io/provisioned-by": PROVISIONER},
        },
        "spec": {
            "accessModes": spec["accessModes"],
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
            "hostPath": {"path": str(folder), "type": "Directory"},
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": spec["storageClassName"],
            "volumeMode": "Filesystem",
        },
    }


def _remove(api: Api, name: str) -> None:
    api.request("DELETE", f"{VOLUMES_PATH}/{name}")
    shutil.rmtree(VOLUMES / name, ignore_errors=True)


def _is_for_us(claim: dict[str, Any]) -> bool:
    return bool(claim["spec"].get("storageClassName") == STORAGE_CLASS)


def _is_ours(volume: dict[str, Any]) -> bool:
    return bool((volume["metadata"].get("annotations") or {}).get("pv.kubernetes.io/provisioned-by") == PROVISIONER)


def _name(claim: dict[str, Any]) -> str:
    return f"pvc-{claim['metadata']['uid']}"


if __name__ == "__main__":
    main()
