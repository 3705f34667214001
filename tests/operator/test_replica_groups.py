"""Replicas of several pods: how they are planned, rendered as a LeaderWorkerSet, and observed as one replica each."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import kubernetes_validate
import msgspec
import pytest
from pydantic import ValidationError

from pagemill_crds.models import LLMDeployment
from pagemill_engine.server.settings import Settings
from pagemill_operator.backends.kubernetes.differences import rolled_out
from pagemill_operator.backends.kubernetes.observe import observe
from pagemill_operator.backends.kubernetes.observe.groups import slow_ranks
from pagemill_operator.backends.kubernetes.render import render_children
from pagemill_operator.backends.kubernetes.snapshot import ApplyError, Manifest, Owner, RenderContext, Snapshot
from pagemill_operator.load.store import LoadStore
from pagemill_operator.plan import make_plan
from pagemill_operator.status.conditions import find_conditions
from pagemill_protocol.report.load import DeploymentLoad, EngineReport, LoadFrame
from pagemill_protocol.report.state import SlowRank

Make = Callable[..., LLMDeployment]
CONTEXT = RenderContext(namespace="pagemill-system", engine_image="engine:1", tokens=("token",))
NOW = datetime(2026, 11, 29, 8, 0, tzinfo=UTC)
TWO = {"engine__tensorParallel": 2, "engine__podsPerReplica": 2}
LWS = "leaderworkerset.sigs.k8s.io"
READY = {"type": "Ready", "status": "True"}
NO_CPU = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient cpu. preemption: 0/3 nodes are available.",
}


def rendered(deployment: LLMDeployment) -> dict[str, Manifest]:
    plan = make_plan(deployment, "kubernetes")
    assert plan.problems == ()
    found = render_children(plan, Owner(plan.namespace, plan.name, "uid-1"), CONTEXT)
    return {manifest["kind"]: manifest for manifest in found}


def templates(groups: Manifest) -> tuple[Manifest, Manifest]:
    template = groups["spec"]["leaderWorkerTemplate"]
    return template["leaderTemplate"], template["workerTemplate"]


def test_a_replica_of_two_pods_is_a_group_that_is_restarted_as_a_whole(deployment: Make) -> None:
    children = rendered(deployment(replicas=3, rollout={"maxSurge": 1}, **TWO))
    assert "Deployment" not in children
    groups = children["LeaderWorkerSet"]
    assert groups["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert groups["metadata"]["name"] != children["Service"]["metadata"]["name"], "both have a Service of their name"
    spec = groups["spec"]
    assert spec["replicas"] == 3
    assert spec["startupPolicy"] == "LeaderCreated"
    assert spec["leaderWorkerTemplate"]["size"] == 2
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    rolling = spec["rolloutStrategy"]["rollingUpdateConfiguration"]
    assert rolling == {"maxSurge": 1, "maxUnavailable": 1, "partition": 0}


def test_only_the_first_pod_of_a_group_is_an_endpoint(deployment: Make) -> None:
    children = rendered(deployment(replicas=2, **TWO))
    leader, worker = templates(children["LeaderWorkerSet"])
    selected = children["Service"]["spec"]["selector"].items()
    assert selected <= leader["metadata"]["labels"].items()
    assert not selected <= worker["metadata"]["labels"].items()
    container = worker["spec"]["containers"][0]
    assert not {"readinessProbe", "livenessProbe", "startupProbe"} & container.keys()
    assert container["ports"] == []
    assert container["args"] == leader["spec"]["containers"][0]["args"]
    grace = "terminationGracePeriodSeconds"
    assert worker["spec"][grace] > leader["spec"][grace], "a worker must outlive the requests of its group"


def test_the_templates_and_policies_are_valid(deployment: Make) -> None:
    children = rendered(deployment(replicas=2, **TWO))
    for template in templates(children["LeaderWorkerSet"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": "a"}}
        kubernetes_validate.validate({**pod, "spec": template["spec"]}, "1.31", strict=True)
    for kind in ("NetworkPolicy", "PodDisruptionBudget"):
        kubernetes_validate.validate(children[kind], "1.31", strict=True)


def test_pods_of_a_group_find_each_other_by_their_settings(deployment: Make) -> None:
    text = rendered(deployment(**TWO))["ConfigMap"]["data"]["settings.json"]
    nodes = msgspec.json.decode(text, type=Settings, strict=True).engine.nodes
    assert nodes is not None
    assert (nodes.count, nodes.of_group, nodes.tokens_file) == (2, True, "/var/run/secrets/pagemill/tokens")


def test_pods_of_a_group_reach_each_other_at_the_ports_of_ranks_only(deployment: Make) -> None:
    def peers(policy: Manifest, direction: str) -> list[Manifest]:
        name = {"ingress": "from", "egress": "to"}[direction]
        return [rule for rule in policy["spec"][direction] if any("podSelector" in each for each in rule.get(name, []))]

    alone, group = (rendered(deployment(**more))["NetworkPolicy"] for more in ({}, TWO))
    for direction in ("ingress", "egress"):
        assert peers(alone, direction) == []
        (rule,) = peers(group, direction)
        assert rule["ports"][0]["port"] == 29501
        ranges = [(each["port"], each.get("endPort", each["port"])) for each in rule["ports"]]
        assert not any(low <= port <= high for low, high in ranges for port in (8000, 8001, 8443, 8444))


def test_one_group_is_disrupted_at_a_time_whichever_of_its_pods(deployment: Make) -> None:
    children = rendered(deployment(replicas=2, **TWO))
    budget = children["PodDisruptionBudget"]["spec"]
    assert budget["maxUnavailable"] == 1
    (components,) = budget["selector"]["matchExpressions"]
    for template in templates(children["LeaderWorkerSet"]):
        assert template["metadata"]["labels"][components["key"]] in components["values"]


def test_labels_of_schedulers_that_place_groups_are_the_groups_own(deployment: Make) -> None:
    metadata = {
        "labels": {"kueue.x-k8s.io/queue-name": "llms", "team": "a"},
        "annotations": {f"{LWS}/exclusive-topology": "rack", "note": "b"},
    }
    groups = rendered(deployment(template={"metadata": metadata}, **TWO))["LeaderWorkerSet"]
    assert groups["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "llms"
    assert groups["metadata"]["annotations"][f"{LWS}/exclusive-topology"] == "rack"
    for template in templates(groups):
        assert template["metadata"]["labels"]["team"] == "a"
        assert template["metadata"]["annotations"]["note"] == "b"
        assert "kueue.x-k8s.io/queue-name" not in template["metadata"]["labels"]


def test_a_change_of_the_group_changes_both_templates(deployment: Make) -> None:
    four = {"engine__tensorParallel": 4}
    kept = {
        each["metadata"]["annotations"]["pagemill.dev/template"]
        for pods in (2, 4)
        for each in templates(rendered(deployment(**four, engine__podsPerReplica=pods))["LeaderWorkerSet"])
    }
    assert len(kept) == 2


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        (None, "each pod of a group reads spec.model.source by itself"),
        ({"size": "1Gi", "accessMode": "ReadWriteMany"}, "all pods of a group read one claim"),
        ({"claimName": "models"}, "all pods of a group read one claim"),
        ({"hostPath": "/models"}, "each node fetches the whole model into its hostPath once"),
        ({"size": "1Gi"}, "a ReadWriteOnce volume keeps all pods on one node"),
    ],
)
def test_the_plan_says_what_the_pods_of_a_group_read_the_model_from(
    deployment: Make, cache: dict[str, Any] | None, said: str
) -> None:
    fields = {"model__source": "hf://org/name", **({} if cache is None else {"model__cache": cache})}
    plan = make_plan(deployment(**fields, **TWO), "kubernetes")
    assert plan.problems == ()
    assert [said in note.message for note in plan.notes] == [True]
    alone = make_plan(deployment(**fields, replicas=1, rollout={"strategy": "Replace"}), "kubernetes")
    assert alone.notes == ()


def test_ranks_that_do_not_divide_are_refused(deployment: Make) -> None:
    with pytest.raises(ValidationError, match="podsPerReplica must divide tensorParallel x pipelineParallel"):
        deployment(engine__tensorParallel=3, engine__podsPerReplica=2)


def test_a_pod_with_fewer_cores_than_processes_is_refused(deployment: Make) -> None:
    four = {"engine__tensorParallel": 4, "engine__podsPerReplica": 2, "resources__cpu": 1}
    problems = make_plan(deployment(**four), "kubernetes").problems
    assert any("2 processes need a core" in each.message for each in problems), problems


def test_groups_serve_adapters(deployment: Make) -> None:
    """The first pod reads them and gives them to the others."""
    groups = rendered(deployment(engine__lora={}, **TWO))["LeaderWorkerSet"]
    for template in templates(groups):
        assert any(volume["name"] == "adapters" for volume in template["spec"]["volumes"])


def test_a_group_is_one_process_group_on_one_machine(deployment: Make) -> None:
    plan = make_plan(deployment(**TWO), "local")
    assert plan.pods_per_replica == 1
    assert "nodes" not in plan.groups[0].process.settings["engine"]
    assert "spec.engine.podsPerReplica" in [each.field for each in plan.ignored]


def test_the_price_of_a_group_is_that_of_all_its_gpus(deployment: Make) -> None:
    plan = make_plan(deployment(engine__tensorParallel=4, resources__gpus=2, cost={"gpuHour": 3}), "kubernetes")
    assert (plan.pods_per_replica, plan.gpus_per_replica, plan.replica_price) == (2, 4, 12)


class Groups:
    """The world of one deployment with a group of two pods."""

    def __init__(self, deployment: LLMDeployment) -> None:
        self.plan = make_plan(deployment, "kubernetes")
        children = rendered(deployment)
        self.groups = children["LeaderWorkerSet"]
        self.groups["metadata"]["creationTimestamp"] = (NOW - timedelta(hours=1)).isoformat()
        self.owner = {
            "metadata": {"namespace": self.plan.namespace, "name": self.plan.name, "uid": "uid-1", "generation": 1}
        }
        self.groups["metadata"]["annotations"]["pagemill.dev/generation"] = "1"
        self.pods = [self.pod(number) for number in (0, 1)]

    def pod(self, number: int) -> Manifest:
        pod = copy.deepcopy(templates(self.groups)[min(number, 1)])
        name = f"{self.groups['metadata']['name']}-0" + (f"-{number}" if number else "")
        pod["metadata"] |= {"name": name, "uid": name, "creationTimestamp": (NOW - timedelta(minutes=1)).isoformat()}
        pod["metadata"]["labels"] |= {f"{LWS}/group-index": "0", f"{LWS}/worker-index": str(number)}
        pod["metadata"]["annotations"] |= {f"{LWS}/size": "2"}
        pod["spec"]["nodeName"] = "a"
        running = {"name": "engine", "ready": True, "started": True, "state": {"running": {}}}
        pod["status"] = {"phase": "Running", "conditions": [READY], "containerStatuses": [running]}
        return pod

    def unready(self, number: int, **status: Any) -> None:
        pod = self.pods[number]
        pod["status"]["conditions"] = []
        pod["status"]["containerStatuses"][0] |= {"ready": False, **status}

    def unplaced(self, number: int) -> None:
        del self.pods[number]["spec"]["nodeName"]
        self.pods[number]["status"] = {"phase": "Pending", "conditions": [NO_CPU]}

    def observe(self, **more: Any) -> Any:
        children = {("LeaderWorkerSet", self.groups["metadata"]["name"]): self.groups}
        snapshot = Snapshot(self.owner, children, tuple(self.pods), num_gateways=1, num_gateways_ready=1, **more)
        return observe(snapshot, self.plan, NOW)

    def write_status(self) -> list[Any]:
        """Write the conditions into the object, as the operator does; return them."""
        found = find_conditions(self.observe())
        generation = self.owner["metadata"]["generation"]
        written = [{**each._asdict(), "observedGeneration": generation} for each in found]
        self.owner["status"] = {"conditions": written, "plan": {"digest": self.plan.groups[0].digest}}
        return found

    def condition(self, kind: str, **more: Any) -> Any:
        return next(each for each in find_conditions(self.observe(**more)) if each.type == kind)


@pytest.fixture
def world(deployment: Make) -> Groups:
    return Groups(deployment(name="chat", **TWO))


def test_a_ready_group_is_one_replica(world: Groups) -> None:
    (replica,) = world.observe().replicas
    assert (replica.name, replica.phase) == ("chat-group-0", "ready")
    assert replica.digest == world.plan.groups[0].digest
    assert world.condition("Ready").reason == "AllReplicasReady"


def test_the_pod_that_finds_no_node_is_named(world: Groups) -> None:
    world.unready(0)
    world.unplaced(1)
    scheduled = world.condition("Scheduled")
    assert scheduled.reason == "InsufficientCPU"
    assert scheduled.message.startswith("pod chat-group-0-1 of the group chat-group-0: no node has enough free cpu")
    assert "minutes" not in scheduled.message


def test_a_group_that_holds_places_for_ten_minutes_says_so(world: Groups) -> None:
    world.unready(0)
    world.unplaced(1)
    world.pods[0]["metadata"]["creationTimestamp"] = (NOW - timedelta(minutes=11)).isoformat()
    assert "hold their places for more than 10 minutes: make room, or let a scheduler that places whole groups" in (
        world.condition("Scheduled").message
    )


def test_a_workers_cause_comes_before_that_of_the_first_pod(world: Groups) -> None:
    lost = '{"reason": "RankLost", "message": "Rank 1 ended"}'
    world.unready(0, state={"terminated": {"exitCode": 1, "message": lost}})
    world.unready(1, state={"terminated": {"exitCode": 137, "reason": "OOMKilled"}})
    loaded = world.condition("ModelLoaded")
    assert loaded.reason == "OOMKilled"
    assert loaded.message.startswith("pod chat-group-0-1 of the group")


def test_a_group_that_lacks_a_pod_starts(world: Groups) -> None:
    world.unready(0)
    del world.pods[1]
    (replica,) = world.observe().replicas
    assert (replica.phase, replica.message) == ("starting", "1 of 2 pods of the group are placed")


def ended(reason: str, message: str = "m", code: int = 1) -> dict[str, Any]:
    text = json.dumps({"reason": reason, "message": message})
    return {"exitCode": code, "message": text}


def test_what_followed_from_a_cause_is_not_the_cause(world: Groups) -> None:
    """Node 0 refuses another version, and the worker only sees that its connection ends."""
    world.unready(0, state={"terminated": ended("RankMismatch", "Rank 1 has the version 1, but rank 0 has 2")})
    world.unready(1, state={"terminated": ended("RankLost", "Rank 0 ended the connection")})
    loaded = world.condition("ModelLoaded")
    assert loaded.reason == "RankMismatch"
    assert loaded.message.startswith("pod chat-group-0 of the group chat-group-0: Rank 1 has the version 1")
    assert "set spec.engine.image to a tag that never changes" in loaded.message


def test_a_first_pod_that_is_not_found_is_a_cause_with_the_remedy(world: Groups) -> None:
    world.unready(0)
    said = ended("RendezvousFailed", "The address `chat-group-0.chat-group` of node 0 does not resolve: unknown")
    world.unready(1, state={"terminated": said})
    loaded = world.condition("ModelLoaded")
    assert loaded.reason == "RendezvousFailed"
    assert "pod chat-group-0-1 of the group chat-group-0: The address `chat-group-0.chat-group`" in loaded.message
    assert "check the cluster's DNS" in loaded.message


def test_a_group_that_is_made_again_keeps_its_cause_until_it_is_ready(world: Groups) -> None:
    """Its controller deletes all of its pods as soon as a container has been started again."""
    seen = []

    def look() -> None:
        seen.append({each.type: (each.status, each.reason) for each in world.write_status()})

    mismatch = ended("RankMismatch", "Rank 1 has the version 1, but rank 0 has 2")
    world.unready(0, state={"running": {}}, restartCount=1, lastState={"terminated": mismatch})
    world.unready(1, state={"terminated": ended("RankLost")})
    for pod in world.pods:
        pod["metadata"]["deletionTimestamp"] = NOW.isoformat()
    look()
    world.pods = []
    look()
    world.pods = [world.pod(number) for number in (0, 1)]
    for pod in world.pods:
        del pod["spec"]["nodeName"]
        pod["status"] = {"phase": "Pending"}
    look()
    world.pods = [world.pod(number) for number in (0, 1)]
    world.unready(0)
    look()
    world.unready(0, state={"terminated": ended("RankLost")})
    look()
    assert [each["Ready"] for each in seen] == [("False", "RankMismatch")] * 5
    assert all(each == seen[0] for each in seen), seen
    world.unready(0, state={"terminated": ended("ModelTooLarge")})
    look()
    assert seen[-1]["Ready"] == ("False", "ModelTooLarge")
    world.pods[0] = world.pod(0)
    look()
    assert seen[-1]["Ready"] == ("True", "AllReplicasReady")


LOST = '{"reason": "RankLost", "message": "rank 1 (node 1 at 10.0.0.5) ended its connection"}'
KILLED = {"exitCode": 137, "reason": "Error"}


def test_a_killed_worker_is_the_cause_at_every_moment(world: Groups) -> None:
    """The first pod sees its end first, is not ready, and ends; then all pods are deleted, the worker's before."""
    seen = []

    def look() -> None:
        ready = next(each for each in world.write_status() if each.type == "Ready")
        seen.append((ready.reason, ready.message.partition(": ")[0]))

    unready = {**READY, "status": "False", "lastTransitionTime": (NOW - timedelta(seconds=9)).isoformat()}
    started = {"running": {"startedAt": (NOW - timedelta(minutes=1)).isoformat()}}
    first, worker = world.pods
    world.unready(0, state=started)
    first["status"]["conditions"] = [unready]
    look()
    world.unready(0, state={"terminated": {"exitCode": 1, "message": LOST}})
    look()
    worker["status"]["containerStatuses"][0] |= {"lastState": {"terminated": KILLED}}
    look()
    first["status"]["containerStatuses"][0] |= {"state": started, "lastState": {"terminated": dict(KILLED)}}
    first["status"]["containerStatuses"][0]["lastState"]["terminated"] |= {"exitCode": 1, "message": LOST}
    first["metadata"]["deletionTimestamp"] = NOW.isoformat()
    world.pods = [first]
    look()
    world.pods = [world.pod(number) for number in (0, 1)]
    world.unready(0)
    look()
    group = "of the group chat-group-0"
    assert seen[0] == ("ProbeFailing", f"pod chat-group-0 {group}")
    assert seen[1] == ("RankLost", f"pod chat-group-0 {group}")
    assert seen[2:] == [("ContainerKilled", f"pod chat-group-0-1 {group}")] * 3


