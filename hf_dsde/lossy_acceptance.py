"""Rules of acceptance that are lossy: drafted tokens may stand that the target would not have written.

Exact verification (`hf_dsde.decoding.verification`) keeps the text, or its distribution, the target's own. A lossy rule
gives that up for more accepted tokens: it lets a drafted token stand when the target finds it plausible enough. None is
used unless `SpeculationConfig(acceptance=...)` asks for it, and whatever comes out of it says so.

A rule answers one question, which drafted tokens stand, as a function of tensors: it has no state, and never waits for
a device. The tokens are what was drafted, however they came about. What becomes of the answer is the same for all
rules (`hf_dsde.decoding.verification.lossy`): the text takes the drafted tokens up to the first that does not stand,
and a token of the target's own after them.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_dsde import signals
from hf_dsde.utils.callers import callers_level
from hf_dsde.utils.checks import check_number
from hf_dsde.utils.words import EXACT


class LossyAcceptanceWarning(UserWarning):
    """Drafted tokens are accepted by a rule that changes the text."""


class LossyAcceptance(ABC):
    """Says which drafted tokens stand, though the target itself would have written others.

    Subclasses are frozen dataclasses whose fields JSON can hold, checked when they are made.
    """

    name: ClassVar[str]
    """What saved settings call the rule."""

    @abstractmethod
    def stands(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """Judge every drafted token as if all before it stood.

        Args:
            scores: The target's scores where each token was drafted, after all logits processors,
                `[rows, width, vocabulary]`, float32; -inf where a token is excluded.
            tokens: What was drafted, `[rows, width]`, int64. Rows may be shorter: then both hold anything after a row's
                end, which must not reach back to the positions before.

        Returns:
            `[rows, width]`, bool. Never True for a token that is excluded.
        """

    def to_dict(self) -> dict[str, Any]:
        """Name and fields, as JSON holds them."""
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload] # subclasses are dataclasses

    def __str__(self) -> str:
        shown = [
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value!r}"
            for name, value in self.to_dict().items()
            if name != "name"
        ]
        return f"{self.name}({', '.join(shown)})"


@dataclass(frozen=True)
class Consultant(LossyAcceptance):
    """Consultant Decoding (Ding et al. 2025, arXiv 2506.02391): a token stands while the target is not too surprised.

    With p the target's law at position i of a block and x the drafted token there,

        r_i = decay * r_(i-1) + (1 - decay) * -ln p(x),    r_0 = 0

    and x stands if r_i is at most `threshold`. Every block begins with r_0 again.

    Attributes:
        threshold: The most surprise on average that is let pass, nats, at least 0 (epsilon in the paper). With `decay`
            0 a token of at least probability exp(-threshold) stands.
        decay: Weight of the tokens before, at least 0 and below 1 (beta in the paper).
    """

    name: ClassVar[str] = "consultant"
    threshold: float = 2.0
    decay: float = 0.2

    def __post_init__(self) -> None:
        """Check the fields."""
        check_number("threshold", self.threshold, 0.0)
        check_number("decay", self.decay, 0.0)
        if self.decay >= 1:
            raise ValueError(
                f"`decay` is {self.decay!r}, but a number below 1 is needed: with 1 no token would count. The paper's "
                "is 0.2."
            )

    def stands(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """As for any rule; reads the target's law at the drafted tokens alone."""
        chosen = scores.gather(2, tokens[:, :, None])[:, :, 0]
        surprise = scores.logsumexp(dim=-1) - chosen
        averages = torch.empty_like(surprise)
        average = surprise.new_zeros(surprise.shape[0])
        for position in range(surprise.shape[1]):
            # An excluded token's surprise is infinite, and makes the average infinite or no number: neither passes.
            average = torch.lerp(surprise[:, position], average, self.decay, out=averages[:, position])
        return averages <= self.threshold


@dataclass(frozen=True)
class TypicalAcceptance(LossyAcceptance):
    """Typical acceptance, as in Medusa (Cai et al. 2024, arXiv 2401.10774): a token stands if it is likely enough.

    With p the target's law and H(p) its entropy in nats, token x stands if

        p(x) > min(threshold, alpha * exp(-H(p)))

    so that less is asked where the target itself is unsure.

    Attributes:
        threshold: The probability above which every token stands, above 0 and at most 1 (epsilon in the paper).
        alpha: Asks for this share of exp(-H), above 0 (delta in the paper, which takes the root of epsilon). Up to 1,
            the target's best token always stands.
    """

    name: ClassVar[str] = "typical"
    threshold: float = 0.09
    alpha: float = 0.3

    def __post_init__(self) -> None:
        """Check the fields."""
        check_number("threshold", self.threshold, 0.0, 1.0, open_minimum=True)
        check_number("alpha", self.alpha, 0.0, open_minimum=True)

    def stands(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """As for any rule."""
        log_probs = scores.log_softmax(dim=-1)
        chosen = log_probs.gather(2, tokens[:, :, None])[:, :, 0]
        entropy = signals.entropy_of_(log_probs)  # the log-probabilities are gone after this
        return chosen > (math.log(self.alpha) - entropy).clamp_max(math.log(self.threshold))


RULES: tuple[type[LossyAcceptance], ...] = (Consultant, TypicalAcceptance)
"""Those that saved settings can name."""


def rule_of(value: LossyAcceptance | Mapping[str, Any]) -> LossyAcceptance:
    """A rule as it is, or the one that `to_dict` has described.

    Raises:
        TypeError: It is neither, or a field has the wrong type.
        ValueError: No rule has the name, the rule has no such field, or a value is out of bounds.
    """
    if isinstance(value, LossyAcceptance):
        return value
    known = {rule.name: rule for rule in RULES}
    if not isinstance(value, Mapping):
        raise TypeError(
            f"`acceptance` is {value!r}, but a lossy rule is needed: "
            f"{' or '.join(f'{rule.__name__}()' for rule in RULES)}. Leave it None for exact acceptance."
        )
    fields = dict(value)
    name = fields.pop("name", None)
    if name not in known:
        raise ValueError(f"`acceptance` has the name {name!r}, but one of {', '.join(map(repr, known))} is needed.")
    try:
        return known[name](**fields)
    except (TypeError, ValueError) as failure:
        raise type(failure)(f"`acceptance` is {dict(value)!r}, which {name!r} does not take: {failure}") from failure


def described(rule: LossyAcceptance | None) -> str:
    """What results say of the acceptance of a call."""
    return EXACT if rule is None else f"lossy: {rule}"


@cache
def warn_once(rule: LossyAcceptance) -> None:
    """Issue one `LossyAcceptanceWarning` for a rule, which names the line that called from outside the libraries."""
    warnings.warn(
        f"Drafted tokens are accepted by a lossy rule, {rule}: the text is not the target's own, and depends on what "
        "is drafted. Leave out SpeculationConfig(acceptance=...) where it has to be.",
        LossyAcceptanceWarning,
        stacklevel=callers_level(),
    )
