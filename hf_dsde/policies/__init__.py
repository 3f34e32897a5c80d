"""How many tokens each sequence drafts: the contract, the registry and one file per published policy."""

from hf_dsde.policies.adaedl import AdaEDLPolicy
from hf_dsde.policies.auto import AutoPolicy
from hf_dsde.policies.base import (
    BatchInfo,
    DraftStep,
    PhaseTimes,
    PolicyFactory,
    RoundOutcome,
    Signal,
    StoppingPolicy,
)
from hf_dsde.policies.batch_table import BatchTablePolicy
from hf_dsde.policies.confidence import ConfidencePolicy
from hf_dsde.policies.cost_cap import CostCap
from hf_dsde.policies.dsde import DSDEStoppingPolicy
from hf_dsde.policies.gammatune import GammaTunePlusPolicy, GammaTunePolicy
from hf_dsde.policies.goodput import GoodputPolicy
from hf_dsde.policies.heuristic import HeuristicPolicy
from hf_dsde.policies.marginal_goodput import MarginalGoodputPolicy
from hf_dsde.policies.registry import available_policies, create_policy, register
from hf_dsde.policies.static import StaticPolicy
from hf_dsde.policies.svip import SVIPPolicy
from hf_dsde.policies.tapout import TapOutPolicy
from hf_dsde.policies.token_budget import TokenBudgetPolicy

__all__ = [
    "AdaEDLPolicy",
    "AutoPolicy",
    "BatchInfo",
    "BatchTablePolicy",
    "ConfidencePolicy",
    "CostCap",
    "DSDEStoppingPolicy",
    "DraftStep",
    "GammaTunePlusPolicy",
    "GammaTunePolicy",
    "GoodputPolicy",
    "HeuristicPolicy",
    "MarginalGoodputPolicy",
    "PhaseTimes",
    "PolicyFactory",
    "RoundOutcome",
    "SVIPPolicy",
    "Signal",
    "StaticPolicy",
    "StoppingPolicy",
    "TapOutPolicy",
    "TokenBudgetPolicy",
    "available_policies",
    "create_policy",
    "register",
]
