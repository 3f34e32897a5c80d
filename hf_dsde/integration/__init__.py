"""How `generate` gets to the loop, and what it gets back."""
