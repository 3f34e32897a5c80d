"""The memory plan says what a job will do, which is compared with jobs that are run."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console
from tiny_models import fresh_pair, tiny_model
from tiny_pair import tiny_pair
from tiny_text import tiny_tokenizer

import hf_dsde.execution.memory
from hf_dsde.batch import admission, memory_plan
from hf_dsde.batch.generator import BatchGenerator
from hf_dsde.config import SpeculationConfig

STATIC = SpeculationConfig("static", {"num_draft_tokens": 2}, max_draft_length=4)
ROWS = ["abc", "", "abcdef" * 20, "ab", {"prompt": "d", "max_new_tokens": 300}, {"title": "no prompt"}, "f" * 480]
SLOT_BYTES = 2 * 2 * 2 * 8 * 4
"""Keys and values, layers, heads, head size, float32: one token of one row of a tiny model."""


def _generator(budget=None, *, batch_size=3, **changes):
    pair = tiny_pair()
    return BatchGenerator(
        pair.target,
        pair.tokenizer,
        assistant_model=pair.draft,
        speculation_policy=STATIC,
        batch_size=batch_size,
        cache_budget=budget,
        **{"max_new_tokens": 8, **changes},
    )


def _budget(rows, slots):
    """Bytes for the caches of both models."""
    return rows * (slots + 1) * 2 * SLOT_BYTES


def _lines(plan):
    console = Console(width=140)
    with console.capture() as capture:
        console.print(plan)
    return capture.get()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_are_those_in_memory_with_shared_ones_counted_once(family):
    target, draft = fresh_pair(family)
    own = sum(w.numel() * w.element_size() for w in [*draft.parameters(), *draft.buffers()])
    shared = draft.get_input_embeddings().weight
    if draft.get_output_embeddings().weight is shared:
        pytest.fail("the test needs weights that are shared between the models only")
    draft.set_input_embeddings(target.get_input_embeddings())
    generator = BatchGenerator(target, tiny_tokenizer(), assistant_model=draft, speculation_policy="static")
    (device,) = generator.memory_plan().devices
    assert device.target_bytes == own
    assert device.draft_bytes == own - shared.numel() * shared.element_size()


def test_no_model_runs_for_a_plan():
    generator = _generator(_budget(3, 256))
    calls = []
    for model in (generator._model, generator._draft):
        model.register_forward_hook(lambda *_: calls.append(1))
    generator.memory_plan(ROWS)
    assert not calls


def test_without_a_budget_every_prompt_is_ready():
    plan = _generator().memory_plan(ROWS)
    assert plan.slots is None
    assert plan.devices[0].cache_budget is None
    assert plan.devices[0].free_bytes is None
    rows = plan.input
    assert (rows.rows, rows.ready, rows.waiting, rows.too_long, rows.rejected) == (7, 5, 0, 0, 2)
    assert rows.first_error.startswith("row 1: ")
    assert rows.longest_prompt == 480
    assert rows.prompt_tokens == 3 + 120 + 2 + 1 + 480
    assert rows.largest_need == 480 + 8 + 4
    assert rows.smallest_batch == 3
    assert "Nothing limits the caches" in _lines(plan)


def test_the_plan_of_the_models_alone_has_no_input():
    plan = _generator(_budget(3, 256)).memory_plan()
    assert plan.input is None
    assert plan.slots == 256
    assert plan.longest_cache_bytes(plan.devices[0]) is None
    assert "256 tokens" in _lines(plan)


@pytest.mark.parametrize(
    ("budget", "ready", "waiting", "too_long", "smallest"),
    [
        (_budget(3, 512), 5, 0, 0, 3),
        (_budget(3, 512) - 1, 3, 2, 0, 2),
        (_budget(3, 256), 3, 2, 0, 1),
        (_budget(1, 512) - 1, 0, 3, 2, 1),
        (_budget(1, 256) - 1, 0, 0, 5, None),
    ],
)
def test_a_job_does_what_was_planned(budget, ready, waiting, too_long, smallest):
    generator = _generator(budget)
    plan = generator.memory_plan(ROWS)
    rows = plan.input
    assert (rows.ready, rows.waiting, rows.too_long, rows.rejected) == (ready, waiting, too_long, 2)
    assert rows.smallest_batch == smallest
    results = list(generator.stream(ROWS, ordered=True))
    assert [r.index for r in results] == list(range(len(ROWS)))
    assert generator.statistics.texts == ready + waiting
    assert generator.statistics.failed == too_long + rows.rejected
    assert generator.statistics.prompt_tokens == rows.prompt_tokens
    if smallest is None:
        assert generator.statistics.batch_sizes == []
    else:
        # The longest comes last, when there may be fewer texts left than rows.
        assert generator.statistics.batch_sizes[-1] <= smallest
    lines = _lines(plan)
    assert f"│ {ready} │" in " ".join(lines.split())
    assert "row 1: " in lines


def test_a_prompt_that_takes_the_last_slot_is_ready():
    exact = "f" * (256 - 8 - 4)
    rows = _generator(_budget(3, 256)).memory_plan([exact, exact + "f"]).input
    assert (rows.ready, rows.waiting) == (1, 1)


def test_caches_of_the_longest_texts_stay_within_the_budget():
    for budget in (_budget(3, 512), _budget(2, 512) + 7, _budget(1, 512)):
        plan = _generator(budget).memory_plan(ROWS)
        (device,) = plan.devices
        assert device.slot_bytes == 2 * SLOT_BYTES
        assert plan.longest_cache_bytes(device) == plan.input.smallest_batch * 513 * 2 * SLOT_BYTES
        assert plan.longest_cache_bytes(device) <= budget


def test_a_device_that_says_what_is_free_limits_the_caches(monkeypatch):
    for module in (hf_dsde.execution.memory, admission, memory_plan):
        monkeypatch.setattr(module, "free_bytes", lambda device: 1_000_000)
    (device,) = _generator().memory_plan().devices
    assert device.free_bytes == 1_000_000
    assert device.cache_budget == int(admission.USED_SHARE * 1_000_000)


def test_rows_of_a_file_are_planned_as_those_of_a_list(tmp_path):
    path = tmp_path / "prompts.txt"
    texts = ["abc", "", "abcdef" * 20]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    generator = _generator(_budget(3, 256), max_prompt_tokens=100)
    assert generator.memory_plan(path) == generator.memory_plan(texts)
    assert generator.memory_plan(texts).input.rejected == 2


def test_weights_on_several_devices_are_told_apart():
    target, draft = tiny_model().to(torch.float32), tiny_model(seed=1).to(torch.float32)
    budget = admission.CacheBudget.of([target, draft], 1000)
    head = target.get_output_embeddings()
    head.to("meta")
    devices = memory_plan.plan_memory(target, draft, budget, 2, 4, None).devices
    assert [device.device for device in devices] == ["cpu", "meta"]
    assert devices[1].target_bytes == 96 * 32 * 4
    assert (devices[1].slot_bytes, devices[1].cache_budget) == (0, None)
    assert devices[0].draft_bytes - devices[0].target_bytes == 96 * 32 * 4
