"""Adapters as resources: they come and go while pods serve, and new, restarted and woken replicas have pinned ones.

bash runs the kubectl commands of docs/how-to/serve-adapters.md.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import yaml
from support import lora, metrics
from support.clusters import Cluster
from support.deployments import Deployed, deploy
from support.kubectl import Kubectl
from support.load import Service
from support.lora import LARGEST_RANK, AdapterBucket, adapter, wait_adapter
from support.objects import Document
from support.processes import kill_pod, restart_count
from support.release import Release
from support.waiting import until

from pagemill_protocol.engine_ports import CONTROL_PORT, engine_url

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "serve-adapters.md"
STARTED_S = 300.0
ASLEEP_S = 240.0
"""Time limit for the engine's start, `scaleToZeroAfter`, and the completion of its Deployment."""

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def bucket(near_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterBucket]:
    with lora.adapter_bucket(near_cluster, tmp_path_factory.mktemp("s3")) as found:
        yield found


def test_adapters_come_and_go_without_a_restart(release: Release, space: Kubectl, bucket: AdapterBucket) -> None:
    chat = deploy(space, bucket.deployment("chat"))
    chat.wait_ready(1, STARTED_S)
    pods = _identities(chat)
    plain = release.service("chat").ask()
    space.apply(_of_the_page(chat.name, bucket))
    status = wait_adapter(space, "sales", "Ready", "Loaded")
    assert (status["name"], status["loadedReplicas"], status["loaded"]) == ("sales", 1, [name for name, *_ in pods])
    sales = release.service("sales")
    answer = sales.ask()
    assert answer not in ("", plain)
    assert release.service("chat").ask() == plain
    assert {"chat", "sales"} <= set(sales.models())

    listed, described = _typed(space)
    assert re.search(r"^sales +sales +chat +1 +Loaded", listed, re.MULTILINE), listed
    assert pods[0][0] in described

    space.apply(adapter("other", chat.name, "support", name="sales"), adapter("large", chat.name, "large"))
    conflict = wait_adapter(space, "other", "Accepted", "NameConflict")
    assert f"{space.namespace}/sales has the name sales already" in conflict["message"]
    refused = wait_adapter(space, "large", "Ready", "AdapterTooLarge")
    assert [(each["pod"], each["reason"]) for each in refused["refused"]] == [(pods[0][0], "AdapterTooLarge")]
    assert "32" in refused["message"]
    assert "16" in refused["message"]
    assert sales.ask() == answer
    space.delete("lora/other lora/large")

    assert _deleted_while_it_generates(space, sales) in ("stop", "length")
    assert _identities(chat) == pods, "a pod was replaced or restarted"


def test_a_new_replica_is_ready_once_pinned_adapters_are_loaded(
    release: Release, space: Kubectl, bucket: AdapterBucket
) -> None:
    space.apply(adapter("sales", "chat", "sales", pinned=True))
    wait_adapter(space, "sales", "Accepted", "DeploymentNotFound")
    bucket.proxy.bytes_per_s = 1.0
    try:
        chat = deploy(space, bucket.deployment("chat"))
        until("the engine waits for the adapter", lambda: "adapters sales" in _readiness(chat), timeout_s=STARTED_S)
        assert chat.status().get("readyReplicas", 0) == 0
    finally:
        bucket.proxy.bytes_per_s = float("inf")
    chat.wait_ready(1, STARTED_S)
    assert release.service("sales").ask() != release.service("chat").ask()


def test_a_restarted_engine_is_ready_once_pinned_adapters_are_loaded(
    release: Release, space: Kubectl, bucket: AdapterBucket
) -> None:
    chat = deploy(space, bucket.deployment("chat"))
    space.apply(adapter("sales", "chat", "sales", pinned=True))
    chat.wait_ready(1, STARTED_S)
    wait_adapter(space, "sales", "Ready", "Loaded")
    sales = release.service("sales")
    answer = sales.ask()
    (pod,) = chat.pods()
    kill_pod(pod, "pagemill_engine")
    until("the engine is gone", lambda: not _readiness(chat), timeout_s=60, interval_s=0.05)
    until("the engine is ready", lambda: '"ready":true' in _readiness(chat), timeout_s=STARTED_S, interval_s=0.02)
    assert metrics.total(chat.pods()[0], CONTROL_PORT, "pagemill_engine_adapters", state="known") == 1
    until("the pod is ready", lambda: restart_count(chat.pods()[0]) == 1 and _is_ready(chat.pods()[0]), timeout_s=60)
    assert sales.ask() == answer
    assert [each["metadata"]["uid"] for each in chat.pods()] == [pod["metadata"]["uid"]]


