"""What passes cost, as numbers: what is measured or given, and one call's live view of it."""

from hf_dsde.costs.live import LiveCosts
from hf_dsde.costs.model import BatchCosts, CostCurve, CostModel

__all__ = ["BatchCosts", "CostCurve", "CostModel", "LiveCosts"]
