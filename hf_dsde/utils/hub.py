"""Files from the Hugging Face Hub or a local folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def local_folder(folder: Path | str, patterns: Sequence[str], written_by: str) -> Path:
    """Return `folder` itself if it exists, otherwise a snapshot of the Hub repository of that name.

    Args:
        folder: A folder, or the id of a repository.
        patterns: Of the files that are fetched from the Hub.
        written_by: What writes such folders, for the error.

    Raises:
        FileNotFoundError: There is neither.
    """
    local = Path(folder).expanduser()
    if local.is_dir():
        return local
    # Imported here: only a repository id needs it, and it brings an HTTP client with it.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(folder), allow_patterns=list(patterns)))
    except Exception as error:
        raise FileNotFoundError(
            f"folder {str(folder)!r} is no local folder, and fetching it as a Hub repository failed "
            f"({type(error).__name__}: {error}): pass a folder written by {written_by} or a repository id such as "
            "'name/draft'"
        ) from error
