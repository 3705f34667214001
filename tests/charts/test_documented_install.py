"""The images in the installation commands of the documentation are those that its commands build and push."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from waiting import WAIT_LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ("engine", "engine-cpu", "gateway", "operator")
PAGES = ("README.md", "docs/how-to/install-with-helm.md")
NAMED = {"REGISTRY": "registry.example.com/team", "TAG": "0123456"}
"""A tag of digits alone must stay a text."""
OPTION = re.compile(r"--(set|set-string)[= ](\S+)")


def typed(page: str, program: str) -> str:
    """Return the words that `program` gets from the page's blocks, one command per line, expanded by bash."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    wanted = [
        block for block in blocks if re.search(rf"^\s*{program} ", block, re.MULTILINE) and "uninstall" not in block
    ]
    others = {"helm", "kubectl", "docker", "curl"} - {program}
    deaf = "\n".join(f"{other}() {{ :; }}" for other in sorted(others))
    script = f'set -eu\n{deaf}\n{program}() {{ echo "{program} $*"; }}\n' + "\n".join(wanted)
    environment = {"PATH": "/usr/bin:/bin", **NAMED}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=WAIT_LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def values_of(command: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option, setting in OPTION.findall(command):
        path, _, text = setting.partition("=")
        *parents, name = path.split(".")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = text if option == "set-string" else yaml.safe_load(text)
    return values


@pytest.mark.parametrize("page", PAGES)
def test_every_image_of_the_installation_is_pushed_before(page: str, render: Callable[..., Any]) -> None:
    pushed = set(re.findall(r"^docker push (\S+)$", typed(page, "docker"), re.MULTILINE))
    built = dict(re.findall(r"^docker build --target (\S+) -t (\S+) \.$", typed(page, "docker"), re.MULTILINE))
    assert all(name.split("/")[-1].partition(":")[0] == target for target, name in built.items())
    assert set(built.values()) == pushed == {f"{NAMED['REGISTRY']}/pagemill/{each}:{NAMED['TAG']}" for each in IMAGES}
    (install,) = re.findall(r"^helm install .*$", typed(page, "helm"), re.MULTILINE)
    rendered = render(values_of(install))
    used = {container["image"] for pod in rendered.pod_specs().values() for container in pod["containers"]}
    settings = yaml.safe_load(rendered.component("ConfigMap", "operator")["data"]["operator.json"])
    assert used | {settings["engine_image"], settings["cpu_engine_image"]} == pushed
