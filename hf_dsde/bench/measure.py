"""One call of a method, measured: seconds, memory, warnings, and what is checked of its answer."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import BatchEncoding

from hf_dsde.bench.methods import Answer, Method, Request
from hf_dsde.pairs import Pair, answer_lengths, end_tokens

Clock = Callable[[], float]


@dataclass(frozen=True)
class Measurement:
    """What one call did.

    Attributes:
        seconds: Wall time, with the device idle before and after.
        ids: What was generated, without the prompts, `[rows, tokens]`, int64, on the host.
        tokens: Generated tokens that count: see `RepeatResult.tokens`.
        past_end_tokens: See `RepeatResult.past_end_tokens`.
        peak_memory_bytes: Most memory allocated during the call; None on a CPU.
        answer: What the method gave, with `ids` for its sequences, so that it holds nothing on the device.
        warnings: Texts of the warnings.
    """

    seconds: float
    ids: Tensor
    tokens: int
    past_end_tokens: int
    peak_memory_bytes: int | None
    answer: Answer
    warnings: tuple[str, ...]


def measure_call(
    method: Method,
    pair: Pair,
    inputs: BatchEncoding,
    request: Request,
    *,
    seed: int,
    clock: Clock = time.perf_counter,
) -> Measurement:
    """Call a method once.

    Args:
        method: What to call.
        pair: Target, enabled, and draft.
        inputs: The batch, on the target's device.
        request: What to ask for.
        seed: Of the sampling.
        clock: Gives seconds.

    Raises:
        RuntimeError: The answer has not as many tokens as were asked for.
    """
    device = pair.target.device
    on_cuda = device.type == "cuda"
    torch.manual_seed(seed)
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        _synchronize(device)
        begin = clock()
        answer = method(pair, inputs, request)
        _synchronize(device)
        seconds = clock() - begin
    peak = torch.cuda.max_memory_allocated(device) if on_cuda else None
    ids = answer.sequences[:, inputs["input_ids"].shape[1] :].cpu()
    _check_length(ids, request)
    until_end = int(answer_lengths(ids, 0, end_tokens(pair)).sum())
    tokens = until_end if request.stop_at_eos else ids.numel()
    return Measurement(
        seconds=seconds,
        ids=ids,
        tokens=tokens,
        past_end_tokens=tokens - until_end,
        peak_memory_bytes=peak,
        answer=replace(answer, sequences=ids),
        warnings=tuple(dict.fromkeys(f"{w.category.__name__}: {w.message}" for w in caught)),
    )


def free_memory(device: torch.device) -> None:
    """Give back what nobody refers to any longer, so that the next case finds room."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def equal_rows(answers: Tensor, expected: Tensor) -> int:
    """Rows that are the same in two answers of the same batch, `[rows, any]`; one may be padded further."""
    width = min(answers.shape[1], expected.shape[1])
    return int((answers[:, :width] == expected[:, :width]).all(-1).sum())


def _check_length(ids: Tensor, request: Request) -> None:
    """A method that stops early or runs on would be compared over other texts than the rest."""
    got, asked = ids.shape[1], request.new_tokens
    if got > asked or (got < asked and not request.stop_at_eos):
        raise RuntimeError(f"{got} tokens per row were generated, but {asked} were asked for")


def _synchronize(device: torch.device) -> None:
    """Wait for queued work, without which a GPU's times would be those of the queueing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
