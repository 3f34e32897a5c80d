"""Colours and markers of all figures, in the order in which curves take them."""

COLOURS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9")
MARKERS = "osD^vPX<>*"
