"""The requests of the demo: different kinds, short to long, all written for it.

Mixed on purpose: a draft follows code and arithmetic well and free text badly, so one batch shows rows that accept
long drafts next to rows that accept none. The longest stays below 200 tokens, since plain `generate` pads all rows to
it and a CPU feels that.
"""

from __future__ import annotations

from dataclasses import dataclass

_BRIDGE = """\
The town council of Harrow Bay voted on Tuesday to close the old iron bridge over the Linnet to lorries from the first
of March. Engineers who inspected the structure in the autumn found rust in four of its twelve cross beams and advised
a limit of seven tonnes. Shopkeepers on the north bank said that deliveries would take forty minutes longer by way of
the motorway. The council will decide in June whether to repair the bridge for an estimated three million or to build
a new one two hundred metres upstream, which would take four years."""

_HANDBOOK = """\
Lending. Members may borrow up to four tools at a time for two weeks. Power tools need a short introduction by a
volunteer before they are lent for the first time; it holds for all tools of that class.

Returning. Tools come back clean and dry. Whoever breaks a tool tells us so; we ask for half of the price of what cannot
be repaired. Batteries are returned charged.

Safety. Goggles lie in the green box beside the door and are lent with every saw and grinder. Nobody under sixteen
borrows a power tool."""


@dataclass(frozen=True)
class DemoPrompt:
    """One request: what kind it is, and its text as the user would type it."""

    kind: str
    text: str


DEMO_PROMPTS = (
    DemoPrompt("code", "Write a Python function that checks if a number is prime. Include a docstring."),
    DemoPrompt(
        "word problem",
        "Mara has 3 boxes with 12 pencils each. She gives 8 pencils to her brother and shares the rest equally among "
        "4 friends. How many pencils does each friend get? Explain step by step.",
    ),
    DemoPrompt("summary", f"Summarise this report in two sentences.\n\n{_BRIDGE}"),
    DemoPrompt("short fact", "What is the capital of France?"),
    DemoPrompt(
        "rewrite",
        "Rewrite this message so that it is polite: I need the figures today. You are late again and I am tired of "
        "waiting. Send them now.",
    ),
    DemoPrompt("list", "List seven things to pack for a weekend of hiking in the mountains."),
    DemoPrompt("explanation", "Explain to a ten-year-old why the sky is blue."),
    DemoPrompt(
        "long document", f"{_HANDBOOK}\n\nUsing only the rules above: what must a member do before borrowing a saw?"
    ),
)


@dataclass(frozen=True)
class Serving:
    """Requests, and how many of them are answered at a time.

    Attributes:
        name: What users read.
        batches: Answered one after another.
    """

    name: str
    batches: tuple[tuple[DemoPrompt, ...], ...]


SERVINGS = (
    Serving("one at a time", tuple((prompt,) for prompt in DEMO_PROMPTS if prompt.kind in ("code", "list", "rewrite"))),
    Serving("in one batch", (DEMO_PROMPTS,)),
)