def test_a_lost_rank_of_a_worker_comes_before_what_the_first_pod_says_of_it(world: Groups) -> None:
    own = ended("RankLost", "Rank 1 ended with the exit code -9; its log says why.")
    world.unready(1, state={"terminated": own})
    world.unready(0, state={"terminated": {"exitCode": 1, "message": LOST}})
    world.write_status()
    assert world.condition("Ready").message.startswith("pod chat-group-0-1 of the group chat-group-0: Rank 1 ended")
    world.pods = world.pods[:1]
    assert world.condition("Ready").message.startswith("pod chat-group-0-1 of the group chat-group-0: Rank 1 ended")


def test_a_first_pod_that_a_probe_ends_is_still_named_with_its_probe(world: Groups) -> None:
    world.unready(0, state={"terminated": KILLED})
    world.unready(1, state={"terminated": ended("RankLost", "Rank 0 ended the connection")})
    assert world.condition("Ready").reason == "ProbeFailing"
    assert "startup or liveness probe fails" in world.condition("Ready").message


def test_a_cause_outlasts_a_change_of_the_number_of_replicas(deployment: Make) -> None:
    world = Groups(deployment(name="chat", replicas=2, **TWO))
    world.unready(0)
    world.unready(1, state={"terminated": ended("ModelTooLarge")})
    world.write_status()
    world.pods[1] = world.pod(1)
    world.plan = make_plan(deployment(name="chat", replicas=1, **TWO), "kubernetes")
    world.owner["metadata"]["generation"] = 2
    world.groups["metadata"]["annotations"]["pagemill.dev/generation"] = "2"
    assert world.condition("Ready").reason == "ModelTooLarge"
    world.plan = make_plan(deployment(name="chat", engine__maxNumSeqs=3, **TWO), "kubernetes")
    assert world.condition("Ready").reason != "ModelTooLarge"


