"""The parts of `distill_draft.py`: prompts, generation of training text, training, evaluation."""
