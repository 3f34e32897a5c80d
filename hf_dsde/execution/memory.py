"""Whether a cache fits, before it is made, and what there is for copies of weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_dsde import compat


def cache_bytes(model: PreTrainedModel, rows: int, slots: int) -> int:
    """Return the bytes of a model's keys and values, or of the latent vectors that both are made of.

    Args:
        model: Tells layers, key-value heads, their size and the dtype.
        rows: Number of sequences.
        slots: Tokens per sequence.
    """
    config = compat.decoder_config(model)
    tokens = config.num_hidden_layers * rows * slots
    if getattr(config, "kv_lora_rank", None):  # DeepSeek's attention
        return int(tokens * (config.kv_lora_rank + config.qk_rope_head_dim) * model.dtype.itemsize)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * tokens * heads * head_dim * model.dtype.itemsize)


def free_bytes(device: torch.device) -> int | None:
    """Return what can still be allocated on a CUDA device, memory that torch holds and does not use included.

    None for other devices, which do not say.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def check_cache_fits(model: PreTrainedModel, rows: int, slots: int) -> None:
    """Refuse a cache that the device has no room for.

    Raises:
        torch.OutOfMemoryError: With what to lower.
    """
    needed, free = cache_bytes(model, rows, slots), free_bytes(model.device)
    if free is not None and needed > free:
        raise torch.OutOfMemoryError(
            f"The key-value cache of {type(model).__name__} for {rows} rows of {slots} tokens needs "
            f"{needed / 1e9:.1f} GB, and {model.device} has {free / 1e9:.1f} GB left. Lower the batch size, the "
            "prompts' length or max_new_tokens."
        )


CONTROL_GROUPS = Path("/sys/fs/cgroup")
GROUPS_OF_PROCESS = Path("/proc/self/cgroup")
GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Where the kernel's two versions of control groups say what a group may have, what it has, and what of that in
`memory.stat` is files that it can do without."""


def available_bytes() -> int:
    """Return the bytes of the host's memory that are available, to this process's container or job where it has one."""
    import psutil

    return int(min([psutil.virtual_memory().available, *map(_available_to, _control_groups())]))


def _control_groups() -> Iterator[Path]:
    """Yield the directories of the groups that this process is in, each with those it lies in."""
    try:
        lines = GROUPS_OF_PROCESS.read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            group = CONTROL_GROUPS / ("memory" if controllers else "") / path.strip("/")
            yield from (each for each in (group, *group.parents) if each.is_relative_to(CONTROL_GROUPS))


def _available_to(group: Path) -> float:
    """Return the bytes that a group may still take; infinity where it has no limit, or does not say."""
    for most, taken, spare in GROUP_FILES:
        try:
            limit, usage = int((group / most).read_text()), int((group / taken).read_text())
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # "max" is no number
            continue
        return limit - usage + int(counts.get(spare, 0))
    return float("inf")
