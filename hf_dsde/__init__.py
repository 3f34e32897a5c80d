"""Batched assisted generation for Hugging Face transformers, with a draft length per sequence."""

from hf_dsde.batch.engine import BatchSizeWarning
from hf_dsde.batch.generator import BatchGenerator, RowError
from hf_dsde.batch.results import RowResult, RowStatistics
from hf_dsde.config import SpeculationConfig
from hf_dsde.drafting.layer_draft import load_draft
from hf_dsde.integration import disable, enable, generate, install, uninstall
from hf_dsde.outputs import SpeculativeGenerateOutput
from hf_dsde.policies import (
    ConfidencePolicy,
    DSDEStoppingPolicy,
    HeuristicPolicy,
    StaticPolicy,
    StoppingPolicy,
    available_policies,
    register,
)
from hf_dsde.runners import RunnerWarning, release_memory
from hf_dsde.statistics import SpeculationStatistics, SpeculationWarning
from hf_dsde.streamers import BatchIteratorStreamer, BatchStreamer, BatchTextStreamer

__all__ = [
    "BatchGenerator",
    "BatchIteratorStreamer",
    "BatchSizeWarning",
    "BatchStreamer",
    "BatchTextStreamer",
    "ConfidencePolicy",
    "DSDEStoppingPolicy",
    "HeuristicPolicy",
    "RowError",
    "RowResult",
    "RowStatistics",
    "RunnerWarning",
    "SpeculationConfig",
    "SpeculationStatistics",
    "SpeculationWarning",
    "SpeculativeGenerateOutput",
    "StaticPolicy",
    "StoppingPolicy",
    "available_policies",
    "disable",
    "enable",
    "generate",
    "install",
    "load_draft",
    "register",
    "release_memory",
    "uninstall",
]
