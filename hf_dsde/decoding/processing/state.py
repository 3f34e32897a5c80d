"""Logits processors that remember their earlier calls: they cannot serve several positions at once, and are found out.

A processor that serves a position must answer by text and scores alone. Some do not: a grammar's matcher that moves on
by a token in every call, one that counts its calls. Whether a processor does is seen by asking it again about a text
that it has been asked about. What was computed once and kept (lazily made tensors, answers by text) changes nothing
then; memory of calls does, in the answer or in the processor itself.
"""

from __future__ import annotations

import functools
import math
import random
import types
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, PreTrainedTokenizerBase
from transformers.generation import logits_process

STATEFUL = (
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    logits_process.SynthIDTextWatermarkLogitsProcessor,
)
"""Processors of transformers that remember their last call."""
STATEFUL_MODULES = ("xgrammar.contrib.hf", "outlines.backends")
"""Modules of other packages whose processors move a matcher on in every call."""
MOST_LOOKED_AT = 20_000
"""Values inside a processor that are compared; of a larger one the rest is taken to stay as it is."""
LARGEST_COMPARED = 1 << 22
"""Elements of the largest tensor that is compared."""
TOLERANCE = 1e-3
"""What two answers to the same question may differ by: sums on a GPU may be taken in another order."""

Call = Callable[[Tensor, Tensor], Tensor]


class RemembersCallsError(ValueError):
    """A logits processor's answer depends on the calls before."""

    def __init__(self, processor: object, what: str = "it remembers its last call") -> None:
        super().__init__(
            f"speculation_policy cannot be used with logits processor {type(processor).__name__}: {what}, so it cannot "
            "judge several positions at once. Leave out `speculation_policy` in a call of `generate` to decode it the "
            "stock way."
        )


def refuse_known(processor: object) -> None:
    """Refuse a processor whose class is known to remember its last call.

    Raises:
        RemembersCallsError: It is one.
    """
    modules = [kind.__module__ for kind in type(processor).__mro__]
    known = any(module == name or module.startswith(name + ".") for module in modules for name in STATEFUL_MODULES)
    if known or isinstance(processor, STATEFUL):
        raise RemembersCallsError(processor)


def is_trusted(processor: object) -> bool:
    """Whether a processor is one of transformers', of which it is known that they remember nothing.

    A constraint is one of theirs as well, but asks a function of the user's.
    """
    kind = type(processor)
    return kind.__module__ == logits_process.__name__ and kind is not logits_process.PrefixConstrainedLogitsProcessor


class StateWatch:
    """Calls a processor, and asks again about the first two texts that it is shown.

    Args:
        processor: Is watched.
    """

    def __init__(self, processor: LogitsProcessor) -> None:
        self._processor = processor
        self._asked: list[tuple[Call, Tensor, Tensor, Tensor]] = []
        self._over = is_trusted(processor)

    def __call__(self, call: Call, text: Tensor, scores: Tensor) -> Tensor:
        """Return `call(text, scores)`.

        Args:
            call: Calls the processor, as often as it is called.
            text: `[rows, tokens]`, int64.
            scores: `[rows, vocabulary]`, which the processor may overwrite.

        Raises:
            RemembersCallsError: The processor answers otherwise when it is asked again, or is changed by that.
        """
        if self._over or (self._asked and _same_tensor(text, self._asked[0][1])):
            return call(text, scores)
        given = scores.clone()
        answer = call(text, scores)
        self._asked.append((call, text.clone(), given, answer.clone()))
        self._ask_again()
        if len(self._asked) == 2:
            self._over, self._asked = True, []
        return answer

    def _ask_again(self) -> None:
        before = state_of(self._processor)
        for call, text, scores, answer in self._asked:
            try:
                again = call(text, scores.clone())
            except Exception as failure:
                raise RemembersCallsError(
                    self._processor, f"asked again about a text, it raises {type(failure).__name__}"
                ) from failure
            if not _same_answer(again, answer):
                raise RemembersCallsError(self._processor, "asked again about a text, it answers otherwise")
        if not _same(before, state_of(self._processor)):
            raise RemembersCallsError(self._processor, "each call changes it")


def _same_answer(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, TOLERANCE, TOLERANCE, equal_nan=True)


def _same_tensor(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def state_of(processor: object) -> Any:
    """Return what a processor holds, as nested tuples, such that a later change of it shows.

    Looked at are attributes, containers, what functions enclose, tensors, arrays and generators of random numbers;
    models, tokenizers and what other languages implement are left out.
    """
    return _Look().at(processor)


class _Look:
    """Walks through values, each object once, until there were too many."""

    def __init__(self) -> None:
        self._left = MOST_LOOKED_AT
        self._places: dict[int, int] = {}
        self._kept: list[Any] = []  # no id may be used twice

    def at(self, value: Any) -> Any:
        if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
            return value
        self._left -= 1
        if self._left < 0:
            return None
        if id(value) in self._places:
            return ("again", self._places[id(value)])
        self._places[id(value)] = len(self._places)
        self._kept.append(value)
        return (type(value).__qualname__, self._inside(value))

    def _inside(self, value: Any) -> Any:
        for kinds, look in self._looks:
            if isinstance(value, kinds):
                return look(value)
        return self._in_object(value)

    @property
    def _looks(self) -> list[tuple[Any, Callable[[Any], Any]]]:
        return [
            (Tensor, lambda value: value.detach().clone() if value.numel() <= LARGEST_COMPARED else None),
            (np.ndarray, lambda value: value.tobytes() if value.size <= LARGEST_COMPARED else None),
            (torch.Generator, torch.Generator.get_state),
            (np.random.Generator, lambda value: repr(value.bit_generator.state)),
            (random.Random, random.Random.getstate),
            ((nn.Module, PreTrainedTokenizerBase, type, types.ModuleType), lambda _: None),
            (Mapping, lambda value: tuple((self.at(key), self.at(entry)) for key, entry in list(value.items()))),
            (AbstractSet, lambda value: tuple(sorted(map(repr, value))) if len(value) <= self._left else None),
            ((list, tuple, deque), lambda value: tuple(map(self.at, list(value)))),
            (functools.partial, lambda value: (self.at(value.func), self.at(value.args), self.at(value.keywords))),
            (types.MethodType, lambda value: (self.at(value.__func__), self.at(value.__self__))),
            (types.FunctionType, lambda value: tuple(map(self.at, value.__closure__ or ()))),
            (types.CellType, lambda value: self.at(getattr(value, "cell_contents", None))),
        ]

    def _in_object(self, value: Any) -> Any:
        names = []
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            names += [slots] if isinstance(slots, str) else list(slots)
        held = {**{name: getattr(value, name, None) for name in names}, **getattr(value, "__dict__", {})}
        return tuple((name, self.at(entry)) for name, entry in held.items())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if one.is_floating_point():
            return torch.allclose(one, other, TOLERANCE, TOLERANCE, equal_nan=True)
        return torch.equal(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return isinstance(other, float) and math.isnan(other)
    return type(one) is type(other) and bool(one == other)
