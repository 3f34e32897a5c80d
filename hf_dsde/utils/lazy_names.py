"""Public names of a package that are imported when they are first asked for (PEP 562)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

_one_at_a_time = threading.RLock()
"""Held while a public name is imported: what it brings in has import cycles, in which two threads would meet.

No module of this package asks another for a lazy name while it is itself being imported, so nobody waits for this lock
who holds the import lock of a module that the lock's holder may need.
"""


def lazy_names(
    package: str, namespace: dict[str, Any], modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a package's `__getattr__` and `__dir__`.

    Modules of the package are attributes of it as well, imported or not.

    Args:
        package: Name of the package.
        namespace: Its `globals()`, where a name is kept from its first use on.
        modules: For each public name the full name of the module that defines it.
    """

    def get(name: str) -> Any:
        if name in modules:
            with _one_at_a_time:
                value = getattr(import_module(modules[name]), name)
            namespace[name] = value
            return value
        full_name = f"{package}.{name}"
        try:
            return import_module(full_name)
        except ModuleNotFoundError as missing:
            if missing.name != full_name:
                raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])

    def names() -> list[str]:
        return sorted({*namespace, *modules})

    return get, names
