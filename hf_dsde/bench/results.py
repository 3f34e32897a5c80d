"""What a benchmark measured: one file format, which the sweep writes and tables and plots read.

A *case* is one method in one setting (pair, workload, batch size, temperature); a *cell* is all cases of one setting,
whose repeats took turns and belong together: ratios are taken repeat by repeat. Nothing here measures.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

SCHEMA_VERSION = 1
"""Raised whenever a key of the file changes its name or its meaning."""
OURS, BASELINE, PEER = "ours", "baseline", "peer"
"""Kinds of methods: a policy of this package, a decoding mode of transformers, another published implementation."""


class Cell(NamedTuple):
    """A setting in which methods are compared."""

    pair: str
    workload: str
    batch: int
    temperature: float


@dataclass(frozen=True)
class Spread:
    """A median with the extremes around it."""

    median: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """The spread of some values; None when there are none."""
        numbers = list(values)
        return cls(median(numbers), min(numbers), max(numbers)) if numbers else None


@dataclass(frozen=True)
class RepeatResult:
    """One timed call.

    Attributes:
        repeat: Index of the repeat; the repeats of one index in a cell ran one after the other with the same seed.
        order: Place of the call among those of its repeat, from 0.
        seconds: Wall time of the call, prompts included.
        tokens: Generated tokens of all rows; up to each row's end token where texts may end.
        prefill_seconds: Of `seconds`, what the prompts took; None where the method does not tell.
        past_end_tokens: Of `tokens`, those after a row's first end token, when texts go on after it.
        peak_memory_bytes: Most memory allocated on the device during the call; None on a CPU. It includes the models,
            and what methods of the cell keep between their calls.
        equal_rows: Rows whose tokens are those of plain `generate` in the same repeat; None for sampled texts, and
            where `generate` was not measured. In half precision, rows part at near-ties whatever the method.
        statistics: See `CaseResult.statistics`, of this call alone.
    """

    repeat: int
    order: int
    seconds: float
    tokens: int
    prefill_seconds: float | None = None
    past_end_tokens: int = 0
    peak_memory_bytes: int | None = None
    equal_rows: int | None = None
    statistics: dict[str, Any] | None = None

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all rows per second of the call, prompts included."""
        return self.tokens / self.seconds


@dataclass
class CaseResult:
    """One method in one setting.

    Attributes:
        pair: Name of the pair of models.
        workload: Name of the workload.
        batch: Rows per call.
        temperature: 0 is greedy.
        method: The method's name, unique in its cell.
        kind: `OURS`, `BASELINE` or `PEER`.
        settings: What defines the method, as JSON holds it: for ours the fields of `SpeculationConfig`
            and of its options.
        repeats: The timed calls, in order.
        warmup_seconds: Of the untimed calls, setting up, compiling and capturing included; None without any.
        error: Why the case broke off: type and message of what was raised.
        skipped: Why it did not run, or not to its end.
        warnings: What the method warned of, each text once: for example that it fell back to something slower.
        statistics: For ours, over all repeats: `rounds`, `emitted`, `tokens_per_round` (per row), `acceptance_rate`,
            `acceptance_by_position`, `drafted_by_position`, `accepted_by_position`, `mean_draft_length` (draft tokens
            per row and round), `mean_draft_steps`, `mean_pass_width`, `predicted_speedup`, `plain_step_seconds`,
            `draft_step_seconds`, and `seconds`: a dict of `draft`, `verify`, `bookkeeping`, `policy` (part of the
            other phases), `prefill`, `idle` (of the call, outside of the phases) and `recording` (part of the others).
            Peers may leave any of them out. None where nothing is told.
        run: Index into `BenchResults.runs`.
    """

    pair: str
    workload: str
    batch: int
    temperature: float
    method: str
    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    repeats: list[RepeatResult] = field(default_factory=list)
    warmup_seconds: float | None = None
    error: str | None = None
    skipped: str | None = None
    warnings: list[str] = field(default_factory=list)
    statistics: dict[str, Any] | None = None
    run: int = 0

    @property
    def cell(self) -> Cell:
        """The setting."""
        return Cell(self.pair, self.workload, self.batch, self.temperature)

    @property
    def tokens_per_second(self) -> Spread | None:
        """Over the repeats; None when no call was timed."""
        return Spread.of(repeat.tokens_per_second for repeat in self.repeats)

    @property
    def prefill_share(self) -> Spread | None:
        """Share of a call's time that its prompts took, over the repeats; None where the method does not tell."""
        return Spread.of(r.prefill_seconds / r.seconds for r in self.repeats if r.prefill_seconds is not None)

    @property
    def peak_memory_bytes(self) -> int | None:
        """The most over the repeats; None when unknown."""
        known = [r.peak_memory_bytes for r in self.repeats if r.peak_memory_bytes is not None]
        return max(known, default=None)

    def ratio_to(self, reference: CaseResult) -> Spread | None:
        """Speed over that of another case of the same cell and run, from calls of the same repeat.

        A machine that gets slower meanwhile slows both calls of a repeat, so the ratio of each repeat is taken first
        and the median afterwards.

        Returns:
            None when no repeat has both.
        """
        if self.run != reference.run:
            return None
        others = {repeat.repeat: repeat.tokens_per_second for repeat in reference.repeats}
        return Spread.of(r.tokens_per_second / others[r.repeat] for r in self.repeats if r.repeat in others)


