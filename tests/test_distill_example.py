"""The distillation example on a tiny target: every stage, and going on after a stop."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from tiny_pair import CHAT_TEMPLATE
from tiny_text import tiny_tokenizer

from hf_dsde.drafting.layer_draft import initialise_draft, load_draft

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"
TEXTS = ("abc", "fed", "cab", "bad", "face", "dead")


@pytest.fixture(scope="module", autouse=True)
def examples_on_the_path():
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(autouse=True)
def accelerate_starts_again():
    """A process has one state of Accelerate, which whatever ran before may have settled otherwise."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def distill_draft():
    return importlib.import_module("distill_draft")


@pytest.fixture
def target_folder(tmp_path):
    import copy

    folder = tmp_path / "target"
    tiny_model(num_hidden_layers=3).to(torch.float32).save_pretrained(folder)
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def work_folder(tmp_path):
    """A work folder whose prompts are there already, so that none of the packages they come from is needed."""
    folder = tmp_path / "work"
    folder.mkdir()
    prompts = [{"task": task, "text": text} for task in ("code", "news", "math") for text in TEXTS]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    (folder / "held_out.json").write_text(json.dumps(prompts[::3]))
    return folder


def run(module, target_folder, work_folder, **changes):
    settings = {
        "work_folder": work_folder,
        "output": work_folder / "draft",
        "target": str(target_folder),
        "layers": "0,2",
        "train_steps": 4,
        "invent": 4,
        "batch_size": 4,
        "prompt_tokens": 24,
        "row_tokens": 32,
        "tokens_per_batch": 128,
        "evaluation_tokens": 8,
    }
    module.main(**{**settings, **changes})


def test_all_stages_leave_their_results(distill_draft, target_folder, work_folder):
    run(distill_draft, target_folder, work_folder)
    record = json.loads((work_folder / "draft" / "evaluation.json").read_text())
    assert record["training"]["step"] == 4
    assert record["generation"]["rows"] >= 3 * len(TEXTS)
    assert {(line["task"], line["temperature"]) for line in record["acceptance"]} == {
        (task, temperature) for task in ("code", "news", "math") for temperature in (0.0, 1.0)
    }
    for line in record["acceptance"]:
        assert 0 <= line["overlap"] <= 1
        assert 1 <= line["tokens_per_call"] <= 5
    target, _ = distill_draft.load_target(str(target_folder), torch.float32, torch.device("cpu"))
    assert load_draft(work_folder / "draft", target).config.num_hidden_layers == 2


def test_stopped_run_is_taken_up_where_it_stopped(distill_draft, target_folder, work_folder, monkeypatch):
    training = importlib.import_module("distillation.train")
    real_save = training.save_checkpoint

    def save_and_die(file, draft, optimizer, progress):
        real_save(file, draft, optimizer, progress)
        if progress.step == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "save_checkpoint", save_and_die)
    monkeypatch.setattr(distill_draft, "TrainingSettings", _checkpoint_every_step(training.TrainingSettings))
    with pytest.raises(KeyboardInterrupt):
        run(distill_draft, target_folder, work_folder)
    assert not (work_folder / "draft").exists()
    shards = {file: file.stat().st_mtime_ns for file in work_folder.rglob("shard-*")}
    monkeypatch.setattr(training, "save_checkpoint", real_save)
    run(distill_draft, target_folder, work_folder)
    interrupted = torch.load(work_folder / "checkpoint.pt", weights_only=True)
    assert {file: file.stat().st_mtime_ns for file in work_folder.rglob("shard-*")} == shards

    (work_folder / "checkpoint.pt").unlink()
    run(distill_draft, target_folder, work_folder)
    at_once = torch.load(work_folder / "checkpoint.pt", weights_only=True)
    assert interrupted["progress"]["step"] == at_once["progress"]["step"] == 4
    for name, value in at_once["draft"].items():
        torch.testing.assert_close(interrupted["draft"][name], value, rtol=0, atol=0)


def _checkpoint_every_step(settings_class):
    return lambda **kwargs: settings_class(**kwargs, checkpoint_minutes=0.0)


def test_run_out_of_time_saves_and_does_not_publish(distill_draft, target_folder, work_folder):
    run(distill_draft, target_folder, work_folder, stop_after_minutes=0.0)
    assert (work_folder / "checkpoint.pt").exists()
    assert not (work_folder / "draft").exists()


def test_training_lowers_the_loss(distill_draft, target_folder, work_folder):
    run(distill_draft, target_folder, work_folder, train_steps=60, learning_rate=3e-3)
    target, _ = distill_draft.load_target(str(target_folder), torch.float32, torch.device("cpu"))
    training = importlib.import_module("distillation.train")
    rows = importlib.import_module("distillation.generate").read_shards(work_folder / "rows")
    input_ids, weights = training.collate(rows[:8], 1.0)

    def loss(draft):
        return float(training.DistillationLoss(draft, target, 64, 0.5, compiled=False)(input_ids, weights).detach())

    assert loss(load_draft(work_folder / "draft", target)) < loss(initialise_draft(target, [0, 2])) - 0.1


def test_chunks_do_not_change_the_loss(distill_draft):
    training = importlib.import_module("distillation.train")
    target = tiny_model()
    draft = initialise_draft(target, [0])
    rows = [(torch.arange(3, 20), 5), (torch.arange(30, 41), 4)]
    input_ids, weights = training.collate(rows, 0.3)
    losses = [
        training.DistillationLoss(draft, target, chunk, 0.5, compiled=False)(input_ids, weights)
        for chunk in (7, 28, 256)
    ]
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(losses[0], losses[2])


@pytest.mark.parametrize(
    ("accepted", "calls"),
    [
        ([], 0),
        ([False], 1),
        ([False, False, False], 3),
        ([True, True, True, True, False], 1),
        ([True, True, True, True, True, True], 2),
        ([True, False, True, False], 2),
    ],
)
def test_calls_are_counted_as_decoding_makes_them(examples_on_the_path, accepted, calls):
    assert importlib.import_module("distillation.evaluate").count_calls(accepted, 4) == calls


def test_packed_decode_attention_equals_the_stock_function(examples_on_the_path):
    generate = importlib.import_module("distillation.generate")
    generator = torch.Generator().manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = 3
    query = torch.randn(2, 6, 1, 8, generator=generator)
    key, value = (torch.randn(2, 2, 10, 8, generator=generator) for _ in range(2))
    mask = torch.rand(2, 1, 1, 10, generator=generator) < 0.7
    packed, _ = generate.packed_decode_attention(module, query, key, value, mask, scaling=0.3)
    stock, _ = generate.sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(packed, stock)


def test_held_out_templates_are_never_trained_on(examples_on_the_path):
    pytest.importorskip("reasoning_gym")
    import random

    prompts = importlib.import_module("distillation.prompts")
    used: dict[bool, set[int]] = {True: set(), False: set()}

    class Recorder(dict):
        def __init__(self, held_out):
            self.held_out = held_out

        def __getitem__(self, template):
            used[self.held_out].add(template)
            return lambda rng, difficulty: {"question": "?"}

    import reasoning_gym

    for held_out in (True, False):
        dataset = type("Dataset", (), {"generators": Recorder(held_out)})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reasoning_gym, "create_dataset", lambda *args, dataset=dataset, **kwargs: dataset)
            list(prompts._math_prompts(random.Random(0), held_out, 2, ("{question}",)))
    assert used[True]
    assert used[False]
    assert not used[True] & used[False]
