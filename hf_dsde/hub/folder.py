"""Writes the folder that `model.generate(custom_generate=FOLDER, trust_remote_code=True)` loads."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

from hf_dsde.hub.texts import GENERATE, README

PACKAGE = "hf-dsde"
GENERATE_NAME = "custom_generate/generate.py"
REQUIREMENTS_NAME = "custom_generate/requirements.txt"
README_NAME = "README.md"


def export_generate(folder: Path | str, *, overwrite: bool = False) -> list[Path]:
    """Write a folder that transformers loads `generate` with drafts from, here or as a repository of the Hub.

    It holds no weights and no code of this package, which has to be installed where it is used: in this version, or in
    a later one that promises the same (the same minor version before 1.0, the same major version after).

    Args:
        folder: Where to; made if it is not there. Other files in it stay.
        overwrite: Whether files of an earlier export, or others of the same names, may be replaced.

    Returns:
        The files written.

    Raises:
        FileExistsError: If one of the files is there and `overwrite` is False. Nothing is written then.
        NotADirectoryError: If there is a file where the folder would be.
        PackageNotFoundError: If this package runs without being installed, and so has no version.
    """
    folder = Path(folder).expanduser()
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file, and the export is a folder. Name another place.")
    oldest = Version(version(PACKAGE))
    before = f"0.{oldest.minor + 1}" if oldest.major == 0 else str(oldest.major + 1)
    names = {"oldest": oldest.public, "before": before}
    texts = {
        README_NAME: README.substitute(names),
        GENERATE_NAME: GENERATE.substitute(names),
        REQUIREMENTS_NAME: _requirements(oldest, before),
    }
    present = [name for name in texts if (folder / name).exists()]
    if present and not overwrite:
        raise FileExistsError(
            f"{folder} has {', '.join(present)} already. Name another folder, or pass overwrite=True (--overwrite)."
        )
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def _requirements(oldest: Version, before: str) -> str:
    """The range of versions as far as transformers can read it: one comparison a line, with a version of digits.

    Digits cannot say that a development version will do. There the line only asks for the package, and `generate.py`
    looks at the version.
    """
    lower = PACKAGE if oldest.is_prerelease else f"{PACKAGE}>={oldest.base_version}"
    return f"{lower}\n{PACKAGE}<{before}\n"
