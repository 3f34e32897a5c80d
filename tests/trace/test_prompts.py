"""Files of prompts."""

from __future__ import annotations

import pytest

from hf_dsde.trace import Prompt, read_prompts


def test_lines_of_json_carry_a_task(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"task": "code", "prompt": "a\\nb"}\n\n{"prompt": "ä", "task": "news"}\n', encoding="utf-8")
    assert read_prompts(file) == [Prompt("code", "a\nb"), Prompt("news", "ä")]


def test_plain_lines_are_prompts_of_one_task(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("first\n\n  second\n", encoding="utf-8")
    assert read_prompts(file) == [Prompt("text", "first"), Prompt("text", "  second")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no JSON"),
        ("[]", 'line 2 has no "task"'),
        ('{"prompt": "x"}', 'line 2 has no "task"'),
        ('{"task": "t", "prompt": " "}', 'line 2 has no "task"'),
        ('{"task": 3, "prompt": "x"}', 'line 2 has no "task"'),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"task": "t", "prompt": "p"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_prompts(file)


def test_a_file_without_prompts_is_refused(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(file)
