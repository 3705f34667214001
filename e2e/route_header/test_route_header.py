"""The header that says where a request went, as docs/how-to/see-why-a-request-went-there.md describes it."""

from __future__ import annotations

from support.deployments import deploy
from support.kubectl import Kubectl
from support.objects import llmdeployment
from support.release import Release


def test_the_route_header_names_policy_pod_and_cached_tokens(release: Release, space: Kubectl) -> None:
    chat, service = deploy(space, llmdeployment("chat")), release.service("chat")
    chat.wait_ready(1)
    with service.client() as client:
        answer = client.chat.completions.with_raw_response.create(
            model="chat", messages=[{"role": "user", "content": "Hello"}], max_tokens=2
        )
    policy, endpoint, cached = answer.headers["x-pagemill-route"].split("; ")
    (engine,) = chat.pods()
    assert (policy, endpoint, cached) == ("Cost", engine["metadata"]["uid"], "cached=0")
