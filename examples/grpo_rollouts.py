"""Train with TRL's GRPO, its rollouts drafted by a smaller model or a head.

    python examples/grpo_rollouts.py --output trained
    python examples/grpo_rollouts.py --model path/to/model --draft path/to/draft --keep-memory --output trained

The trainer calls `generate` itself, so the draft is named once, to `hf_dsde.enable`; whatever is written is the model's
own law, after every step. The draft is not trained. As the model moves away from it, fewer of its tokens stand and the
policy has it draft less, in the end nothing: the lines that are printed show it.

The reward is that of a sum, 1 for the right number. Needs `pip install 'hf-dsde[grpo]'`.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

import hf_dsde
from hf_dsde.pairs import load_packaged_pair, load_pair


class Watch(hf_dsde.RoundListener, TrainerCallback):
    """Counts the rounds of a step's rollouts and prints them."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._rounds = self._emitted = self._drafted = self._accepted = 0

    def on_round(self, record: hf_dsde.RoundRecord) -> None:
        """Count a round; `active` rows would each have got one token without drafts."""
        self._rounds += sum(record.active)
        self._emitted += sum(record.emitted)
        self._drafted += sum(record.drafted)
        self._accepted += sum(record.accepted)

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002 - the trainer's arguments
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Print what the step's rollouts were made of."""
        rate = f"{self._accepted / self._drafted:.2f}" if self._drafted else "none were drafted"
        per_pass = f"{self._emitted / self._rounds:.2f}" if self._rounds else "no"
        print(f"step {state.global_step}: {per_pass} tokens per pass and row, acceptance {rate}")
        self._begin()


def sums(count: int, tokenizer: PreTrainedTokenizerBase, seed: int) -> Dataset:
    """Questions after a sum, each with its answer."""
    draw = random.Random(seed)
    pairs = [(draw.randint(2, 99), draw.randint(2, 99)) for _ in range(count)]
    texts = [f"What is {a} + {b}? Answer with the number." for a, b in pairs]
    prompts: list[Any] = list(texts)
    if tokenizer.chat_template is not None:
        prompts = [[{"role": "user", "content": text}] for text in texts]
    return Dataset.from_dict({"prompt": prompts, "answer": [str(a + b) for a, b in pairs]})


def right_number(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where the last number of a completion is the answer, 0 elsewhere."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    found = [re.findall(r"\d+", text) for text in texts]
    return [float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(found, answer, strict=True)]


def main(
    *,
    output: Annotated[Path, typer.Option(help="Folder of the trained model.")],
    model: Annotated[str | None, typer.Option(help="Folder or Hub id; the packaged model without.")] = None,
    draft: Annotated[str | None, typer.Option(help="Its draft or head, likewise; needed with a model.")] = None,
    policy: Annotated[str, typer.Option(help="How many tokens each row drafts.")] = "auto",
    keep_memory: Annotated[
        bool | None,
        typer.Option(help="Whether caches and recorded passes stay on the GPU while the model trains. Not by default."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 20,
    rollouts: Annotated[int, typer.Option(min=2, help="Completions of each question.")] = 8,
    questions: Annotated[int, typer.Option(min=1, help="Questions in a step.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=1, help="Longest completion.")] = 128,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-6,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
) -> None:
    """Train, and save the model."""
    if (model is None) != (draft is None):
        raise typer.BadParameter("--model and --draft are a pair: name both, or neither for the packaged one.")
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    pair = load_packaged_pair(dtype, device) if model is None else load_pair(model, str(draft), dtype, device)
    watch = Watch()
    hf_dsde.enable(
        pair.target,
        assistant_model=pair.draft,
        speculation_policy=policy,
        speculation_config=hf_dsde.SpeculationConfig(options=hf_dsde.RuntimeOptions(keep_memory=keep_memory)),
        speculation_listeners=[watch],
    )
    settings = GRPOConfig(
        output_dir=str(output),
        max_steps=steps,
        num_generations=rollouts,
        per_device_train_batch_size=rollouts * questions,
        max_completion_length=new_tokens,
        learning_rate=learning_rate,
        seed=seed,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=pair.target,
        reward_funcs=right_number,
        args=settings,
        train_dataset=sums(steps * questions, pair.tokenizer, seed),
        processing_class=pair.tokenizer,
        callbacks=[watch],
    )
    trainer.train()
    trainer.save_model(str(output))


if __name__ == "__main__":
    typer.run(main)
