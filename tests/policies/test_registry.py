"""Policies by name: built-in, decorated, and from entry points of other packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from hf_dsde.policies import (
    ConfidencePolicy,
    DSDEStoppingPolicy,
    HeuristicPolicy,
    StaticPolicy,
    StoppingPolicy,
    available_policies,
    create_policy,
    register,
    registry,
)

ONE_FILE_POLICY = """
import torch
from hf_dsde.policies import StoppingPolicy, register

@register("third-party")
class ThirdPartyPolicy(StoppingPolicy):
    def __init__(self, length=3):
        self.length = length

    def start(self, batch):
        self.lengths = torch.full((batch.rows,), min(self.length, batch.max_draft_length), device=batch.device)

    def draft_lengths(self):
        return self.lengths

    def select_rows(self, index):
        self.lengths = self.lengths[index]
"""


@pytest.fixture(autouse=True)
def restored_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of an importable module, not yet imported, that holds one policy."""
    (tmp_path / "third_party_policy.py").write_text(ONE_FILE_POLICY)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "third_party_policy"
    sys.modules.pop("third_party_policy", None)


def install(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    """Pretend that installed packages declare these entry points."""
    monkeypatch.setattr(registry, "entry_points", lambda **selection: EntryPoints(points).select(**selection))


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, registry.ENTRY_POINT_GROUP)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("static", StaticPolicy),
        ("heuristic", HeuristicPolicy),
        ("confidence", ConfidencePolicy),
        ("dsde", DSDEStoppingPolicy),
    ],
)
def test_built_in_policies_are_known_by_their_name(name: str, policy: type[StoppingPolicy]) -> None:
    assert name in available_policies()
    assert type(create_policy(name)) is policy
    assert policy.name == name


def test_arguments_reach_the_policy() -> None:
    policy = create_policy("dsde", sl_max=8)
    assert isinstance(policy, DSDEStoppingPolicy)
    assert policy.sl_max == 8


def test_every_call_builds_a_new_policy() -> None:
    assert create_policy("static") is not create_policy("static")


def test_unknown_name_lists_the_known_and_tells_how_to_register() -> None:
    with pytest.raises(ValueError, match="There is no policy 'dsd'") as caught:
        create_policy("dsd")
    known = ", ".join(available_policies())
    for fragment in (known, "Did you mean 'dsde'?", "register('dsd')", "entry-point"):
        assert fragment in str(caught.value)


def test_unknown_argument_lists_the_accepted() -> None:
    with pytest.raises(TypeError, match=r"'static' cannot be built .*'length'.* num_draft_tokens\.") as caught:
        create_policy("static", length=4)
    assert "unexpected keyword argument" in str(caught.value)


def test_bad_value_keeps_the_policys_own_error() -> None:
    with pytest.raises(ValueError, match="`num_draft_tokens` is -1"):
        create_policy("static", num_draft_tokens=-1)


def test_a_third_party_adds_a_policy_in_one_file(third_party: str) -> None:
    __import__(third_party)
    assert "third-party" in available_policies()
    assert create_policy("third-party", length=7).name == "third-party"


def test_entry_points_are_listed_without_being_imported(third_party: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, point("third-party", f"{third_party}:ThirdPartyPolicy"))
    assert "third-party" in available_policies()
    assert third_party not in sys.modules


def test_entry_points_are_loaded_when_asked_for(third_party: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, point("third-party", f"{third_party}:ThirdPartyPolicy"))
    for _ in range(2):
        assert type(create_policy("third-party")).__name__ == "ThirdPartyPolicy"


def test_an_entry_point_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, point("broken", "no_such_module_here:Policy"))
    with pytest.raises(ValueError, match=r"'broken' comes from 'no_such_module_here:Policy'.*failed to load"):
        create_policy("broken")
    assert type(create_policy("static")) is StaticPolicy


def test_an_entry_point_may_not_take_a_built_in_name(third_party: str, monkeypatch: pytest.MonkeyPatch) -> None:
    __import__(third_party)
    install(monkeypatch, point("dsde", f"{third_party}:ThirdPartyPolicy"))
    with pytest.raises(ValueError, match=r"'dsde' is claimed by .*dsde:DSDEStoppingPolicy and by third_party_policy"):
        create_policy("dsde")


def test_two_packages_with_one_name_are_refused(third_party: str, monkeypatch: pytest.MonkeyPatch) -> None:
    static = "hf_dsde.policies.static:StaticPolicy"
    install(monkeypatch, point("twice", f"{third_party}:ThirdPartyPolicy"), point("twice", static))
    with pytest.raises(ValueError, match=r"'twice' is claimed by .* and by "):
        create_policy("twice")


def test_duplicate_registration_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'static' is taken by hf_dsde\.policies\.static:StaticPolicy"):

        @register("static")
        class Another(StaticPolicy):
            name = "static"


def test_defining_the_same_class_again_replaces_it() -> None:
    def define(length: int) -> Any:
        @register("rerun-cell")
        class Cell(StaticPolicy):
            name = "rerun-cell"
            number = length

        return Cell

    define(1)
    newest = define(2)
    assert type(create_policy("rerun-cell")) is newest


def test_a_class_may_not_have_two_names() -> None:
    with pytest.raises(ValueError, match=r"calls itself 'static' but is registered as 'other'"):
        register("other")(StaticPolicy)


def test_a_function_can_be_the_factory() -> None:
    @register("short")
    def short(num_draft_tokens: int = 2) -> StoppingPolicy:
        return StaticPolicy(num_draft_tokens)

    assert type(create_policy("short")) is StaticPolicy


def test_a_factory_that_returns_something_else_is_refused() -> None:
    register("nonsense")(lambda: 5)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"registered as policy 'nonsense', returned 5"):
        create_policy("nonsense")


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_name_is_a_non_empty_string(name: Any) -> None:
    with pytest.raises(ValueError, match="a non-empty string is needed"):
        register(name)
