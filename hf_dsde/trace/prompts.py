"""The prompts of a recording, each with the task that its rows are filed under."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

PLAIN_TASK = "text"
"""Task of prompts that come from a file of plain lines."""


@dataclass(frozen=True)
class Prompt:
    """One request and the task that it belongs to."""

    task: str
    text: str


def read_prompts(file: Path) -> list[Prompt]:
    """Read prompts from a file: objects with `task` and `prompt` in a `.jsonl` file, else one prompt per line.

    Blank lines are skipped.

    Raises:
        ValueError: A line of a `.jsonl` file is no such object, or there is no prompt.
    """
    lines = file.read_text(encoding="utf-8").splitlines()
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ValueError(f"{file} holds no prompt: write one per line")
    if file.suffix != ".jsonl":
        return [Prompt(PLAIN_TASK, line) for _, line in numbered]
    return [_parse(f"{file}, line {number}", line) for number, line in numbered]


def _parse(place: str, line: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as failure:
        raise ValueError(f"{place} is no JSON ({failure}): write one object per line") from failure
    task, text = (entry.get("task"), entry.get("prompt")) if isinstance(entry, dict) else (None, None)
    if not (isinstance(task, str) and task.strip() and isinstance(text, str) and text.strip()):
        raise ValueError(
            f'{place} has no "task" and "prompt" that are texts: write {{"task": "code", "prompt": "..."}}'
        )
    return Prompt(task, text)
