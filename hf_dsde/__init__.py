"""Batched assisted generation for Hugging Face transformers, with a draft length per sequence."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_dsde.batch.engine import BatchSizeWarning
    from hf_dsde.batch.generator import BatchGenerator, RowError
    from hf_dsde.batch.results import RowResult, RowStatistics
    from hf_dsde.config import SpeculationConfig
    from hf_dsde.decoding.streamers import BatchIteratorStreamer, BatchStreamer, BatchTextStreamer
    from hf_dsde.drafting.early_exit import EarlyExitDrafter
    from hf_dsde.drafting.layer_draft import load_draft
    from hf_dsde.drafting.lookup.prompt_lookup import PromptLookupDrafter
    from hf_dsde.drafting.lookup.sssd import SSSDDrafter
    from hf_dsde.drafting.lookup.suffix import SuffixDrafter
    from hf_dsde.execution.create_runner import RunnerWarning, release_memory
    from hf_dsde.execution.options import RuntimeOptions
    from hf_dsde.heads.loading import load_head
    from hf_dsde.heads.saving import save_head
    from hf_dsde.integration.hooks import disable, enable, generate, install, uninstall
    from hf_dsde.integration.outputs import SpeculativeGenerateOutput
    from hf_dsde.lossy_acceptance import Consultant, LossyAcceptance, LossyAcceptanceWarning, TypicalAcceptance
    from hf_dsde.measurement.rounds import RoundListener, RoundRecord
    from hf_dsde.measurement.statistics import SpeculationStatistics, SpeculationWarning
    from hf_dsde.policies import (
        ConfidencePolicy,
        DSDEStoppingPolicy,
        HeuristicPolicy,
        StaticPolicy,
        StoppingPolicy,
        available_policies,
        register,
    )
else:
    # `import hf_dsde` is to cost nothing that the caller does not use.
    from hf_dsde.utils.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        globals(),
        {
            "BatchGenerator": "hf_dsde.batch.generator",
            "BatchIteratorStreamer": "hf_dsde.decoding.streamers",
            "BatchSizeWarning": "hf_dsde.batch.engine",
            "BatchStreamer": "hf_dsde.decoding.streamers",
            "BatchTextStreamer": "hf_dsde.decoding.streamers",
            "ConfidencePolicy": "hf_dsde.policies",
            "Consultant": "hf_dsde.lossy_acceptance",
            "DSDEStoppingPolicy": "hf_dsde.policies",
            "EarlyExitDrafter": "hf_dsde.drafting.early_exit",
            "HeuristicPolicy": "hf_dsde.policies",
            "LossyAcceptance": "hf_dsde.lossy_acceptance",
            "LossyAcceptanceWarning": "hf_dsde.lossy_acceptance",
            "PromptLookupDrafter": "hf_dsde.drafting.lookup.prompt_lookup",
            "RoundListener": "hf_dsde.measurement.rounds",
            "RoundRecord": "hf_dsde.measurement.rounds",
            "RowError": "hf_dsde.batch.generator",
            "RowResult": "hf_dsde.batch.results",
            "RowStatistics": "hf_dsde.batch.results",
            "RunnerWarning": "hf_dsde.execution.create_runner",
            "RuntimeOptions": "hf_dsde.execution.options",
            "SSSDDrafter": "hf_dsde.drafting.lookup.sssd",
            "SpeculationConfig": "hf_dsde.config",
            "SpeculationStatistics": "hf_dsde.measurement.statistics",
            "SpeculationWarning": "hf_dsde.measurement.statistics",
            "SpeculativeGenerateOutput": "hf_dsde.integration.outputs",
            "StaticPolicy": "hf_dsde.policies",
            "StoppingPolicy": "hf_dsde.policies",
            "SuffixDrafter": "hf_dsde.drafting.lookup.suffix",
            "TypicalAcceptance": "hf_dsde.lossy_acceptance",
            "available_policies": "hf_dsde.policies",
            "disable": "hf_dsde.integration.hooks",
            "enable": "hf_dsde.integration.hooks",
            "generate": "hf_dsde.integration.hooks",
            "install": "hf_dsde.integration.hooks",
            "load_draft": "hf_dsde.drafting.layer_draft",
            "load_head": "hf_dsde.heads.loading",
            "register": "hf_dsde.policies",
            "release_memory": "hf_dsde.execution.create_runner",
            "save_head": "hf_dsde.heads.saving",
            "uninstall": "hf_dsde.integration.hooks",
        },
    )

__all__ = [
    "BatchGenerator",
    "BatchIteratorStreamer",
    "BatchSizeWarning",
    "BatchStreamer",
    "BatchTextStreamer",
    "ConfidencePolicy",
    "Consultant",
    "DSDEStoppingPolicy",
    "EarlyExitDrafter",
    "HeuristicPolicy",
    "LossyAcceptance",
    "LossyAcceptanceWarning",
    "PromptLookupDrafter",
    "RoundListener",
    "RoundRecord",
    "RowError",
    "RowResult",
    "RowStatistics",
    "RunnerWarning",
    "RuntimeOptions",
    "SSSDDrafter",
    "SpeculationConfig",
    "SpeculationStatistics",
    "SpeculationWarning",
    "SpeculativeGenerateOutput",
    "StaticPolicy",
    "StoppingPolicy",
    "SuffixDrafter",
    "TypicalAcceptance",
    "available_policies",
    "disable",
    "enable",
    "generate",
    "install",
    "load_draft",
    "load_head",
    "register",
    "release_memory",
    "save_head",
    "uninstall",
]
