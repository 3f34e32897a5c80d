"""What a job will take of each device's memory, and which prompts its caches have room for, without running a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.batch.admission import Admission, CacheBudget
from hf_dsde.batch.requests import RejectedRow, Request
from hf_dsde.execution.memory import free_bytes
from hf_dsde.execution.model_runner import next_multiple

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_UNKNOWN = "-"


@dataclass(frozen=True)
class DevicePlan:
    """One device's share.

    Attributes:
        device: Its name, such as `cuda:0`.
        target_bytes: Weights of the target.
        draft_bytes: Weights of the draft, without those that it shares with the target.
        slot_bytes: Of one token of one row, of each model that keeps its cache here, as in `CacheBudget`; 0 if none
            does.
        row_bytes: Of one row whatever its length, as in `CacheBudget`.
        cache_budget: Bytes that the caches may take; None for no limit, and where there is no cache.
        free_bytes: What can be allocated beside the weights; None where the device does not say.
    """

    device: str
    target_bytes: int
    draft_bytes: int
    slot_bytes: int
    row_bytes: int
    cache_budget: int | None
    free_bytes: int | None


@dataclass(frozen=True)
class InputPlan:
    """What becomes of the rows of an input.

    Attributes:
        rows: How many there are.
        ready: Rows that fit into a whole batch.
        waiting: Rows that need a smaller batch, and are generated last.
        too_long: Rows that do not even fit alone, and become errors.
        rejected: Rows from which nothing can be generated, whatever the memory.
        prompt_tokens: Tokens of all prompts that are generated from.
        longest_prompt: Tokens of the longest of them.
        largest_need: The most slots that one of them takes in a row of the caches.
        smallest_batch: Rows of the batch that `largest_need` leaves room for; None if nothing is generated.
        first_error: Why the first rejected row was rejected, with its place in the input.
    """

    rows: int
    ready: int
    waiting: int
    too_long: int
    rejected: int
    prompt_tokens: int
    longest_prompt: int
    largest_need: int
    smallest_batch: int | None
    first_error: str | None


@dataclass(frozen=True)
class MemoryPlan:
    """What a job takes. A rich console prints it as tables.

    Attributes:
        devices: Every device that holds weights or caches.
        batch_size: Rows of the batch.
        slots: Tokens that each row of a whole batch may have in the caches, prompt, new and drafted ones; None for any
            number.
        scratch: How many of them are for drafts.
        granularity: Slots are allocated in multiples of this.
        input: What becomes of the rows; None if none were given.
    """

    devices: tuple[DevicePlan, ...]
    batch_size: int
    slots: int | None
    scratch: int
    granularity: int
    input: InputPlan | None

    def longest_cache_bytes(self, device: DevicePlan) -> int | None:
        """Bytes of the caches on a device while the batch is full of the longest texts; None without any text."""
        if self.input is None or self.input.smallest_batch is None:
            return None
        # Each row has one slot for what is no token.
        slots = next_multiple(self.input.largest_need, self.granularity) + 1
        return self.input.smallest_batch * (slots * device.slot_bytes + device.row_bytes)

    def __rich__(self) -> RenderableType:
        """The plan as tables."""
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = [self._device_table(), Text()]
        parts.append(Text(_sentence(self)))
        if self.input is not None:
            parts.append(_input_table(self.input))
            if self.input.first_error is not None:
                parts.append(Text(f"the first rejected: {self.input.first_error}", style="yellow"))
        return Group(*parts)

    def _device_table(self) -> Table:
        from rich.filesize import decimal
        from rich.table import Table

        table = Table("device", title=f"Memory, batch of {self.batch_size}")
        for heading in ("target", "draft", "free beside", "for caches", "one row's token", "longest texts"):
            table.add_column(heading, justify="right")
        for place in self.devices:
            limit = "no limit" if place.cache_budget is None else decimal(place.cache_budget)
            table.add_row(
                place.device,
                decimal(place.target_bytes),
                decimal(place.draft_bytes),
                _size(place.free_bytes),
                limit if place.slot_bytes else "no cache",
                _size(place.slot_bytes or None),
                _size(self.longest_cache_bytes(place) or None),
            )
        return table


def plan_memory(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    budget: CacheBudget,
    batch_size: int,
    scratch: int,
    requests: Iterable[Request | RejectedRow] | None,
) -> MemoryPlan:
    """Plan a job.

    Args:
        target: The target, loaded.
        draft: The draft, loaded.
        budget: Memory for the caches of both.
        batch_size: Rows of the batch, at least 1.
        scratch: Slots that a row needs beside its prompt and its new tokens.
        requests: The rows of the input, gone through once; None plans for the models alone.
    """
    return MemoryPlan(
        _device_plans(target, draft, budget),
        batch_size,
        budget.slots(batch_size),
        scratch,
        budget.granularity,
        None if requests is None else _input_plan(requests, budget, batch_size, scratch),
    )


def _device_plans(target: PreTrainedModel, draft: PreTrainedModel, budget: CacheBudget) -> tuple[DevicePlan, ...]:
    seen: set[tuple[torch.device, int]] = set()
    weights = [_weight_bytes(model, seen) for model in (target, draft)]
    caches = {model.device: place for place, model in enumerate(budget.models)}
    return tuple(
        DevicePlan(
            device=str(device),
            target_bytes=weights[0].get(device, 0),
            draft_bytes=weights[1].get(device, 0),
            slot_bytes=budget.slot_bytes(caches[device]) if device in caches else 0,
            row_bytes=budget.row_bytes(caches[device]) if device in caches else 0,
            cache_budget=budget.limits[caches[device]] if device in caches else None,
            free_bytes=free_bytes(device),
        )
        for device in dict.fromkeys([*weights[0], *weights[1], *caches])
    )


def _weight_bytes(model: PreTrainedModel, seen: set[tuple[torch.device, int]]) -> dict[torch.device, int]:
    """Bytes of parameters and buffers by device, each memory counted once and added to `seen`."""
    sizes: dict[torch.device, int] = {}
    for tensor in _tensors(model):
        # Tensors that were left on no device have no address.
        place = (tensor.device, tensor.data_ptr() or id(tensor))
        if place not in seen:
            seen.add(place)
            sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.numel() * tensor.element_size()
    return sizes


def _tensors(model: PreTrainedModel) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _input_plan(
    requests: Iterable[Request | RejectedRow], budget: CacheBudget, batch_size: int, scratch: int
) -> InputPlan:
    need = Admission([], scratch).need
    whole, alone = budget.slots(batch_size), budget.slots(1)
    ready = waiting = too_long = rejected = tokens = longest = largest = 0
    first_error = None
    for request in requests:
        if isinstance(request, RejectedRow):
            rejected += 1
            first_error = first_error or f"row {request.index}: {request.error}"
            continue
        needed = need(request)
        if alone is not None and needed > alone:
            too_long += 1
            continue
        fits = whole is None or needed <= whole
        ready, waiting = ready + fits, waiting + (not fits)
        tokens += len(request.prompt)
        longest, largest = max(longest, len(request.prompt)), max(largest, needed)
    return InputPlan(
        rows=ready + waiting + too_long + rejected,
        ready=ready,
        waiting=waiting,
        too_long=too_long,
        rejected=rejected,
        prompt_tokens=tokens,
        longest_prompt=longest,
        largest_need=largest,
        smallest_batch=budget.rows(largest, batch_size) if largest else None,
        first_error=first_error,
    )


def _sentence(plan: MemoryPlan) -> str:
    if plan.slots is None:
        return "Nothing limits the caches: no budget was given, and the device does not say what is free."
    return (
        f"Each of {plan.batch_size} rows may have {plan.slots:,} tokens in the caches: prompt, new tokens, and "
        f"{plan.scratch} for drafts."
    )


def _input_table(rows: InputPlan) -> Table:
    from rich.table import Table

    table = Table("prompts", "number", title="Input")
    table.columns[1].justify = "right"
    table.add_row("all", f"{rows.rows:,}")
    table.add_row("fit into a whole batch", f"{rows.ready:,}")
    smaller = f" of {rows.smallest_batch} at the least" if rows.waiting else ""
    table.add_row(f"wait for a smaller batch{smaller}", f"{rows.waiting:,}")
    table.add_row("do not fit alone, become errors", f"{rows.too_long:,}", style="yellow" if rows.too_long else "")
    table.add_row("rejected, become errors", f"{rows.rejected:,}", style="yellow" if rows.rejected else "")
    table.add_section()
    table.add_row("tokens of all that are answered", f"{rows.prompt_tokens:,}")
    table.add_row("tokens of the longest", f"{rows.longest_prompt:,}")
    table.add_row("tokens in the caches for the longest text", f"{rows.largest_need:,}")
    return table


def _size(count: int | None) -> str:
    from rich.filesize import decimal

    return _UNKNOWN if count is None else decimal(count)
