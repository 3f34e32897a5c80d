"""Predicts from the draft's own distribution whether the target will accept, and learns from every verified token.

Four logistic regressions share their arithmetic: two judge the token just drafted (`PLAIN_NOWCAST` from the draft's
distribution alone, `NOWCAST` also from how the row has deviated of late), two look one token ahead (`FIRST` before
anything is drafted, `NEXT` after a drafted token). They learn by an extended Kalman filter in information form: for a
round's samples x with labels y in [0, 1],

    L <- f L + (1 - f) I + sum w x x',   w = max(p (1 - p), 0.01),   theta <- theta + L^-1 sum x (y - p)

which for f = 1 and one sample is the usual rank-one update. All tensors are small and stay on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dsde.utils.transfers import upload

PLAIN_NOWCAST, NOWCAST, FIRST, NEXT = range(4)
FEATURES = 7
LEAST_WEIGHT = 0.01
LARGEST_STEP = 1.0
"""No round moves a coefficient further: with few samples a single linearisation can overshoot."""
LOGIT_MARGIN = 0.02
LEAST_PROBABILITY = 1e-9

_INTERCEPT = -0.3
_ROW_MEAN_WEIGHT = 0.7


def logit(probabilities: Tensor) -> Tensor:
    """`ln(p / (1 - p))` with p kept `LOGIT_MARGIN` away from 0 and 1, so that certainty stays a finite feature."""
    return probabilities.logit(eps=LOGIT_MARGIN)


def inverse(matrices: Tensor) -> Tensor:
    """Invert symmetric positive definite matrices by Gauss-Jordan elimination, `[..., n, n]`, float32.

    For a handful of tiny matrices this is a few dozen small operations; a solver's factorisation makes the host wait
    until the device has done all that it was asked for before. Positive definite matrices need no pivoting.
    """
    size = matrices.shape[-1]
    unit = torch.eye(size, dtype=matrices.dtype, device=matrices.device)
    left = torch.cat([matrices, unit.expand_as(matrices)], dim=-1)
    for place in range(size):
        row = left[..., place : place + 1, :]
        row = row / row[..., place : place + 1]
        # The pivot's own row becomes `row`, all others lose their share of it.
        column = left[..., :, place : place + 1] - unit[:, place : place + 1]
        left = torch.addcmul(left, column, row, value=-1.0)
    return left[..., size:]


class AcceptanceModel:
    """The four regressions, and what they read.

    Args:
        device: Where they live.
        forgetting: Share of what was learnt that each sample keeps, in (0, 1]: 0.999 remembers about a thousand.

    Attributes:
        coefficients: Shape `[4, FEATURES]`, float32.
        information: Inverse covariances of the coefficients, shape `[4, FEATURES, FEATURES]`, float32.
    """

    def __init__(self, device: torch.device, forgetting: float) -> None:
        self._forgetting = forgetting
        self.coefficients = torch.zeros(4, FEATURES, device=device)
        self.coefficients[:, 0] = _INTERCEPT
        self.coefficients[FIRST, 1] = _ROW_MEAN_WEIGHT
        self._prior = torch.eye(FEATURES, device=device)
        self.information = self.covariance = self._prior.repeat(4, 1, 1)
        self._one = torch.ones((), device=device)
        self._draft_scale = upload([1.0, 1.0, 0.5, 0.3, 1.0, 1.0, 1.0], device)
        self._next_scale = upload([1.0, 1.0, 1.0, 0.5, 0.5, 1.0, 0.0], device)

    def draft_features(self, top_probabilities: Tensor, entropy: Tensor, bias: Tensor) -> Tensor:
        """What the draft's distribution says about itself, and how the row has deviated of late.

        Args:
            top_probabilities: The two largest probabilities, shape `[rows, 2]`, float32.
            entropy: Shape `[rows]`, float32, nats.
            bias: How much more was accepted of late than predicted, times 4, shape `[rows]`, float32.

        Returns:
            `[1, ln t1, H / 2, 0.3 min(6, ln(t1 / t2)), t1, sqrt H, 4 b]`, shape `[rows, FEATURES]`, float32.
        """
        first, second = top_probabilities.clamp_min(LEAST_PROBABILITY).log().unbind(-1)
        entropy = entropy.clamp_min(0.0)
        margin = (first - second).clamp_max(6.0)
        one = self._one.expand_as(bias)
        values = [one, first, entropy, margin, top_probabilities[:, 0], entropy.sqrt(), bias]
        return torch.stack(values, dim=-1) * self._draft_scale

    def first_features(
        self, row_logit: Tensor, bias: Tensor, entropy: Tensor, probability: Tensor, all_accepted: Tensor
    ) -> Tensor:
        """What is known before a round's first draft token.

        Args:
            row_logit: `logit` of the row's recent acceptance rate, shape `[rows]`, float32.
            bias: As in `draft_features`.
            entropy: Of the target's distribution after the last token, shape `[rows]`, float32, nats.
            probability: Of the last token under that distribution, shape `[rows]`, float32.
            all_accepted: Whether all drafts of the row's last round were accepted, shape `[rows]`, float32, 0 or 1.

        Returns:
            `[1, logit m, 4 b, H / 2 - 0.5, ln(p) / 2 + 0.3, all accepted, 0]`, shape `[rows, FEATURES]`, float32.
        """
        chosen = 0.5 * probability.clamp_min(LEAST_PROBABILITY).log() + 0.3
        values = [self._one.expand_as(bias), row_logit, bias, 0.5 * entropy - 0.5, chosen, all_accepted]
        return torch.stack([*values, torch.zeros_like(bias)], dim=-1)

    def next_features(self, row_logit: Tensor, draft: Tensor, nowcast: Tensor) -> Tensor:
        """What is known about the token after the one just drafted.

        Args:
            row_logit: As in `first_features`.
            draft: `draft_features` of the token just drafted, shape `[rows, FEATURES]`.
            nowcast: Its acceptance probability as `NOWCAST` predicts it, shape `[rows]`, float32.

        Returns:
            `[1, logit m, 4 b, ln(t1) / 2, sqrt(H) / 2, logit nowcast, 0]`, shape `[rows, FEATURES]`, float32.
        """
        one, log_top, _, _, _, root, bias = draft.unbind(-1)
        return torch.stack([one, row_logit, bias, log_top, root, logit(nowcast), one], dim=-1) * self._next_scale

    def predict(self, model: int, features: Tensor) -> Tensor:
        """Probability of acceptance; `features` is `[..., FEATURES]`, the result `[...]`, float32."""
        return torch.sigmoid(features @ self.coefficients[model])

    def uncertainty(self, model: int, features: Tensor) -> Tensor:
        """Standard deviation of the predicted logit; `features` is `[FEATURES]`, the result a scalar, float32."""
        return (features @ self.covariance[model] @ features).clamp_min(0.0).sqrt()

    def learn(self, features: Tensor, labels: Tensor, counts: Tensor) -> None:
        """Take in a round's samples.

        Args:
            features: Shape `[4, samples, FEATURES]`, float32.
            labels: Exact acceptance probabilities, or 0 and 1, shape `[samples]`, float32.
            counts: 1 where a sample is one for that regression and 0 elsewhere, shape `[4, samples]`, float32.
        """
        predicted = torch.sigmoid(torch.einsum("mnd,md->mn", features, self.coefficients))
        weights = (predicted * (1 - predicted)).clamp_min(LEAST_WEIGHT) * counts
        kept = torch.pow(self._forgetting, counts.sum(1)).view(4, 1, 1)
        gained = torch.einsum("mnd,mn,mne->mde", features, weights, features)
        self.information = kept * self.information + (1 - kept) * self._prior + gained
        gradient = torch.einsum("mnd,mn->md", features, (labels - predicted) * counts)
        self.covariance = inverse(self.information)
        step = torch.einsum("mde,me->md", self.covariance, gradient)
        self.coefficients = self.coefficients + step.clamp(-LARGEST_STEP, LARGEST_STEP)

    def unsettle(self, surprised: Tensor) -> None:
        """Where `surprised` (scalar, bool), keep the coefficients but trust them no more than at the start."""
        self.information = torch.where(surprised, self._prior, self.information)
        self.covariance = torch.where(surprised, self._prior, self.covariance)
