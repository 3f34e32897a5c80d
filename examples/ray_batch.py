"""Batch inference with Ray Data: a pool of actors, each with a pair of models of its own.

    python examples/ray_batch.py --model TARGET --assistant-model DRAFT --input prompts.jsonl --output results

Rows are those of `BatchGenerator`: a line of the input has a `prompt`, `text`, `messages` or `input_ids`. Plain text is
put into the tokenizer's chat template if there is one, as `hf-dsde generate` does. The output is a folder of Parquet or
JSON Lines files, with the columns of the input and those of `BatchGenerator.__call__` beside them. Ray starts on this
machine unless `RAY_ADDRESS` names a cluster. Needs `pip install 'hf-dsde[ray]'`.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import ray
import typer

COLUMNS = {
    "generated_text": pa.string(),
    "generated_token_ids": pa.list_(pa.int64()),
    "finish_reason": pa.string(),
    "generation_error": pa.string(),
    "generation_statistics": pa.struct(
        [(name, pa.int64()) for name in ("prompt_tokens", "new_tokens", "rounds", "drafted", "accepted")]
    ),
}
"""What is added to every row. Named types, since a block whose texts are all empty would not show theirs."""


class OutputFormat(str, Enum):
    """Files that Ray writes."""

    parquet = "parquet"
    json = "json"


class Generates:
    """What one actor does: it loads the models once, and generates for one block of rows after the other.

    Args:
        model: Folder or Hub id of the target.
        assistant_model: Folder or Hub id of the draft.
        dtype: Name of the dtype of both.
        **settings: Arguments of `BatchGenerator`.
    """

    def __init__(self, model: str, assistant_model: str, dtype: str, **settings: Any) -> None:
        # Here, since only actors need torch: the driver may be a machine without it.
        import torch

        from hf_dsde import BatchGenerator
        from hf_dsde.pairs import load_pair

        # Ray shows an actor no other devices than its own.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        pair = load_pair(model, assistant_model, getattr(torch, dtype), device)
        settings.setdefault("chat", pair.tokenizer.chat_template is not None)
        self._generator = BatchGenerator(pair.target, pair.tokenizer, assistant_model=pair.draft, **settings)

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Add the columns of `COLUMNS` to a block of rows."""
        generated = self._generator(rows.to_pydict())
        for name, kind in COLUMNS.items():
            rows = rows.append_column(name, pa.array(generated[name], kind))
        return rows


def main(
    *,
    model: Annotated[str, typer.Option(help="Target: a folder or a Hub id.")],
    assistant_model: Annotated[str, typer.Option(help="Draft: a folder or a Hub id.")],
    input_file: Annotated[str, typer.Option("--input", help="JSON Lines with one prompt each; a file or a folder.")],
    output: Annotated[Path, typer.Option(help="Folder of the results.")],
    output_format: Annotated[OutputFormat, typer.Option("--format", help="Of the results.")] = OutputFormat.parquet,
    actors: Annotated[int, typer.Option(min=1, help="Actors; each loads both models.")] = 1,
    gpus_per_actor: Annotated[float, typer.Option(min=0, help="1 on GPUs; 0 runs on the CPU.")] = 0,
    cpus_per_actor: Annotated[float, typer.Option(min=0, help="Ray needs some CPU beside the actors'.")] = 0.5,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of each actor's batch.")] = 32,
    rows_per_call: Annotated[
        int | None, typer.Option(min=1, help="Rows that an actor gets at a time; 16 batches if not given.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens behind each prompt.")] = 256,
    speculation_policy: Annotated[str, typer.Option(help="How many tokens each row drafts.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of both models.")] = "bfloat16",
) -> None:
    """Generate for every line of the input."""
    ray.init(ignore_reinit_error=True, include_dashboard=False)
    # The end of a call has rows without a text to generate, so a call should be long against a batch.
    rows_per_call = rows_per_call or 16 * batch_size
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    results = (
        ray.data.read_json(input_file, lines=True)
        # One actor takes one block at a time, and a file is one block.
        .repartition(target_num_rows_per_block=rows_per_call)
        .map_batches(
            Generates,
            fn_constructor_kwargs={
                "model": model,
                "assistant_model": assistant_model,
                "dtype": dtype,
                "batch_size": batch_size,
                "max_new_tokens": max_new_tokens,
                "speculation_policy": speculation_policy,
                "do_sample": False,
            },
            batch_size=rows_per_call,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=actors),
            num_cpus=cpus_per_actor,
            num_gpus=gpus_per_actor,
        )
    )
    write = results.write_parquet if output_format is OutputFormat.parquet else results.write_json
    write(str(output.absolute()))
    del results  # the actors end with what refers to them, and all at once with Ray
    ray.shutdown()


if __name__ == "__main__":
    typer.run(main)
