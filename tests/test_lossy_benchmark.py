"""The benchmark of lossy acceptance, on the tiny pair."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_pair import tiny_pair

import hf_dsde
from hf_dsde import pairs

pytestmark = [
    pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"),
    pytest.mark.filterwarnings("ignore::hf_dsde.LossyAcceptanceWarning"),
]
BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "lossy_acceptance.py"


@pytest.fixture(scope="module")
def benchmark() -> dict[str, Any]:
    return runpy.run_path(str(BENCHMARK))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("So it costs $1,234.50.", 1234.5),
        ("3 apples and 4 pears make 7 fruits.", 7.0),
        ("12 - 5 = 7. The answer is 7", 7.0),
        ("no idea", None),
    ],
)
def test_the_answer_to_a_word_problem_is_its_last_number(
    benchmark: dict[str, Any], text: str, number: float | None
) -> None:
    assert benchmark["last_number"](text) == number


@pytest.mark.parametrize(
    ("tokens", "expected", "shared"), [([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2, 3], 2), ([5], [1], 0), ([], [1], 0)]
)
def test_prefixes_are_counted_up_to_the_first_difference(
    benchmark: dict[str, Any], tokens: list[int], expected: list[int], shared: int
) -> None:
    assert benchmark["shared_prefix"](tokens, expected) == shared


def test_exact_answers_are_the_greedy_ones_and_lossy_ones_are_shorter_work(benchmark: dict[str, Any]) -> None:
    pair = tiny_pair(torch.float64)
    hf_dsde.enable(pair.target)
    scores = benchmark["measure"](pair, [["abc", "fedcba"], ["d"]], 3, 12, numbers=False)
    exact = scores["exact"]
    assert exact.equal == exact.shared_prefix == 1.0
    assert len(scores) == len(benchmark["RULES"])
    loosest = scores["lossy: typical(threshold=0.01, alpha=0.1)"]
    assert loosest.tokens_per_pass > exact.tokens_per_pass
    assert loosest.equal < 1.0


def test_the_likelihood_of_an_answer_is_that_of_its_steps(benchmark: dict[str, Any]) -> None:
    pair = tiny_pair(torch.float64)
    hf_dsde.enable(pair.target)
    scores = benchmark["measure"](pair, [["fedcba"]], 3, 8, numbers=True)
    inputs = pairs.encode(pair.tokenizer, ["fedcba"])
    output = pair.target.generate(
        **inputs, do_sample=False, max_new_tokens=8, output_logits=True, return_dict_in_generate=True
    )
    new = output.sequences[0, inputs["input_ids"].shape[1] :]
    steps = [logits[0].log_softmax(-1)[token] for logits, token in zip(output.logits, new, strict=True)]
    assert scores["exact"].log_probability == pytest.approx(float(torch.stack(steps).mean()), abs=1e-5)
    assert scores["exact"].equal_numbers == 1.0
