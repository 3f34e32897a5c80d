"""Which policy plays, with which arguments: a name for results, and a short form for command lines."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from hf_dsde.config import SpeculationConfig
from hf_dsde.policies import StoppingPolicy

FILL_SUFFIX = "+fill"
CAP_SUFFIX = "+cap"
_WORDS = {"true": True, "false": False, "none": None, "null": None}


@dataclass(frozen=True)
class PolicySpec:
    """A policy to play.

    Attributes:
        policy: Name in the registry.
        arguments: Keyword arguments of its constructor.
        fill_to_batch: Whether every row drafts as many tokens as the batch's longest asks for.
        cost_cap: Whether it plays under a `CostCap`.
        name: What results call it; its short form when empty.
    """

    policy: str
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)
    fill_to_batch: bool = False
    cost_cap: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        """Make up the name."""
        if not self.name:
            written = ",".join(f"{key}={_written(value)}" for key, value in self.arguments.items())
            short = self.policy + (f":{written}" if written else "")
            short += (CAP_SUFFIX if self.cost_cap else "") + (FILL_SUFFIX if self.fill_to_batch else "")
            object.__setattr__(self, "name", short)

    @classmethod
    def parse(cls, text: str) -> PolicySpec:
        """The policy of a short form: `dsde`, `dsde:sl_max=8,cap=false`, `dsde+fill`, `dsde+cap`, `dsde+cap+fill`.

        Values are read as JSON; what is no JSON is a string.

        Raises:
            ValueError: The text has another form.
        """
        unfilled = text.removesuffix(FILL_SUFFIX)
        policy, colon, arguments = unfilled.removesuffix(CAP_SUFFIX).partition(":")
        pairs = [item.partition("=") for item in arguments.split(",")] if colon else []
        if not policy or any(not key or not equals for key, equals, _ in pairs):
            raise ValueError(
                f"`policy` is {text!r}, but NAME or NAME:ARGUMENT=VALUE,... is needed, with {CAP_SUFFIX} after it for "
                f"a cap on costs, {FILL_SUFFIX} to draft as many tokens in every row as in the longest: for example "
                "'dsde:sl_max=8+cap+fill'."
            )
        values = {key.strip(): _value(value.strip()) for key, _, value in pairs}
        return cls(policy, values, text.endswith(FILL_SUFFIX), unfilled.endswith(CAP_SUFFIX), text)

    def create(self) -> StoppingPolicy:
        """A new policy; errors are those of `SpeculationConfig`."""
        return SpeculationConfig(self.policy, self.arguments, cost_cap=self.cost_cap).build_policy()

    def to_dict(self) -> dict[str, Any]:
        """All values as JSON holds them."""
        return {
            "name": self.name,
            "policy": self.policy,
            "arguments": self.arguments,
            "fill_to_batch": self.fill_to_batch,
            "cost_cap": self.cost_cap,
        }


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
