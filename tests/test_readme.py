"""What the documents show is true: the example runs, links lead somewhere, commands parse, names exist."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer

from hf_dsde import smollm2
from hf_dsde.cli.main import app

REPOSITORY = Path(__file__).parent.parent
README = REPOSITORY / "README.md"
DOCUMENTS = [README, REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
EXAMPLES = [path for path in sorted((REPOSITORY / "examples").iterdir()) if path.suffix in {".py", ".ipynb"}]
EXAMPLE_HEADING = "A whole data set"
MOST_LINES = 10
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"\bhf_dsde(?:\.[A-Za-z_]\w*)+")
IMPORT = re.compile(r"from (hf_dsde[\w.]*) import ([\w, ]+)")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def section(heading: str) -> str:
    """The README from a heading to the next one of its level."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", README.read_text(), re.DOTALL | re.MULTILINE)
    assert found, f"the README has no section {heading!r}"
    return found[1]


def example() -> str:
    """The first block of Python of the section."""
    return next(code for language, code in FENCE.findall(section(EXAMPLE_HEADING)) if language == "python")


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(document: Path) -> set[str]:
    return {slug(line.lstrip("#")) for line in FENCE.sub("", document.read_text()).splitlines() if line.startswith("#")}


def commands(document: Path) -> list[list[str]]:
    """Words of every command line of `hf-dsde` in a document's blocks for the shell, without what follows a `#`."""
    blocks = [code for language, code in FENCE.findall(document.read_text()) if language == "sh"]
    lines = [shlex.split(line, comments=True) for code in blocks for line in code.replace("\\\n", " ").splitlines()]
    return [words[words.index("hf-dsde") + 1 :] for words in lines if "hf-dsde" in words]


def parse(words: list[str]) -> None:
    """Let a subcommand read its arguments; nothing of it is run. Inputs that it misses are made in the working folder.

    Raises:
        Exception: Whatever else the command line has against a word.
    """
    try:
        typer.main.get_command(app).commands[words[0]].make_context(words[0], words[1:])
    except Exception as failure:
        if not make_missing(str(failure)):
            raise
        parse(words)


def make_missing(message: str) -> bool:
    """Make what a message says does not exist; return whether there was such a thing to make."""
    found = re.search(r"(\w+) '([^']+)' does not exist", message)
    if found is None or Path(found[2]).exists():
        return False
    path, is_file = Path(found[2]), found[1].lower() == "file"
    (path.parent if is_file else path).mkdir(parents=True, exist_ok=True)
    if is_file:
        path.touch()
    return True


def mentioned(text: str) -> set[str]:
    """Every dotted name of the package in a text, and every name that a line imports from it."""
    imported = {
        f"{module}.{name}" for module, names in IMPORT.findall(text) for name in re.split(r"\W+", names) if name
    }
    return set(NAME.findall(text)) | imported


def resolve(name: str) -> object:
    """What a dotted name stands for: a module, or an attribute of one.

    Raises:
        AttributeError: There is no such thing.
    """
    found = importlib.import_module("hf_dsde")
    for i, part in enumerate(name.split(".")[1:], start=2):
        if not hasattr(found, part):
            module = ".".join(name.split(".")[:i])
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as failure:
                if failure.name != module:  # the module is there and misses another package
                    raise
        found = getattr(found, part)
    return found


def exists(name: str) -> bool:
    """Whether a dotted name stands for something."""
    try:
        resolve(name)
    except AttributeError:
        return False
    return True


def test_example_has_at_most_ten_lines():
    assert 0 < len([line for line in example().splitlines() if line.strip()]) <= MOST_LINES


@pytest.mark.slow
def test_example_prints_what_generate_gives_for_each_prompt_alone(tmp_path, monkeypatch, capsys):
    if not smollm2._is_complete(smollm2.cache_folder() / smollm2.FOLDER_NAME):
        pytest.skip("SmolLM2 is not in the cache; 'hf-dsde demo' fetches it")
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    names: dict = {}
    exec(compile(example(), name_of(README), "exec"), names)  # noqa: S102 - the point of this test

    target, tokenizer = names["pair"].target, names["pair"].tokenizer
    assert target.dtype == torch.float32  # or else equality could not be asked for
    limit = int(re.search(r"max_new_tokens=(\d+)", example())[1])
    texts = []
    for question in names["questions"]:
        message = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        width = inputs["input_ids"].shape[1]
        tokens = target.generate(**inputs, max_new_tokens=limit, do_sample=False)[0, width:]
        texts.append(tokenizer.decode(tokens, skip_special_tokens=True))
    assert len(texts) > names["generator"]._batch_size  # or else no row would be refilled
    assert capsys.readouterr().out.rstrip("\n").split("\n---\n") == texts
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_relative_links_lead_to_files_and_headings(document):
    for link in LINK.findall(FENCE.sub("", document.read_text())):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        place = document.parent / path if path else document
        assert place.exists(), f"{name_of(document)} links to {link}"
        if anchor:
            assert anchor in anchors(place), f"{name_of(document)} links to {link}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_command_lines_parse(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # which must have nothing that the commands refuse to overwrite
    for words in commands(document):
        parse(words)


def test_readme_shows_commands_and_a_wrong_option_is_noticed():
    shown = {words[0] for words in commands(README)}
    assert {"demo", "generate", "profile", "trace", "replay"} <= shown
    with pytest.raises(Exception, match="No such option: --length"):
        parse(["demo", "--length", "3"])


@pytest.mark.parametrize("document", [*DOCUMENTS, *EXAMPLES], ids=name_of)
def test_names_of_the_package_exist(document):
    missing = [name for name in sorted(mentioned(document.read_text(encoding="utf-8"))) if not exists(name)]
    assert missing == [], f"{name_of(document)} names what does not exist"


def test_a_name_that_does_not_exist_is_noticed():
    text = "`hf_dsde.pairs`, hf_dsde.divergence.compare_outputs(a)\nfrom hf_dsde.batch.output import read_results, gone"
    assert mentioned(text) == {
        "hf_dsde.pairs",
        "hf_dsde.divergence.compare_outputs",
        "hf_dsde.batch.output",
        "hf_dsde.batch.output.read_results",
        "hf_dsde.batch.output.gone",
    }
    assert exists("hf_dsde.batch.output.read_results")
    assert not any(map(exists, ("hf_dsde.batch.output.gone", "hf_dsde.gone", "hf_dsde.pairs.gone.deeper")))
