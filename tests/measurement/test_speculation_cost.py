"""What a user learns when speculation does not pay, and what crosses between devices.

People ask why assisted generation is slower than none, and get no word (transformers #36337, #26565).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from tiny_calls import config_of, pair, speculative
from tiny_models import ragged_batch

import hf_dsde
from hf_dsde import SpeculationWarning
from hf_dsde.decoding import loop
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.measurement.clock import PhaseClock
from hf_dsde.policies import PhaseTimes

INPUTS = ragged_batch([3, 5])


@pytest.fixture
def draft_costs_as_much_as_the_target(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the clock: a round's draft and target passes take a second each, where there are any."""

    class Clock(PhaseClock):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self._rounds = 0

        def start(self, *, seamless: bool = False) -> None: ...

        def restart(self) -> None: ...

        def mark(self, *, again: bool = False) -> None: ...

        def phases(self, policy: float = 0.0) -> Callable[[], PhaseTimes]:
            self._rounds += 1
            draft = float(self._rounds != loop.COST_PROBE_ROUND + 1)
            return lambda: PhaseTimes(draft=draft, verify=1.0, bookkeeping=0.0, policy=policy)

    monkeypatch.setattr(loop, "PhaseClock", Clock)
    return


def warnings_of(agreement: str, new_tokens: int, **settings: bool) -> list[str]:
    target, draft = pair(agreement=agreement)
    config = config_of(**settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        speculative(target, draft, INPUTS, hf_dsde.StaticPolicy(4), config, max_new_tokens=new_tokens)
    return [str(w.message) for w in caught if w.category is SpeculationWarning]


@pytest.mark.usefixtures("draft_costs_as_much_as_the_target")
def test_a_call_that_loses_says_so_once_and_why() -> None:
    (message,) = warnings_of("never", 80)
    assert "slower than plain decoding" in message
    assert "acceptance rate of 0.0" in message


@pytest.mark.usefixtures("draft_costs_as_much_as_the_target")
def test_calls_that_win_or_measured_nothing_are_silent() -> None:
    assert warnings_of("full", 80) == []
    assert warnings_of("never", 30) == []
    assert warnings_of("never", 80, cost_probe=False) == []


@pytest.mark.parametrize(
    ("options", "writes"), [({}, 0), ({"repetition_penalty": 1.3}, 4 + 1)], ids=["scores", "history"]
)
def test_draft_tokens_reach_the_sequences_only_where_processors_look_for_them(
    options: dict[str, float], writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two may live on different devices (transformers #35099)."""
    offsets: list[int] = []
    write = SequenceBatch.write_drafts

    def counted(self: SequenceBatch, tokens: torch.Tensor, offset: int = 0) -> None:
        offsets.append(offset)
        write(self, tokens, offset)

    monkeypatch.setattr(SequenceBatch, "write_drafts", counted)
    target, draft = pair(agreement="full")
    output = speculative(target, draft, INPUTS, hf_dsde.StaticPolicy(4), max_new_tokens=5, **options)
    assert len(output.speculation_statistics.rounds) == 1
    assert len(offsets) == writes + 1, "four steps, the whole block for the target's, and the accepted text itself"
