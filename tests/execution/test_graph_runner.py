"""Recorded passes give the text of plain decoding, whatever is recorded, reused, thrown away or given up."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from recorded import NotingCapture
from tiny_calls import config_of
from tiny_models import AGREEMENT, FAMILIES, fresh_pair, noisy_copy, ragged_batch, random_lengths, tiny_model
from tiny_policies import RandomLengths, ScriptedLengths
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.execution import pass_shapes
from hf_dsde.execution.create_runner import RunnerWarning, create_runner
from hf_dsde.execution.eager_runner import EagerRunner
from hf_dsde.execution.fused_families import why_not_fused
from hf_dsde.execution.graph_runner import CAPACITY_STEP, MIN_REACH, GraphRunner
from hf_dsde.execution.obstacles import why_not_recorded
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.recording_key import recording_key
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.execution.workspaces import Workspaces, workspace_key, workspaces
from hf_dsde.integration import generation
from hf_dsde.policies import StoppingPolicy
from hf_dsde.utils import tuning

pytestmark = [pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"), pytest.mark.usefixtures("recording")]
RECORDABLE = [family for family in FAMILIES if family != "mixtral"]
FUSED = [family for family in RECORDABLE if why_not_fused(tiny_model(family)) is None]


def generate(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    policy: str | StoppingPolicy = "static",
    rows: int = 5,
    new_tokens: int = 40,
    **settings: Any,
) -> torch.Tensor:
    """Generate with recorded passes; `settings` are those of the call, of the configuration or of its options."""
    call = {name: settings.pop(name) for name in ("do_sample", "temperature") if name in settings}
    hf_dsde.enable(target)
    return target.generate(
        **ragged_batch(random_lengths(rows)),
        max_new_tokens=new_tokens,
        **{"do_sample": False, **call},
        assistant_model=draft,
        speculation_policy=policy,
        speculation_config=config_of(**{"runner": "graph", **settings}),
    )


def plain(target: PreTrainedModel, rows: int = 5, new_tokens: int = 40) -> torch.Tensor:
    return target.generate(**ragged_batch(random_lengths(rows)), max_new_tokens=new_tokens, do_sample=False)


def runner_of(model: PreTrainedModel, rows: int = 4, **settings: Any) -> GraphRunner:
    runner = create_runner(model, rows, 64, RuntimeOptions(**settings), "graph")
    assert isinstance(runner, GraphRunner)
    return runner


def test_models_of_the_known_structure_are_fused() -> None:
    assert FUSED == ["llama", "qwen2", "qwen3", "mistral"]


@pytest.mark.parametrize(
    ("family", "fused", "agreement"),
    [
        *((family, False, "half") for family in RECORDABLE),
        *((family, True, "half") for family in FUSED),
        ("llama", True, "full"),
        ("qwen3", True, "never"),
    ],
)
def test_greedy_text_is_that_of_plain_decoding(family: str, fused: bool, agreement: str) -> None:
    target = tiny_model(family)
    expected = plain(target, rows=6, new_tokens=24)
    policy = RandomLengths(longest=4, stop_probability=0.2)
    draft = noisy_copy(target, AGREEMENT[agreement])
    assert torch.equal(generate(target, draft, policy, rows=6, new_tokens=24, fused_layers=fused), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "stop_probability", "agreement"),
    [("llama", 0.0, "full"), ("llama", 0.3, "half"), ("llama", 0.0, "never"), ("qwen3", 0.0, "half"),
     ("mistral", 0.3, "half"), ("qwen2", 0.0, "half")],
)  # fmt: skip
def test_packed_passes_give_the_same_text(
    family: str, stop_probability: float, agreement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "HOPPER", replace(tuning.HOPPER, free_tokens=0))
    packed = []
    original = GraphRunner._stage_packed
    monkeypatch.setattr(
        GraphRunner, "_stage_packed", lambda self, *block: packed.append(block[1]) or original(self, *block)
    )
    target = tiny_model(family)
    expected = plain(target, rows=9, new_tokens=24)
    policy = RandomLengths(longest=4, stop_probability=stop_probability)
    draft = noisy_copy(target, AGREEMENT[agreement])
    assert torch.equal(generate(target, draft, policy, rows=9, new_tokens=24), expected)
    assert packed


@pytest.mark.slow
def test_packed_passes_of_many_sizes_share_few_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes as long as dozens of passes, and lengths that differ from round to round give a size to each."""
    monkeypatch.setattr(tuning, "HOPPER", replace(tuning.HOPPER, free_tokens=0))
    needed, run = [], set()
    nearest = GraphRunner._nearest

    def noting(self: GraphRunner, shape: Any, reach: int, **flags: Any) -> Any:
        found = nearest(self, shape, reach, **flags)
        if shape[0] == "packed":
            needed.append(shape)
            run.add((found, reach))
            assert found[1] >= shape[1]
            assert found[2] >= shape[2]
        return found

    monkeypatch.setattr(GraphRunner, "_nearest", noting)
    target = tiny_model()
    draft = noisy_copy(target, AGREEMENT["never"])
    for seed in range(3):
        generate(target, draft, RandomLengths(longest=12, seed=seed), rows=16, new_tokens=40)
    sizes = {shape[1] for shape in needed}
    assert len(needed) > 100
    assert len(sizes) > 10
    assert len(run) <= len(sizes) / 2, "and no size has come up often enough to be recorded for itself"


