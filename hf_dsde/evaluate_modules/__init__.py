"""Modules for the `evaluate` library, which `evaluate.load` takes from the installed package, without a network.

    acceptance = evaluate.load(module_path("speculative_acceptance"))

`evaluate` copies a module's file into its own cache and imports it from there; what the file needs of this package it
imports by name.
"""

from __future__ import annotations

from pathlib import Path

from hf_dsde.utils.checks import check_choice

MODULES = ("output_equivalence", "speculative_acceptance")
"""Names of the modules: a comparison and a measurement."""


def module_path(name: str) -> str:
    """The folder of a module, to be given to `evaluate.load`.

    Args:
        name: One of `MODULES`.

    Raises:
        ValueError: If there is no such module.
    """
    return str(Path(__file__).parent / check_choice("name", name, MODULES))
