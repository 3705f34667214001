"""A changed name of a model: no pod is replaced, and clients may send both names for a while."""

from __future__ import annotations

from support.deployments import deploy
from support.kubectl import Kubectl
from support.load import running_load
from support.objects import llmdeployment
from support.release import Release
from support.waiting import until


def test_a_changed_name_reaches_running_engines_and_the_former_one_is_answered(
    release: Release, space: Kubectl
) -> None:
    chat = deploy(space, llmdeployment("chat"))
    chat.wait_ready(1)
    pods = {pod["metadata"]["uid"] for pod in chat.pods()}
    with running_load(release.service("chat"), workers=2) as load:
        load.wait_for(3)
        chat.patch(model={"name": "renamed"})
        until("the new name is answered", lambda: "renamed" in release.service("chat").models(), timeout_s=30)
        chat.wait_ready(1)
        assert release.service("renamed").ask()
        load.wait_for(3)
    load.report().assert_all_complete(at_least=6)
    assert {pod["metadata"]["uid"] for pod in chat.pods()} == pods
    plan = chat.status()["plan"]
    assert (plan["modelName"], plan["formerName"]) == ("renamed", "chat")
    assert plan["formerUntil"]
    (engine,) = chat.pods()
    script = (
        "import json; from urllib.request import Request, urlopen; "
        "token = open('/var/run/secrets/pagemill/tokens').readline().strip(); "
        "asked = Request('http://127.0.0.1:8000/v1/models', headers={'Authorization': f'Bearer {token}'}); "
        "print([each['id'] for each in json.load(urlopen(asked))['data']])"
    )
    ask = ("exec", engine["metadata"]["name"], "--", "python", "-c", script)
    until("the engine shows the new name", lambda: "renamed" in space.run(*ask).stdout, timeout_s=150)
