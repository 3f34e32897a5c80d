"""The parts of `distill_draft.py` and `train_head.py`: prompts, generation, training, evaluation."""
