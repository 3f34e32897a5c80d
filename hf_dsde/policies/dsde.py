"""DSDE (arXiv 2509.01083): a draft length per row from the stability of the divergence between draft and target.

After each verification the KLDs of the row's draft tokens are remembered. Their last mean (SF) says how far the models
are apart, the ratio of their weighted variances over a short and a long window (WVIR) whether that is changing; both
shorten the draft. The batch's mean length caps every row, so that no row makes the others wait (SL_cap).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_dsde import signals
from hf_dsde.policies.base import BatchInfo, RoundOutcome, Signal, StoppingPolicy
from hf_dsde.policies.host_rows import HostRows, append_newest
from hf_dsde.policies.registry import register
from hf_dsde.utils.checks import check_choice, check_flag, check_integer, check_number

_VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {
        "sl_min": 2,
        "sl_max": None,
        "cap": True,
        "decay": 0.85,
        "sl_max_coefficient": 1.0,
        "sl_min_fraction": 0.0,
        "round_sl_max": False,
        "flat_variance": 1e-10,
        "flat_ratio": 1.0,
    },
    "reference": {
        "sl_min": 6,
        "sl_max": 20,
        "cap": False,
        "decay": 0.9,
        "sl_max_coefficient": 0.5,
        "sl_min_fraction": 0.1,
        "round_sl_max": True,
        "flat_variance": 1e-6,
        "flat_ratio": 20.0,
    },
}
_DIRECTIONS = {"target_draft": Signal.KLD, "draft_target": Signal.REVERSE_KLD}
_FIRST_GROWING_LENGTH = 5
_TINY = 1e-8
Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
_WORST_KLD = -math.log(signals.DRAFT_PROBABILITY_FLOOR)


@dataclass
class _State(HostRows):
    window: Floats  # [rows, long_window]: KLDs, newest last
    filled: Integers  # [rows]: how many of the window's last entries are real
    last_mean: Floats  # [rows]: mean KLD of the last verified step
    active: Flags  # [rows]: still generating, as of the last round
    calibration_length: Integers  # [rows]: draft length while the window fills
    calibration_count: Integers  # [rows]: KLDs seen in calibration
    calibration_sum: Floats  # [rows]: their sum
    calibration_max: Floats  # [rows]: their maximum
    best_accepted: Integers  # [rows]: SL_A,max, most tokens accepted in a step of calibration


@register("dsde")
class DSDEStoppingPolicy(StoppingPolicy):
    """Draft lengths by DSDE's equations, with the paper's constants or those of the authors' public code.

    Every row starts in calibration: until its window of KLDs is full it drafts `initial_length` tokens, and with
    `warmup="grow"` twice as many after a fully accepted draft. Rows in calibration are neither counted in nor bounded
    by the cap.

    Args:
        sl_max: Hard ceiling of a row's draft length; None leaves the loop's own. Reference: 20.
        sl_min: The length of a row that is not to be trusted. Paper 2, reference 6. Not 0: a row that drafts nothing
            yields no KLD and would never draft again.
        variant: "paper" or "reference": whose constants the arguments left at None take.
        warmup: "grow" doubles a row's calibration length after it has accepted all it was asked to draft, "hold" keeps
            it. Held at SL_min, calibration makes no row of a batch wait, but Eq. 1 then allows at most twice SL_min.
        initial_length: Draft length at the start of calibration; a smaller `sl_max` lowers it. None takes 5 when it
            grows, and `sl_min` when it is held.
        cap: Whether no row may exceed the active rows' mean length (Eq. 9-11). Paper on, reference off. Under a
            `CostCap` there is none: measured prices say what it stands in for.
        decay: delta of the weighted variance, in (0, 1]. Paper 0.85, reference 0.9.
        short_window: KLDs in the short window; None takes a third of the long one (10 of 30).
        long_window: KLDs in the long window; calibration lasts until it is full.
        kld_direction: "target_draft" is KL(target || draft), as in the public code; "draft_target" the reverse.
        kld_positions: "all" drafted positions, as in the public code, or "to_first_rejection", which leaves out
            those after the first rejected token, whose prefix the target never wrote.
        sl_max_coefficient: Factor of mean / max in SL_max (Eq. 1). Paper 1, reference 0.5.
        sl_min_fraction: SL_min is at least this fraction of SL_max, rounded up. Paper 0, reference 0.1.
        round_sl_max: Whether SL_max is rounded to an integer. Paper False, reference True.
        scaling_exponent: Factor in the exponent of SF (Eq. 3).
        temperature_scaling: Divides the mean KLD in SF. The public code puts the sampling temperature here, which a
            policy cannot see. None and 0 leave it out.
        flat_variance: Below this variance of the long window WVIR is `flat_ratio`. Reference 1e-6.
        flat_ratio: Paper 1 (it is silent; SF alone decides), reference 20.
    """

    name = "dsde"
    requires = frozenset({Signal.KLD})

    def __init__(
        self,
        *,
        sl_max: int | None = None,
        sl_min: int | None = None,
        variant: str = "paper",
        warmup: str = "grow",
        initial_length: int | None = None,
        cap: bool | None = None,
        decay: float | None = None,
        short_window: int | None = None,
        long_window: int = 30,
        kld_direction: str = "target_draft",
        kld_positions: str = "all",
        sl_max_coefficient: float | None = None,
        sl_min_fraction: float | None = None,
        round_sl_max: bool | None = None,
        scaling_exponent: float = 2.0,
        temperature_scaling: float | None = None,
        flat_variance: float | None = None,
        flat_ratio: float | None = None,
    ) -> None:
        self.variant = check_choice("variant", variant, _VARIANTS)
        constants = _VARIANTS[variant]

        def chosen(argument: str, value: Any) -> Any:
            return constants[argument] if value is None else value

        self._set_bounds(chosen("sl_min", sl_min), chosen("sl_max", sl_max))
        self._set_calibration(warmup, initial_length)
        self.cap = check_flag("cap", chosen("cap", cap))
        self.decay = check_number("decay", chosen("decay", decay), 0.0, 1.0, open_minimum=True)
        self.long_window = check_integer("long_window", long_window, 2)
        third = max(1, self.long_window // 3)
        self.short_window = check_integer(
            "short_window",
            third if short_window is None else short_window,
            1,
            self.long_window,
            way_out=f"`long_window` is {self.long_window}: enlarge it or shorten the short one.",
        )
        self.kld_direction = check_choice("kld_direction", kld_direction, _DIRECTIONS)
        self.requires = frozenset({_DIRECTIONS[kld_direction]})
        self.kld_positions = check_choice("kld_positions", kld_positions, ("all", "to_first_rejection"))
        self.sl_max_coefficient = check_number(
            "sl_max_coefficient", chosen("sl_max_coefficient", sl_max_coefficient), 0.0
        )
        self.sl_min_fraction = check_number("sl_min_fraction", chosen("sl_min_fraction", sl_min_fraction), 0.0, 1.0)
        self.round_sl_max = check_flag("round_sl_max", chosen("round_sl_max", round_sl_max))
        self.scaling_exponent = check_number("scaling_exponent", scaling_exponent, 0.0)
        self.temperature_scaling = check_number(
            "temperature_scaling", 0.0 if temperature_scaling is None else temperature_scaling, 0.0
        )
        self.flat_variance = check_number(
            "flat_variance", chosen("flat_variance", flat_variance), 0.0, open_minimum=True
        )
        self.flat_ratio = check_number("flat_ratio", chosen("flat_ratio", flat_ratio), 0.0)
        self._state: _State | None = None
        self._known_bounds: tuple[Floats, Floats] | None = None

    def _set_bounds(self, sl_min: Any, sl_max: Any) -> None:
        self.sl_min = check_integer(
            "sl_min", sl_min, 1, way_out="A row that drafts nothing yields no KLD and would never draft again."
        )
        self.sl_max: int | None = None
        if sl_max is not None:
            self.sl_max = check_integer(
                "sl_max",
                sl_max,
                self.sl_min,
                way_out=f"`sl_min` is {self.sl_min}, the default of variant {self.variant!r} unless you passed it: "
                "pass a smaller `sl_min` too.",
            )

    def _set_calibration(self, warmup: Any, initial_length: Any) -> None:
        self.warmup = check_choice("warmup", warmup, ("grow", "hold"))
        if initial_length is None:
            initial_length = _FIRST_GROWING_LENGTH if warmup == "grow" else self.sl_min
        self.initial_length = check_integer("initial_length", initial_length, 1)

    @property
    def _rows(self) -> _State:
        if self._state is None:
            raise RuntimeError("DSDEStoppingPolicy was used before `start(batch)`.")
        return self._state

    @property
    def calibrating(self) -> Flags:
        """Rows whose window of KLDs is not full yet, shape `[rows]`."""
        return self._rows.filled < self.long_window

    def start(self, batch: BatchInfo) -> None:
        """Forget everything and prepare for a batch."""
        self._device = batch.device
        self._known_bounds = None
        self._ceiling = batch.max_draft_length if self.sl_max is None else min(self.sl_max, batch.max_draft_length)
        self._floor = min(self.sl_min, self._ceiling)
        self._caps = self.cap and batch.costs is None
        self._state = self._initial(batch.rows)
        self._fresh = self._initial(1)

    def _initial(self, rows: int) -> _State:
        return _State(
            window=np.zeros((rows, self.long_window), np.float32),
            filled=np.zeros(rows, np.int64),
            last_mean=np.zeros(rows, np.float32),
            active=np.ones(rows, np.bool_),
            calibration_length=np.full(rows, min(self.initial_length, self._ceiling), np.int64),
            calibration_count=np.zeros(rows, np.int64),
            calibration_sum=np.zeros(rows, np.float32),
            calibration_max=np.zeros(rows, np.float32),
            best_accepted=np.zeros(rows, np.int64),
        )

    @property
    def may_lag(self) -> bool:
        """Always: what it learns from a draft does not depend on who has asked for it."""
        return True

    def draft_lengths(self) -> Tensor:
        """Each row's length, shape `[rows]`, int64: `min(ceil(SL^), SL_cap)`, or its calibration length."""
        return torch.from_numpy(self._lengths()).to(self._device)

    def _lengths(self) -> Integers:
        lengths = np.ceil(self.predicted_lengths()).astype(np.int64)
        if self._caps:
            lengths = np.minimum(lengths, self._length_cap(lengths))
        return np.minimum(np.where(self.calibrating, self._rows.calibration_length, lengths), self._ceiling)

    def predicted_lengths(self) -> Floats:
        """SL^ of Eq. 8, `(1 - SF WVIR) (SL_max - SL_min) + SL_min`, before rounding and cap.

        Shape `[rows]`, tokens. Where `SF WVIR` exceeds 1 it is SL_min. It means nothing for rows that are still
        calibrating.
        """
        sl_min, sl_max = self._bounds()
        with np.errstate(invalid="ignore", over="ignore"):  # an infinite SF times 0 is no number: SL_min
            share = np.fmax(1 - self._scaling_factor() * self._variance_ratio(), np.float32(0))
        lengths: Floats = share * (sl_max - sl_min) + sl_min
        return lengths

    def _variance_ratio(self) -> Floats:
        """WVIR of each row, shape `[rows]`; of no meaning where the window is not full."""
        return signals.weighted_variance_ratio(
            self._rows.window,
            self.short_window,
            self.decay,
            flat_variance=self.flat_variance,
            flat_ratio=self.flat_ratio,
        )

    def _scaling_factor(self) -> Floats:
        mean = self._rows.last_mean
        if self.temperature_scaling:
            mean = mean / self.temperature_scaling
        return signals.scaling_factor(mean, self.scaling_exponent)

    def _bounds(self) -> tuple[Floats, Floats]:
        """SL_min and SL_max of each row, shape `[rows]`.

        SL_max is Eq. 1, `SL_A,max (1 + mu / max)` over the KLDs of calibration, between `sl_min` and the ceiling.
        """
        if self._known_bounds is None:
            self._known_bounds = self._new_bounds()
        return self._known_bounds

    def _new_bounds(self) -> tuple[Floats, Floats]:
        state = self._rows
        mean = state.calibration_sum / np.maximum(state.calibration_count, 1)
        relative_mean = mean / (state.calibration_max + _TINY)
        sl_max = state.best_accepted * (1 + self.sl_max_coefficient * relative_mean)
        if self.round_sl_max:
            sl_max = sl_max.round()
        sl_max = sl_max.clip(self._floor, self._ceiling)
        sl_min = np.minimum(np.ceil(self.sl_min_fraction * sl_max).clip(self._floor), sl_max)
        return sl_min.astype(np.float32), sl_max.astype(np.float32)

    def _length_cap(self, lengths: Integers) -> int:
        """SL_cap (Eq. 9-11): the mean minimises the mean squared distance to the rows' lengths; rounded up.

        Taken over active rows past calibration, of lengths already rounded up, in integers.
        """
        counted = self._rows.active & ~self.calibrating
        return math.ceil(int(lengths @ counted) / max(int(np.count_nonzero(counted)), 1))

    def observe(self, outcome: RoundOutcome) -> None:
        """Remember the round's KLDs and, of rows in calibration, how far they came."""
        divergence = self._divergence(outcome)
        state = self._rows
        drafted, accepted, active = (
            values.numpy(force=True) for values in (outcome.drafted, outcome.accepted, outcome.active)
        )
        counts = self._counted_positions(drafted, accepted, active)
        learning = counts > 0
        # Broken logits read as the worst agreement there is, instead of poisoning the window until it has moved on.
        kld = np.where(np.isfinite(divergence), divergence, np.float32(_WORST_KLD))
        counted = np.where(np.arange(kld.shape[1]) < counts[:, None], kld, np.float32(0))
        total = counted.sum(1)
        calibrating = self.calibrating & learning
        if calibrating.any():
            self._calibrate(calibrating, counted, total, counts, accepted)
        state.window = append_newest(state.window, kld, counts)
        state.filled = np.minimum(state.filled + counts, self.long_window)
        state.last_mean = np.where(learning, total / np.maximum(counts, 1).astype(np.float32), state.last_mean)
        state.active = active

    def _calibrate(
        self, calibrating: Flags, counted: Floats, total: Floats, counts: Integers, accepted: Integers
    ) -> None:
        """Learn from rows in calibration.

        Args:
            calibrating: Which rows, `[rows]`.
            counted: The round's KLDs that count, 0 in place of the others, `[rows, width]`.
            total: Their sums, `[rows]`.
            counts: How many they are, `[rows]`.
            accepted: Tokens that stand, `[rows]`.
        """
        state = self._rows
        state.calibration_length = np.where(calibrating, self._next_length(accepted), state.calibration_length)
        state.calibration_count = state.calibration_count + counts * calibrating
        state.calibration_sum = state.calibration_sum + total * calibrating
        largest = np.maximum(counted.max(1, initial=0), state.calibration_max)
        state.calibration_max = np.where(calibrating, largest, state.calibration_max)
        best = np.maximum(state.best_accepted, accepted)
        state.best_accepted = np.where(calibrating, best, state.best_accepted)
        self._known_bounds = None

    def _divergence(self, outcome: RoundOutcome) -> Floats:
        """The round's KLDs in the direction asked for, shape `[rows, width]`."""
        signal = _DIRECTIONS[self.kld_direction]
        divergence = outcome.kld if signal is Signal.KLD else outcome.reverse_kld
        if divergence is None:
            raise ValueError(
                f"DSDEStoppingPolicy got `outcome.{signal.value}=None`, but it requires `Signal.{signal.name}`: a "
                "float tensor of shape [rows, width] is needed, also when no row drafted (width 0)."
            )
        values: Floats = divergence.float().numpy(force=True)
        return values

    def _counted_positions(self, drafted: Integers, accepted: Integers, active: Flags) -> Integers:
        """How many KLDs count of each row's block, from its front, shape `[rows]`; 0 where none is learned."""
        counts = np.minimum(drafted, accepted + 1) if self.kld_positions == "to_first_rejection" else drafted
        return counts * active

    def _next_length(self, accepted: Integers) -> Integers:
        """Calibration's next length: doubled once a row accepted all it was asked to draft, never below `sl_min`.

        A row that the loop let draft less than it was asked to has not shown that it deserves more. A held length stays
        what it is.
        """
        asked = self._rows.calibration_length
        if self.warmup == "hold":
            return asked
        return np.clip(np.where(accepted >= asked, 2 * asked, asked), self._floor, self._ceiling)

    def select_rows(self, index: Tensor) -> None:
        """Rearrange the batch; -1 is a new sequence. `index` is int64, `[places]`."""
        self._state = self._rows.select_rows(index.numpy(force=True), self._fresh)
        self._known_bounds = None