@pytest.mark.slow
@pytest.mark.parametrize("free_tokens", [0, 128])
@pytest.mark.parametrize("settings", [{}, {"fused_layers": False}], ids=str)
def test_sampled_text_is_that_of_the_eager_runner(
    settings: dict[str, Any], free_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "HOPPER", replace(tuning.HOPPER, free_tokens=free_tokens))
    target, draft = fresh_pair()

    def sampled(**changes: Any) -> torch.Tensor:
        torch.manual_seed(3)
        return generate(target, draft, RandomLengths(), do_sample=True, temperature=0.8, **settings, **changes)

    assert torch.equal(sampled(), sampled(runner="eager"))


@pytest.mark.slow
def test_a_second_call_records_nothing(recording: list[NotingCapture]) -> None:
    target, draft = fresh_pair()
    first = generate(target, draft)
    recorded = [capture.recorded for capture in recording]
    assert len(recorded) == 2
    assert min(recorded) > 0
    assert torch.equal(generate(target, draft), first)
    assert [capture.recorded for capture in recording] == recorded


def test_lengths_that_differ_from_round_to_round_share_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = []
    original = GraphRunner._record

    def record(self: GraphRunner, shape: tuple[Any, ...], reach: int) -> Any:
        if shape[0] == "padded" and shape[3] > 1:
            columns.append(shape[2])
        return original(self, shape, reach)

    monkeypatch.setattr(GraphRunner, "_record", record)
    target, draft = fresh_pair()
    lengths = ScriptedLengths([[7] * 5, [4] * 5, [6] * 5, [5] * 5, [2] * 5])
    assert torch.equal(generate(target, draft, lengths), plain(target))
    assert set(columns) == {8, 3}


@pytest.mark.slow
def test_rows_that_left_in_one_call_are_back_in_the_next() -> None:
    target, draft = fresh_pair(noise=0.0)
    expected = plain(target, rows=8)
    uneven = ScriptedLengths([[6, 0, 0, 6, 0, 6, 0, 0]])
    for _ in range(3):
        assert torch.equal(generate(target, draft, uneven, rows=8), expected)


def test_a_model_may_be_its_own_draft() -> None:
    target = tiny_model()
    expected = plain(target)
    for _ in range(2):
        assert torch.equal(generate(target, target), expected)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
def test_passes_are_recorded_again_when_the_cache_has_grown(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "RESERVED_NEW_TOKENS", 4)
    monkeypatch.setattr("hf_dsde.execution.graph_runner.CAPACITY_STEP", 8)
    monkeypatch.setattr("hf_dsde.execution.graph_runner.MIN_REACH", 16)
    target = tiny_model()
    expected = plain(target, new_tokens=70)
    text = generate(target, noisy_copy(target, 0.05), new_tokens=70, fused_layers=fused, view_bucket=16)
    assert torch.equal(text, expected)


