"""A line about an API key: its valid fields, and the error for a wrong one."""

from __future__ import annotations

import pytest

from pagemill_servers.keys.caller import ANONYMOUS, Caller, Limits
from pagemill_servers.keys.entries import EntryError, fault_of, parse_entry

HASH = "ab" * 32


def test_a_bare_hash_is_a_key_without_limits() -> None:
    assert parse_entry(HASH.upper()) == Caller(key_hash=HASH)
    assert parse_entry(HASH).limits.none


def test_an_entry_names_the_tenant_and_the_limits_of_a_key() -> None:
    line = (
        f"{HASH}  tenant=team-a models=llama,gpt-4o requests_per_minute=60 tokens_per_minute=10000 concurrency=4 "
        "tokens_per_day=200000 tokens_per_month=1000000000000 priority=high"
    )
    caller = parse_entry(line)
    assert caller.tenant == "team-a"
    assert caller.models == {"llama", "gpt-4o"}
    assert caller.limits == Limits(60, 10_000, 4, 200_000, 10**12)
    assert caller.priority_class == "high"
    assert caller.may_use("llama")
    assert not caller.may_use("other")


def test_an_entry_limits_single_models_too() -> None:
    caller = parse_entry(
        f"{HASH} tenant=a models=llama,sales requests_per_minute=60 tokens_per_day@sales=500 concurrency@sales=2"
    )
    assert caller.limits == Limits(60)
    assert [(each.account, each.limits, each.model) for each in caller.charges(("sales",))] == [
        ("tenant:a", Limits(60), ""),
        ("tenant:a/model:sales", Limits(concurrency=2, tokens_per_day=500), "sales"),
    ]
    assert [each.model for each in caller.charges(("llama",))] == [""]
    assert [each.model for each in parse_entry(f"{HASH} concurrency@a/b:c=1").charges(("a/b:c",))] == ["a/b:c"]


@pytest.mark.parametrize(
    ("rest", "named"),
    [
        ("tenant=", "tenant=''"),
        ("tenant=a/b", "letters, digits"),
        (f"tenant={'x' * 64}", "63"),
        ("models=", "models"),
        ("models=a,,b", "models"),
        ("requests_per_minute=0", "requests_per_minute='0'"),
        ("tokens_per_minute=-1", "whole number"),
        ("tokens_per_minute=1.5", "whole number"),
        ("tokens_per_day=1000000000001", "1000000000000"),
        ("concurrency=²", "concurrency"),
        ("priority=urgent", "high, normal, low"),
        ("tenant=a objective=101", "50 to 99.999"),
        ("tenant=a objective=9e1", "percentage"),
        ("objective=99.9", "without `tenant`"),
        ("requests_per_minut=5", "`requests_per_minut`, which is none of"),
        ("tenant", "`tenant`"),
        ("tenant=a tenant=b", "twice"),
        ("concurrency@sales=1 concurrency@sales=2", "`concurrency@sales` twice"),
        ("concurrency@=1", "without a name. Write concurrency@MODEL=NUMBER"),
        ("models=llama concurrency@sales=1", "`concurrency@sales`, and its `models` lacks that name"),
        ("requests_per_minute@sales=0", "requests_per_minute@sales='0'"),
        ("priority@sales=low", "which is none of"),
    ],
)
def test_a_wrong_field_is_named_with_its_remedy(rest: str, named: str) -> None:
    with pytest.raises(EntryError, match=named):
        parse_entry(f"{HASH} {rest}")


@pytest.mark.parametrize("line", ["", "sk-plain-key", f"{HASH}00", "sk-plain-key tenant=a", f"{HASH} sk-plain-key"])
def test_a_value_that_may_be_a_key_is_never_shown(line: str) -> None:
    fault = fault_of(line)
    assert fault is not None
    assert "sk-plain" not in fault
    assert "sha256sum" in fault or "FIELD=VALUE" in fault


def test_keys_of_one_tenant_share_counters_and_keys_of_others_do_not() -> None:
    one, two = parse_entry(f"{HASH} tenant=a"), parse_entry(f"{'cd' * 32} tenant=a")
    assert one.account == two.account
    assert len({one.account, parse_entry(HASH).account, parse_entry("cd" * 32).account, ANONYMOUS.account}) == 4
    assert HASH not in parse_entry(HASH).account


def test_the_class_of_a_key_overrides_the_clients_priority() -> None:
    high, normal, low = (parse_entry(f"{HASH} priority={name}") for name in ("high", "normal", "low"))
    assert high.priority(2**31 - 1) < normal.priority(-(2**31))
    assert normal.priority(2**31 - 1) < low.priority(-(2**31))
    assert normal.priority(-5) < normal.priority(0) < normal.priority(7)
    assert ANONYMOUS.priority(123456) == 123456