@dataclass
class BenchResults:
    """A results file.

    Attributes:
        runs: One entry per call of the benchmark that added to it: `provenance` and `settings`.
        cases: All cases, in the order in which they began.
        references: Methods that every other is compared with, as far as they are in its cell.
    """

    runs: list[dict[str, Any]] = field(default_factory=list)
    cases: list[CaseResult] = field(default_factory=list)
    references: tuple[str, ...] = ("generate",)

    def cells(self) -> list[Cell]:
        """All settings, each once, in order."""
        return list(dict.fromkeys(case.cell for case in self.cases))

    def methods(self) -> list[str]:
        """All methods, each once, in order."""
        return list(dict.fromkeys(case.method for case in self.cases))

    def select(self, **wanted: Any) -> list[CaseResult]:
        """The cases whose attributes have these values, for example `select(batch=8, kind="ours")`."""
        return [case for case in self.cases if all(getattr(case, name) == value for name, value in wanted.items())]

    def find(self, cell: Cell, method: str, run: int | None = None) -> CaseResult | None:
        """The case of a method in a cell, of one run or else of the last that has it; None when there is none."""
        found = [c for c in self.cases if c.cell == cell and c.method == method and run in (None, c.run)]
        return found[-1] if found else None

    def ratio(self, case: CaseResult, reference: str) -> Spread | None:
        """A case's speed over that of a method in its cell and run; None when that was not measured."""
        other = self.find(case.cell, reference, case.run)
        return None if other is None else case.ratio_to(other)

    def ratios(self, case: CaseResult) -> dict[str, Spread]:
        """A case's speed over that of every reference that was measured with it, itself left out."""
        found = {name: self.ratio(case, name) for name in self.references if name != case.method}
        return {name: ratio for name, ratio in found.items() if ratio is not None}

    def to_dict(self) -> dict[str, Any]:
        """Everything, with the numbers derived from it, in types that `json.dumps` takes; nan and inf become None."""
        return {
            "schema_version": SCHEMA_VERSION,
            "references": list(self.references),
            "runs": self.runs,
            "cases": [without_nan(asdict(case) | self._derived(case)) for case in self.cases],
        }

    def _derived(self, case: CaseResult) -> dict[str, Any]:
        """What a reader of the file should not have to compute; ignored when it is loaded."""
        speed = case.tokens_per_second
        return {
            "tokens_per_second": None if speed is None else asdict(speed),
            "ratio": {name: asdict(ratio) for name, ratio in self.ratios(case).items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BenchResults:
        """The results that `to_dict` described.

        Raises:
            ValueError: They are of another schema.
        """
        found = values.get("schema_version") if isinstance(values, Mapping) else None
        if found != SCHEMA_VERSION:
            raise ValueError(
                f"`values` has schema_version {found!r}, but {SCHEMA_VERSION} is needed: take a file that "
                "`hf-dsde bench` of this version wrote."
            )
        return cls(list(values["runs"]), [_case(case) for case in values["cases"]], tuple(values["references"]))

    def save(self, path: str | Path) -> None:
        """Write the file in one step, so that a reader and a killed run find the old one or the new one, whole."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
            # Private by default, unlike any other file that a program writes.
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | Path) -> BenchResults:
        """Read a file.

        Raises:
            ValueError: It is no results file.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as failure:
            raise ValueError(f"{path} is no results file of `hf-dsde bench`: {failure}") from failure


def _case(values: Mapping[str, Any]) -> CaseResult:
    kept = {f.name: values[f.name] for f in fields(CaseResult) if f.name in values}
    return CaseResult(**kept | {"repeats": [RepeatResult(**repeat) for repeat in values["repeats"]]})


def without_nan(value: Any) -> Any:
    """The same with None for what JSON cannot hold."""
    if isinstance(value, dict):
        return {key: without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