def test_a_slow_rank_is_a_warning_that_names_pod_node_and_both_times(world: Groups) -> None:
    world.pods[1]["spec"]["nodeName"] = "b"
    held = {"chat-group-0": EngineReport("chat-group-0", slow_rank=SlowRank(1, 1, 41.5, 13.0))}
    (fault,) = slow_ranks(world.pods, held)
    assert fault.reason == "SlowRank"
    assert "rank 1 (pod chat-group-0-1 on node b) computes 41.5 ms" in fault.message
    assert "13 ms at the speed of the other ranks" in fault.message
    assert "raise spec.resources.cpu" in fault.message
    found = find_conditions(dataclasses.replace(world.observe(), warnings=(fault,)))
    ready = next(each for each in found if each.type == "Ready")
    assert ready.status == "True"
    assert "; warning SlowRank: rank 1" in ready.message
    assert list(slow_ranks(world.pods, {"chat-group-0": EngineReport("chat-group-0")})) == []
    assert list(slow_ranks([], held)) == []


def test_a_slow_rank_changes_what_the_status_shows() -> None:
    def frame(slow: SlowRank | None) -> LoadFrame:
        load = DeploymentLoad(namespace="a", name="chat", replicas=[EngineReport("1", slow_rank=slow)])
        return LoadFrame(sequence=1, deployments=[load])

    store = LoadStore()
    store.put("gateway", frame(None))
    assert store.put("gateway", frame(SlowRank(1, 1, 41.5, 13.0))) == {"a/chat"}
    assert store.put("gateway", frame(SlowRank(1, 1, 41.5, 13.0))) == set()
    assert store.put("gateway", frame(None)) == {"a/chat"}


