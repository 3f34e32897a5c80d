"""The example for Ray: two actors on this machine give the texts that one generator gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from tiny_pair import tiny_pair

ROOT = Path(__file__).parents[1]
PROMPTS = ["abcdef"[i % 6] * (i % 3 + 1) + "GhIjKl"[: i % 4 * 2] for i in range(12)]
NEW_TOKENS = 4


def read(folder: Path, output_format: str) -> list[dict]:
    files = sorted(folder.iterdir())
    if output_format == "parquet":
        return [row for file in files for row in pq.read_table(file).to_pylist()]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("output_format", ["parquet"])
def test_actors_generate_what_generate_gives_for_each_line_alone(tmp_path, output_format):
    pytest.importorskip("ray.data", reason="Ray is not installed: pip install 'hf-dsde[ray]'")
    pair = tiny_pair(torch.float64)
    pair.target.save_pretrained(tmp_path / "target")
    pair.draft.save_pretrained(tmp_path / "draft")
    pair.tokenizer.save_pretrained(tmp_path / "target")
    rows = [{"id": i, "prompt": prompt} for i, prompt in enumerate(PROMPTS)]
    rows[5]["prompt"] = ""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "--model": tmp_path / "target",
        "--assistant-model": tmp_path / "draft",
        "--input": tmp_path / "in.jsonl",
        "--output": tmp_path / "out",
        "--format": output_format,
        "--actors": 2,
        "--batch-size": 2,
        "--rows-per-call": 3,
        "--max-new-tokens": NEW_TOKENS,
        "--dtype": "float64",
    }
    command = [sys.executable, "examples/ray_batch.py", *(str(part) for option in options.items() for part in option)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    environment["RAY_worker_niceness"] = "0"  # else workers hardly run beside tests that keep the cores busy
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    results = read(tmp_path / "out", output_format)
    assert [row["id"] for row in results] == list(range(len(PROMPTS)))
    for row, prompt in zip(results, PROMPTS, strict=True):
        if row["id"] == 5:
            assert row["generation_error"]
            continue
        inputs = pair.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        text = pair.target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)[0]
        assert row["generated_token_ids"] == text[inputs["input_ids"].shape[1] :].tolist()
        assert row["generation_statistics"]["new_tokens"] == len(row["generated_token_ids"])
