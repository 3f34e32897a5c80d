"""The measurement of that name; its class is loaded by `evaluate.load`."""
