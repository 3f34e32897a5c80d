"""`hf-dsde generate` writes jobs, goes on with them, streams through pipes, and answers mistakes with a way out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_pair import tiny_pair
from typer.testing import CliRunner

from hf_dsde import pairs
from hf_dsde.batch.generator import BatchGenerator
from hf_dsde.batch.output import read_results
from hf_dsde.batch.progress import JobProgress
from hf_dsde.cli import generate as batch_cli
from hf_dsde.cli import main as cli
from hf_dsde.config import SpeculationConfig
from hf_dsde.drafting.early_exit import EarlyExitDrafter
from hf_dsde.drafting.hybrid import HybridDrafter

RUNNER = CliRunner()
PROMPTS = ["abc", "fedcba", "d", "bcdbcd", "ee"]
NAMED = ("--model", "org/target", "--assistant-model", "org/draft")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """The tiny pair in place of every other, on the CPU."""
    asked = []

    def load(*arguments):
        asked.append(arguments)
        return tiny_pair(arguments[-2])

    monkeypatch.setattr(pairs, "load_packaged_pair", load)
    monkeypatch.setattr(pairs, "load_pair", load)
    monkeypatch.setenv("COLUMNS", "200")
    return asked


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    return path


def run(*arguments, given=None):
    shared = ("--device", "cpu", "--dtype", "float32", "--policy", "static", "--max-new-tokens", "6")
    return RUNNER.invoke(cli.app, ["generate", *shared, *map(str, arguments)], input=given)


def lines_of(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def expected():
    """What the generator itself gives."""
    pair = tiny_pair(torch.float32)
    generator = BatchGenerator(
        pair.target, pair.tokenizer, assistant_model=pair.draft, speculation_policy="static", max_new_tokens=6
    )
    return {
        "raw": [r.text for r in generator.stream(PROMPTS, ordered=True)],
        "asked": [r.text for r in generator.stream([[{"role": "user", "content": p}] for p in PROMPTS], ordered=True)],
    }


def test_a_job_is_written_and_not_done_again(prompts, tmp_path, expected):
    output = tmp_path / "results" / "out.jsonl"
    arguments = (prompts, "--output", output, "--batch-size", "2", "--ordered")
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert f"5 rows finished; results in {output}" in result.stdout
    assert "policy 'static'" in result.stdout
    assert [r.text for r in read_results(output)] == expected["asked"]
    again = run(*arguments)
    assert again.exit_code == 0, again.output
    assert "0 rows finished, 5 were finished before" in again.stdout
    assert "policy" not in again.stdout


@pytest.mark.parametrize("model", [None, "org/target"])
def test_a_drafter_without_a_model_is_named_in_place_of_a_draft(model, prompts, tmp_path, expected, monkeypatch, tiny):
    loaded = []

    def load_target(*arguments):
        loaded.append(arguments)
        pair = tiny_pair(arguments[1])
        return pair.target, pair.tokenizer

    monkeypatch.setattr(pairs, "load_target", load_target)
    output = tmp_path / "out.jsonl"
    named = () if model is None else ("--model", model)
    result = run(prompts, *named, "--draft", "suffix", "--output", output, "--ordered")
    assert result.exit_code == 0, result.output
    assert [r.text for r in read_results(output)] == expected["asked"]
    assert [arguments[0] for arguments in loaded] == [model]
    assert not tiny


def test_an_interrupted_job_says_how_to_go_on_and_goes_on(prompts, tmp_path, expected, monkeypatch):
    output = tmp_path / "out.jsonl"
    finished = []

    def interrupt(self, rows):
        finished.append(rows)
        if len(finished) == 3:
            raise KeyboardInterrupt

    arguments = (prompts, "--output", output, "--batch-size", "1", "--ordered")
    with monkeypatch.context() as during:
        during.setattr(JobProgress, "advance", interrupt)
        result = run(*arguments)
    assert result.exit_code == 130
    assert "Interrupted" in result.stderr
    assert "run the same command again to go on" in result.stderr
    assert "Traceback" not in result.output
    assert len(list(read_results(output))) == 3
    again = run(*arguments)
    assert "2 rows finished, 3 were finished before" in again.stdout
    assert [r.text for r in read_results(output)] == expected["asked"]


def test_an_interrupted_new_start_goes_on_without_starting_anew_once_more(prompts, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(JobProgress, "advance", interrupt)
    result = run(prompts, "--output", tmp_path / "out.jsonl", "--overwrite")
    assert "again without --overwrite" in result.stderr


def test_a_job_of_other_settings_is_refused_until_it_may_be_overwritten(prompts, tmp_path):
    output = tmp_path / "out.jsonl"
    assert run(prompts, "--output", output).exit_code == 0
    for changed in (("--stop", "b"), ("--no-chat",), ("--temperature", "1"), ("--policy", "heuristic")):
        refused = run(prompts, "--output", output, *changed)
        assert refused.exit_code == 2, changed
        assert "another" in refused.output
    assert "chat" in run(prompts, "--output", output, "--no-chat").output
    assert "0 rows finished" in run(prompts, "--output", output, "--chat").stdout
    before = output.read_bytes()
    replaced = run(prompts, "--output", output, "--no-chat", "--overwrite")
    assert replaced.exit_code == 0, replaced.output
    assert output.read_bytes() != before


def test_bad_rows_become_results_and_are_counted(tmp_path):
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"q": "abc"}\n{"q": ""}\nno json\n{"q": "def"}\n', encoding="utf-8")
    result = run(file, "--column", "q", "--output", output, "--ordered")
    assert result.exit_code == 0, result.output
    assert "2 rows in error" in result.stdout
    assert [r.error is None for r in read_results(output)] == [True, False, False, True]


@pytest.mark.parametrize("written", [True, False])
def test_a_bad_row_ends_the_command_if_that_is_asked_for(tmp_path, written):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"abc"\n""\n', encoding="utf-8")
    output = ("--output", tmp_path / "out.jsonl") if written else ()
    result = run(file, "--on-error", "raise", *output)
    assert result.exit_code == 1
    assert "error: row 1: " in result.stderr
    assert "Traceback" not in result.output


def test_a_pipe_gets_json_lines_and_nothing_else(expected):
    result = run("-", "--lines", "text", "--ordered", given="\n".join(PROMPTS) + "\n")
    assert result.exit_code == 0, result.output
    rows = lines_of(result)
    assert [row["text"] for row in rows] == expected["asked"]
    assert [row["index"] for row in rows] == list(range(5))
    assert "new tokens per second" in result.stderr


def test_standard_input_is_json_lines_unless_said_otherwise(expected):
    given = "".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS)
    assert [row["text"] for row in lines_of(run("-", "--ordered", given=given))] == expected["asked"]


def test_a_job_from_standard_input_knows_its_prompts_again(tmp_path):
    arguments = ("-", "--lines", "text", "--output", tmp_path / "out.parquet")
    assert "2 rows finished" in run(*arguments, given="abc\nd\n").stdout
    assert "0 rows finished, 2 were" in run(*arguments, given="abc\nd\n").stdout
    other = run(*arguments, given="abc\ne\n")
    assert other.exit_code == 2
    assert "another" in other.output


NOTE = "Prompts of plain text go into the model's chat template"


def test_plain_text_from_anywhere_is_asked_unless_it_is_to_stay_as_it_is(prompts, tmp_path, expected):
    repeated = [part for text in PROMPTS for part in ("--prompt", text)]
    table, question = tmp_path / "prompts.csv", tmp_path / "questions.jsonl"
    table.write_text("text\n" + "\n".join(PROMPTS) + "\n", encoding="utf-8")
    question.write_text("".join(json.dumps({"q": text}) + "\n" for text in PROMPTS), encoding="utf-8")
    given = "\n".join(PROMPTS)
    for arguments in (repeated, [prompts], [table], [question, "--column", "q"], ["-", "--lines", "text"]):
        asked = run(*arguments, "--ordered", given=given)
        assert [row["text"] for row in lines_of(asked)] == expected["asked"], arguments
        assert asked.stderr.count(NOTE) == 1
        assert NOTE not in asked.stdout
    for option, kind in (("--no-chat", "raw"), ("--chat", "asked")):
        chosen = run(question, "--column", "q", option, "--ordered")
        assert [row["text"] for row in lines_of(chosen)] == expected[kind], option
        assert NOTE not in chosen.output


def test_messages_and_token_ids_are_the_same_with_and_without_chat(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": "abc"}]}, {"input_ids": [3, 4]}, [5, 6]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    texts = [[row["text"] for row in lines_of(run(file, "--ordered", option))] for option in ("--chat", "--no-chat")]
    assert texts[0] == texts[1]
    assert all(texts[0])


def test_without_a_template_plain_text_stays_plain_and_asking_is_refused(prompts, expected, monkeypatch):
    monkeypatch.setattr("tiny_pair.CHAT_TEMPLATE", None)
    plain = run(prompts, "--ordered")
    assert [row["text"] for row in lines_of(plain)] == expected["raw"]
    assert NOTE not in plain.output
    refused = run(prompts, "--chat")
    assert refused.exit_code == 2
    assert "no chat template" in refused.output


def test_a_terminal_gets_texts_below_their_prompts_and_statistics(tmp_path, expected, monkeypatch):
    monkeypatch.setattr(batch_cli, "sys", SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True)))
    file = tmp_path / "prompts.jsonl"
    rows = [{"text": PROMPTS[0]}, {"prompt": PROMPTS[1]}, [3, 4], {"prompt": ""}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = run(file)
    assert result.exit_code == 0, result.output
    printed = result.stdout.splitlines()
    for index in (0, 1):
        place = next(i for i, line in enumerate(printed) if line.startswith(f"row {index}: {PROMPTS[index]} "))
        assert printed[place + 1] == expected["asked"][index].strip()
    assert any(line.startswith("error: ") for line in printed)
    assert "acceptance rate" in result.stdout
    assert "1 row in error" in result.stdout
    assert '"index"' not in result.stdout


def test_rows_decide_for_themselves_and_stop_strings_end_texts(tmp_path, expected):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": PROMPTS[0], "max_new_tokens": 2}) + "\n", encoding="utf-8")
    assert len(lines_of(run(file))[0]["token_ids"]) == 2
    text = expected["raw"][0]
    stopped = lines_of(run("--prompt", PROMPTS[0], "--no-chat", "--stop", text[2:4], "--stop", "<never>"))[0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] in text
    assert len(stopped["text"]) < len(text)


def test_long_prompts_can_be_refused(prompts):
    rows = lines_of(run(prompts, "--max-prompt-tokens", "3", "--no-chat", "--ordered"))
    assert [row["error"] is None for row in rows] == [True, False, True, False, True]


def test_sampling_is_reproducible_from_the_seed():
    texts = []
    for seed in (1, 1, 2):
        result = run("--prompt", "abc", "--temperature", "1.0", "--top-p", "0.95", "--seed", seed)
        texts.append(lines_of(result)[0]["text"])
    assert texts[0] == texts[1] != texts[2]


def test_a_saved_config_decides_unless_a_policy_is_named(tmp_path):
    SpeculationConfig("static", {"num_draft_tokens": 0}).save_pretrained(tmp_path)
    shared = ["generate", "--device", "cpu", "--prompt", "abc", "--max-new-tokens", "8", "--dtype", "float32"]
    saved = RUNNER.invoke(cli.app, [*shared, "--speculation-config", str(tmp_path)])
    assert lines_of(saved)[0]["statistics"]["drafted"] == 0
    named = RUNNER.invoke(cli.app, [*shared, "--speculation-config", str(tmp_path), "--policy", "heuristic"])
    assert lines_of(named)[0]["statistics"]["drafted"] > 0
    assert "policy 'heuristic'" in named.stderr


def test_a_dry_run_plans_and_generates_nothing(prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(BatchGenerator, "_generate", lambda *_: pytest.fail("a text was generated"))
    output = tmp_path / "out.jsonl"
    result = run(prompts, "--output", output, "--dry-run", "--batch-size", "2", "--cache-budget", "0.001")
    assert result.exit_code == 0, result.output
    assert "1.0 MB" in result.stdout
    assert "fit into a whole batch" in result.stdout
    assert "Nothing was generated" in result.stdout
    assert not output.exists()
    assert run("--dry-run").exit_code == 0
    assert "Input" in run("-", "--dry-run", given='"abc"\n').stdout


def test_both_names_of_the_draft_load_the_named_pair(tiny):
    for option in ("--assistant-model", "--draft"):
        result = run("--prompt", "abc", "--model", "org/target", option, "org/draft")
        assert result.exit_code == 0, result.output
        assert tiny[-1] == ("org/target", "org/draft", torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("drafts", [("suffix", "org/draft"), ("org/draft", "suffix")])
def test_a_drafter_out_of_texts_drafts_beside_the_named_draft(tiny, monkeypatch, prompts, tmp_path, expected, drafts):
    started, start = [], HybridDrafter.start
    monkeypatch.setattr(HybridDrafter, "start", lambda self, call: started.append(start(self, call)))
    output = tmp_path / "out.jsonl"
    named = [part for draft in drafts for part in ("--draft", draft)]
    result = run(prompts, "--model", "org/target", *named, "--output", output, "--ordered")
    assert result.exit_code == 0, result.output
    assert tiny[-1][:2] == ("org/target", "org/draft")
    assert [r.text for r in read_results(output)] == expected["asked"]
    assert started


@pytest.mark.parametrize("beside", [(), ("--draft", "suffix")])
def test_the_targets_own_layers_need_no_draft(tiny, monkeypatch, prompts, tmp_path, expected, beside):
    started, start = [], EarlyExitDrafter.start
    monkeypatch.setattr(EarlyExitDrafter, "start", lambda self, call: started.append(start(self, call)))
    monkeypatch.setattr(pairs, "load_target", lambda *_: (tiny_pair().target, tiny_pair().tokenizer))
    output = tmp_path / "out.jsonl"
    result = run(prompts, "--model", "org/target", "--draft", "early_exit", *beside, "--output", output, "--ordered")
    assert result.exit_code == 0, result.output
    assert [r.text for r in read_results(output)] == expected["asked"]
    assert started


@pytest.mark.parametrize("drafts", [("suffix", "sssd"), ("org/draft", "org/other"), ("suffix", "org/a", "org/b")])
def test_more_than_two_of_a_kind_are_refused(tiny, drafts):
    result = run("--prompt", "abc", "--model", "org/target", *(part for draft in drafts for part in ("--draft", draft)))
    assert result.exit_code == 2
    assert "names more than one of a kind" in " ".join(result.output.split())
    assert not tiny


def test_each_process_takes_its_own_gpu_and_needs_a_file(tiny, prompts, tmp_path, monkeypatch):
    state = SimpleNamespace(num_processes=2, process_index=1, local_process_index=1, is_main_process=False)
    monkeypatch.setattr(batch_cli, "process_state", lambda: state)
    result = run(prompts, "--output", tmp_path / "out.jsonl", "--device", "cuda")
    assert result.exit_code == 0, result.output
    assert tiny[-1][-1] == torch.device("cuda:1")
    assert not result.stdout
    assert not run(prompts, "--dry-run").stdout
    for arguments, message in (
        ((prompts,), "--output is missing"),
        (("-", "--output", tmp_path / "out.jsonl"), "standard input"),
        ((prompts, "--output", tmp_path / "out.jsonl", *NAMED, "--device-map", "auto"), "--device-map"),
    ):
        refused = run(*arguments)
        assert refused.exit_code == 2
        assert message in refused.output


def test_a_device_map_reaches_the_models(tmp_path):
    target, draft = _save(tmp_path)
    result = run("--prompt", "abc", "--model", target, "--draft", draft, "--device-map", "cpu")
    assert result.exit_code == 0, result.output
    assert lines_of(result)[0]["error"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there is no prompt"),
        (("missing.jsonl",), "no input file"),
        ((".",), "is a folder"),
        (("pyproject.toml",), "'.toml'"),
        (("-", "--prompt", "abc"), "give one of them"),
        (("--prompt", "abc", "--model", "org/target"), "--assistant-model is missing"),
        (("--prompt", "abc", "--assistant-model", "org/draft"), "--model is missing"),
        (("--prompt", "abc", "--device-map", "auto"), "--device-map needs --model"),
        (("--prompt", "abc", "--output", "out.txt"), "out.txt"),
        (("--prompt", "abc", "--overwrite"), "--overwrite needs --output"),
        (("--prompt", "abc", "--batch-size", "0"), "--batch-size"),
        (("--prompt", "abc", "--cache-budget", "0"), "cache_budget"),
        (("--prompt", "abc", "--top-p", "0.9"), "--temperature"),
        (("--prompt", "abc", "--temperature", "1", "--top-p", "2"), "top_p"),
        (("--prompt", "abc", "--policy", "dsed"), "dsed"),
        (("--prompt", "abc", "--device", "gpu"), "--device"),
        (("--prompt", "abc", "--speculation-config", "tests"), "speculation_config.json"),
    ],
)
def test_mistakes_are_refused_with_a_way_out(arguments, message, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output


def test_mistakes_in_the_input_are_found_before_the_models_are_loaded(tiny, tmp_path):
    file = tmp_path / "prompts.csv"
    file.write_text("question\nabc\n", encoding="utf-8")
    result = run(file, "--column", "prompt")
    assert result.exit_code == 2
    assert "question" in result.output
    assert not tiny


@pytest.mark.slow
def test_a_shell_pipes_prompts_through_until_it_is_interrupted(tmp_path):
    with _shell(tmp_path, "--column", "q", "--no-chat", "--ordered", "--batch-size", "1") as process:
        # More than is read below, and no end: the command waits for a line.
        process.stdin.write("".join(json.dumps({"q": text}) + "\n" for text in ["abc", "", "ß", "d"]).encode())
        process.stdin.flush()
        rows = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        process.wait(60)
        assert b"Interrupted" in process.stderr.read()
    assert process.returncode == 130
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert rows[0]["statistics"]["new_tokens"] == len(rows[0]["token_ids"]) > 0
    assert "one character" in rows[1]["error"]


def _shell(folder, *arguments):
    """The command in a process of its own, with the tiny pair, reading standard input."""
    target, draft = _save(folder)
    named = ["--model", str(target), "--assistant-model", str(draft), "--device", "cpu", "--dtype", "float32"]
    paths = [str(Path(cli.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Shells start background commands with the signal ignored, and with them what these start.
    start = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from hf_dsde.cli.main import app; app()"
    )
    settings = ["--policy", "static", "--max-new-tokens", "6"]
    return subprocess.Popen(
        [sys.executable, "-c", start, "generate", "-", *named, *settings, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


def _save(folder):
    """The tiny pair as folders that can be loaded by name."""
    pair = tiny_pair(torch.float32)
    for model, name in ((pair.target, "target"), (pair.draft, "draft")):
        model.save_pretrained(folder / name)
        pair.tokenizer.save_pretrained(folder / name)
    return folder / "target", folder / "draft"
