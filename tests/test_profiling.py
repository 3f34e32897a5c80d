"""Profiling a pair: acceptance by position, costs, the best length of each batch, the configuration saved."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import noisy_copy
from tiny_pair import PROMPTS, tiny_pair
from typer.testing import CliRunner

import hf_dsde
from hf_dsde import pairs
from hf_dsde.cli import main as cli
from hf_dsde.costs import BatchCosts, CostCurve
from hf_dsde.pairs import Pair
from hf_dsde.profiling import BatchProfile, ProfileOptions, profile_pair, tuned_config


@pytest.fixture(autouse=True)
def given_costs() -> None:
    """Costs are measured here."""


TEXTS = [prompt.text for prompt in PROMPTS]
OPTIONS = ProfileOptions(batch_sizes=(3, 1), draft_length=4, max_new_tokens=20)


def enabled_pair() -> Pair:
    pair = tiny_pair()
    hf_dsde.enable(pair.target)
    pair.target.generation_config.eos_token_id = None
    return pair


def test_a_pair_is_profiled_by_batch_size() -> None:
    profiles = profile_pair(enabled_pair(), TEXTS, OPTIONS)
    assert [profile.rows for profile in profiles] == [1, 3]
    for profile in profiles:
        assert len(profile.survival) == 4
        assert all(1 >= a >= b >= 0 for a, b in zip(profile.survival, profile.survival[1:], strict=False))
        assert 0 <= profile.length <= 4
        assert profile.costs.draft_seconds(1) > 0


def test_survival_is_that_of_the_pair() -> None:
    """A draft that is the target itself is accepted throughout; one that has nothing to do with it hardly ever."""
    pair = enabled_pair()
    same = Pair(pair.target, noisy_copy(pair.target, 0.0), pair.tokenizer)
    other = Pair(pair.target, noisy_copy(pair.target, 5.0), pair.tokenizer)
    (sure,), (never,) = (profile_pair(p, TEXTS, ProfileOptions((3,), 4, 20)) for p in (same, other))
    assert sure.survival == (1.0,) * 4
    assert never.survival[0] < 0.3


def test_prompts_are_repeated_to_fill_a_batch() -> None:
    (profile,) = profile_pair(enabled_pair(), TEXTS[:1], ProfileOptions((5,), 2, 10))
    assert profile.rows == 5


def test_without_prompts_there_is_nothing_to_profile() -> None:
    with pytest.raises(ValueError, match="prompts"):
        profile_pair(enabled_pair(), [], OPTIONS)


def test_answers_that_end_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="max_new_tokens"):
        profile_pair(enabled_pair(), TEXTS, ProfileOptions((2,), 4, max_new_tokens=1))


def test_the_configuration_holds_the_table_and_the_costs(tmp_path: Path) -> None:
    costs = BatchCosts(CostCurve.line(0.1, 0.1), CostCurve((1, 5), (1.0, 1.2)))
    profiles = [BatchProfile(1, (0.9, 0.8), costs, 2), BatchProfile(8, (0.5, 0.1), costs, 1)]
    tuned_config(profiles).save_pretrained(tmp_path)
    loaded = hf_dsde.SpeculationConfig.from_pretrained(tmp_path)
    assert loaded.policy == "batch_table"
    assert loaded.policy_arguments == {"table": {"1": 2, "8": 1}}
    assert loaded.cost_model is not None
    assert loaded.cost_model.at(8) == costs
    assert profiles[0].predicted_speedup(2) == pytest.approx(2.7 / (0.2 + 1.1))


def test_the_command_saves_what_generate_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "load_packaged_pair", lambda *_: tiny_pair())
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(TEXTS), encoding="utf-8")
    arguments = ["--prompts", str(prompts), "--batch", "1", "--batch", "2", "--max-new-tokens", "12", "--device", "cpu"]
    result = CliRunner().invoke(cli.app, ["profile", "--output", str(tmp_path / "tuned"), *arguments])
    assert result.exit_code == 0, result.output
    config = hf_dsde.SpeculationConfig.from_pretrained(tmp_path / "tuned")
    pair = enabled_pair()
    inputs = pair.tokenizer(TEXTS, padding=True, return_tensors="pt")
    plain = pair.target.generate(**inputs, max_new_tokens=10, do_sample=False)
    text = pair.target.generate(
        **inputs, assistant_model=pair.draft, speculation_policy=config, max_new_tokens=10, do_sample=False
    )
    assert text.tolist() == plain.tolist()


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "prompts.txt"
    empty.write_text("\n\n", encoding="utf-8")
    result = CliRunner().invoke(cli.app, ["profile", "--output", str(tmp_path), "--prompts", str(empty)])
    assert result.exit_code == 2
