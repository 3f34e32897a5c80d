"""Grids of replays: what is played, how seeds are paired, and how results look."""

from __future__ import annotations

import io
import json
import multiprocessing
import statistics

import pytest
from rich.console import Console
from synthetic_traces import toy_table, write_trace

from hf_dsde.policies import CostCap
from hf_dsde.replay import CostSetting, Gap, PolicySpec, Realization, ReplayGrid, ReplayResult, play_priced, run_grid
from hf_dsde.replay.plot import save_plot
from hf_dsde.replay.report import result_view

POLICIES = ("static:num_draft_tokens=2", "heuristic", "heuristic+fill")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("traces") / "toy")


def grid(folder, **changes) -> ReplayGrid:
    values = {
        "traces": (folder,),
        "policies": tuple(PolicySpec.parse(text) for text in POLICIES),
        "costs": (CostSetting.linear(0.1), CostSetting.linear(0.05, ridge=8, packed=True)),
        "batches": (1, 3),
        "temperatures": (0, 1),
        "seeds": 2,
        "tokens": 300,
        "max_draft_length": 6,
    }
    return ReplayGrid(**values | changes)


@pytest.fixture(scope="module")
def result(folder) -> ReplayResult:
    return run_grid(grid(folder))


class TestGrid:
    def test_every_cell_holds_every_policy(self, result: ReplayResult) -> None:
        assert len(result.cells) == 2 * 2 * 2
        for cell in result.cells:
            assert tuple(score.name for score in cell.policies) == POLICIES
            assert len(cell.static) == 7
            assert all(len(speeds) == 2 for speeds in (*cell.static, cell.oracle))
            assert bool(cell.fractional) == (cell.costs.packed and cell.rows > 1)

    def test_speeds_are_those_of_single_runs(self, result: ReplayResult) -> None:
        cell = next(c for c in result.cells if c.temperature == 1 and c.rows == 3 and not c.costs.packed)
        played = Realization(toy_table(1), 1, 6)
        ((speed, log),) = play_priced(PolicySpec("heuristic"), played, 1, [cell.costs], rows=3, tokens=900)
        score = cell.score("heuristic")
        assert score.speeds[1] == speed
        assert score.row_rounds > 3 * len(log.steps)
        assert score.emitted >= 2 * 900
        assert score.draft_length == pytest.approx(score.drafted / score.row_rounds)

    def test_a_fixed_length_lies_where_its_reference_does(self, result: ReplayResult) -> None:
        for cell in result.cells:
            assert cell.score(POLICIES[0]).speeds == pytest.approx(cell.static[2])
            assert cell.gap(cell.static_opt_speeds) == Gap(0.0, 0.0)
            assert cell.gap(cell.static[2]).mean <= 1e-9

    def test_filling_is_for_the_better_in_padded_batches_only(self, result: ReplayResult) -> None:
        for cell in result.cells:
            alone, lifted = (statistics.fmean(cell.score(name).speeds) for name in POLICIES[1:])
            if cell.rows == 1:
                assert alone == lifted
            elif not cell.costs.packed:
                assert lifted > alone

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_processes_change_nothing(self, folder, result: ReplayResult, monkeypatch: pytest.MonkeyPatch) -> None:
        # A fork need not import torch again; what goes to it and comes back is pickled all the same.
        forks = multiprocessing.get_context("fork")
        monkeypatch.setattr("hf_dsde.replay.experiment.multiprocessing.get_context", lambda method: forks)
        told = []
        again = run_grid(grid(folder, temperatures=(1,)), 2, lambda done, total: told.append((done, total)))
        assert [c.to_dict() for c in again.cells] == [c.to_dict() for c in result.cells if c.temperature == 1]
        assert told == [(i, 16) for i in range(1, 17)]

    def test_large_batches_play_longer(self, folder) -> None:
        assert [grid(folder, tokens=20_000).tokens_for(rows) for rows in (1, 64, 128)] == [20_000, 20_000, 38_400]

    @pytest.mark.parametrize(
        ("changes", "fragment"),
        [
            ({"policies": (PolicySpec("dsed"),)}, "There is no policy 'dsed'"),
            ({"policies": (PolicySpec("static"), PolicySpec("static"))}, "`policies` holds 'static' twice"),
            ({"seeds": 0}, "`seeds` is 0"),
            ({"batches": (0,)}, "`batches` is 0"),
            ({"tasks": ("poems",)}, "`tasks` names 'poems'"),
        ],
    )
    def test_mistakes_are_named_before_anything_is_played(self, folder, changes, fragment) -> None:
        with pytest.raises(ValueError, match=fragment):
            run_grid(grid(folder, **changes))


