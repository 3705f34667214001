"""A routing policy in a package of its own: that of the page that explains decisions, installed for one test."""

from __future__ import annotations

import logging
import random
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from packages import install_package

from pagemill_gateway.config import GatewayConfig, SettingsError
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.report.state import StateFrame
from pagemill_routing.brain.brain import LocalBrain
from pagemill_routing.brain.interface import RoutingRequest
from pagemill_routing.config import RoutingConfig
from pagemill_routing.policies.policy import Candidate, RequestView
from pagemill_routing.policies.registry import GROUP, RoutingPolicies

PAGE = Path(__file__).parents[2] / "docs/how-to/see-why-a-request-went-there.md"
NAME = "MostCached"


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the page's package; the lines of this file, its entry points, may be replaced before policies are
    searched."""
    (code,) = [
        each for each in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "RoutingPolicy" in each
    ]
    (line,) = re.findall(rf"^{NAME} = .*$", PAGE.read_text(), re.MULTILINE)
    return install_package(tmp_path, monkeypatch, "my_routing", code, GROUP, line.replace('"', ""))


async def test_the_policy_of_the_page_decides_for_the_deployments_that_name_it(entry: Path) -> None:
    model = CatalogModel(
        deployment="d",
        name="m",
        routing_policy=NAME,
        endpoints=[Endpoint(id=each, data_url=f"http://{each}", control_url=f"http://{each}") for each in "ab"],
    )
    brain = LocalBrain(RoutingConfig(), clock=lambda: 0.0, rng=random.Random(1))
    brain.observer.apply_catalog(Catalog(models=[model]))
    for name in "ab":
        brain.observer.observe(name, StateFrame(sequence=1, snapshot=True, max_model_len=100))
    placed = await brain.choose(brain.resolve("m"), frozenset(), RoutingRequest(10))
    assert placed.policy == NAME
    # The same endpoints by the default policy: nothing that another policy derived is used.
    brain.observer.apply_catalog(Catalog(models=[replace(model, routing_policy="Auto")]))
    placed = await brain.choose(brain.resolve("m"), frozenset(), RoutingRequest(10))
    assert placed.policy == "Cost"


def test_the_policy_of_the_page_chooses_by_cached_tokens_and_may_be_a_gateways_default(entry: Path) -> None:
    pods = [Candidate("a", 0, 0, 0, num_cached_tokens=16), Candidate("b", 9, 0, 0, num_cached_tokens=32)]
    config = GatewayConfig(routing_policy=NAME).checked()
    policy = RoutingPolicies(config.routing_policy, 50.0).named("Auto")
    decision = policy.choose(RequestView(64), pods)
    assert (decision.chosen.endpoint_id, list(decision.rows)) == ("b", [(16.0,), (32.0,)])


def test_a_policy_that_cannot_be_used_is_left_out_and_the_default_decides(
    entry: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = (
        "Cost = my_routing:MostCached",
        "Gone = my_routing:Gone",
        "Other = my_routing:MostCached",
        "No = pathlib:Path",
    )
    entry.write_text(f"[{GROUP}]\n" + "\n".join(lines))
    with caplog.at_level(logging.WARNING):
        policies = RoutingPolicies("LeastRequest", 50.0)
        assert [policies.named(name).name for name in ("Gone", "Gone", "Other", "No")] == ["LeastRequest"] * 4
    assert policies.named("Cost").name == "Cost"
    text = [each.getMessage() for each in caplog.records]
    for part in ("policy Cost already", "has no attribute 'Gone'", "its name is 'MostCached'", "no subclass"):
        assert sum(part in each for each in text) == 1, part
    assert sum("no routing policy 'Gone', so LeastRequest decides" in each for each in text) == 1


def test_an_unknown_default_is_an_error_that_names_the_policies() -> None:
    with pytest.raises(
        SettingsError, match=r"routing_policy: there is no routing policy 'Fastest'; there are Cost, .*install"
    ):
        GatewayConfig(routing_policy="Fastest").checked()
