"""What a refusal of a call says: the argument, its value, and the way out."""

from __future__ import annotations

from typing import NoReturn

PLAIN = "Leave out `speculation_policy`, or `custom_generate`, in `model.generate` to decode it the stock way."
PLAIN += " Where `enable` was given defaults, pass speculation_policy=None."


def refuse(what: str, why: str) -> NoReturn:
    """Refuse a call.

    Args:
        what: The argument and its value.
        why: The reason, and the way out.

    Raises:
        ValueError: Always.
    """
    msg = f"speculation_policy cannot be used with {what}: {why}"
    raise ValueError(msg)
