"""Policies by name. This file knows names and factories, not what any policy does.

A policy becomes known in one of two ways: its module decorates it with `register("name")` and is imported, or its
distribution declares it in the entry-point group `hf_dsde.policies`, which is looked at when a name is asked for.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any, TypeVar

from hf_dsde.policies.base import PolicyFactory, StoppingPolicy

ENTRY_POINT_GROUP = "hf_dsde.policies"

_factories: dict[str, PolicyFactory] = {}

Factory = TypeVar("Factory", bound=PolicyFactory)


def _address(factory: PolicyFactory) -> str:
    return f"{getattr(factory, '__module__', '?')}:{getattr(factory, '__qualname__', repr(factory))}"


def register(name: str) -> Callable[[Factory], Factory]:
    """Decorate a policy class, or a function that returns a policy, to make it known under `name`.

    A class without a `name` of its own receives it. Defining the same class again, as a re-run notebook cell does,
    replaces the earlier one; any other second claim to a name is refused.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"A policy's name is {name!r}, but a non-empty string is needed.")

    def decorate(factory: Factory) -> Factory:
        own_name = getattr(factory, "name", None)
        if isinstance(factory, type) and own_name is None:
            factory.name = name  # type: ignore[attr-defined]
        elif own_name is not None and own_name != name:
            raise ValueError(
                f"{_address(factory)} calls itself {own_name!r} but is registered as {name!r}. Use one name for both."
            )
        known = _factories.get(name)
        if known is not None and _address(known) != _address(factory):
            raise ValueError(
                f"The policy name {name!r} is taken by {_address(known)}, so {_address(factory)} cannot have it. "
                "Register it under another name."
            )
        _factories[name] = factory
        return factory

    return decorate


def available_policies() -> list[str]:
    """Every name that `create_policy` knows, sorted. Third-party policies are listed without being imported."""
    return sorted({*_factories, *_declared().names})


def create_policy(name: str, **arguments: Any) -> StoppingPolicy:
    """A new policy by name.

    Args:
        name: A name in `available_policies()`.
        arguments: Keyword arguments of that policy's constructor.

    Raises:
        ValueError: The name is unknown or claimed twice, or the policy refused an argument's value.
        TypeError: The policy has no such argument, or what was registered returned no policy.
    """
    factory = _find(name)
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as mismatch:
        accepted = ", ".join(inspect.signature(factory).parameters) or "none"
        raise TypeError(
            f"Policy {name!r} cannot be built from the arguments {sorted(arguments)}: {mismatch}. "
            f"Its arguments are: {accepted}."
        ) from mismatch
    policy = factory(**arguments)
    if not isinstance(policy, StoppingPolicy):
        raise TypeError(f"{_address(factory)}, registered as policy {name!r}, returned {policy!r}: no StoppingPolicy.")
    return policy


def _declared() -> EntryPoints:
    """What distributions declare. Reading it takes 30 ms, and is done again when the search path has changed."""
    return _read_entry_points(entry_points, tuple(sys.path))


@lru_cache(maxsize=1)
def _read_entry_points(read: Callable[..., EntryPoints], path: tuple[str, ...]) -> EntryPoints:  # noqa: ARG001 - a key
    return read(group=ENTRY_POINT_GROUP)


def _find(name: str) -> PolicyFactory:
    claims = {point.value: point for point in _declared().select(name=name)}
    loaded = {value: _load(point) for value, point in claims.items()}
    # Loading may have registered the policy: a module can use the decorator and be an entry point as well.
    factories = {_address(factory): factory for factory in loaded.values()}
    if name in _factories:
        factories.setdefault(_address(_factories[name]), _factories[name])
    if len(factories) > 1:
        raise ValueError(
            f"The policy name {name!r} is claimed by {' and by '.join(sorted(factories))}. Uninstall one of the "
            f"packages, or have it use another name in its entry-point group {ENTRY_POINT_GROUP!r}."
        )
    if factories:
        return next(iter(factories.values()))
    known = available_policies()
    close = get_close_matches(str(name), known, n=1)
    raise ValueError(
        f"There is no policy {name!r}. Known policies: {', '.join(known)}."
        + (f" Did you mean {close[0]!r}?" if close else "")
        + f" To add one, decorate its class with `hf_dsde.policies.register({str(name)!r})` and import its module, or "
        f"declare it in the entry-point group {ENTRY_POINT_GROUP!r} of your package."
    )


def _load(point: EntryPoint) -> PolicyFactory:
    try:
        factory = point.load()
    except Exception as failure:
        raise ValueError(
            f"Policy {point.name!r} comes from {point.value!r} in the entry-point group {ENTRY_POINT_GROUP!r}, which "
            f"failed to load: {failure!r}. Repair or uninstall that package."
        ) from failure
    if not callable(factory):
        raise TypeError(f"Policy {point.name!r} comes from {point.value!r}, which is no class and no function.")
    return factory
