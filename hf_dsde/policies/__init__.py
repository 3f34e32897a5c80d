"""How many tokens each sequence drafts: the contract, the registry and one file per published policy."""

from hf_dsde.policies.base import (
    BatchInfo,
    DraftStep,
    PhaseTimes,
    PolicyFactory,
    RoundOutcome,
    Signal,
    StoppingPolicy,
)
from hf_dsde.policies.confidence import ConfidencePolicy
from hf_dsde.policies.dsde import DSDEStoppingPolicy
from hf_dsde.policies.heuristic import HeuristicPolicy
from hf_dsde.policies.registry import available_policies, create_policy, register
from hf_dsde.policies.static import StaticPolicy

__all__ = [
    "BatchInfo",
    "ConfidencePolicy",
    "DSDEStoppingPolicy",
    "DraftStep",
    "HeuristicPolicy",
    "PhaseTimes",
    "PolicyFactory",
    "RoundOutcome",
    "Signal",
    "StaticPolicy",
    "StoppingPolicy",
    "available_policies",
    "create_policy",
    "register",
]
