"""Logits processors over whole blocks of positions, and what is known of those that can only be called step by step."""
