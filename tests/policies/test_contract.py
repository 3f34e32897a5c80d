"""What every registered policy promises, whatever its rule."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dsde.costs import CostModel, LiveCosts
from hf_dsde.policies import (
    BatchInfo,
    DraftStep,
    RoundOutcome,
    Signal,
    StoppingPolicy,
    available_policies,
    create_policy,
)

VOCABULARY = 11
POLICIES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in available_policies()),
    ("dsde", {"variant": "reference"}),
    ("dsde", {"sl_max": 4, "cap": False, "kld_positions": "to_first_rejection", "long_window": 6}),
    ("dsde", {"long_window": 6}),
    ("dsde", {"warmup": "hold", "kld_direction": "draft_target", "long_window": 6}),
    ("confidence", {"threshold": 0.1, "history": 6}),
    ("static", {"num_draft_tokens": 0}),
    ("batch_table", {"table": {"2": 6, "4": 3, "5": 0}}),
    ("token_budget", {"knee_tokens": 20.5}),
    ("token_budget", {"slack": 0.05, "num_draft_tokens": 12}),
    ("tapout", {"scope": "row", "bandit": "ucb_tuned", "num_draft_tokens": 4}),
    ("tapout", {"scope": "row", "bandit": "thompson", "seed": 7}),
    ("tapout", {"bandit": "thompson", "arms": ["adaedl", "svip_difference"]}),
    ("adaedl", {"scope": "batch", "end_condition": "full"}),
    ("gammatune", {"min_length": 3, "max_length": 6, "initial_length": 1}),
    ("goodput", {"interval": 3, "estimator": "drafted", "plain_bonus": 1.1}),
    ("goodput", {"initial_acceptance": 0.0, "probe_share": 0.5}),
]
BY_POSITION = (Signal.KLD, Signal.REVERSE_KLD, Signal.ENTROPY, Signal.CONFIDENCE, Signal.ACCEPTANCE)
NEXT_TOKEN = ("next_entropy", "next_probability")
every_policy = pytest.mark.parametrize(("name", "arguments"), POLICIES, ids=lambda value: str(value) or "defaults")
BESIDE_DRAFTS = [case for case in POLICIES if create_policy(case[0], **case[1]).stops_inside_round]
every_policy_beside_drafts = pytest.mark.parametrize(("name", "arguments"), BESIDE_DRAFTS, ids=str)


COSTS = CostModel.relative(0.1, [1.0, 1.05, 1.1, 1.2, 1.3])
SHARING: dict[str, dict[str, Any] | None] = {
    "adaedl": {"scope": "row"},
    "auto": None,
    "batch_table": None,
    "dsde": {"cap": False},
    "goodput": None,
    "marginal_goodput": None,
    "tapout": {"scope": "row"},
    "token_budget": None,
}
"""Policies in which rows act on each other, with the arguments that switch it off; None where nothing does."""


def batch(rows: int, max_draft_length: int = 9, device: str = "cpu") -> BatchInfo:
    return BatchInfo(rows, torch.device(device), VOCABULARY, max_draft_length, 100, LiveCosts(COSTS, rows))


def draft_step(rows: int, generator: torch.Generator) -> DraftStep:
    logits = torch.randn(rows, VOCABULARY, generator=generator)
    tokens = torch.randint(0, VOCABULARY, (rows,), generator=generator)
    return DraftStep(0, tokens, logits, logits, torch.ones(rows, dtype=torch.bool))


def random_outcome(lengths: torch.Tensor, requires: frozenset[Signal], generator: torch.Generator) -> RoundOutcome:
    """A round in which some rows are finished, some drafted nothing and unread positions are not a number."""
    rows = len(lengths)
    active = torch.rand(rows, generator=generator) < 0.8
    skipped = torch.rand(rows, generator=generator) < 0.2
    drafted = lengths * active * ~skipped
    accepted = (torch.rand(rows, generator=generator) * (drafted + 1)).long()
    width = int(drafted.max())
    unread = torch.arange(width) >= drafted[:, None]

    def signal(kind: Signal) -> torch.Tensor | None:
        values = torch.rand(rows, width, generator=generator).masked_fill(unread, torch.nan)
        return values if kind in requires else None

    return RoundOutcome(
        drafted=drafted,
        accepted=accepted,
        active=active,
        **{kind.value: signal(kind) for kind in BY_POSITION},
        **{name: torch.rand(rows, generator=generator) for name in NEXT_TOKEN if Signal.NEXT_TOKEN in requires},
    )


def constant_outcome(drafted: list[int], accepted: list[int], active: list[bool], width: int) -> RoundOutcome:
    """A round with every signal there is, all of one value."""
    by_position = {kind.value: torch.full((len(drafted), width), 0.3) for kind in BY_POSITION}
    by_row = {name: torch.full((len(drafted),), 0.3) for name in NEXT_TOKEN}
    return RoundOutcome(torch.tensor(drafted), torch.tensor(accepted), torch.tensor(active), **by_position, **by_row)


def play(policy: StoppingPolicy, rows: int, rounds: int, seed: int) -> list[list[int]]:
    """The lengths and stops of a policy over random rounds."""
    generator = torch.Generator().manual_seed(seed)
    said = []
    for _ in range(rounds):
        lengths = policy.draft_lengths()
        stops = policy.should_stop(draft_step(rows, generator))
        said.append(lengths.tolist() + ([] if stops is None else stops.tolist()))
        policy.observe(random_outcome(lengths, policy.requires, generator))
    return said


def row_tensors(holder: Any, rows: int) -> dict[str, torch.Tensor]:
    """Everything in a policy that has one entry per row, as tensors."""
    found: dict[str, torch.Tensor] = {}
    names = [f.name for f in fields(holder)] if is_dataclass(holder) else list(vars(holder))
    for name in names:
        value = getattr(holder, name)
        if name == "_fresh":  # what a new sequence starts with, not a row of the batch
            continue
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        elif isinstance(value, list):
            value = torch.tensor(value)
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == rows:
            found[name] = value
        elif is_dataclass(value):
            found.update(row_tensors(value, rows))
    return found


@every_policy
def test_equal_calls_behave_equally_after_start(name: str, arguments: dict[str, Any]) -> None:
    policy, fresh = create_policy(name, **arguments), create_policy(name, **arguments)
    policy.start(batch(5))
    play(policy, 5, rounds=20, seed=1)
    policy.start(batch(4))
    fresh.start(batch(4))
    assert play(policy, 4, rounds=25, seed=2) == play(fresh, 4, rounds=25, seed=2)


@every_policy
def test_asking_twice_changes_nothing(name: str, arguments: dict[str, Any]) -> None:
    policy = create_policy(name, **arguments)
    policy.start(batch(4))
    play(policy, 4, rounds=15, seed=3)
    assert policy.draft_lengths().tolist() == policy.draft_lengths().tolist()


@every_policy
@given(rows=st.integers(1, 6), limit=st.integers(1, 33), seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=15)
def test_lengths_stay_within_bounds(name: str, arguments: dict[str, Any], rows: int, limit: int, seed: int) -> None:
    policy = create_policy(name, **arguments)
    policy.start(batch(rows, limit))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(12):
        lengths = policy.draft_lengths()
        assert lengths.shape == (rows,)
        assert lengths.dtype == torch.int64
        assert lengths.device.type == "cpu"
        assert int(lengths.min()) >= 0
        assert int(lengths.max()) <= limit
        policy.observe(random_outcome(lengths, policy.requires, generator))


@every_policy
def test_should_stop_answers_per_row_or_never(name: str, arguments: dict[str, Any]) -> None:
    policy = create_policy(name, **arguments)
    policy.start(batch(3))
    stops = policy.should_stop(draft_step(3, torch.Generator().manual_seed(0)))
    assert policy.stops_inside_round == (stops is not None)
    if stops is not None:
        assert stops.shape == (3,)
        assert stops.dtype == torch.bool


@every_policy
def test_finished_and_draftless_rows_keep_their_state(name: str, arguments: dict[str, Any]) -> None:
    policy = create_policy(name, **arguments)
    policy.start(batch(4))
    play(policy, 4, rounds=10, seed=4)
    before = {key: tensor.clone() for key, tensor in row_tensors(policy, 4).items()}
    policy.observe(constant_outcome([5, 0, 0, 5], [5, 0, 0, 2], [True, True, False, True], width=5))
    for key, tensor in row_tensors(policy, 4).items():
        if key.lstrip("_") != "active":
            torch.testing.assert_close(tensor[1:3], before[key][1:3], equal_nan=True, msg=f"{name}: {key} has changed")


@every_policy
def test_a_round_without_drafts_changes_nothing(name: str, arguments: dict[str, Any]) -> None:
    policy = create_policy(name, **arguments)
    policy.start(batch(3))
    play(policy, 3, rounds=10, seed=5)
    policy.observe(random_outcome(torch.tensor([0, 0, 0]), policy.requires, torch.Generator().manual_seed(1)))
    nothing = constant_outcome([0, 0, 0], [0, 0, 0], [True, True, True], width=0)
    policy.observe(nothing)
    before = {key: tensor.clone() for key, tensor in row_tensors(policy, 3).items()}
    policy.observe(nothing)
    for key, tensor in row_tensors(policy, 3).items():
        torch.testing.assert_close(tensor, before[key], equal_nan=True)


@every_policy
@given(kept=st.permutations(range(5)).flatmap(lambda rows: st.integers(1, 5).map(lambda n: rows[:n])))
@settings(deadline=None, max_examples=10)
def test_rows_that_stay_keep_their_state_in_the_order_asked_for(
    name: str, arguments: dict[str, Any], kept: list[int]
) -> None:
    policy = create_policy(name, **arguments)
    policy.start(batch(5))
    play(policy, 5, rounds=12, seed=6)
    before = {key: tensor.clone() for key, tensor in row_tensors(policy, 5).items()}
    policy.select_rows(torch.tensor(kept))
    after = row_tensors(policy, len(kept))
    assert after.keys() == before.keys()
    for key, tensor in after.items():
        torch.testing.assert_close(tensor, before[key][kept], equal_nan=True)
    assert policy.draft_lengths().shape == (len(kept),)
    play(policy, len(kept), rounds=3, seed=7)


@every_policy
def test_a_new_sequence_starts_as_rows_do_at_the_start(name: str, arguments: dict[str, Any]) -> None:
    policy, fresh = create_policy(name, **arguments), create_policy(name, **arguments)
    policy.start(batch(4))
    fresh.start(batch(4))
    at_start = row_tensors(fresh, 4)
    play(policy, 4, rounds=15, seed=11)
    kept = {key: tensor.clone() for key, tensor in row_tensors(policy, 4).items()}
    policy.select_rows(torch.tensor([2, -1, 0, -1]))
    for key, tensor in row_tensors(policy, 4).items():
        torch.testing.assert_close(tensor[[1, 3]], at_start[key][:2], equal_nan=True, msg=f"{name}: {key} is not clean")
        torch.testing.assert_close(tensor[[0, 2]], kept[key][[2, 0]], equal_nan=True)


@every_policy
def test_a_row_alone_behaves_as_it_does_in_a_batch(name: str, arguments: dict[str, Any]) -> None:
    """Rows learn from themselves only, where nothing of the policy is meant for the whole batch."""
    if name in SHARING:
        switched_off = SHARING[name]
        if switched_off is None:
            pytest.skip("decides for the whole batch")
        arguments = {**arguments, **switched_off}
    together, alone = create_policy(name, **arguments), create_policy(name, **arguments)
    together.start(batch(4))
    alone.start(batch(1))
    generator = torch.Generator().manual_seed(8)
    for _ in range(20):
        lengths = together.draft_lengths()
        assert alone.draft_lengths().tolist() == lengths[2:3].tolist()
        outcome = random_outcome(lengths, together.requires, generator)
        single = {f.name: getattr(outcome, f.name) for f in fields(outcome)}
        together.observe(outcome)
        alone.observe(RoundOutcome(**{key: None if value is None else value[2:3] for key, value in single.items()}))


@every_policy_beside_drafts
def test_never_asks_the_host(name: str, arguments: dict[str, Any]) -> None:
    """On the meta device a tensor has no values, so whatever would fetch one raises."""
    policy = create_policy(name, **arguments)
    policy.start(batch(3, device="meta"))
    logits = torch.empty(3, VOCABULARY, device="meta")
    whole = torch.empty(3, dtype=torch.int64, device="meta")
    flags = torch.empty(3, dtype=torch.bool, device="meta")
    by_position = {kind.value: torch.empty(3, 5, device="meta") for kind in BY_POSITION}
    by_row = {name: torch.empty(3, device="meta") for name in NEXT_TOKEN}
    for _ in range(2):
        assert policy.draft_lengths().device.type == "meta"
        policy.should_stop(DraftStep(0, whole, logits, logits, flags))
        policy.observe(RoundOutcome(whole, whole, flags, **by_position, **by_row))
    policy.select_rows(torch.empty(2, dtype=torch.int64, device="meta"))
    assert policy.draft_lengths().shape == (2,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# torch calls the debug mode a prototype when it is first set.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@every_policy_beside_drafts
def test_runs_on_a_gpu_without_synchronising_and_answers_as_on_the_cpu(name: str, arguments: dict[str, Any]) -> None:
    on_cpu, on_gpu = create_policy(name, **arguments), create_policy(name, **arguments)
    on_cpu.start(batch(4))
    on_gpu.start(batch(4, device="cuda"))
    generator = torch.Generator().manual_seed(10)
    for _ in range(25):
        lengths = on_cpu.draft_lengths()
        outcome = random_outcome(lengths, on_cpu.requires, generator)
        values = {f.name: getattr(outcome, f.name) for f in fields(outcome)}
        moved = RoundOutcome(**{key: None if value is None else value.cuda() for key, value in values.items()})
        try:
            torch.cuda.set_sync_debug_mode("error")
            answer = on_gpu.draft_lengths()
            on_gpu.observe(moved)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        on_cpu.observe(outcome)
        # One rounding error may decide a length that lies next to an integer.
        assert int((answer.cpu() - lengths).abs().max()) <= 1


@every_policy
def test_outcomes_are_not_written_to(name: str, arguments: dict[str, Any]) -> None:
    policy = create_policy(name, **arguments)
    policy.start(batch(4))
    outcome = random_outcome(policy.draft_lengths(), policy.requires, torch.Generator().manual_seed(9))
    original = copy.deepcopy(outcome)
    policy.observe(outcome)
    policy.draft_lengths()
    for f in fields(outcome):
        torch.testing.assert_close(getattr(outcome, f.name), getattr(original, f.name), equal_nan=True)


@every_policy
def test_use_before_start_is_refused(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"before `start\(batch\)`"):
        create_policy(name, **arguments).draft_lengths()
