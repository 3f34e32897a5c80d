"""Heads that draft from the hidden states of their target: architecture, checkpoint formats, loading."""

from hf_dsde.heads.loading import load_head
from hf_dsde.heads.mtp import load_mtp
from hf_dsde.heads.saving import save_head

__all__ = ["load_head", "load_mtp", "save_head"]
