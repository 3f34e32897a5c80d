"""A draft step whose outputs are the next one's inputs: once recorded, a chain of them is as many replays."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.execution.block_buffers import BlockBuffers
from hf_dsde.execution.cuda_graphs import Replay
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.execution.token_choice import Chosen, FillNumbers, TokenChoice

LONGEST_CHAIN = 64
"""Tokens of a row that are kept while it drafts."""


@dataclass(frozen=True)
class Chain:
    """What is drafted without the host in between, each step fed what the one before gave.

    Attributes:
        block: Returns one of one column, in each row its first draft token, and its position; asked where the chain
            begins.
        lengths: Tokens that each row drafts in all, `[rows]`, int64; what it gets beyond is anything.
        steps: Tokens that the row which drafts most drafts after its first; at least 1.
        longest: A bound, known without asking the device, on the largest slot + 1.
        choice: Makes tokens of logits.
        exit_layer: The layer that passes end after, if not all are run.
        keeps_logits: Whether somebody looks at what the tokens were chosen from.
        goes_on: Whether the steps of the runner's last chain are the first ones of this one.
        fill: Gives what `choice` takes of random numbers, step by step; None if it takes none.
    """

    block: Callable[[], RowBlock]
    lengths: Tensor
    steps: int
    longest: int
    choice: TokenChoice
    exit_layer: int | None = None
    keeps_logits: bool = False
    goes_on: bool = False
    fill: FillNumbers | None = None


@dataclass(frozen=True)
class DraftedChain:
    """What a chain brought.

    Attributes:
        tokens: First draft tokens and those of the steps, `[rows, 1 + steps]`, int64.
            Of drawn ones the first is as the draft was fed it, and the others as the target knows them.
        logits: The draft's own that the steps chose from, `[rows, steps, its vocabulary]`, float32; None if they were
            not to be kept.
        probs: What the steps drew from, `[rows, steps, vocabulary]`, float32; None if they did not draw.
    """

    tokens: Tensor
    logits: Tensor | None = None
    probs: Tensor | None = None


class ChainStep:
    """The static tensors of a recorded step of one token per row. They are its inputs, and it leaves the next one's.

    Args:
        buffers: What the pass reads, of one column. Where nothing is drawn, its tokens are replaced by the last line of
            `tokens`.
        choice: Makes tokens of logits.
        numbers: What `choice` reads of random numbers, `[rows, choice.numbers]`, float32; None if it takes none. They
            are filled in before each replay: nothing that is recorded draws any, so recording leaves no generator
            changed, and which numbers a step gets does not depend on what was recorded when.

    Attributes:
        choice: As given.
        tokens: A line per step, the last one on the bottom, `[LONGEST_CHAIN, rows]`, int64.
        places: Positions after those of the tokens that are fed next, `[rows, 1]`, int64.
        ends: Positions after those of each row's last token, which is not fed, `[rows, 1]`, int64.
    """

    def __init__(self, buffers: BlockBuffers, choice: TokenChoice, numbers: Tensor | None = None) -> None:
        rows, _ = buffers.tokens.shape
        self.buffers = buffers
        self.choice = choice
        self.numbers = numbers
        self.tokens = buffers.tokens.new_zeros(LONGEST_CHAIN, rows)
        if numbers is None:
            buffers.tokens = self.tokens[-1][:, None]
        self.places = torch.zeros_like(buffers.positions)
        self.ends = torch.zeros_like(buffers.positions)
        self._zero = self.places.new_tensor(0)

    def begin(self, chain: Chain, of_rows: Callable[[Tensor], Tensor]) -> None:
        """Take the first step's inputs.

        Args:
            chain: Of the whole batch.
            of_rows: Gives the rows of a tensor that the step runs.
        """
        block, buffers = chain.block().map(of_rows), self.buffers
        buffers.tokens.copy_(block.tokens)
        if self.numbers is not None:
            self.tokens[-1].copy_(block.tokens[:, 0])
        torch.add(block.positions, 1, out=self.places)
        torch.add(block.positions, of_rows(chain.lengths)[:, None], out=self.ends)
        if buffers.states is not None and block.states is not None:
            buffers.states.copy_(block.states)

    def aim(self) -> None:
        """Recorded in front of the pass: rows that have drafted all their tokens have none to feed."""
        torch.where(self.places < self.ends, self.places, self._zero, out=self.buffers.positions)
        self.buffers.positions.sub_(1)
        self.places.add_(1)

    def feed(self, chosen: Chosen, output: PassOutput) -> None:
        """Recorded after the pass: what it gave is what the next one reads.

        Args:
            chosen: Of the pass's logits.
            output: Of the pass, `[rows, 1, ...]`.
        """
        self.tokens.copy_(torch.cat([self.tokens[1:], chosen.tokens[None]]))
        if self.numbers is not None:
            self.buffers.tokens.copy_(chosen.fed[:, None])
        if self.buffers.states is not None:
            self.buffers.states.copy_(output.hidden[0])

    def around(self, forward: Callable[[], PassOutput], model: PreTrainedModel) -> Callable[[], PassOutput]:
        """Return what is recorded: the pass `forward` over the static tensors of `buffers`, and what comes of it."""

        def body() -> PassOutput:
            self.aim()
            output = forward()
            chosen = self.choice(model, output.logits[:, 0], self.numbers)
            self.feed(chosen, output)
            return output if chosen.probs is None else output._replace(probs=chosen.probs[:, None])

        return body

    def go_on(self, lengths: Tensor, done: int) -> None:
        """Take note of how much rows draft in all, `[rows]`, int64, after so many steps."""
        torch.add(self.places, lengths[:, None] - (done + 1), out=self.ends)

    def drafted(self, steps: int) -> Tensor:
        """Return the first draft tokens and those of `steps` replays, `[rows, 1 + steps]`, int64; a copy."""
        return self.tokens[-steps - 1 :].T.clone()


@dataclass
class BegunChain:
    """A chain under way: more steps may follow, as long as rows and the bound on lengths are the same.

    Attributes:
        replay: Runs a step.
        step: Its static tensors.
        conditions: What has to be the same.
        steps: How many were run.
        logits: What they chose from, `[rows, 1, its vocabulary]`, float32, as far as it was kept.
        probs: What they drew from, `[rows, 1, vocabulary]`, float32, if they draw.
    """

    replay: Replay[PassOutput]
    step: ChainStep
    conditions: Hashable
    steps: int = 0
    logits: list[Tensor] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)

    def may_become(self, chain: Chain, conditions: Hashable) -> bool:
        """Whether a chain can go on with this one."""
        return self.conditions == conditions and len(self.logits) >= self.steps * chain.keeps_logits

    def run(self, chain: Chain, of_rows: Callable[[Tensor], Tensor]) -> None:
        """Run the steps that are missing; `of_rows` as in `ChainStep.begin`."""
        if 0 < self.steps < chain.steps:
            self.step.go_on(of_rows(chain.lengths), self.steps)
        for done in range(self.steps, chain.steps):
            if self.step.numbers is not None and chain.fill is not None:
                chain.fill(self.step.numbers, done + 1)
            self.replay()
            output = self.replay.output
            if chain.keeps_logits:
                self.logits.append(output.logits.to(torch.float32, copy=True))
            if output.probs is not None:
                self.probs.append(output.probs.clone())
        self.steps = max(self.steps, chain.steps)

    def drafted(self, chain: Chain, of_everyone: Callable[[Tensor], Tensor]) -> DraftedChain:
        """Return what a chain asks for; `of_everyone` gives tensors of the rows that were run a line for each row."""

        def kept(steps: list[Tensor]) -> Tensor:
            return of_everyone(torch.cat(steps[: chain.steps], dim=1))

        return DraftedChain(
            of_everyone(self.step.drafted(self.steps)[:, : chain.steps + 1]),
            kept(self.logits) if chain.keeps_logits else None,
            kept(self.probs) if self.probs else None,
        )
