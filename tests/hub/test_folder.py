"""What `export-generate` writes, and what its files say where the package is missing or of another version."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_batch import ARGUMENTS, draft, plain_text, untouched
from typer.testing import CliRunner

from hf_dsde.cli.main import app
from hf_dsde.hub.folder import export_generate

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")
RUNNER = CliRunner()


def test_the_command_writes_it_and_says_what_it_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "dsde"
    command = ["export-generate", str(folder)]
    result = RUNNER.invoke(app, command)
    assert result.exit_code == 0, result.output
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sorted(result.output.split()) == sorted([*map(str, files), *["written"] * 3])
    again = RUNNER.invoke(app, command)
    assert again.exit_code == 2
    assert "--overwrite" in again.output
    assert RUNNER.invoke(app, [*command, "--overwrite"]).exit_code == 0


def test_the_folder_holds_three_files_and_no_more(tmp_path: Path) -> None:
    files = export_generate(tmp_path / "a" / "b")
    assert sorted(files) == sorted(path for path in (tmp_path / "a").rglob("*") if path.is_file())
    names = {"README.md", "custom_generate/generate.py", "custom_generate/requirements.txt"}
    assert {str(path.relative_to(tmp_path / "a" / "b")) for path in files} == names


@pytest.mark.parametrize(
    ("number", "requirements", "install"),
    [
        ("0.1.0.dev0", "hf-dsde\nhf-dsde<0.2\n", "hf-dsde>=0.1.0.dev0,<0.2"),
        ("0.3.2rc1", "hf-dsde\nhf-dsde<0.4\n", "hf-dsde>=0.3.2rc1,<0.4"),
        ("0.3.2.post1", "hf-dsde>=0.3.2\nhf-dsde<0.4\n", "hf-dsde>=0.3.2.post1,<0.4"),
        ("1.2.0+local", "hf-dsde>=1.2.0\nhf-dsde<2\n", "hf-dsde>=1.2.0,<2"),
    ],
)
def test_every_kind_of_version_is_accepted_by_what_it_wrote(
    tmp_path: Path, package: Callable[[str | None], None], number: str, requirements: str, install: str
) -> None:
    package(number)
    export_generate(tmp_path)
    assert (tmp_path / "custom_generate" / "requirements.txt").read_text() == requirements
    assert install in (tmp_path / "README.md").read_text()
    output = untouched().generate(
        **ARGUMENTS, custom_generate=str(tmp_path), trust_remote_code=True, assistant_model=draft()
    )
    assert output.tolist() == plain_text()


def test_the_readme_has_the_tag_and_code_that_calls_generate(tmp_path: Path) -> None:
    export_generate(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("---\n")
    assert "  - custom_generate\n" in text.split("---\n")[1]
    code = text.partition("```python\n")[2].partition("```")[0]
    compile(code, "README.md", "exec")
    for name in ("custom_generate=", "trust_remote_code=True", "assistant_model=", "speculation_policy="):
        assert name in code


def test_files_that_are_there_are_not_replaced_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("a model's own")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match=r"README\.md"):
        export_generate(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "config.json"]
    assert (tmp_path / "README.md").read_text() == "a model's own"
    export_generate(tmp_path, overwrite=True)
    export_generate(tmp_path, overwrite=True)
    assert (tmp_path / "config.json").read_text() == "{}"
    assert "custom_generate" in (tmp_path / "README.md").read_text()


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file is a file"):
        export_generate(tmp_path / "file")


def test_a_missing_package_is_named_by_transformers(
    call: dict[str, Any], package: Callable[[str | None], None]
) -> None:
    package(None)
    with pytest.raises(ImportError, match=r"hf-dsde>=0\.1\.0 \(installed: None\)"):
        untouched().generate(**ARGUMENTS, **call, assistant_model=draft())


@pytest.mark.parametrize("number", ["0.0.9", "0.2.0"])
def test_a_version_too_old_or_too_new_is_named_by_transformers(
    call: dict[str, Any], package: Callable[[str | None], None], number: str
) -> None:
    package(number)
    with pytest.raises(ImportError, match=rf"hf-dsde.*\(installed: {number}\)"):
        untouched().generate(**ARGUMENTS, **call, assistant_model=draft())


@pytest.mark.parametrize("number", [None, "0.0.9", "0.2.0"])
def test_without_requirements_the_file_says_what_to_install(
    call: dict[str, Any], package: Callable[[str | None], None], number: str | None
) -> None:
    """As where transformers cannot fetch the second file."""
    (Path(call["custom_generate"]) / "custom_generate" / "requirements.txt").unlink()
    package(number)
    found = "is not installed" if number is None else f"version {number}"
    with pytest.raises(ImportError, match=rf'{found}.*pip install "hf-dsde>=0\.1\.0,<0\.2"'):
        untouched().generate(**ARGUMENTS, **call, assistant_model=draft())


def test_a_package_that_cannot_be_imported_says_what_is_missing(
    call: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hf_dsde.hub.generate", None)
    with pytest.raises(ImportError, match=r'hf_dsde\.hub\.generate is missing.*pip install "hf-dsde'):
        untouched().generate(**ARGUMENTS, **call, assistant_model=draft())
