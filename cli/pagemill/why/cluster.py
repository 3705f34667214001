"""Reads the operator's records from a ConfigMap in the LLMDeployment's namespace, with the user's rights.

Only the API server must be reachable: no port forward to the operator's pod is needed.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pagemill.cluster import HELP, ClusterError, connect
from pagemill.why.sources import FoundRecords, WhyError
from pagemill_kube.errors import ApiError, Unreachable
from pagemill_operator.autoscaler.records import Record, decode_record
from pagemill_operator.backends.kubernetes.kinds import CONFIG_MAP, LLM_DEPLOYMENT
from pagemill_operator.backends.kubernetes.render.records import lines_of, records_name
from pagemill_operator.backends.kubernetes.snapshot import Manifest


async def from_cluster(name: str, namespace: str | None, context: str | None, kubeconfig: Path | None) -> FoundRecords:
    """Return the records of the deployment. Raises `WhyError` if there are none."""
    try:
        client, chosen, default_namespace = await connect(context, kubeconfig)
    except ClusterError as error:
        raise WhyError(str(error)) from None
    namespace = namespace or default_namespace
    try:
        kept = await client.find(CONFIG_MAP, namespace, records_name(name))
        lines = lines_of(kept) if kept is not None else []
        if not lines:
            deployment = await client.find(LLM_DEPLOYMENT, namespace, name)
            raise WhyError(_why_none(deployment, name, namespace))
    except ApiError as error:
        remedy = f"; ask for the role `view` in namespace {namespace}" if error.status in (401, 403) else ""
        raise WhyError(f"the API server of context {chosen} refuses: {error}{remedy}") from None
    except Unreachable as error:
        raise WhyError(f"the API server of context {chosen} cannot be reached: {error}; {HELP}") from None
    finally:
        await client.close()
    where = f"the operator (ConfigMap {namespace}/{records_name(name)}, context {chosen})"
    return FoundRecords([_record(line, where) for line in lines], where)


def _why_none(deployment: Manifest | None, name: str, namespace: str) -> str:
    if deployment is None:
        return f"there is no LLMDeployment {name} in namespace {namespace}; `kubectl get llmd -A` lists all"
    key, autoscaling = f"{namespace}/{name}", deployment.get("spec", {}).get("autoscaling")
    if autoscaling is None:
        return f"{key} has no spec.autoscaling: its number of replicas is spec.replicas, and there are no decisions"
    if autoscaling.get("mode") == "External":
        return f"{key} has spec.autoscaling.mode External: another autoscaler decides (see `kubectl get hpa`)"
    return (
        f"no decision about {key} is recorded yet; if that lasts, see `kubectl describe llmd {name} -n {namespace}` "
        "and the operator's log"
    )


def _record(line: str, where: str) -> Record:
    try:
        return decode_record(line.encode())
    except (msgspec.DecodeError, ValueError) as error:
        raise WhyError(
            f"{where} has records that this version cannot read: {error}; use the pagemill command of the operator's "
            "version"
        ) from None