def test_a_bound_on_lengths_does_not_make_the_cache_grow() -> None:
    target = tiny_model()
    generate(target, noisy_copy(target, 0.05), new_tokens=8)
    [workspace] = workspaces._idle[target]
    assert workspace.cache.capacity == CAPACITY_STEP < MIN_REACH


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("limit", [None, 600, 520])
def test_a_cache_grows_by_the_longest_row_and_not_by_the_bound_it_is_recorded_for(
    limit: int | None, fused: bool
) -> None:
    runner = create_runner(tiny_model(), 1, MIN_REACH, RuntimeOptions(fused_layers=fused), "graph")
    runner.cache.limit = limit
    with runner.active(), torch.no_grad():
        for longest in (1, MIN_REACH + 1):
            runner.forward(RowBlock(torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), longest - 1)), longest)
    assert runner.cache.capacity == (MIN_REACH * 3 // 2 if limit is None else limit)


def test_bounds_of_lengths_are_few() -> None:
    target = tiny_model()
    runner = create_runner(target, 1, 20_000, RuntimeOptions(), "graph")
    assert isinstance(runner, GraphRunner)
    reaches = [runner._reach(longest) for longest in (1, 512, 513, 2048, 2049, 8192, 8193, 19_000)]
    assert reaches == [512, 512, 2048, 2048, 8192, 8192, runner.cache.capacity, runner.cache.capacity]


def test_a_single_graph_is_enough_to_be_right(recording: list[NotingCapture]) -> None:
    target = tiny_model()
    expected = plain(target, new_tokens=12)
    text = generate(target, noisy_copy(target, 0.05), RandomLengths(), new_tokens=12, max_graphs=1)
    assert torch.equal(text, expected)
    [first, *_] = workspaces._idle[target]
    assert len(first.passes) == 1
    assert first.passes.captures > 1


@pytest.mark.slow
@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_failed_recording_goes_on_eagerly_with_one_warning(
    fails_at: int, recording: list[NotingCapture], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []
    original = NotingCapture.__call__

    def failing(self: NotingCapture, *bodies: Any) -> Any:
        if self is recording[0]:  # the draft's is made second
            attempts.append(1)
            if len(attempts) >= fails_at:
                raise RuntimeError("operation not permitted when stream is capturing")
        return original(self, *bodies)

    monkeypatch.setattr(NotingCapture, "__call__", failing)
    target, draft = fresh_pair(noise=0.0)
    expected = plain(target, rows=8)
    uneven = ScriptedLengths([[6, 0, 0, 6, 0, 6, 0, 0], [1] * 8, [3, 0, 2, 1, 4, 5, 1, 0]])
    with pytest.warns(RunnerWarning, match="run eagerly.*operation not permitted"):
        assert torch.equal(generate(target, draft, uneven, rows=8), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RunnerWarning)
        assert torch.equal(generate(target, draft, uneven, rows=8), expected)
    assert len(attempts) == fails_at


def test_control_flow_that_depends_on_data_falls_back() -> None:
    target = tiny_model("mixtral")
    expected = plain(target)
    with pytest.warns(RunnerWarning, match="MixtralForCausalLM is run eagerly"):
        assert torch.equal(generate(target, noisy_copy(target, 0.05)), expected)


@pytest.mark.parametrize("release", [hf_dsde.release_memory, hf_dsde.disable])
def test_what_is_kept_can_be_freed(release: Any) -> None:
    target = tiny_model()
    generate(target, noisy_copy(target, 0.05), new_tokens=4)
    cache = weakref.ref(workspaces._idle[target][0].cache)
    release(target)
    gc.collect()
    assert cache() is None


@pytest.mark.slow
def test_new_weights_are_never_served_by_old_recordings() -> None:
    target, draft = fresh_pair()
    generate(target, draft)
    other = tiny_model(seed=7)
    for old, new in zip(target.parameters(), other.parameters(), strict=True):
        old.data = new.data.clone()
    assert torch.equal(generate(target, draft), plain(other))


@pytest.mark.slow
def test_modules_from_elsewhere_are_recorded_again_in_each_call() -> None:
    class Adapter(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner, self.on = inner, False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * (1.5 if self.on else 1.0)

    target, draft = fresh_pair()
    adapter = target.model.layers[0].mlp.down_proj = Adapter(target.model.layers[0].mlp.down_proj)
    assert workspace_key(recording_key(target), 5, RuntimeOptions(), fused=True) is None
    for adapter.on in (False, True, False):
        assert torch.equal(generate(target, draft), plain(target))


@pytest.mark.parametrize(
    "change", [{"rows": 6}, {"view_bucket": 32}, {"packed_attention": False}, {"fused": False}], ids=str
)
def test_what_a_recording_depends_on_is_in_its_key(change: dict[str, Any]) -> None:
    model = tiny_model()
    rows, fused = change.pop("rows", 5), change.pop("fused", True)
    assert workspace_key(recording_key(model), rows, RuntimeOptions(**change), fused) != workspace_key(
        recording_key(model), 5, RuntimeOptions(), fused=True
    )


@pytest.mark.parametrize("fused", [True, False])
def test_text_is_the_same_on_a_device_of_no_known_class(
    fused: bool, recording: list[NotingCapture], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "HOPPER", replace(tuning.SAFE, stored_sizes=(2, 4)))
    target = tiny_model()
    text = generate(target, noisy_copy(target, 0.05), RandomLengths(), fused_layers=fused)
    assert torch.equal(text, plain(target))
    assert recording


def test_rows_leave_passes_by_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_shapes, "IDLE_PLACES", 0)
    runner = runner_of(tiny_model(), rows=12)
    runner.keep_rows([0, 1, 2, 3, 4, 5, 6, 7, 11])
    assert len(runner.live_rows) == 12
    runner.keep_rows([1, 3, 6, 7, 11])
    assert len(runner.live_rows) == 8
    assert {1, 3, 6, 7, 11} <= set(runner.live_rows)
    runner.keep_rows([3, 11])
    assert runner.live_rows == [3, 11]


@pytest.mark.parametrize(("rows", "calls"), [(12, 4), (32, 2), (33, 1)])
def test_few_rows_stay_in_passes_until_they_have_cost_as_much_as_recording(
    rows: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 places of 12 for nobody, or 28 of 32; long drafts of more rows are more tokens than come for nothing."""
    monkeypatch.setattr(pass_shapes, "IDLE_PLACES", 32)
    monkeypatch.setattr(tuning, "HOPPER", replace(tuning.HOPPER, free_tokens=512))
    runner = runner_of(tiny_model(), rows=rows)
    for _ in range(calls - 1):
        runner.keep_rows([1, 3, 6])
        assert len(runner.live_rows) == rows
    runner.keep_rows([1, 3, 6])
    assert len(runner.live_rows) == 4
    runner.keep_rows([3])
    assert len(runner.live_rows) == 4, "the next ones begin anew"


def test_a_recorded_forward_pass_of_the_model_keeps_all_rows() -> None:
    runner = runner_of(tiny_model(), rows=8, fused_layers=False)
    runner.keep_rows([2])
    assert runner.live_rows == list(range(8))


def test_workspaces_are_lent_to_one_at_a_time_and_must_be_large_enough() -> None:
    model = tiny_model()
    shelf = Workspaces()
    workspace = runner_of(model)._workspace
    shelf.give_back(model, workspace)
    assert shelf.take(model, workspace.key, workspace.cache.capacity) is workspace
    assert shelf.take(model, workspace.key, 1) is None
    shelf.give_back(model, workspace)
    assert shelf.take(model, workspace.key, workspace.cache.capacity + 1) is None
    assert shelf.take(model, workspace.key, 1) is None, "one that does not fit is freed, not kept beside the next"
    shelf.give_back(model, workspace)
    shelf.release(model)
    assert shelf.take(model, workspace.key, 1) is None


class TestChoice:
    def test_a_cpu_gets_the_eager_runner(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        runner = create_runner(tiny_model(), 2, 16, RuntimeOptions())
        assert type(runner) is EagerRunner

    def test_recording_by_name_is_refused_where_it_cannot_be_done(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        with pytest.raises(ValueError, match=r"runner: 'graph'.*on cpu.*runner=None"):
            create_runner(tiny_model(), 2, 16, RuntimeOptions(), "graph")

    def test_recording_is_the_default_where_it_can_be_done(self) -> None:
        assert isinstance(create_runner(tiny_model(), 2, 16, RuntimeOptions()), GraphRunner)

    @pytest.mark.parametrize("where", ["", "model.layers.1.mlp"])
    def test_hooks_are_never_skipped(self, where: str) -> None:
        model = tiny_model()
        model.get_submodule(where).register_forward_hook(lambda *_: None)
        with pytest.warns(RunnerWarning, match=f"hooks.*'{where or 'the model itself'}'"):
            assert type(create_runner(model, 2, 16, RuntimeOptions())) is EagerRunner

    def test_hooks_that_only_record_hidden_states_do_not_count(self) -> None:
        model = tiny_model()
        model(torch.tensor([[1, 2]]), output_hidden_states=True)
        assert isinstance(create_runner(model, 2, 16, RuntimeOptions()), GraphRunner)

    def test_layers_on_several_devices_are_run_eagerly(self) -> None:
        model = copy.deepcopy(tiny_model())
        model.model.layers[1].to("meta")
        assert "several devices (cpu, meta)" in str(why_not_recorded(model))

    def test_eager_by_name_warns_of_nothing(self) -> None:
        model = tiny_model().train()
        assert type(create_runner(model, 2, 16, RuntimeOptions(), "eager")) is EagerRunner
