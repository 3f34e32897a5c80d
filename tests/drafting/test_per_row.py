"""Candidate generators of transformers, and drafters of a user's own, in a batch: exact, also when sampled."""

from __future__ import annotations
