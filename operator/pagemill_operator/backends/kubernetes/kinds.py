"""The kinds that the operator reads and writes, with their API groups and plurals."""

from __future__ import annotations

from pagemill_crds import ADAPTER_KIND, ADAPTER_PLURAL, GROUP, KIND, PLURAL, STORED_VERSION
from pagemill_kube.kinds import Kind

LLM_DEPLOYMENT = Kind(KIND, GROUP, STORED_VERSION, PLURAL)
LORA_ADAPTER = Kind(ADAPTER_KIND, GROUP, STORED_VERSION, ADAPTER_PLURAL)
POD = Kind("Pod", "", "v1", "pods")
SECRET = Kind("Secret", "", "v1", "secrets")
CONFIG_MAP = Kind("ConfigMap", "", "v1", "configmaps")
EVENT = Kind("Event", "", "v1", "events")
LEASE = Kind("Lease", "coordination.k8s.io", "v1", "leases")
AUTOSCALER = Kind("HorizontalPodAutoscaler", "autoscaling", "v2", "horizontalpodautoscalers")
LEADER_WORKER_SET = Kind("LeaderWorkerSet", "leaderworkerset.x-k8s.io", "v1", "leaderworkersets")
"""Makes the pods of replicas that have several. Not watched, because many clusters lack it: it is read in each turn of
a deployment that has one."""
POD_MONITOR = Kind("PodMonitor", "monitoring.coreos.com", "v1", "podmonitors")

CHILD_KINDS = (
    SECRET,
    CONFIG_MAP,
    Kind("Service", "", "v1", "services"),
    Kind("PersistentVolumeClaim", "", "v1", "persistentvolumeclaims"),
    Kind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies"),
    Kind("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets"),
    Kind("Job", "batch", "v1", "jobs"),
    Kind("Deployment", "apps", "v1", "deployments"),
)
"""Kinds of children that every cluster has, in the order in which they are applied: pods come last."""

WATCHED_KINDS = (LLM_DEPLOYMENT, LORA_ADAPTER, POD, AUTOSCALER, *CHILD_KINDS)
BY_NAME = {kind.name: kind for kind in (*WATCHED_KINDS, LEADER_WORKER_SET, POD_MONITOR, EVENT, LEASE)}
