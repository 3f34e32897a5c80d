"""A tiny pair with a tokenizer, in place of the packaged one, and prompts that its tokenizer can read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import noisy_copy, tiny_model
from tiny_text import tiny_tokenizer

from hf_dsde import pairs
from hf_dsde.cli.demo.prompts import DemoPrompt, Serving
from hf_dsde.pairs import Pair

PROMPTS = (DemoPrompt("short", "a"), DemoPrompt("medium", "abcdeHgJk"), DemoPrompt("long", "fedcbaGhIjKlMn" * 3))
SERVINGS = (Serving("alone", ((PROMPTS[1],), (PROMPTS[2],))), Serving("together", (PROMPTS,)))
CHAT_TEMPLATE = (
    "{% for message in messages %}ab{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}f{% endif %}"
)


def tiny_pair(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Pair:
    """Return a pair that agrees about half of the time."""
    target = tiny_model()
    draft = noisy_copy(target, 0.05)
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE
    return Pair(target.to(dtype), draft.to(dtype), tokenizer)


def replace_pairs(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> list[tuple[Any, ...]]:
    """Let commands load the tiny pair, on a wide terminal; the list gets the arguments of every load."""
    asked: list[tuple[Any, ...]] = []

    def load(*arguments: Any, **_: Any) -> Pair:
        asked.append(arguments)
        return tiny_pair(*arguments[-2:])

    for module in (pairs, *modules):
        monkeypatch.setattr(module, "load_packaged_pair", load)
    monkeypatch.setattr(pairs, "load_pair", load)
    monkeypatch.setenv("COLUMNS", "200")
    return asked
