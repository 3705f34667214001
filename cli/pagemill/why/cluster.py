"""Records of an operator: a ConfigMap beside the LLMDeployment, read with the user's own rights to the namespace.

Nothing reaches the operator's pod: neither a port forward nor a way through its network policy is needed.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
from kubernetes.aio import config as credentials
from kubernetes.aio.client import Configuration

from pagemill.why.sources import Found, WhyError
from pagemill_operator.autoscaler.records import Record, decode_record
from pagemill_operator.backends.kubernetes.client import ApiError, Client, Unreachable
from pagemill_operator.backends.kubernetes.kinds import CONFIG_MAP, LLM_DEPLOYMENT
from pagemill_operator.backends.kubernetes.render.records import lines_of, records_name
from pagemill_operator.backends.kubernetes.snapshot import Manifest

HELP = "run `pagemill why` where `kubectl get llmd` works, or name a file with --kubeconfig"


async def from_cluster(name: str, namespace: str | None, context: str | None, kubeconfig: Path | None) -> Found:
    """Raises `WhyError`."""
    configuration, chosen, default_namespace = await _connect(context, kubeconfig)
    namespace = namespace or default_namespace
    client = Client(configuration)
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
    return Found([_record(line, where) for line in lines], where)


def _why_none(deployment: Manifest | None, name: str, namespace: str) -> str:
    if deployment is None:
        return f"there is no LLMDeployment {name} in namespace {namespace}; `kubectl get llmd -A` lists all"
    key, autoscaling = f"{namespace}/{name}", deployment.get("spec", {}).get("autoscaling")
    if autoscaling is None:
        return f"{key} has no spec.autoscaling: its replicas are spec.replicas, and nothing is decided"
    if autoscaling.get("mode") == "External":
        return f"{key} has spec.autoscaling.mode External: whoever writes spec.replicas decides (`kubectl get hpa`)"
    return (
        f"no decision about {key} is recorded yet; if that lasts, see `kubectl describe llmd {name} -n {namespace}` "
        "and the operator's log"
    )


def _record(line: str, where: str) -> Record:
    try:
        return decode_record(line.encode())
    except (msgspec.DecodeError, ValueError) as error:
        raise WhyError(
            f"{where} records decisions otherwise: {error}; use the pagemill command of the operator's version"
        ) from None


async def _connect(context: str | None, kubeconfig: Path | None) -> tuple[Configuration, str, str]:
    """Credentials, the context's name and its namespace."""
    file = None if kubeconfig is None else str(kubeconfig)
    # It warns of a file that is not there; the error says so.
    logging.getLogger("kubernetes").setLevel(logging.ERROR)
    configuration = Configuration()
    try:
        contexts, active = credentials.list_kube_config_contexts(file)  # type: ignore[no-untyped-call]
        chosen = next((each for each in contexts if each["name"] == context), None) if context else active
        if chosen is None:
            known = ", ".join(each["name"] for each in contexts)
            raise WhyError(f"--context {context}: the kubeconfig has no such context; it has {known or 'none'}")
        await credentials.load_kube_config(file, context=chosen["name"], client_configuration=configuration)  # type: ignore[no-untyped-call]
    except (credentials.ConfigException, OSError) as error:
        raise WhyError(f"no cluster is known here: {error}; {HELP}") from None
    return configuration, chosen["name"], chosen["context"].get("namespace") or "default"
