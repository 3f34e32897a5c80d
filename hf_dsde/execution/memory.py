"""Whether a cache fits, before it is made."""

from __future__ import annotations

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
