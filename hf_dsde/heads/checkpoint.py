"""The files of a head: its configuration, and its weights by name."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
WEIGHT_FILES = (WEIGHTS_NAME, "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Names under which weights are looked for, in this order; an index names the files of a sharded checkpoint."""
PATTERNS = (CONFIG_NAME, "model*.safetensors", "pytorch_model*.bin", "*.index.json")
"""Of the files that are fetched from the Hub."""

AUX_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
DERIVED = "rotary_emb.inv_freq"
"""End of the name of a buffer that old checkpoints hold and every model computes."""


@dataclass
class Checkpoint:
    """A head as it lies in a folder.

    Attributes:
        folder: Where it lies.
        config: What config.json says.
        names: For each weight, under its standard name, the name in its file.
        shapes: Of the weights, by standard name.
        files: The file of each weight, by standard name.
    """

    folder: Path
    config: dict[str, Any]
    names: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    files: dict[str, Path]

    def tensors(self, names: Sequence[str], device: torch.device) -> dict[str, Tensor]:
        """Read weights, by standard name."""
        found: dict[str, Tensor] = {}
        for file in sorted({self.files[name] for name in names}):
            wanted = {name: self.names[name] for name in names if self.files[name] == file}
            if file.suffix == ".bin":
                held = _load_bin(file)
                found |= {name: held[key].to(device) for name, key in wanted.items()}
            else:
                with safe_open(file, framework="pt", device=str(device)) as opened:
                    found |= {name: opened.get_tensor(key) for name, key in wanted.items()}
        return found


def standard_name(key: str) -> str | None:
    """Return the name that a weight has in this package: that of speculators' format."""
    name = key.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
    first, _, rest = name.partition(".")
    return f"{AUX_NORMS[first]}.{rest}" if first in AUX_NORMS else name


def open_checkpoint(folder: Path, naming: Callable[[str], str | None] = standard_name) -> Checkpoint:
    """Read the configuration and the names and shapes of the weights.

    Args:
        folder: Where they lie.
        naming: Gives a weight's standard name for that in the file; None for weights that are not the head's.

    Raises:
        FileNotFoundError: The folder holds no configuration or no weights.
        ValueError: Two weights have the same standard name.
    """
    described = folder / CONFIG_NAME
    if not described.is_file():
        raise FileNotFoundError(f"folder {str(folder)!r} has no {CONFIG_NAME}: pass the folder of a head")
    config = json.loads(described.read_text(encoding="utf-8"))
    checkpoint = Checkpoint(folder, config, {}, {}, {})
    for file in _weight_files(folder, naming):
        for key, shape in _shapes(file).items():
            name = naming(key)
            if name is None:
                continue
            if name in checkpoint.names:
                raise ValueError(
                    f"folder {str(folder)!r} has the weights {checkpoint.names[name]!r} and {key!r}, which both are "
                    f"{name!r}: remove the one that is not the head's"
                )
            if not name.endswith(DERIVED):
                checkpoint.names[name], checkpoint.shapes[name], checkpoint.files[name] = key, shape, file
    return checkpoint


def wanted_weights(
    checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], optional: Collection[str], kind: str
) -> list[str]:
    """Return the names of the weights to load.

    Args:
        checkpoint: Where they are.
        expected: Shapes of all weights that there may be.
        optional: Those of them that may be missing.
        kind: Of head, for the error.

    Raises:
        ValueError: Some are missing, unknown or of another shape.
    """
    found, where = set(checkpoint.shapes), f"of the head in {str(checkpoint.folder)!r}"
    missing, unknown = sorted(set(expected) - set(optional) - found), sorted(found - set(expected))
    if missing or unknown:
        raise ValueError(
            f"the weights {where} are not those of an {kind} with the settings of its configuration: missing "
            f"{missing or 'none'}, unknown {unknown or 'none'}; correct its config.json, or load another head"
        )
    wanted = sorted(found)
    held = {name: checkpoint.shapes[name] for name in wanted}
    wrong = [f"{name} {shape}, not {expected[name]}" for name, shape in held.items() if shape != expected[name]]
    if wrong:
        raise ValueError(
            f"weights {where} have other shapes than its configuration says: {'; '.join(wrong)}; correct its "
            "config.json, or load another head"
        )
    return wanted


def _weight_files(folder: Path, naming: Callable[[str], str | None]) -> list[Path]:
    for name in WEIGHT_FILES:
        file = folder / name
        if not file.is_file():
            continue
        if file.suffix != ".json":
            return [file]
        return [folder / shard for shard in shards(file, naming)]
    raise FileNotFoundError(f"folder {str(folder)!r} has none of {list(WEIGHT_FILES)}: pass the folder of a head")


def shards(index: Path, naming: Callable[[str], str | None]) -> list[str]:
    """Return the names of the files that hold the head's weights, from the index of a sharded checkpoint."""
    places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return sorted({Path(shard).name for key, shard in places.items() if naming(key) is not None})


def weight_names(file: Path) -> list[str]:
    """Return the names of all weights that one of `WEIGHT_FILES` holds or lists."""
    if file.suffix == ".json":
        return list(json.loads(file.read_text(encoding="utf-8"))["weight_map"])
    return list(_shapes(file))


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    if file.suffix == ".bin":
        return {key: tuple(tensor.shape) for key, tensor in _load_bin(file).items()}
    with safe_open(file, framework="pt") as opened:
        return {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118 - no mapping


def _load_bin(file: Path) -> dict[str, Tensor]:
    # Files of the old kind cannot be mapped.
    return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
