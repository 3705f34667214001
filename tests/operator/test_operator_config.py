"""The operator's settings: errors name field, value and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagemill_operator.config import load_config
from pagemill_servers.process.settings import SettingsError

GOOD = {"namespace": "pagemill-system", "engine_image": "pagemill/engine:1"}


@pytest.fixture
def settings(tmp_path: Path) -> Any:
    def write(**changes: Any) -> Path:
        path = tmp_path / "operator.json"
        path.write_text(json.dumps({**GOOD, **changes}))
        return path

    return write


def test_two_fields_are_sufficient(settings: Any) -> None:
    config = load_config(settings())
    assert config.watch_namespaces == []
    assert config.renew_deadline_s < config.lease_duration_s


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"namespace": ""}, "namespace is empty"),
        ({"engine_image": ""}, "engine_image is empty"),
        ({"gateway_selector": {"a": "b"}}, "gateway_selector"),
        ({"renew_deadline_s": 15}, "renew_deadline_s 15"),
        ({"retry_period_s": 0}, "retry_period_s 0"),
        ({"metrics_port": 70_000}, "metrics_port is 70000"),
        ({"workers": 0}, "workers is 0: use 1 to 64"),
        ({"resync_s": 0}, "resync_s is 0"),
        ({"engine_tls": {"secret": "x", "ca_file": "/ca.crt"}}, "engine_tls.server_name"),
        ({"engine_imagee": "x"}, "engine_imagee"),
        ({"log_level": "LOUD"}, "log_level"),
    ],
)
def test_an_invalid_setting_is_refused(settings: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        load_config(settings(**changes))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.json: No such file"):
        load_config(tmp_path / "absent.json")
