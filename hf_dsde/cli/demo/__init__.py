"""`hf-dsde demo`."""
