"""Who proposes draft tokens: models, texts, candidate generators of transformers, and drafters of a user's own.

To write one, subclass `Drafter`; the documentation shows how in docs/drafters.md.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_dsde.decoding.candidates import CandidateBatch, Deterministic, Sampled
    from hf_dsde.decoding.draft_monitor import DraftMonitor
    from hf_dsde.decoding.drafter import DraftCall, Drafter
    from hf_dsde.decoding.plan import RoundPlan
    from hf_dsde.decoding.sequences import SequenceBatch
    from hf_dsde.drafting.early_exit import EarlyExitDrafter
    from hf_dsde.drafting.lookup.prompt_lookup import PromptLookupDrafter
    from hf_dsde.drafting.lookup.sssd import SSSDDrafter
    from hf_dsde.drafting.lookup.suffix import SuffixDrafter
else:
    from hf_dsde.utils.lazy_names import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(
        __name__,
        globals(),
        {
            "CandidateBatch": "hf_dsde.decoding.candidates",
            "Deterministic": "hf_dsde.decoding.candidates",
            "DraftCall": "hf_dsde.decoding.drafter",
            "DraftMonitor": "hf_dsde.decoding.draft_monitor",
            "Drafter": "hf_dsde.decoding.drafter",
            "EarlyExitDrafter": "hf_dsde.drafting.early_exit",
            "PromptLookupDrafter": "hf_dsde.drafting.lookup.prompt_lookup",
            "RoundPlan": "hf_dsde.decoding.plan",
            "SSSDDrafter": "hf_dsde.drafting.lookup.sssd",
            "Sampled": "hf_dsde.decoding.candidates",
            "SequenceBatch": "hf_dsde.decoding.sequences",
            "SuffixDrafter": "hf_dsde.drafting.lookup.suffix",
        },
    )

__all__ = [
    "CandidateBatch",
    "Deterministic",
    "DraftCall",
    "DraftMonitor",
    "Drafter",
    "EarlyExitDrafter",
    "PromptLookupDrafter",
    "RoundPlan",
    "SSSDDrafter",
    "Sampled",
    "SequenceBatch",
    "SuffixDrafter",
]
