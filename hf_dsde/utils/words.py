"""Words that results share, for whoever writes or reads them without a model."""

EXACT = "exact"
"""What results say of acceptance that is not lossy."""
