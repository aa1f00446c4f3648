"""The upstream switch: every value it can have, and the selectors that were withdrawn."""

import pytest
from support import refused

from refimpl.environment import policy_from_environment
from refimpl.partition import Policy

SWITCH = "NVTE_EXPERIMENTAL_CP_AG_THD_PACKED_CONTIGUOUS"


@pytest.mark.clause("P11")
@pytest.mark.parametrize(
    ("variables", "policy"),
    [
        ({}, "dual_chunk_swap"),
        ({SWITCH: ""}, "dual_chunk_swap"),
        ({SWITCH: "0"}, "dual_chunk_swap"),
        ({SWITCH: "1"}, "packed_contiguous"),
        ({"PATH": "/bin", SWITCH.lower(): "1", "X" + SWITCH: "1"}, "dual_chunk_swap"),  # other names mean nothing
        ({"NVTE_PACKED_SUPER_SEQUENCE": "0", SWITCH: "1"}, "packed_contiguous"),
        ({"NVTE_PACKED_SUPER_SEQUENCE": ""}, "dual_chunk_swap"),
        ({"NVTE_EXPERIMENTAL_CP_AG_THD_NO_LOAD_BALANCE": "0", SWITCH: "1"}, "packed_contiguous"),
        ({"NVTE_EXPERIMENTAL": "1"}, "dual_chunk_swap"),
    ],
)
def test_values_of_the_switch(variables, policy):
    selected = policy_from_environment(variables)
    assert selected == policy
    assert type(selected) is Policy


@pytest.mark.clause("P11")
@pytest.mark.parametrize(
    "value", ["2", "-1", "01", "00", " 1", "1 ", " ", "true", "True", "on", "yes", "False", "1.0", "packed_contiguous"]
)
def test_any_other_value_is_refused(value):
    with refused("environment", SWITCH, repr(value)):
        policy_from_environment({SWITCH: value})


@pytest.mark.clause("P11")
@pytest.mark.parametrize(
    "variables",
    [
        {SWITCH: "packed_super_sequence"},
        {SWITCH: "PACKED_SUPER_SEQUENCE"},
        {"NVTE_EXPERIMENTAL_CP_AG_THD_PACKED_SUPER_SEQUENCE": "1"},
        {"NVTE_PACKED_SUPER_SEQUENCE": "1"},
        {"nvte_packed_super_sequence": "yes", SWITCH: "0"},
        {"NVTE_EXPERIMENTAL_CP_AG_THD_NO_LOAD_BALANCE": "1"},  # a name the switch had for a while
        {"NVTE_EXPERIMENTAL_CP_AG_THD_NO_LOAD_BALANCE": "1", SWITCH: "1"},
    ],
)
def test_retired_selectors_are_refused(variables):
    name = next((name for name in variables if name != SWITCH), SWITCH)
    with refused("policy_retired", name, f"{SWITCH}=1"):
        policy_from_environment(variables)


@pytest.mark.clause("P11")
def test_reads_this_process_when_told_nothing(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    assert policy_from_environment() == "dual_chunk_swap"
    monkeypatch.setenv(SWITCH, "1")
    assert policy_from_environment() == "packed_contiguous"
    assert policy_from_environment({}) == "dual_chunk_swap"  # an empty mapping is not "this process"
    monkeypatch.setenv(SWITCH, "x")
    with refused("environment"):
        policy_from_environment()
