"""Prices of rounds, by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hf_dsde.costs import BatchCosts, CostCurve, CostModel
from hf_dsde.replay import CostSetting, LinearCosts, RoundLog


def log(*lengths: list[int]) -> RoundLog:
    """Rounds in which rows drafted these lengths and emitted one token each."""
    drafted = np.array(lengths)
    ones = np.full(len(lengths), drafted.shape[1])
    return RoundLog(drafted.shape[1], drafted.max(1), drafted.sum(1), 0 * ones, ones)


ROUNDS = log([3, 0, 1, 0], [0, 0, 0, 0], [2, 2, 2, 2])


class TestFormula:
    def test_a_padded_pass_pays_for_the_longest_row(self) -> None:
        prices = CostSetting.linear(0.1, slope=0.05).prices(4, 3)
        assert prices.rounds(ROUNDS.steps, ROUNDS.drafted).tolist() == pytest.approx(
            [3 * 0.1 + 1 + 3 * 0.05, 1, 2 * 0.1 + 1 + 2 * 0.05]
        )

    def test_a_packed_pass_pays_for_each_token(self) -> None:
        prices = CostSetting.linear(0.1, slope=0.05, packed=True).prices(4, 3)
        assert prices.rounds(ROUNDS.steps, ROUNDS.drafted).tolist() == pytest.approx(
            [3 * 0.1 + 1 + 0.05, 1, 2 * 0.1 + 1 + 2 * 0.05]
        )

    def test_beyond_the_ridge_every_token_costs(self) -> None:
        padded = CostSetting.linear(0.1, slope=0.05, ridge=6).prices(4, 3)
        packed = CostSetting.linear(0.1, slope=0.05, ridge=6, packed=True).prices(4, 3)
        # 16, 4 and 12 tokens padded; 8, 4 and 12 packed.
        plain = [0.3 + 1.15, 1.0, 0.2 + 1.1]
        assert padded.rounds(ROUNDS.steps, ROUNDS.drafted).tolist() == pytest.approx(
            [plain[0] + 10 / 6, plain[1], plain[2] + 1]
        )
        assert packed.rounds(ROUNDS.steps, ROUNDS.drafted).tolist() == pytest.approx(
            [0.3 + 1.05 + 2 / 6, plain[1], plain[2] + 1]
        )

    def test_speed_is_tokens_per_row_and_plain_step(self) -> None:
        prices = CostSetting.linear(0.1, slope=0.05).prices(4, 3)
        assert ROUNDS.speed(prices) == pytest.approx(12 / (4 * (1.45 + 1 + 1.3)))
        assert log([0, 0], [0, 0]).speed(CostSetting.linear(0.5).prices(2, 4)) == pytest.approx(1.0)

    def test_policies_see_the_same_prices(self) -> None:
        costs = CostSetting.linear(0.1, slope=0.05, ridge=6, packed=True).prices(4, 3).live(3)
        assert costs.rows == 4
        assert [costs.current.draft_seconds(steps) for steps in range(4)] == pytest.approx([0, 0.1, 0.2, 0.3])
        assert [costs.current.verify.at(width) for width in (1, 2, 3, 4)] == pytest.approx(
            [1, 1.05 + 2 / 6, 1.1 + 1, 1.15 + 10 / 6]
        )
        version = costs.version
        costs.observe(draft_steps=2, width=3, draft=9.0, verify=9.0, overhead=9.0)
        assert costs.version == version

    @pytest.mark.parametrize(
        ("arguments", "fragment"),
        [((0.0,), "`draft_step` is 0.0"), ((0.1, -1.0), "`slope` is -1.0"), ((0.1, 0.1, 0), "`ridge` is 0")],
    )
    def test_bad_values_are_named(self, arguments, fragment) -> None:
        with pytest.raises(ValueError, match=fragment):
            LinearCosts(*arguments)


class TestMeasured:
    MODEL = CostModel(
        {4: BatchCosts(CostCurve((1, 2), (0.002, 0.004)), CostCurve((1, 2, 4), (0.018, 0.020, 0.030)), overhead=0.002)}
    )

    def setting(self, tmp_path, packed: bool = False) -> CostSetting:
        file = tmp_path / "h100.json"
        file.write_text(json.dumps(self.MODEL.to_dict()), encoding="utf-8")
        return CostSetting.measured(file, packed)

    def test_a_round_without_drafts_is_the_unit(self, tmp_path) -> None:
        setting = self.setting(tmp_path)
        assert setting.name == "h100"
        times = setting.prices(4, 3).rounds(ROUNDS.steps, ROUNDS.drafted)
        assert times.tolist() == pytest.approx([(0.006 + 0.030 + 0.002) / 0.02, 1, (0.004 + 0.025 + 0.002) / 0.02])
        seconds = [self.MODEL.at(4).round_seconds(k) for k in (3, 0, 2)]
        assert times.tolist() == pytest.approx([s / seconds[1] for s in seconds])

    def test_a_packed_pass_lies_between_whole_columns(self, tmp_path) -> None:
        times = self.setting(tmp_path, packed=True).prices(4, 3).rounds(np.array([3, 2]), np.array([6, 2]))
        # 10 and 6 tokens of 4 rows: two and a half, and one and a half columns.
        assert times.tolist() == pytest.approx([(0.006 + 0.0225 + 0.002) / 0.02, (0.004 + 0.019 + 0.002) / 0.02])

    def test_other_files_are_refused(self, tmp_path) -> None:
        file = tmp_path / "costs.json"
        file.write_text("not json", encoding="utf-8")
        with pytest.raises(ValueError, match=r"costs\.json holds no costs"):
            CostSetting.measured(file)
        file.write_text('{"8": {"verify": 3}}', encoding="utf-8")
        with pytest.raises(ValueError, match="describes no costs"):
            CostSetting.measured(file)


def test_names_tell_settings_apart() -> None:
    assert CostSetting.linear(0.05).name == "c=0.05"
    assert CostSetting.linear(0.05, ridge=256, packed=True).name == "c=0.05 ridge 256 packed"
