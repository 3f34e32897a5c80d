"""An exported folder, a place for what transformers imports out of it, and versions of the package."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_dsde.hub.folder import export_generate

VERSION = importlib.metadata.version


@pytest.fixture(autouse=True)
def module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are copied to, and imported from, a place of the test's own."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Say which version of the package is installed, None for none."""

    def install(number: str | None) -> None:
        def version(name: str) -> str:
            if name != "hf-dsde":
                return VERSION(name)
            if number is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return number

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr("hf_dsde.hub.folder.version", version)

    return install


@pytest.fixture
def call(tmp_path: Path, package: Callable[[str | None], None]) -> dict[str, Any]:
    """Arguments that name an exported folder."""
    package("0.1.0")
    export_generate(tmp_path / "dsde")
    return {"custom_generate": str(tmp_path / "dsde"), "trust_remote_code": True}