class TestGaps:
    def test_they_are_paired_by_seed(self) -> None:
        gap = Gap.over([1.1, 2.4], [1.0, 2.0])
        assert gap.mean == pytest.approx(15)
        assert gap.deviation == pytest.approx(statistics.stdev([10, 20]))
        assert Gap.over([1.1], [1.0]).deviation == 0

    def test_an_unplayed_policy_is_named(self, result: ReplayResult) -> None:
        with pytest.raises(KeyError, match="No policy 'svip' was played"):
            result.cells[0].score("svip")


class TestSpecs:
    def test_short_forms(self) -> None:
        spec = PolicySpec.parse("dsde:sl_max=8,cap=false,kld_positions=all,decay=0.9,short_window=None+fill")
        assert spec.policy == "dsde"
        assert spec.arguments == {"sl_max": 8, "cap": False, "kld_positions": "all", "decay": 0.9, "short_window": None}
        assert spec.fill_to_batch
        assert spec.create().sl_max == 8
        assert PolicySpec.parse("dsde+fill") == PolicySpec("dsde", fill_to_batch=True)

    def test_a_cap_is_put_over_a_policy_as_in_a_call(self):
        assert isinstance(PolicySpec.parse("dsde+cap").create(), CostCap)
        assert not isinstance(PolicySpec.parse("dsde").create(), CostCap)
        assert not isinstance(PolicySpec.parse("goodput+cap").create(), CostCap), "it weighs costs itself"

    def test_names_can_be_read_back(self) -> None:
        spec = PolicySpec("dsde", {"cap": False, "variant": "reference"}, fill_to_batch=True)
        assert spec.name == "dsde:cap=false,variant=reference+fill"
        assert PolicySpec.parse(spec.name) == spec

    @pytest.mark.parametrize("text", ["", "+fill", "dsde:", "dsde:sl_max", "dsde:=3", ":sl_max=3"])
    def test_other_forms_are_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="NAME:ARGUMENT=VALUE"):
            PolicySpec.parse(text)


class TestPresentation:
    def test_a_table_per_temperature(self, result: ReplayResult) -> None:
        stream = io.StringIO()
        Console(width=120, file=stream).print(result_view(result))
        text = stream.getvalue()
        assert text.count("best fixed length: x plain (k)") == 2
        for name in (*POLICIES, "oracle", "best fractional budget", "toy, temperature 1"):
            assert name in text
        cell = result.cells[0]
        assert f"{statistics.fmean(cell.static_opt_speeds):.2f} ({cell.static_opt})" in text
        assert f"{cell.gap(cell.oracle).mean:+.1f}" in text

    def test_a_grid_without_policies_shows_the_references(self, folder) -> None:
        stream = io.StringIO()
        Console(width=120, file=stream).print(result_view(run_grid(grid(folder, policies=(), temperatures=(0,)))))
        assert "oracle" in stream.getvalue()

    def test_narrow_consoles_get_several_tables_and_no_cut_numbers(self, result: ReplayResult) -> None:
        stream = io.StringIO()
        Console(width=60, file=stream).print(result_view(result))
        assert stream.getvalue().count("best fixed length: x plain (k)") == 2 * 4
        assert "continued" in stream.getvalue()
        assert "…" not in stream.getvalue()

    def test_a_file_tells_how_to_repeat_it(self, result: ReplayResult) -> None:
        told = json.loads(json.dumps(result.to_dict()))
        assert {"commit", "versions", "command"} <= told["provenance"].keys()
        assert told["grid"]["policies"][2] == {
            "name": "heuristic+fill",
            "policy": "heuristic",
            "arguments": {},
            "fill_to_batch": True,
            "cost_cap": False,
        }
        cell = told["cells"][0]
        assert (
            cell["policies"]["heuristic"]["gap_percent"]
            == result.cells[0].gap(result.cells[0].score("heuristic").speeds).mean
        )

    def test_a_plot_has_a_panel_per_cost_and_a_line_per_policy(self, result: ReplayResult, tmp_path) -> None:
        pytest.importorskip("matplotlib")
        path = tmp_path / "new" / "gaps.svg"
        save_plot(result, path)
        text = path.read_text(encoding="utf-8")
        assert text.count('id="axes_') == 4
        for label in (*POLICIES, "oracle"):
            assert label in text
