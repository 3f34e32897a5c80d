"""Pairs by folder or Hub id, as the command line names them: what lies there decides what the draft is."""

import json

import huggingface_hub
import pytest
import torch
from head_files import (
    FEATURE,
    SHAPE,
    eagle3_weights,
    eagle_config,
    eagle_names,
    first_eagle_weights,
    layer_fields,
    speculators_config,
    write,
)
from tiny_models import noisy_copy, tiny_model
from tiny_text import tiny_tokenizer
from typer.testing import CliRunner

from hf_dsde import pairs
from hf_dsde.cli import main as cli
from hf_dsde.heads.eagle import EagleHead
from hf_dsde.heads.eagle3 import Eagle3Head

FIRST_EAGLE = {**SHAPE, "width": FEATURE, "head_dim": 8}
PLAIN_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The folder of a target with its tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    model = tiny_model(num_hidden_layers=8).float()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder, model


def first_eagle(folder, kind="bin"):
    config = {**PLAIN_LLAMA, **layer_fields(FIRST_EAGLE)}
    return write(folder, config, first_eagle_weights(FIRST_EAGLE), kind=kind)


def plain_eagle3(folder):
    """Nothing in the configuration says that this is no Llama."""
    return write(folder, {**PLAIN_LLAMA, **layer_fields()}, eagle_names(eagle3_weights()))


HEADS = {
    "EAGLE-1": (first_eagle, EagleHead),
    "EAGLE-1 in an old file": (lambda folder: first_eagle(folder, "old bin"), EagleHead),
    "EAGLE-1 in parts": (lambda folder: first_eagle(folder, "sharded safetensors"), EagleHead),
    "EAGLE-3": (lambda folder: write(folder, eagle_config(), eagle_names(eagle3_weights())), Eagle3Head),
    "EAGLE-3 under a Llama's name": (plain_eagle3, Eagle3Head),
    "speculators": (lambda folder: write(folder, speculators_config(), eagle3_weights()), Eagle3Head),
}


@pytest.mark.parametrize(("make", "kind"), HEADS.values(), ids=HEADS)
def test_heads_are_told_by_their_files(target, tmp_path, make, kind):
    pair = pairs.load_pair(str(target[0]), str(make(tmp_path)), torch.float32, "cpu")
    assert type(pair.draft) is kind
    assert pair.draft.dtype == torch.float32


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_a_complete_model_is_no_head(target, tmp_path, shard_size):
    noisy_copy(target[1], 0.05).save_pretrained(tmp_path, max_shard_size=shard_size)
    draft = pairs.load_pair(str(target[0]), str(tmp_path), torch.float32, "cpu").draft
    assert type(draft) is type(target[1])


def test_of_a_repository_no_weights_are_fetched_that_are_not_needed(target, tmp_path, monkeypatch):
    """The index of a sharded checkpoint names its weights."""
    repository = tmp_path / "repository"
    noisy_copy(target[1], 0.05).save_pretrained(repository, max_shard_size="20KB")
    fetched = []

    def download(name, file):
        fetched.append(file)
        return str(repository / file)

    monkeypatch.setattr(huggingface_hub, "file_exists", lambda _, file: (repository / file).is_file())
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(pairs, "_load_model", lambda name, *_: name)
    pair = pairs.load_pair(str(target[0]), "somebody/a-draft", torch.float32, "cpu")
    assert pair.draft == "somebody/a-draft"
    assert fetched == ["config.json", "model.safetensors.index.json"]


def test_the_command_line_takes_the_folder_of_a_head_of_eagle_1(target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"task": "letters", "prompt": "abc"}) + "\n", encoding="utf-8")
    head = first_eagle(tmp_path / "head")
    result = CliRunner().invoke(
        cli.app,
        ["trace", "--model", str(target[0]), "--draft", str(head), "--prompts", str(prompts), "--device", "cpu",
         "--output", str(tmp_path / "trace"), "--max-new-tokens", "4", "--temperature", "0"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
