"""The benchmark of rollouts in a training loop, on the tiny pair."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import torch
from recorded import NotingCapture
from tiny_pair import tiny_pair

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "rollouts.py"


def test_every_method_writes_as_much_and_what_is_kept_is_recorded_once(
    tmp_path: Path, recording: list[NotingCapture]
) -> None:
    benchmark = runpy.run_path(str(BENCHMARK))
    main = benchmark["main"]
    pair = tiny_pair()
    before = pair.target.lm_head.weight.clone()
    main.__globals__["load"] = lambda *_: pair
    settings = {"pair": None, "target_shape": "deep-1B", "prompts": None, "device": "cpu", "dtype": "float32"}
    output = tmp_path / "rollouts.json"
    main(
        output=output,
        batch=[2],
        method=list(benchmark["METHODS"]),
        policy="static",
        steps=3,
        new_tokens=12,
        **settings,
    )
    results = {result["method"]: result for result in json.loads(output.read_text())["results"]}
    assert set(results) == set(benchmark["METHODS"])
    assert not torch.equal(pair.target.lm_head.weight, before)
    assert results["generate"]["recorded_passes"] == []
    freed, kept = results["speculation"]["recorded_passes"], results["speculation_kept"]["recorded_passes"]
    assert min(freed) > 0
    assert sum(kept) < sum(freed)
    assert results["speculation"]["acceptance_rate"] > 0
