"""Who called: so that a warning names the user's line."""

from __future__ import annotations

import sys

_LIBRARIES = ("hf_dsde", "transformers", "torch")
"""Top-level packages whose frames stand between the user's call and the one that warns."""


def callers_level() -> int:
    """Stack level, for `warnings.warn` in the calling function, of the first frame that is the user's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level
