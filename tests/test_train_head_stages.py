"""All stages of the example that trains an EAGLE-3 head, on a tiny target: text, training, evaluation, and again."""

from __future__ import annotations

import copy
import importlib
import json
import random
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import EOS, tiny_model
from tiny_pair import CHAT_TEMPLATE
from tiny_text import tiny_tokenizer

from hf_dsde.heads import load_head
from hf_dsde.heads.eagle3 import Eagle3Head

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMPTS = ("abc", "fed", "cab", "bad")
DRAFT_IDS = (EOS, 4, 7, 9, 11, 12, 20, 21, 22, 30, 35, 40, 41, 47, 50, 58, 60, 61, 70, 77, 80, 90, 94, 95)


@pytest.fixture(scope="module")
def example():
    """The example's modules, by name."""
    sys.path.insert(0, str(EXAMPLES))
    names = ("evaluate", "generate", "heads", "prompts", "stages", "train")
    modules = {name: importlib.import_module(f"distillation.{name}") for name in names}
    yield SimpleNamespace(main=importlib.import_module("train_head"), **modules)
    sys.path.remove(str(EXAMPLES))


def start_accelerate_again():
    """A process has one state of Accelerate, which whatever ran before may have settled otherwise."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_model(num_hidden_layers=6).to(torch.float32).save_pretrained(folder)
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(example, target_folder):
    """The target as the example loads it, and its tokenizer."""
    return example.stages.load_target(str(target_folder), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def generated(example, target_folder, tmp_path_factory):
    """A work folder after a training that had no time: with rows, and an untrained head with the target's product.

    The prompts were there before, so that none of the packages they come from is needed.
    """
    folder = tmp_path_factory.mktemp("generated")
    prompts = [{"task": task, "text": text} for task in ("code", "news", "math") for text in PROMPTS]
    for name in ("prompts", "prompts-1"):
        (folder / f"{name}.json").write_text(json.dumps(prompts))
    (folder / "held_out.json").write_text(json.dumps(prompts[::2]))
    run(example, target_folder, folder, stop_after_minutes=0.0, train_product=False)
    return folder


@pytest.fixture
def work_folder(tmp_path, generated):
    """A copy of that folder."""
    return shutil.copytree(generated, tmp_path / "work")


def run(example, target_folder, work_folder, **changes):
    settings = {
        "work_folder": work_folder, "output": work_folder / "head", "target": str(target_folder), "train_steps": 4,
        "invent": 4, "batch_size": 32, "prompt_tokens": 24, "row_tokens": 32, "tokens_per_batch": 128,
        "evaluation_tokens": 8, "continued_evaluation": 12,
    }  # fmt: skip
    start_accelerate_again()
    if "start_from" not in changes:
        settings["draft_vocabulary"] = 40
    example.main.main(**{**settings, **changes})


def shards(folder):
    return {file.relative_to(folder): file.stat().st_mtime_ns for file in folder.rglob("shard-*")}


@pytest.mark.slow
def test_all_stages_leave_their_results(example, target_folder, tmp_path, generated, loaded):
    for name in ("prompts.json", "held_out.json"):
        shutil.copy(generated / name, tmp_path)
    run(example, target_folder, tmp_path, intermediate_size=48)
    record = json.loads((tmp_path / "head" / "evaluation.json").read_text())
    assert record["training"]["step"] == 4
    assert record["generation"]["continued_share"] == 0.25
    of_tasks = {(task, temperature) for task in ("code", "news", "math") for temperature in (0.0, 1.0)}
    lines = {(line["task"], line["temperature"]): line for line in record["acceptance"]}
    assert set(lines) - {("past the end", 0.0)} == of_tasks | {("continued", 0.0)}
    assert lines["continued", 0.0]["positions"] == 6 * 12
    for line in lines.values():
        assert len(line["tokens_per_call"]) == len(line["accepted"]) == len(line["overlap"]) == 7
        assert all(1 <= tokens <= 8 for tokens in line["tokens_per_call"])
        assert all(0 <= share <= 1 for share in (*line["accepted"], *line["overlap"], line["coverage"]))
    target, _ = loaded
    head = load_head(tmp_path / "head", target)
    assert isinstance(head, Eagle3Head)
    assert head.settings.feature_layers == (2, 3, 3)
    assert head.config.intermediate_size == 48
    assert head.draft_ids.tolist() == json.loads((tmp_path / "draft_vocabulary.json").read_text())
    assert EOS in head.draft_ids
    assert torch.equal(head.embed_tokens.weight, target.get_input_embeddings().weight)


def test_head_with_the_targets_product_is_saved_without_it(example, loaded, tmp_path):
    from safetensors import safe_open

    target, _ = loaded
    head = example.heads.new_head(target, DRAFT_IDS, example.heads.HeadShape(), (2, 3, 5), train_product=False)
    settings = example.heads.HeadLossSettings(chunk_tokens=64)
    input_ids, weights = example.train.collate([(torch.tensor([4, 5, 7, 9, 11, 4, 20, 21]), 2)], 0.3)
    example.heads.HeadLoss(head, target, settings)(input_ids, weights).backward()
    trained = {name for name, parameter in head.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in head.named_parameters()} - {"lm_head.weight", "embed_tokens.weight"}
    example.main.save_head(head, tmp_path / "head", target_name="x", shared_weights=False)
    with safe_open(tmp_path / "head" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - no dict
    loaded_head = load_head(tmp_path / "head", target)
    assert torch.equal(loaded_head.lm_head.weight, target.lm_head.weight[list(DRAFT_IDS)])
    assert not loaded_head.lm_head.weight.requires_grad


@pytest.mark.slow
def test_stopped_run_is_taken_up_where_it_stopped(example, target_folder, work_folder, monkeypatch):
    real_save = example.train.save_checkpoint
    (work_folder / "head_checkpoint.pt").unlink()
    before = shards(work_folder)

    def save_and_die(file, draft, optimizer, progress):
        real_save(file, draft, optimizer, progress)
        if progress.step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(example.train, "save_checkpoint", save_and_die)
        settings_class = example.train.TrainingSettings
        patch.setattr(example.main, "TrainingSettings", lambda **given: settings_class(**given, checkpoint_minutes=0.0))
        with pytest.raises(KeyboardInterrupt):
            run(example, target_folder, work_folder)
    assert not (work_folder / "head").exists()
    # Only training is looked at.
    monkeypatch.setattr(example.main, "evaluate", lambda *_: [])
    monkeypatch.setattr(example.main, "show", lambda _: None)
    run(example, target_folder, work_folder)
    interrupted = torch.load(work_folder / "head_checkpoint.pt", weights_only=True)
    (work_folder / "head_checkpoint.pt").unlink()
    run(example, target_folder, work_folder)
    assert shards(work_folder) == before
    at_once = torch.load(work_folder / "head_checkpoint.pt", weights_only=True)
    assert interrupted["progress"]["step"] == at_once["progress"]["step"] == 4
    for name, value in at_once["draft"].items():
        torch.testing.assert_close(interrupted["draft"][name], value, rtol=0, atol=0)


@pytest.mark.slow
def test_training_goes_on_from_a_saved_head_with_more_rows(example, target_folder, work_folder, loaded, monkeypatch):
    target, _ = loaded
    begun, earlier = work_folder / "unfinished_head", shards(work_folder)
    before = load_head(begun, target)
    assert before.shares("lm_head")
    (work_folder / "head_checkpoint.pt").unlink()
    (work_folder / "draft_vocabulary.json").unlink()
    old_rows = example.generate.read_shards(work_folder / "rows")
    monkeypatch.setattr(example.main, "evaluate", lambda *_: [])
    monkeypatch.setattr(example.main, "show", lambda _: None)
    run(
        example, target_folder, work_folder, start_from=begun, generation_round=1, train_steps=25, learning_rate=3e-3
    )  # fmt: skip
    assert {file: shards(work_folder)[file] for file in earlier} == earlier
    added = {file.parent.name for file in set(shards(work_folder)) - set(earlier)}
    assert added == {"answers-1", "articles-1", "invented-messages-1"}
    rows = example.generate.read_shards(work_folder / "rows")
    record = json.loads((work_folder / "head" / "evaluation.json").read_text())
    assert record["generation"]["rows"] == len(rows) >= 2 * len(old_rows) - 8
    assert sorted(map(str, rows)) != sorted(map(str, [*old_rows, *old_rows]))
    after = load_head(work_folder / "head", target)
    assert after.shares("lm_head")
    assert torch.equal(before.draft_ids, after.draft_ids)
    assert before.draft_ids.tolist() == json.loads((work_folder / "draft_vocabulary.json").read_text())
    input_ids, weights = example.train.collate(rows[:8], 1.0)
    settings = example.heads.HeadLossSettings(chunk_tokens=64)
    losses = [
        float(example.heads.HeadLoss(head, target, settings)(input_ids, weights).detach()) for head in (before, after)
    ]
    assert losses[1] < losses[0] - 0.1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"draft_vocabulary": 41}, "--draft-vocabulary: 41 .* has 40"),
        ({"train_product": True}, "--train-product: True"),
        ({"shape": {"intermediate_size": 48}}, "--intermediate-size: 48 .* has 64"),
        ({"shape": {"key_value_heads": 4}}, "--key-value-heads: 4"),
    ],
)
def test_options_that_a_saved_head_contradicts_are_refused(example, loaded, work_folder, given, message):
    target, _ = loaded
    shape = example.heads.HeadShape(**given.pop("shape", {}))
    arguments = {"draft_vocabulary": None, "train_product": None, **given}
    with pytest.raises(ValueError, match=message):
        example.main.build_head(target, work_folder, work_folder / "unfinished_head", shape=shape, **arguments)
    same = {"draft_vocabulary": 40, "shape": example.heads.HeadShape(64, 4, 2), "train_product": False}
    assert not example.main.build_head(
        target, work_folder, work_folder / "unfinished_head", **same
    ).lm_head.weight.requires_grad


def test_work_folder_of_another_draft_vocabulary_is_refused(example, loaded, work_folder):
    target, _ = loaded
    (work_folder / "draft_vocabulary.json").write_text("[1, 2, 3]")
    with pytest.raises(ValueError, match=r"draft_vocabulary\.json"):
        example.main.build_head(
            target, work_folder, work_folder / "unfinished_head", None, example.heads.HeadShape(), None
        )


@torch.no_grad()
def plain_greedy(target, prompt, count):
    """What the target goes on with, whatever ends an answer."""
    row = list(prompt)
    for _ in range(count):
        row.append(int(target(torch.tensor([row])).logits[0, -1].argmax()))
    return row


@pytest.fixture
def generator(example, loaded):
    """Makes rows of 20 tokens; what ends an answer comes fourth in the answer to "abc"."""
    target, tokenizer = loaded
    before = target.generation_config.eos_token_id
    prompt = tokenizer(example.generate.render(tokenizer, "abc"), add_special_tokens=False)["input_ids"]
    target.generation_config.eos_token_id = plain_greedy(target, prompt, 4)[-1]
    settings = example.generate.GenerationSettings(4, prompt_tokens=12, row_tokens=20)
    yield example.generate.TextGenerator(target, tokenizer, settings)
    target.generation_config.eos_token_id = before


def test_continued_rows_go_on_past_the_end(example, loaded, generator):
    target, tokenizer = loaded
    texts = [example.generate.render(tokenizer, text) for text in ("abc", "fed", "cabcab")]
    ended = generator.rows(example.generate.Job(texts, 0.0))
    continued = generator.rows(example.generate.Job(texts, 0.0, continued=True))
    width = max(length for _, length in continued)
    for text, (row, length), (short, _) in zip(texts, continued, ended, strict=True):
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert length == len(prompt)
        assert row.tolist() == plain_greedy(target, prompt, len(row) - length)
        assert len(row) - length >= generator.settings.row_tokens - width
        assert row[: len(short)].tolist() == short.tolist()
    assert len(ended[0][0]) < len(continued[0][0])
    assert ended[0][0][-1] == generator.end_ids[0]

    torch.manual_seed(0)
    sampled = generator.rows(example.generate.Job([texts[0]] * 16, 1.0, continued=True))
    assert {len(row) for row, _ in sampled} == {20}
    assert any(generator.end_ids[0] in row[length:-1] for row, length in sampled)


def test_a_share_of_the_answers_is_continued_and_no_other_choice_changes(example, loaded):
    _, tokenizer = loaded
    letters = "abcdef"
    prompts = [
        example.prompts.Prompt("code" if a < "c" else "news", a + b + c)
        for a in letters for b in letters for c in letters
    ]  # fmt: skip
    # One draw a prompt, whether any are continued or not.
    draws = random.Random(0)
    sampled_texts = {example.generate.render(tokenizer, each.text) for each in prompts if draws.random() < 1 / 3}
    plans = {}
    for share in (0.0, 0.25, 1.0):
        settings = example.generate.GenerationSettings(8, 12, 20, continued_share=share)
        plans[share] = example.generate.plan_jobs(prompts, tokenizer, settings)
    for share, jobs in plans.items():
        for sampled in (False, True):
            texts = [(text, job.continued) for job in jobs if (job.temperature > 0) == sampled for text in job.texts]
            assert all((text in sampled_texts) == sampled for text, _ in texts)
            assert sum(continued for _, continued in texts) / len(texts) == pytest.approx(share, abs=0.1)
        assert sum(len(job.texts) for job in jobs) == len(prompts)


@pytest.mark.parametrize("setting", [{"continued_share": 1.5}, {"sampled_share": -0.1}, {"round": -1}])
def test_settings_that_mean_nothing_are_refused(example, setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        example.generate.GenerationSettings(4, 12, 20, **setting)


def test_evaluation_measures_text_past_the_end(example, loaded, generator):
    target, tokenizer = loaded
    scored = {}

    def score(draft, target, rows, task, temperature, settings):
        scored[task, temperature] = rows
        return example.evaluate.Acceptance(task, temperature, len(rows), 0, 0.0, 0.0, 0.0)

    prompts = [example.prompts.Prompt(task, text) for task, text in (("code", "abc"), ("news", "fed"), ("news", "abc"))]
    settings = example.evaluate.EvaluationSettings(answer_tokens=6, continued_tokens=9, batch_size=2)
    results = example.evaluate.evaluate(target, target, tokenizer, prompts, settings, score)
    assert [(line["task"], line["temperature"]) for line in results] == list(scored)
    continued = scored["continued", 0.0]
    for prompt, (row, length) in zip(prompts, continued, strict=True):
        ids = tokenizer(example.generate.render(tokenizer, prompt.text), add_special_tokens=False)["input_ids"]
        assert length == len(ids)
        assert row.tolist() == plain_greedy(target, ids, 9)
    expected = []
    for row, length in continued:
        answer = row[length:].tolist()
        if generator.end_ids[0] in answer[:-1]:
            expected.append((row.tolist(), length + answer.index(generator.end_ids[0]) + 1))
    assert [(row.tolist(), length) for row, length in scored["past the end", 0.0]] == expected
    assert len(expected) >= 2
    assert len(scored["code", 0.0][0][0]) == continued[0][1] + 4


def test_nothing_past_the_end_is_no_line(example):
    rows = [(torch.tensor([4, 2, 5, 6, 2]), 2), (torch.tensor([4, 5, 6]), 1)]
    assert example.evaluate.past_the_end(rows, [2]) == []
    assert [length for _, length in example.evaluate.past_the_end(rows, [5, 6])] == [3, 2]
