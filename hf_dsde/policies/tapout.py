"""TapOut (arXiv 2511.02017): a bandit that learns which of several stopping rules to draft by.

Before a drafting session the bandit chooses a rule, an arm; inside it, the rule says after which token to stop; after
it, what was accepted is the arm's reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_dsde.policies.adaedl import AdaEDLPolicy
from hf_dsde.policies.bandits import BANDITS, ArmStatistics, best_arm
from hf_dsde.policies.base import BatchInfo, DraftStep, RoundOutcome, StoppingPolicy
from hf_dsde.policies.registry import register
from hf_dsde.policies.row_history import RowState
from hf_dsde.utils.checks import check_choice, check_integer, check_number

ARMS = ("max_confidence", "svip", "adaedl", "svip_difference", "logit_margin")
SCOPES = ("batch", "row")
LARGEST_SEED = 2**32 - 1


@dataclass
class _State(RowState):
    root_entropy: Tensor  # [rows], float32: square root of the entropy at this session's newest token


@dataclass
class _BanditState(_State):
    """A row's state with a bandit of its own."""

    plays: Tensor  # [rows, arms], int64
    rewards: Tensor  # [rows, arms], float32
    squares: Tensor  # [rows, arms], float32


@register("tapout")
class TapOutPolicy(StoppingPolicy):
    """Draft each round by the stopping rule that has brought the best rewards so far.

    After a token drawn from q, whose largest probabilities are p1 and p2 and whose entropy is H, the arms stop if

    - "max_confidence": `p1 < confidence_threshold`,
    - "svip": `sqrt(H) > entropy_threshold`,
    - "adaedl": `1 - sqrt(0.2 H) < lambda`, lambda adapting in the sessions that this arm played,
    - "svip_difference": `sqrt(H) - sqrt(H of the token before) > difference_threshold`, never after the first token,
    - "logit_margin": `p1 - p2 < margin_threshold`.

    All look at the draft's raw distribution only, and the token stays.

    Args:
        bandit: "ucb1", "ucb_tuned" or "thompson".
        scope: "batch", one bandit that learns from all rows and chooses one arm for all of them, or "row", a bandit for
            each row.
        arms: The arms to choose from; None takes all five. The two bounds play them once each, in this order, first.
        num_draft_tokens: The most tokens a row drafts in a round: gamma_max.
        blend: Weight `a` of length in the reward `a accepted / gamma_max + (1 - a) accepted / drafted`.
        seed: Seed of Thompson sampling. Equal calls draw equally.
        confidence_threshold: See above, in [0, 1].
        entropy_threshold: See above, square root of nats, at least 0.
        adaedl_threshold: The first lambda, in [0, 1].
        difference_threshold: See above, square root of nats, at least 0.
        margin_threshold: See above, in [0, 1].
    """

    name = "tapout"

    def __init__(
        self,
        bandit: str = "ucb1",
        scope: str = "batch",
        arms: Sequence[str] | None = None,
        num_draft_tokens: int = 20,
        blend: float = 0.5,
        seed: int = 0,
        confidence_threshold: float = 0.8,
        entropy_threshold: float = 0.6,
        adaedl_threshold: float = 0.5,
        difference_threshold: float = 0.2,
        margin_threshold: float = 0.2,
    ) -> None:
        self.bandit = check_choice("bandit", bandit, BANDITS)
        self.scope = check_choice("scope", scope, SCOPES)
        self.arms = ARMS if arms is None else _checked_arms(arms)
        self.num_draft_tokens = check_integer(
            "num_draft_tokens", num_draft_tokens, 1, way_out="To decode without drafts, use policy 'static' with 0."
        )
        self.blend = check_number("blend", blend, 0.0, 1.0)
        self.seed = check_integer("seed", seed, 0, LARGEST_SEED)
        self.confidence_threshold = check_number("confidence_threshold", confidence_threshold, 0.0, 1.0)
        self.entropy_threshold = check_number("entropy_threshold", entropy_threshold, 0.0)
        self.adaedl_threshold = check_number("adaedl_threshold", adaedl_threshold, 0.0, 1.0)
        self.difference_threshold = check_number("difference_threshold", difference_threshold, 0.0)
        self.margin_threshold = check_number("margin_threshold", margin_threshold, 0.0, 1.0)
        self._adaedl = AdaEDLPolicy(threshold=self.adaedl_threshold, num_draft_tokens=self.num_draft_tokens)
        self._state: _State | None = None
        self._length = 0

    @property
    def _rows(self) -> _State:
        if self._state is None:
            raise RuntimeError("TapOutPolicy was used before `start(batch)`.")
        return self._state

    @property
    def statistics(self) -> ArmStatistics:
        """What is known of the arms, in the order of `arms`: `[arms]` in scope "batch", `[rows, arms]` in "row"."""
        state = self._rows
        if isinstance(state, _BanditState):
            return ArmStatistics(state.plays, state.rewards, state.squares)
        return self._shared

    @property
    def chosen(self) -> Tensor:
        """Each row's arm in the coming round, an index into `arms`, shape `[rows]`, int64."""
        rows = self._rows.root_entropy
        return self._arm.expand_as(rows)

    def start(self, batch: BatchInfo) -> None:
        """Forget everything and prepare for a batch."""
        self._length = min(self.num_draft_tokens, batch.max_draft_length)
        self._adaedl.start(batch)
        self._state = self._initial(batch.rows, batch.device)
        self._fresh = self._initial(1, batch.device)
        self._shared = ArmStatistics.nothing(len(self.arms), device=batch.device)
        self._choose()

    def _initial(self, rows: int, device: torch.device) -> _State:
        root_entropy = torch.zeros(rows, dtype=torch.float32, device=device)
        if self.scope == "batch":
            return _State(root_entropy)
        return _BanditState(root_entropy, *ArmStatistics.nothing(rows, len(self.arms), device=device))

    def _choose(self) -> None:
        self._arm = best_arm(BANDITS[self.bandit](self.statistics, self.seed))

    def draft_lengths(self) -> Tensor:
        """The most tokens of a round, shape `[rows]`, int64; most rounds stop earlier."""
        return torch.full_like(self._rows.root_entropy, self._length, dtype=torch.int64)

    def should_stop(self, step: DraftStep) -> Tensor:
        """Rows whose arm stops after their newest token, shape `[rows]`, bool."""
        stops = self.arm_stops(step)
        self._state = replace(self._rows, root_entropy=step.entropy.sqrt())
        return stops.gather(1, self.chosen.unsqueeze(-1)).squeeze(-1)

    def arm_stops(self, step: DraftStep) -> Tensor:
        """What each arm would say after the newest tokens, shape `[rows, arms]`, bool."""
        largest, second = step.top_probabilities.unbind(-1)
        root_entropy = step.entropy.sqrt()
        rise = root_entropy - self._rows.root_entropy
        by_name = {
            "max_confidence": largest < self.confidence_threshold,
            "svip": root_entropy > self.entropy_threshold,
            "adaedl": self._adaedl.should_stop(step),
            # What stands in the state at a session's first token belongs to the session before.
            "svip_difference": (rise > self.difference_threshold) & (step.position > 0),
            "logit_margin": largest - second < self.margin_threshold,
        }
        return torch.stack([by_name[arm] for arm in self.arms], dim=-1)

    def observe(self, outcome: RoundOutcome) -> None:
        """Credit each row's arm with the row's reward, and choose the next arms."""
        learning = outcome.active & (outcome.drafted > 0)
        arm = torch.arange(len(self.arms), device=learning.device)
        played = (self.chosen.unsqueeze(-1) == arm) & learning.unsqueeze(-1)
        newest = ArmStatistics.of_plays(played, self._reward(outcome).unsqueeze(-1))
        if self.scope == "batch":
            self._shared = self._shared.plus(newest.pooled())
        else:
            self._state = _BanditState(self._rows.root_entropy, *self.statistics.plus(newest))
        if "adaedl" in self.arms:
            by_adaedl = played[:, self.arms.index("adaedl")]
            self._adaedl.observe(replace(outcome, drafted=outcome.drafted * by_adaedl))
        self._choose()

    def _reward(self, outcome: RoundOutcome) -> Tensor:
        """TapOut's blended reward, `a accepted / gamma_max + (1 - a) accepted / drafted`, shape `[rows]`, float32."""
        by_length = outcome.accepted / self._length
        by_rate = outcome.accepted / outcome.drafted.clamp_min(1)
        # A loop that lifts drafts above what was asked for could bring more than gamma_max.
        return (self.blend * by_length + (1 - self.blend) * by_rate).clamp_max(1.0)

    def select_rows(self, index: Tensor) -> None:
        """Rearrange the batch; -1 is a new sequence. `index` is int64, `[places]`.

        In scope "batch" a new sequence drafts by what the others have taught.
        """
        self._state = self._rows.select_rows(index, self._fresh)
        self._adaedl.select_rows(index)
        self._choose()


def _checked_arms(arms: Sequence[str]) -> tuple[str, ...]:
    if isinstance(arms, str) or not isinstance(arms, Sequence) or not arms:
        raise TypeError(f"`arms` is {arms!r}, but a list of one or more of {', '.join(map(repr, ARMS))} is needed.")
    checked = tuple(check_choice("arms", arm, ARMS) for arm in arms)
    if len(set(checked)) < len(checked):
        raise ValueError(f"`arms` is {list(arms)!r}, but each arm can be named only once.")
    return checked
