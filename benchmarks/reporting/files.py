"""The result files: which were read, of which commit they are, and one setting of a file by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hf_dsde.bench.results import OURS, BenchResults, CaseResult, Cell, Spread

RESULTS = Path(__file__).parent.parent / "results"
COMMIT_IN_NAME = re.compile(r"_([0-9a-f]{7})(?=[_.])")
PLAIN = "static:0"


@dataclass(frozen=True)
class Measured:
    """One setting as one file has it.

    Attributes:
        file: The file's name.
        results: Its content.
        cell: The setting.
    """

    file: str
    results: BenchResults
    cell: Cell

    def case(self, method: str) -> CaseResult | None:
        """A method's timed calls; None when there are none."""
        found = self.results.find(self.cell, method)
        return found if found is not None and found.repeats else None

    def speed(self, method: str) -> Spread | None:
        """Tokens per second of all rows, over the repeats."""
        found = self.case(method)
        return None if found is None else found.tokens_per_second

    def over(self, method: str | None, reference: str | None) -> Spread | None:
        """A method's speed over another's, from calls of the same repeat; None when one of them was not timed."""
        if method is None or reference is None:
            return None
        one, other = self.case(method), self.case(reference)
        return None if one is None or other is None else one.ratio_to(other)

    def has(self, *methods: str) -> bool:
        """Whether all of these were timed."""
        return all(self.case(method) is not None for method in methods)

    def ours(self) -> list[str]:
        """This package's methods, in order."""
        return [case.method for case in self.results.cases if case.cell == self.cell and self._is_ours(case)]

    def lengths(self) -> list[int]:
        """The fixed lengths that were timed, 0 included."""
        return sorted(int(method.removeprefix("static:")) for method in self.ours() if method.startswith("static:"))

    def fastest(self, methods: Iterable[str]) -> str | None:
        """The method with the most tokens per second in the median; None of none."""
        speeds = {method: speed.median for method in methods if (speed := self.speed(method)) is not None}
        return max(speeds, key=speeds.__getitem__, default=None)

    def best_length(self) -> str | None:
        """The fastest of the fixed lengths, as a method."""
        return self.fastest(f"static:{length}" for length in self.lengths())

    def best_draft(self) -> str | None:
        """The fastest of this package's methods that draft; None when only decoding without drafts was timed."""
        return self.fastest(method for method in self.ours() if method != PLAIN)

    def repeats(self) -> int:
        """The most repeats of a method."""
        return max(len(case.repeats) for case in self.results.cases if case.cell == self.cell)

    def _is_ours(self, case: CaseResult) -> bool:
        return case.kind == OURS and bool(case.repeats)


class Results:
    """A folder of result files, which remembers what was read of it.

    Attributes:
        folder: The folder; files lie in it or in its folder `gpu`.
        used: Names of the files that were read so far.
    """

    def __init__(self, folder: Path = RESULTS) -> None:
        self.folder = folder
        self.used: set[str] = set()
        self._read = cache(self._read_uncached)

    def path(self, name: str) -> Path:
        """Where a file lies, whether it exists or not."""
        plain = self.folder / name
        return plain if plain.exists() else self.folder / "gpu" / name

    def raw(self, name: str) -> Any:
        """A file's content."""
        self.used.add(name)
        return self._read(name)

    def bench(self, name: str) -> BenchResults:
        """A file of `hf-dsde bench`."""
        return BenchResults.from_dict(self.raw(name))

    def measured(self, names: Iterable[str], cell: Cell, *methods: str) -> Measured | None:
        """The setting from the first of some files, newest first, that has it with all of these methods."""
        return next(self.all_measured(names, cell, *methods), None)

    def all_measured(self, names: Iterable[str], cell: Cell, *methods: str) -> Iterator[Measured]:
        """The setting from each of some files that has it with all of these methods; files may be missing."""
        for name in names:
            if self.path(name).exists():
                found = Measured(name, BenchResults.from_dict(self._read(name)), cell)
                if cell in found.results.cells() and found.has(*methods):
                    self.used.add(name)
                    yield found

    def provenances(self, name: str) -> list[dict[str, Any]]:
        """What a file says about how it came about, for each run; nothing where it does not say."""
        content = self.raw(name)
        if "runs" in content and "cases" in content:
            return [run["provenance"] for run in content["runs"]]
        return [content["provenance"]] if "provenance" in content else []

    def commit(self, name: str) -> str | None:
        """The commit that was measured: the one in the file's name, or else that of its provenance.

        A name is given to a file whose provenance is stale: the code was not committed yet when it was measured.
        """
        found = COMMIT_IN_NAME.search(name)
        if found:
            return found[1]
        stated = {str(one["commit"])[:7] for one in self.provenances(name) if one.get("commit")}
        return "/".join(sorted(stated)) or None

    def stale(self, name: str) -> str | None:
        """The commit of a file's provenance if the file's name says that it is not the one that was measured."""
        stated = {str(one["commit"]) for one in self.provenances(name) if one.get("commit")}
        short = {commit[:7] + ("+" if commit.endswith("+") else "") for commit in stated}
        named = COMMIT_IN_NAME.search(name)
        return None if named is None or not short or short == {named[1]} else "/".join(sorted(short))

    def _read_uncached(self, name: str) -> Any:
        return json.loads(self.path(name).read_text(encoding="utf-8"))