def test_three_replicas_with_one_place_each_serve_more_adapters(
    release: Release, space: Kubectl, bucket: AdapterBucket
) -> None:
    engine = {"lora": {"maxLoras": 1, "maxLoraRank": LARGEST_RANK}}
    chat = deploy(space, bucket.deployment("chat", replicas=3, engine=engine))
    names = ("sales", "support")
    space.apply(*(adapter(name, "chat", name) for name in names))
    chat.wait_ready(3, STARTED_S)
    pods = sorted(pod["metadata"]["name"] for pod in chat.pods())
    for name in names:
        until(
            f"all replicas serve {name}",
            lambda name=name: sorted(space.json("get", "lora", name).get("status", {}).get("loaded", [])) == pods,
            timeout_s=STARTED_S,
        )
        assert wait_adapter(space, name, "Ready", "Loaded")["loadedReplicas"] == 3
    services = {name: release.service(name) for name in names}
    answers = {name: service.ask(max_tokens=8) for name, service in services.items()}
    assert len(set(answers.values())) == 2
    for _ in range(8):
        assert {name: service.ask(max_tokens=8) for name, service in services.items()} == answers
    num_loads = [metrics.total(pod, CONTROL_PORT, "pagemill_engine_adapter_loads_total") for pod in chat.pods()]
    assert min(num_loads) >= 2, "each replica has read both"


def test_a_woken_replica_serves_the_adapters_that_were_pinned_while_it_slept(
    release: Release, space: Kubectl, bucket: AdapterBucket
) -> None:
    autoscaling = {"minReplicas": 0, "maxReplicas": 1, "warm": 1, "scaleToZeroAfter": "10s"}
    chat = deploy(space, bucket.deployment("chat", autoscaling=autoscaling))
    space.apply(adapter("sales", "chat", "sales", pinned=True))
    chat.wait_ready(1, STARTED_S)
    wait_adapter(space, "sales", "Ready", "Loaded")
    answer = release.service("sales").ask()
    pods = _identities(chat)
    until("the replica sleeps", lambda: chat.status().get("standbyReplicas") == 1, timeout_s=ASLEEP_S)
    space.apply(adapter("support", "chat", "support", pinned=True))
    wait_adapter(space, "support", "Accepted", "Accepted")
    assert release.service("sales").ask() == answer
    wait_adapter(space, "support", "Ready", "Loaded")
    assert release.service("support").ask() not in ("", answer)
    assert _identities(chat) == pods, "the sleeping pod was replaced or restarted"


def _of_the_page(deployment: str, bucket: AdapterBucket) -> Document:
    """Return the page's LoRAAdapter for a deployment of this case."""
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    document: Document = yaml.safe_load(example)
    document["spec"]["deployment"] = deployment
    return document


def _typed(space: Kubectl) -> list[str]:
    """Return the output of each kubectl command of the page."""
    (block,) = re.findall(r"^```bash\n(kubectl .*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    typed = []
    for line in block.splitlines():
        command = line.replace("kubectl", shlex.join(space.argv()), 1)
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, env=dict(os.environ))
        assert done.returncode == 0, done.stderr
        typed.append(done.stdout)
    return typed


def _deleted_while_it_generates(space: Kubectl, sales: Service) -> str | None:
    """Delete the adapter beside a stream of its; return why the stream ended, once new requests get status 404."""
    reason = None
    with sales.client() as client:
        messages = [{"role": "user", "content": "Tell a long story."}]
        stream = client.chat.completions.create(
            model="sales",
            messages=messages,
            max_tokens=400,
            temperature=0,
            stream=True,  # type: ignore[arg-type]
        )
        deleted = False
        for chunk in stream:
            if not deleted:
                space.delete("lora/sales")
                deleted = True
            reason = (chunk.choices[0].finish_reason if chunk.choices else None) or reason

    def is_gone() -> bool:
        try:
            sales.ask(max_tokens=1)
        except openai.NotFoundError:
            return True
        return False

    until("requests for the deleted adapter get status 404", is_gone, timeout_s=120, interval_s=1)
    return reason


def _identities(chat: Deployed) -> list[tuple[str, str, int]]:
    """Return name, uid and restarts of the pods."""
    return [
        (pod["metadata"]["name"], pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"])
        for pod in chat.pods()
    ]


def _is_ready(pod: Document) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", []))


def _readiness(chat: Deployed) -> str:
    """Return what the only engine answers at `/readyz`; empty while it does not answer."""
    addresses = [address for pod in chat.pods() if (address := pod["status"].get("podIP"))]
    try:
        return urllib.request.urlopen(f"{engine_url(addresses[0], CONTROL_PORT)}/readyz", timeout=5).read().decode()
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except (OSError, IndexError):
        return ""
