"""An object that was deleted without its children and is applied again adopts them, with pods and loader."""

from __future__ import annotations

from support import hubs
from support.deployments import deploy
from support.kubectl import Kubectl
from support.release import Release


def test_what_an_orphaning_deletion_left_is_adopted_and_deleted_with_the_new_object(
    release: Release, space: Kubectl
) -> None:
    document = hubs.cached("chat", hubs.start(space, release.image_tag))
    chat = deploy(space, document)
    chat.wait_ready(1)
    before = {pod["metadata"]["uid"] for pod in chat.pods()}
    space.ok("delete", chat.target, "--cascade=orphan")
    chat = deploy(space, document)
    chat.wait_ready(1)
    assert {pod["metadata"]["uid"] for pod in chat.pods()} == before
    (job,) = space.items("jobs", "--selector", chat.selector)
    owner = chat.get()["metadata"]["uid"]
    assert [each["uid"] for each in job["metadata"]["ownerReferences"]] == [owner]
    chat.delete()
