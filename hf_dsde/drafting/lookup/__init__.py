"""Drafts out of texts that are there already: the row's own, earlier answers, a corpus. No model is asked."""
