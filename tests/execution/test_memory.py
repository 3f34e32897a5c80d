"""A cache that cannot fit is refused before it is made, with what to lower."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stored import store_texts
from tiny_models import FAMILIES, ragged_batch, random_lengths, tiny_model
from tiny_pair import tiny_pair

import hf_dsde
from hf_dsde.execution import memory
from hf_dsde.execution.eager_runner import EagerRunner
from hf_dsde.execution.options import RuntimeOptions

LATENT: dict[str, Any] = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "num_key_value_heads": 4,
}
"""Of a DeepSeek-V3, whose cache holds latent vectors in place of keys and values."""


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3", "gpt_oss", "deepseek_v3"])
def test_predicted_bytes_are_those_of_the_cache_that_is_made(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "deepseek_v3", ("DeepseekV3", LATENT))
    model = tiny_model(family)
    runner = EagerRunner(model, 3, 32, RuntimeOptions())
    tokens = torch.zeros(3, 5, dtype=torch.long)
    with runner.active(), torch.no_grad():
        store_texts(runner, tokens, [5, 2, 4])
    held = sum(
        states.untyped_storage().nbytes()
        for layer in runner.cache.ragged_layers
        for states in (layer.keys, layer.values)
    )
    assert memory.cache_bytes(model, 3, runner.cache.capacity + 1) == held


def test_a_cache_that_cannot_fit_is_refused_before_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tiny_pair()
    target, draft = pair.target, pair.draft
    hf_dsde.enable(target)
    calls = []
    target.register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    with pytest.raises(torch.OutOfMemoryError, match=r"rows of \d+ tokens.*Lower the batch size.*max_new_tokens"):
        target.generate(
            **ragged_batch(random_lengths(4)), max_new_tokens=8, assistant_model=draft, speculation_policy="static"
        )
    assert not calls
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**9)
    target.generate(
        **ragged_batch(random_lengths(4)), max_new_tokens=8, assistant_model=draft, speculation_policy="static"
    )
    assert calls


def test_a_cpu_does_not_say_how_much_is_free() -> None:
    assert memory.free_bytes(torch.device("cpu")) is None


GIVEN = 10**9


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 1 GB available, whose groups are files in a folder."""
    monkeypatch.setattr(memory, "CONTROL_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory, "GROUPS_OF_PROCESS", tmp_path / "process")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=GIVEN))
    return tmp_path


def write_group(folder: Path, names: tuple[str, str, str], limit: object, taken: int, spare: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{taken}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {spare}\nslab 5\n")


def test_a_host_without_groups_has_what_it_says(groups: Path) -> None:
    assert memory.available_bytes() == GIVEN
    (groups / "process").write_text("0::/\n")
    assert memory.available_bytes() == GIVEN


@pytest.mark.parametrize(
    ("line", "root"), [("0::/job/step", "."), ("3:cpu,memory:/job/step", "memory")], ids=["second", "first"]
)
def test_a_container_or_job_has_what_is_left_of_its_limit(line: str, root: str, groups: Path) -> None:
    version = memory.GROUP_FILES[root == "memory"]
    (groups / "process").write_text(f"12:devices:/elsewhere\n{line}\n")
    folder = groups / "groups" / root
    write_group(folder / "elsewhere", version, 1, 1)
    write_group(folder / "job" / "step", version, "max", 10)
    assert memory.available_bytes() == GIVEN
    write_group(folder / "job", version, 900, 500, spare=30)
    assert memory.available_bytes() == 430
    write_group(folder / "job" / "step", version, 800, 500)
    assert memory.available_bytes() == 300
    write_group(folder, version, 10**12, 10)
    assert memory.available_bytes() == 300


def test_a_container_that_sees_its_own_group_alone(groups: Path) -> None:
    (groups / "process").write_text("0::/docker/not/there\n")
    write_group(groups / "groups", memory.GROUP_FILES[0], 700, 500)
    assert memory.available_bytes() == 200
