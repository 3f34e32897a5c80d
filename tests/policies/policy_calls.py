"""Starting a policy, telling it of a round, and refusing its arguments, without any model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch

from hf_dsde.policies import BatchInfo, RoundOutcome, StoppingPolicy

Policy = TypeVar("Policy", bound=StoppingPolicy)


def start(policy: Policy, rows: int = 1, max_draft_length: int = 32) -> Policy:
    policy.start(BatchInfo(rows, torch.device("cpu"), 100, max_draft_length, 1000))
    return policy


def starter(kind: Callable[..., Policy], longest: int = 32) -> Callable[..., Policy]:
    """Return what builds and starts a policy from a number of rows, the loop's limit and the policy's arguments."""

    def started(rows: int = 1, max_draft_length: int = longest, **arguments: Any) -> Policy:
        return start(kind(**arguments), rows, max_draft_length)

    return started


def outcome(drafted: list[int], accepted: list[int], active: list[bool] | None = None) -> RoundOutcome:
    alive = [True] * len(drafted) if active is None else active
    return RoundOutcome(torch.tensor(drafted), torch.tensor(accepted), torch.tensor(alive))


def round_of(active: list[bool]) -> RoundOutcome:
    """A round in which each row that goes on drafted three tokens, two of which were accepted."""
    return outcome([3 * alive for alive in active], [2 * alive for alive in active], active)


def check_refused(
    kind: Callable[..., Any], arguments: dict[str, Any], error: type[Exception], fragments: str | Sequence[str]
) -> None:
    """Check that a policy refuses its arguments by name."""
    with pytest.raises(error) as caught:
        kind(**arguments)
    for fragment in [fragments] if isinstance(fragments, str) else fragments:
        assert fragment in str(caught.value)
