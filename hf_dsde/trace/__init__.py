"""Traces of a pair: recorded once with both models, replayed as often as wanted without any."""

from hf_dsde.trace.prompts import Prompt, read_prompts
from hf_dsde.trace.record import record_trace
from hf_dsde.trace.schema import Trace, load_trace
from hf_dsde.trace.summary import TaskSummary, summarise

__all__ = ["Prompt", "TaskSummary", "Trace", "load_trace", "read_prompts", "record_trace", "summarise"]
