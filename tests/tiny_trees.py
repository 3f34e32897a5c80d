"""Small trees of candidates for a ragged batch, and the logits that plain decoding of each path gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from stored import store_texts
from tiny_models import VOCABULARY
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.row_block import RowBlock

LENGTHS = [9, 1, 14, 5]
"""Tokens of each text; the last of them is the root of its tree."""
PARENTS = [
    [-1, 0, 1, 0, 3, 3, 2, 5],  # two branches, taken up in turn; the second has siblings at one depth
    [-1],
    [-1, 0, 0, 0, 1, 2, 3],  # three branches side by side
    [-1, 0, 1, 2, 3],  # a chain
]
"""Which token of its row each token follows."""
WIDTH = 8


@dataclass(frozen=True)
class Trees:
    """Texts, and for each row the tokens of a tree."""

    texts: Tensor
    tokens: Tensor

    @classmethod
    def drawn(cls) -> Trees:
        generator = torch.Generator().manual_seed(11)
        texts = torch.randint(3, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=generator)
        tokens = torch.randint(3, VOCABULARY, (len(LENGTHS), WIDTH), generator=generator)
        tokens[:, 0] = texts[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1]
        return cls(texts, tokens)

    def path(self, row: int, index: int) -> list[int]:
        """Places of a token's ancestors and itself, from the root on."""
        above = [] if PARENTS[row][index] < 0 else self.path(row, PARENTS[row][index])
        return [*above, index]

    def block(self, size: int | None = None) -> RowBlock:
        """The trees as a runner gets them."""
        positions, slots = torch.full((2, len(LENGTHS), WIDTH), -1)
        ancestors = torch.zeros(len(LENGTHS), WIDTH, dtype=torch.long)
        for row, parents in enumerate(PARENTS):
            for index in range(len(parents)):
                path = self.path(row, index)
                positions[row, index] = LENGTHS[row] - 1 + len(path) - 1
                slots[row, index] = LENGTHS[row] - 1 + index
                ancestors[row, index] = sum(1 << place for place in path)
        counts = torch.tensor([len(parents) for parents in PARENTS])
        return RowBlock(self.tokens, positions, slots, ancestors, counts, size)

    @torch.no_grad()
    def run(self, runner: ModelRunner, block: RowBlock | None = None) -> PassOutput:
        """Store the texts but for their last tokens, then run the trees."""
        with runner.active():
            store_texts(runner, self.texts, [length - 1 for length in LENGTHS])
            return runner.forward(block or self.block(), max(LENGTHS) - 1 + WIDTH)

    @torch.no_grad()
    def check(self, model: PreTrainedModel, found: PassOutput, tolerance: float, layers: tuple[int, ...] = ()) -> None:
        """Compare every token with plain decoding of its path."""
        for row, parents in enumerate(PARENTS):
            for index in range(len(parents)):
                path = self.tokens[row, self.path(row, index)]
                text = torch.cat([self.texts[row, : LENGTHS[row] - 1], path])
                output = model(input_ids=text[None].to(model.device), output_hidden_states=bool(layers))
                pairs = [(found.logits[row, index], output.logits[0, -1].float())]
                for layer, states in zip(layers, found.hidden, strict=True):
                    pairs.append((states[row, index], output.hidden_states[layer][0, -1]))
                for ours, theirs in pairs:
                    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