def test_a_cause_of_an_earlier_spec_is_not_kept(world: Groups) -> None:
    world.unready(0, state={"terminated": ended("ModelTooLarge")})
    world.write_status()
    world.owner["metadata"]["generation"] = 2
    world.owner["status"]["plan"]["digest"] = "another"
    world.pods[0] = world.pod(0)
    world.unready(0)
    assert world.condition("Ready").reason != "ModelTooLarge"


def test_what_pods_wait_for_is_over_when_they_do_not_wait(world: Groups) -> None:
    world.unready(0)
    world.unready(1, state={"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}})
    assert {each.type: each.reason for each in world.write_status()}["Ready"] == "ImagePullFailed"
    world.pods[1] = world.pod(1)
    assert world.condition("Ready").reason == "Loading"


def test_a_removed_group_ends_without_a_fault(world: Groups) -> None:
    for number, pod in enumerate(world.pods):
        world.unready(number, state={"terminated": {"exitCode": 137}})
        pod["metadata"]["deletionTimestamp"] = NOW.isoformat()
    (replica,) = world.observe().replicas
    assert (replica.phase, replica.reason) == ("draining", "")


def test_a_group_that_holds_places_says_so_also_when_it_has_been_made_again(world: Groups) -> None:
    world.unready(0)
    world.unplaced(1)
    world.pods[0]["metadata"]["creationTimestamp"] = (NOW - timedelta(minutes=11)).isoformat()
    before = {each.type: each.message for each in world.write_status()}
    world.pods[0]["metadata"]["creationTimestamp"] = NOW.isoformat()
    assert {each.type: each.message for each in world.write_status()} == before


def test_leader_worker_sets_of_another_version_are_named(world: Groups) -> None:
    """Server-side apply refuses what the definition lacks; a field of the pod templates is the user's."""
    refused = "failed to create typed patch object (a/chat-group; leaderworkerset.x-k8s.io/v1, Kind=LeaderWorkerSet): "
    lacks = f"{refused}.spec.networkConfig: field not declared in schema"
    error = ApplyError("LeaderWorkerSet", "chat-group", 500, "InternalError", lacks)
    scheduled = world.condition("Scheduled", apply_errors=(error,))
    assert scheduled.reason == "LeaderWorkerSetVersion"
    assert ".spec.networkConfig" in scheduled.message
    assert "install version 0.7 of its controller" in scheduled.message
    own = f"{refused}.spec.leaderWorkerTemplate.leaderTemplate.spec.nosuch: field not declared in schema"
    error = ApplyError("LeaderWorkerSet", "chat-group", 500, "InternalError", own)
    assert world.condition("Planned", apply_errors=(error,)).reason == "InvalidTemplate"


def test_a_cluster_without_leader_worker_sets_is_a_condition_with_the_remedy(world: Groups) -> None:
    error = ApplyError("LeaderWorkerSet", "chat-group", 404, "NotFound", "the server could not find the resource")
    scheduled = world.condition("Scheduled", apply_errors=(error,))
    assert scheduled.reason == "LeaderWorkerSetMissing"
    assert "install its controller" in scheduled.message
    assert "set spec.engine.podsPerReplica to 1" in scheduled.message


def test_groups_without_pods_ask_for_their_controller(world: Groups) -> None:
    world.pods = []
    scheduled = world.condition("Scheduled")
    assert scheduled.reason == "PodsNotCreated"
    assert "check that its controller runs" in scheduled.message
    world.groups["metadata"]["creationTimestamp"] = NOW.isoformat()
    assert world.condition("Scheduled").reason == "Starting"


def test_settings_of_older_groups_are_kept_while_their_pods_live(world: Groups) -> None:
    world.groups["status"] = {"replicas": 1, "updatedReplicas": 1}
    assert rolled_out(world.groups, world.pods)
    world.pods[0]["metadata"]["annotations"]["pagemill.dev/template"] = "older"
    assert not rolled_out(world.groups, world.pods)
