"""Write the documents with numbers from the result files, so that they cannot drift from them.

A document is a text of `benchmarks/reporting` with holes such as `$speeds`; every hole is filled by a function of that
folder, from the files in `benchmarks/results`. docs/performance.md is written as a whole, in docs/policies.md and
README.md what stands between two marks.

python benchmarks/report.py            # writes
python benchmarks/report.py --check    # says what is out of date, and fails then
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from string import Template

from reporting import other_weights, other_work, rounds, speed, study
from reporting.files import PLAIN, Results
from reporting.markdown import code, listed, middle, ratio, reflowed

from hf_dsde.bench.results import Spread

REPOSITORY = Path(__file__).parent.parent
TEXTS = Path(__file__).parent / "reporting"
BEGIN, END = "<!-- begin: written by benchmarks/report.py -->", "<!-- end: written by benchmarks/report.py -->"
WHOLE = "<!-- Written by benchmarks/report.py: change its text in benchmarks/reporting, not here. -->"

Filler = Callable[[Results], str]
"""What fills a hole."""

TABLES: dict[str, Filler] = {
    "speeds": speed.speeds,
    "capped": speed.capped,
    "beside_others": speed.beside_others,
    "stages": rounds.stages,
    "processors": rounds.processors,
    "other_weights": other_weights.other_weights,
    "text_jobs": other_work.text_jobs,
    "rollouts": other_work.rollouts,
    "jobs": rounds.jobs,
}
"""Tables of docs/performance.md, and long lists of numbers."""


def devices(results: Results) -> str:
    """The kinds of cards of all files that were read."""
    found = {one["device"] for name in results.used for one in results.provenances(name)}
    return listed(sorted(device for device in found if "NVIDIA" in device))


def shared(results: Results, key: str) -> str:
    """A setting of all benchmarks of speed."""
    names = speed.MEASURED.values()
    found = {str(run["settings"][key]) for name in names for run in results.bench(name).runs}
    assert len(found) == 1, f"benchmarks differ in {key}: {sorted(found)}"
    return found.pop()


def files_text(results: Results) -> str:
    """Versions, cards, and what files do not say themselves."""
    stated = {
        name: results.provenances(name) for name in sorted(results.used) if results.path(name).parent.name == "gpu"
    }
    versions = {
        tuple(
            f"{key} {one['versions'][key]}"
            for key in ("python", "torch", "transformers", "triton")
            if one["versions"].get(key)
        )
        for found in stated.values()
        for one in found
    }
    copies = [
        one["copy_bytes_per_second"] for found in stated.values() for one in found if one.get("copy_bytes_per_second")
    ]
    stale: dict[str, list[str]] = {}
    for name in stated:
        old = results.stale(name)
        if old is not None:
            stale.setdefault(old, []).append(str(results.commit(name)))
    text = ["Versions: " + "; ".join(", ".join(one) for one in sorted(versions)) + "."]
    if copies:
        low, high = min(copies) / 1e12, max(copies) / 1e12
        text.append(f"A copy on the device ran at {low:.2f} to {high:.2f} TB/s.")
    if stale:
        named = "; ".join(f"{old} for {listed(sorted(set(new)))}" for old, new in sorted(stale.items()))
        text.append(f"Where code was committed later, provenances name {named}; names of files count.")
    silent = [code(name.removesuffix(".json")) for name, found in stated.items() if not found]
    if silent:
        text.append(f"Without a provenance are {listed(silent)}.")
    return " ".join(text)


def fill(template: str, holes: Mapping[str, Filler], results: Results) -> str:
    """A text with its holes filled; `devices` and `files_text` last, since they tell of all files that were read."""
    wanted = [name for name in Template(template).get_identifiers() if name not in ("devices", "files_text")]
    values = {name: holes[name](results) for name in wanted}
    values |= {"devices": devices(results), "files_text": files_text(results)}
    return reflowed(Template(template).substitute(values))


def several(values: Callable[[Results], Mapping[str, str]], *names: str) -> dict[str, Filler]:
    """Holes that one function fills together."""
    found = cache(values)

    def one(results: Results, name: str) -> str:
        return found(results)[name]

    return {name: partial(one, name=name) for name in names}


def common_holes() -> dict[str, Filler]:
    """What both documents about a GPU may say."""
    return {
        "new_tokens": partial(shared, key="new_tokens"),
        "vllm_version": lambda results: str(results.raw(speed.VLLM)["settings"]["vllm"]),
        **several(rounds.job_size, "job_texts", "job_tokens", "job_longest", "job_shortest"),
    }


def performance(results: Results) -> str:
    """docs/performance.md."""

    def batch(found: Results, key: str) -> str:
        return str(found.raw(speed.GENERATE_BATCH)["settings"][key]).replace("_", " ")

    holes: dict[str, Filler] = {
        **TABLES,
        **common_holes(),
        **several(rounds.two_devices, "two_rows", "two_ratio", "two_repeats"),
        **several(rounds.import_seconds, "import_base", "import_ours"),
        "batch_transformers": partial(batch, key="transformers"),
        "batch_attention": partial(batch, key="attention"),
        "vllm_plain": speed.vllm_plain_span,
        "served_spread": speed.served_spread,
        "generate_spread": speed.generate_spread,
        "processor_tokens": partial(rounds.processor_settings, key="new_tokens"),
        "processor_repeats": partial(rounds.processor_settings, key="repeats"),
        "processor_spread": rounds.processor_spread,
        "vllm_job": speed.vllm_job,
        "drafting_begins": rounds.drafting_begins,
    }
    text = fill((TEXTS / "performance.md").read_text(encoding="utf-8"), holes, results)
    title, _, rest = text.partition("\n")
    return f"{title}\n\n{WHOLE}\n{rest}"


def policies_part(results: Results) -> str:
    """The study in docs/policies.md."""
    template = Template((TEXTS / "study.md").read_text(encoding="utf-8"))
    holes: dict[str, Filler] = {
        **several(study.numbers, *study.numbers(results)),
        "comparison_0": partial(study.comparison, temperature=0),
        "comparison_1": partial(study.comparison, temperature=1),
        "packed": study.packed,
        "short_calls": study.short_calls,
        "drift": study.drift,
        "overhead": study.overhead,
        "sources": study.sources,
    }
    return fill(template.template, holes, results)


def readme_part(results: Results) -> str:
    """The speeds in README.md."""

    def large(found: Results, what: Callable[[str, Spread | None], str]) -> str:
        ones = [one for one in speed.settings(found) if one.cell.pair == speed.LARGE_HEAD]
        return listed([what(str(one.cell.batch), one.over(one.best_draft(), PLAIN)) for one in ones])

    def job_vllm(found: Results) -> str:
        own = middle(found.raw(rounds.LARGE_JOBS[PLAIN])["speeds"]["refill"]).median
        return ratio(own / middle(found.raw(speed.VLLM_JOB)["job"]["tokens_per_second"]).median)

    holes: dict[str, Filler] = {
        **common_holes(),
        "readme_speeds": speed.readme_speeds,
        "large_rows": partial(large, what=lambda rows, _: rows),
        "large_best": partial(large, what=lambda _, over: ratio(over)),
        "job_vllm": job_vllm,
    }
    return fill((TEXTS / "speeds.md").read_text(encoding="utf-8"), holes, results)


def between_marks(document: str, part: str) -> str:
    """A document with another text between its two marks.

    Raises:
        ValueError: It has no marks, or several.
    """
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(document)) != 1:
        raise ValueError(f"A document must have one part between {BEGIN!r} and {END!r}: put these lines into it.")
    return pattern.sub(lambda _: f"{BEGIN}\n\n{part.strip()}\n\n{END}", document)


def documents(results: Results | None = None, repository: Path = REPOSITORY) -> dict[Path, str]:
    """Every document, as the result files want it to be."""
    results = results or Results()
    parts = {"docs/policies.md": policies_part, "README.md": readme_part}
    read = {name: (repository / name).read_text(encoding="utf-8") for name in parts}
    made = {repository / name: between_marks(text, parts[name](Results(results.folder))) for name, text in read.items()}
    return made | {repository / "docs/performance.md": performance(results)}


def outdated(made: Mapping[Path, str]) -> list[Path]:
    """Documents that are not what the result files want."""
    return [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def main(arguments: list[str] | None = None) -> int:
    """Write the documents, or with `--check` say which are out of date; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a document is out of date")
    only_check = parser.parse_args(arguments).check
    made = documents()
    old = outdated(made)
    for path in old:
        if not only_check:
            path.write_text(made[path], encoding="utf-8")
        state = "out of date: run python benchmarks/report.py" if only_check else "written"
        sys.stdout.write(f"{path.relative_to(REPOSITORY)}: {state}\n")
    return int(only_check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
