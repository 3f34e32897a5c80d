"""How a call speculates: validated, immutable, and kept in `speculation_config.json` but for the machine's options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download

from hf_dsde.costs import CostModel
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.lossy_acceptance import LossyAcceptance, rule_of
from hf_dsde.policies import CostCap, Signal, StoppingPolicy, create_policy
from hf_dsde.utils.checks import check_choice, check_flag, check_integer

CONFIG_NAME = "speculation_config.json"
RUNNERS = ("eager", "graph")


@dataclass(frozen=True)
class SpeculationConfig:
    """How `generate` speculates. Checked when it is made; change one with `replace`.

    Attributes:
        policy: Name of the policy that decides how many tokens each row drafts.
        policy_arguments: Keyword arguments of that policy, as JSON holds them (tuples become lists).
        max_draft_length: The most tokens any row drafts in a round, whatever the policy asks for.
        fill_to_batch: Whether every active row drafts as many tokens as the batch's longest. Free in a padded pass.
        runner: How forward passes are run: `eager`, or `graph`, which records them as CUDA graphs. None takes `graph`
            on a CUDA device and `eager` elsewhere.
        costs: What passes cost, as `CostModel.to_dict` gives it, for policies that weigh cost against gain. None lets
            the first call of a pair and batch size measure it.
        cost_cap: Whether a policy that weighs no costs is kept from drafting what is expected to cost more than it
            brings (`hf_dsde.policies.CostCap`). None: where `costs` are given. True: they are measured if need be.
        refresh_costs: Whether the timings of rounds go on moving the costs. Decisions that rest on timings differ from
            run to run, and with them the draws of a sampled text; given costs without refreshing can be repeated.
        acceptance: A lossy rule (`hf_dsde.Consultant`, `hf_dsde.TypicalAcceptance`), which lets drafted tokens
            stand that the target would not have written; or what its `to_dict` gives. None accepts exactly.
        options: How this machine runs the passes. No part of what is saved.
    """

    policy: str = "dsde"
    policy_arguments: dict[str, Any] = field(default_factory=dict, hash=False)
    max_draft_length: int = 32
    fill_to_batch: bool = False
    runner: str | None = None
    costs: dict[str, Any] | None = field(default=None, hash=False)
    cost_cap: bool | None = None
    refresh_costs: bool = True
    acceptance: LossyAcceptance | None = None
    options: RuntimeOptions = field(default=RuntimeOptions(), hash=False)

    def __new__(cls, *_: Any, **named: Any) -> SpeculationConfig:  # noqa: PYI034 - Python 3.10 has no Self
        """Refuse what is a field of the options, and say where it goes."""
        _refuse_options(named)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check every field and bring it into the form that JSON gives back."""
        if not isinstance(self.policy, str):
            raise TypeError(
                f"`policy` is {self.policy!r}, but a policy's name is needed. "
                "Register your own policy with `hf_dsde.policies.register` to give it one."
            )
        object.__setattr__(self, "policy_arguments", _plain_arguments(self.policy_arguments))
        check_integer(
            "max_draft_length",
            self.max_draft_length,
            1,
            way_out="To decode without drafts, use policy 'static' with 0.",
        )
        check_flag("fill_to_batch", self.fill_to_batch)
        if self.runner is not None:
            check_choice("runner", self.runner, RUNNERS)
        if self.cost_cap is not None:
            check_flag("cost_cap", self.cost_cap)
        check_flag("refresh_costs", self.refresh_costs)
        if self.costs is not None:
            object.__setattr__(self, "costs", CostModel.from_dict(self.costs).to_dict())
        if self.acceptance is not None:
            object.__setattr__(self, "acceptance", rule_of(self.acceptance))
        if not isinstance(self.options, RuntimeOptions):
            raise TypeError(f"`options` is {self.options!r}, but a RuntimeOptions is needed.")
        self.build_policy()

    @property
    def cost_model(self) -> CostModel | None:
        """The costs, if there are any."""
        return None if self.costs is None else CostModel.from_dict(self.costs)

    def build_policy(self) -> StoppingPolicy:
        """A new policy with these arguments, capped as `cost_cap` says."""
        return self.capped(create_policy(self.policy, **self.policy_arguments))

    def capped(self, policy: StoppingPolicy) -> StoppingPolicy:
        """A policy as it plays under this configuration: itself, or under a `CostCap`."""
        wanted = self.costs is not None if self.cost_cap is None else self.cost_cap
        return CostCap(policy) if wanted and Signal.COSTS not in policy.requires else policy

    def replace(self, **changes: Any) -> SpeculationConfig:
        """A copy with some fields changed, checked again.

        Arguments belong to a policy: a new `policy` without `policy_arguments` starts from that policy's defaults.
        """
        _refuse_unknown(changes, [*SAVED, "options"])
        if changes.get("policy", self.policy) != self.policy:
            changes.setdefault("policy_arguments", {})
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """All fields but `options`, as JSON holds them."""
        saved = {name: getattr(self, name) for name in SAVED}
        saved["acceptance"] = None if self.acceptance is None else self.acceptance.to_dict()
        values: dict[str, Any] = json.loads(json.dumps(saved))
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeculationConfig:
        """The config that `to_dict` described; absent fields and options take defaults, unknown ones are refused."""
        if not isinstance(values, Mapping):
            raise TypeError(f"`values` is {values!r}, but a mapping of field names to values is needed.")
        _refuse_unknown(values, SAVED)
        return cls(**values)

    def to_json(self) -> str:
        """`to_dict` as indented JSON text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> SpeculationConfig:
        """The config that `to_json` wrote."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as failure:
            raise ValueError(
                f"`text` is no JSON ({failure}). `SpeculationConfig().to_json()` shows the form."
            ) from failure
        return cls.from_dict(values)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `speculation_config.json` into a folder, which is made if it does not exist."""
        folder = Path(folder)
        if folder.is_file():
            raise NotADirectoryError(f"`folder` is {str(folder)!r}, which is a file. Pass the folder to write into.")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_NAME).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder_or_repo_id: str | Path, **hub_arguments: Any) -> SpeculationConfig:
        """Read `speculation_config.json` from a local folder or else from a repository on the Hub.

        Args:
            folder_or_repo_id: A folder that exists, or a repository's id.
            hub_arguments: Passed to `huggingface_hub.hf_hub_download` (`revision`, `token`, `subfolder`,
                `local_files_only`, ...). For a local folder only `subfolder` has a meaning.
        """
        folder = Path(folder_or_repo_id)
        if folder.is_dir():
            path = folder / (hub_arguments.get("subfolder") or "") / CONFIG_NAME
            if not path.is_file():
                raise FileNotFoundError(
                    f"The folder {str(folder_or_repo_id)!r} has no {path.relative_to(folder)}. "
                    "Write one with `SpeculationConfig(...).save_pretrained(folder)`."
                )
        else:
            path = Path(hf_hub_download(str(folder_or_repo_id), CONFIG_NAME, **hub_arguments))
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except (TypeError, ValueError) as failure:
            raise ValueError(f"{path} holds no valid speculation config: {failure}") from failure


SAVED = tuple(f.name for f in fields(SpeculationConfig) if f.name != "options")
"""Fields that decide what is drafted and what of it stands. `options` belong to the process, and no file has them."""
OPTIONS = tuple(f.name for f in fields(RuntimeOptions))


def _refuse_options(values: Mapping[str, Any]) -> None:
    """Say where a field of the options goes."""
    moved = [name for name in OPTIONS if name in values]
    if moved:
        raise TypeError(
            f"SpeculationConfig has no field `{'`, `'.join(moved)}`: how passes are run is not saved with a model. "
            f"Use SpeculationConfig(options=RuntimeOptions({moved[0]}=...)), and keep it out of {CONFIG_NAME}."
        )


def _refuse_unknown(values: Mapping[str, Any], known: Sequence[str]) -> None:
    _refuse_options(values)
    for name in values:
        if name not in known:
            close = get_close_matches(str(name), [*known, *OPTIONS], n=1)
            hint = f"Did you mean `{close[0]}`? " if close else ""
            raise ValueError(
                f"SpeculationConfig has no field `{name}`. {hint}Its fields are: {', '.join(known)}. "
                "Arguments of a policy belong into `policy_arguments`."
            )


def _plain_arguments(arguments: Any) -> dict[str, Any]:
    """A copy of a policy's arguments as JSON gives them back."""
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise TypeError(f"`policy_arguments` is {arguments!r}, but a dict with argument names as keys is needed.")
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(arguments), allow_nan=False))
    except (TypeError, ValueError) as failure:
        raise TypeError(
            f"`policy_arguments` is {arguments!r}, but values that JSON can hold are needed ({failure}). "
            "Use numbers, strings, booleans, None, lists and dicts."
        ) from failure
    return copy
