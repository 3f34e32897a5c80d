"""What the summary shows, at 80 columns, without colour, and in HTML that nothing can break out of."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType
from tiny_rounds import round_record

from hf_dsde.measurement import views as report
from hf_dsde.measurement.statistics import SpeculationStatistics, StatisticsRecorder
from hf_dsde.policies.base import PhaseTimes


def example(policy: str = "dsde", draft_seconds: float = 0.002) -> SpeculationStatistics:
    recorder = StatisticsRecorder(2, policy)
    recorder.record_prefill(0.01)
    recorder.on_round(round_record([0, 0], [0, 0], times=PhaseTimes(0.0, 0.009, 0.001)))
    for accepted in ([4, 2], [1, 0]):
        recorder.on_round(round_record([4, 2], accepted, times=PhaseTimes(4 * draft_seconds, 0.011, 0.001)))
    return recorder.finish([8, 5])


def printed(renderable: RenderableType, width: int = 80, color: bool = False) -> str:
    output = io.StringIO()
    system = "standard" if color else None
    Console(file=output, width=width, color_system=system, force_terminal=color).print(renderable)
    return output.getvalue()


def test_summary_shows_the_important_numbers() -> None:
    text = printed(example())
    for line in (
        "Speculation, policy 'dsde'",
        r"tokens emitted +│ +13",
        r"acceptance rate +│ +58\.3%",
        r"block efficiency +│ +2\.17",
        r"draft step +│ +2\.00 ms",
        r"plain target step +│ +10\.00 ms",
        r"predicted speedup +│ +1\.60x",
        r"bookkeeping",
    ):
        assert re.search(line, text), line


@pytest.mark.parametrize("width", [80, 60])
def test_summary_fits_the_console_without_cutting_anything(width: int) -> None:
    text = printed(example(), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text


def test_summary_without_colour_has_no_escape_codes_and_says_the_same() -> None:
    plain = printed(example())
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", printed(example(), color=True)) == plain


def test_bar_length_is_the_acceptance_rate() -> None:
    lines = printed(example()).splitlines()
    first = next(line for line in lines if "of 4" in line)
    assert first.count("█") == 15
    assert first.count("█") + first.count("░") == 20
    assert "75% of 4" in first


def test_terminal_that_knows_only_ascii_gets_ascii() -> None:
    raw = io.BytesIO()
    output = io.TextIOWrapper(raw, encoding="ascii")
    Console(file=output, width=80, color_system=None).print(example())
    output.flush()
    assert b"#" * 15 + b"." * 5 in raw.getvalue()


def test_losing_call_says_why() -> None:
    losing = example(draft_seconds=0.009)
    reason = losing.losing_reason()
    assert reason is not None
    assert reason in " ".join(printed(losing).split())
    assert reason.replace("'", "&#x27;") in losing._repr_html_()
    assert "slower than plain" not in printed(example())


def test_call_that_did_nothing_shows_dashes() -> None:
    empty = StatisticsRecorder(1, "dsde").finish([0])
    text = printed(empty)
    assert re.search(r"acceptance rate +│ +- ", text)
    assert "nan" not in text + empty._repr_html_()
    assert "Acceptance by" not in text


def test_html_has_the_same_numbers_and_is_well_formed() -> None:
    html = example()._repr_html_()
    for name, value in report.numbers(example()):
        assert f"<td>{name}</td><td>{value}</td>" in html
    for tag in ("div", "table", "caption", "tbody", "tr", "td"):
        assert html.count(f"<{tag}>") == html.count(f"</{tag}>") > 0


def test_names_are_neither_html_nor_markup() -> None:
    hostile = replace(example(), policy="<script>alert('x')</script>[red]")
    html = hostile._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "[red]" in printed(hostile)


def test_time_shares_sum_to_one() -> None:
    assert sum(share for _, share, _ in report.time_bars(example())) == pytest.approx(1.0)
