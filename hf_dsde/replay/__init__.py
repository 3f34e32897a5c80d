"""Replaying draft-length policies over recorded traces: what would each have gained, at which batch size and cost?"""

from hf_dsde.replay.experiment import ReplayGrid, ReplayResult, play_priced, run_grid
from hf_dsde.replay.pricing import CostSetting, LinearCosts, RoundPrices
from hf_dsde.replay.realization import JoinedRealization, Realization
from hf_dsde.replay.results import Cell, Gap, PolicyScore
from hf_dsde.replay.schedule import Phase, ScheduledRun, play_schedule, useless_draft
from hf_dsde.replay.simulator import RecordedStep, Replay, RoundLog
from hf_dsde.replay.specs import PolicySpec
from hf_dsde.replay.trace_tables import Tails, TraceTable

__all__ = [
    "Cell",
    "CostSetting",
    "Gap",
    "JoinedRealization",
    "LinearCosts",
    "Phase",
    "PolicyScore",
    "PolicySpec",
    "Realization",
    "RecordedStep",
    "Replay",
    "ReplayGrid",
    "ReplayResult",
    "RoundLog",
    "RoundPrices",
    "ScheduledRun",
    "Tails",
    "TraceTable",
    "play_priced",
    "play_schedule",
    "run_grid",
    "useless_draft",
]
