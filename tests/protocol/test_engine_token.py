"""Tokens between gateways and engines are derived, distinct, and accepted before they are used."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_protocol.engine_token import GATEWAY_CONTROL, EngineKeys, derive_token

KEY = bytes(range(32))
names = st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789-.", max_size=20)


def test_a_token_is_the_same_everywhere() -> None:
    # The value is part of the contract between versions: engines of one release accept tokens of the next one's
    # gateways.
    assert derive_token(KEY, "prod", "chat") == "e9b450a7c3b48c356a795ee5d95d2a1612db9b06232d98cd9b4818f25cb6d7fd"


@given(names, names, names, names)
def test_every_deployment_has_its_own_token(namespace: str, name: str, other_namespace: str, other_name: str) -> None:
    same = (namespace, name) == (other_namespace, other_name)
    assert (derive_token(KEY, namespace, name) == derive_token(KEY, other_namespace, other_name)) == same


def test_the_control_token_belongs_to_no_deployment() -> None:
    assert derive_token(KEY, *GATEWAY_CONTROL) != derive_token(KEY, "gateway-control", "")


def test_a_token_is_accepted_a_whole_period_before_and_after_it_is_sent() -> None:
    first, second, third, fourth = (bytes([number]) * 32 for number in range(4))
    before = EngineKeys(current=second, next=third, previous=first)
    after = EngineKeys(current=third, next=fourth, previous=second)
    assert after.sent("ns", "chat") in before.accepted("ns", "chat")
    assert before.sent("ns", "chat") in after.accepted("ns", "chat")


def test_equal_keys_give_one_token() -> None:
    keys = EngineKeys(current=KEY, next=bytes(32), previous=KEY)
    assert len(keys.accepted("ns", "chat")) == 2


@pytest.mark.parametrize(("key", "name"), [(b"", "chat"), (b"short", "chat"), (KEY, "a\0b")])
def test_an_invalid_secret_or_name_is_refused(key: bytes, name: str) -> None:
    with pytest.raises(ValueError):
        derive_token(key, "ns", name)
