"""What drafts for a data set where nobody has chosen a policy, and jobs that were begun with another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_pair import tiny_pair
from typer.testing import CliRunner
from watched_forward import watch

from hf_dsde import SpeculationConfig, pairs
from hf_dsde.batch import job
from hf_dsde.batch.generator import BatchGenerator
from hf_dsde.batch.output import read_results
from hf_dsde.cli import main as cli

PROMPTS = ["abc", "fedcba", "d", "bcdbcd", "ee"]
NO_DRAFTS = SpeculationConfig("static", {"num_draft_tokens": 0})
DRAFTS = SpeculationConfig("static", {"num_draft_tokens": 3})


def generator(**settings: Any) -> BatchGenerator:
    pair = tiny_pair(torch.float64)
    settings = {"batch_size": 2, "max_new_tokens": 6, **settings}
    return BatchGenerator(pair.target, pair.tokenizer, assistant_model=pair.draft, **settings)


def policy_of(made: BatchGenerator) -> str:
    """The name of the policy that decides, as a job keeps it."""
    name: str = made.identity["settings"]["policy"]
    return name


def test_a_data_set_is_drafted_for_by_auto() -> None:
    made = generator()
    assert policy_of(made) == "auto"
    assert made.fingerprint == generator(speculation_policy="auto").fingerprint
    pair = tiny_pair(torch.float64)
    for prompt, result in zip(PROMPTS, made.stream(PROMPTS, ordered=True), strict=True):
        inputs = pair.tokenizer(prompt, return_tensors="pt")
        text = pair.target.generate(**inputs, do_sample=False, max_new_tokens=6)[0, inputs["input_ids"].shape[1] :]
        assert result.token_ids == text.tolist()


def test_a_config_names_the_policy_unless_one_is_named_beside_it() -> None:
    assert policy_of(generator(speculation_config=NO_DRAFTS)) == "static"
    assert policy_of(generator(speculation_config=SpeculationConfig(max_draft_length=4))) == "dsde"
    drafted = []
    for config in (NO_DRAFTS, DRAFTS):
        made = generator(speculation_config=config)
        drafted.append(sum(result.statistics.drafted for result in made.stream(PROMPTS)))
    assert drafted[0] == 0 < drafted[1]
    named = generator(speculation_policy="auto", speculation_config=SpeculationConfig(max_draft_length=4))
    assert policy_of(named) == "auto"
    assert named.identity["speculation"]["max_draft_length"] == 4


def test_the_command_takes_auto_unless_a_config_or_a_name_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "load_packaged_pair", lambda dtype, _: tiny_pair(dtype))
    NO_DRAFTS.save_pretrained(tmp_path)
    command = ["generate", "--device", "cpu", "--dtype", "float32", "--prompt", "abc", "--max-new-tokens", "3"]
    for more, policy in (
        ([], "auto"),
        (["--speculation-config", str(tmp_path)], "static"),
        (["--policy", "dsde"], "dsde"),
    ):
        result = CliRunner().invoke(cli.app, [*command, *more])
        assert result.exit_code == 0, result.output
        assert f"policy '{policy}'" in result.stderr


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_job_of_the_earlier_default_goes_on_only_under_its_own_policy(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "WRITE_SECONDS", 0.0)
    path = tmp_path / f"out{suffix}"
    made = generator(speculation_policy="dsde")
    watch(made._model, KeyboardInterrupt, lambda call, _: call == 9)
    with pytest.raises(KeyboardInterrupt):
        made.run(PROMPTS, path)
    with pytest.raises(ValueError, match=r"another `job`.*settings\.policy`: 'dsde' there, 'auto' here.*repeat the"):
        generator().run(PROMPTS, path)
    report = generator(speculation_policy="dsde").run(PROMPTS, path)
    assert report.skipped
    assert report.rows + report.skipped == len(PROMPTS)
    assert generator().run(PROMPTS, path, overwrite=True).rows == len(PROMPTS)
    assert len(list(read_results(path))) == len(PROMPTS)
