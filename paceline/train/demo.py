"""Make the demo pair: `python -m paceline.train.demo --out paceline/demo`.

The stages are tokenizer, target, drafter, export and model card. They keep their state in
`--work-dir`: after an interruption, even a kill, the same command goes on where it stopped. With
`--drafter-only` the target in `--out` stays, and its drafter trains further.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM

from paceline.bench.prompts import cut_prompts
from paceline.train import corpus
from paceline.train.distill import (
    GAMMA,
    DistillConfig,
    HeldOutAcceptance,
    distill,
    measure_acceptance,
)
from paceline.train.pretrain import (
    ExitQuality,
    PretrainConfig,
    Trained,
    measure_exits,
    new_model,
    pick_device,
    pretrain,
)
from paceline.train.tokenizer import load_tokenizer, pack, train_tokenizer


@dataclass(frozen=True)
class DemoText:
    """The tokenized corpus."""

    training: NDArray[np.uint16]  # [num_tokens]
    held_out: dict[str, NDArray[np.uint16]]  # source -> [num_tokens]
    sizes: dict[str, tuple[int, float]]
    """Training text: source -> (documents, megabytes)."""
    prompts: list[NDArray[np.uint16]]
    """Prompts like those of serving, cut from the training modules.  # [num_tokens] each"""


def prepare(
    work: Path, extra: Sequence[Path], vocab_size: int, max_documents: int | None = None
) -> DemoText:
    """Tokenize the corpus, with the tokenizer in `work` if there is one, else with a new one.

    Raises:
        ValueError: `work` was made from another corpus.
    """
    training, held_out = corpus.split(extra)
    random.Random(0).shuffle(training)
    if max_documents is not None:
        training, held_out = training[:max_documents], held_out[:max_documents]
    digest = hashlib.sha256(str(vocab_size).encode())
    for document in training:
        digest.update(document.text.encode())
    seal = work / "corpus.sha256"
    if seal.exists() and seal.read_text() != digest.hexdigest():
        raise ValueError(
            f"--work-dir {work} was made from another corpus (other --extra-corpus files or "
            "another Python version); choose another directory or remove it"
        )
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "tokenizer").exists():
        fresh = train_tokenizer((d.text for d in training), vocab_size)
        fresh.save_pretrained(work / "tokenizer.tmp")
        os.replace(work / "tokenizer.tmp", work / "tokenizer")
    tokenizer = load_tokenizer(work / "tokenizer")
    sources = sorted({d.source for d in held_out})
    text = DemoText(
        pack(tokenizer, [d.text for d in training]),
        {s: pack(tokenizer, [d.text for d in held_out if d.source == s]) for s in sources},
        {
            s: (
                sum(d.source == s for d in training),
                sum(len(d.text.encode()) for d in training if d.source == s) / 1e6,
            )
            for s in sorted({d.source for d in training})
        },
        [
            np.array(tokenizer.encode(prompt), np.uint16)
            for document in training
            if document.source == corpus.CODE
            for category in cut_prompts(document.text).values()
            for prompt in category
        ],
    )
    seal.write_text(digest.hexdigest())
    return text


def held_out_rows(stream: NDArray[np.uint16], count: int, length: int) -> Tensor:
    """At most `count` windows spread evenly over `stream`: int64 [rows, length + 1]."""
    starts = np.linspace(0, len(stream) - length - 1, count).astype(int)
    rows = np.stack([stream[s : s + length + 1] for s in starts]).astype(np.int64)
    return torch.from_numpy(rows).to(pick_device())


def export(model: LlamaForCausalLM, tokenizer_folder: Path, folder: Path) -> None:
    """Write a standard Hugging Face folder in bfloat16. Files are replaced one by one."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shipped = new_model(model.config, model.state_dict(), torch.bfloat16)
    shipped.generation_config = GenerationConfig.from_dict(
        {
            "bos_token_id": model.config.bos_token_id,
            "eos_token_id": model.config.eos_token_id,
            "pad_token_id": model.config.pad_token_id,
            "do_sample": False,
        }
    )
    shipped.save_pretrained(temporary)
    load_tokenizer(tokenizer_folder).save_pretrained(temporary)
    # transformers 5 writes the name of its own base class, which version 4 does not know.
    config_path = temporary / "tokenizer_config.json"
    config = json.loads(config_path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config = {k: v for k, v in config.items() if k not in ("is_local", "local_files_only")}
    config_path.write_text(json.dumps(config, indent=2) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    for path in temporary.iterdir():
        path.chmod(0o644)  # safetensors writes 0600; engines read weights as another user
        os.replace(path, folder / path.name)
    temporary.rmdir()


def load(folder: Path) -> LlamaForCausalLM:
    """The model that :func:`export` wrote, in float32."""
    loaded = LlamaForCausalLM.from_pretrained(folder)
    return new_model(loaded.config, loaded.state_dict())


def copy_tokenizer(folder: Path, work: Path) -> None:
    """Copy an exported model's tokenizer to the place where :func:`prepare` looks for one."""
    (work / "tokenizer").mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, work / "tokenizer" / name)


def model_card(
    text: DemoText,
    target: Trained,
    drafter: Trained,
    exits: dict[str, list[ExitQuality]],
    acceptance: dict[str, HeldOutAcceptance],
    distill_config: DistillConfig,
    earlier: Sequence[str] = (),
) -> str:
    """The model card, in Markdown.

    Args:
        earlier: rows of the table of models, from the card of the pair that this training
            continues.
    """
    hardware = f"{torch.get_num_threads()} threads of a CPU ({platform.machine()})"
    if torch.cuda.is_available():
        hardware = torch.cuda.get_device_name()
    rows = list(earlier)
    for name, trained in (("target", target), ("drafter", drafter)):
        if earlier and name == "target":
            continue
        c = trained.model.config
        parameters = sum(p.numel() for p in trained.model.parameters()) / 1e6
        rows.append(
            f"| {name} | {c.num_hidden_layers} | {c.hidden_size} | {c.intermediate_size} "
            f"| {c.num_attention_heads} | {parameters:.2f} M | {2 * parameters:.1f} MB "
            f"| {trained.steps:,} | {trained.tokens / 1e6:.1f} M | {trained.seconds / 60:.0f} min |"
        )
    sizes = ", ".join(f"{s}: {n:,} documents, {mb:.1f} MB" for s, (n, mb) in text.sizes.items())
    sources = list(exits)
    head = " | ".join(f"{s}: loss | {s}: agreement" for s in sources)
    exit_rows = []
    for i in range(len(exits[sources[0]])):
        cells = " | ".join(f"{exits[s][i].loss:.3f} | {exits[s][i].agreement:.3f}" for s in sources)
        exit_rows.append(f"| {i + 1} | {cells} |")
    acceptance_rows = [
        f"| {s} | {a.agreement:.3f} | {a.overlap:.3f} | {a.written_agreement:.3f} | {a.tau:.2f} "
        f"| {a.repetition:.2f} |"
        for s, a in acceptance.items()
    ]
    return "\n".join(
        [
            "# Model card: the Paceline demo pair",
            "",
            "Written by `python -m paceline.train.demo`; the numbers are those of the weights "
            "beside it. A Llama-type target and a drafter distilled from it, small enough to run "
            "on a laptop's CPU without a download.",
            "",
            "| | layers | width | FFN | heads | parameters | size | steps | tokens | training |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"Byte-level BPE tokenizer, {target.model.config.vocab_size:,} entries. Embedding and "
            "LM head are tied, positions go up to "
            f"{target.model.config.max_position_embeddings:,}.",
            "",
            "## Data and licences",
            "",
            f"Training text: {sizes}; {len(text.training) / 1e6:.2f} M tokens. `code` is the "
            f"standard library of CPython {platform.python_version()} (PSF licence version 2) "
            "without tests, character tables and generated documentation. `gsm8k_train`, where "
            "listed, is the training part of GSM8K (Cobbe et al. 2021, MIT licence). A tenth of "
            "the modules and of the records, chosen by hash, was held out; all numbers below are "
            "on held-out text.",
            "",
            "## Training",
            "",
            f"On {hardware}, PyTorch {torch.__version__.split('+')[0]}, bfloat16 autocast. The "
            "target is trained with layer dropout and early-exit losses (LayerSkip, arXiv "
            "2404.16710), most often at layers 2 and 4, with Muon for the layers' matrices and "
            "AdamW for the rest. The drafter starts from the target's embedding and first layers "
            f"and is distilled from its {distill_config.top_k} most probable tokens at each "
            "position of the training text and of text the target wrote itself: greedily, seven "
            "times in eight, after prompts that are cut from the modules to train on as those of "
            "`paceline bench` are from the ones held out, and after windows of the training text. "
            "The target's time for those, at most "
            f"{100 * (distill_config.sample_share + distill_config.cache_share):.0f} % of the "
            "drafter's budget, is not in the table."
            + (" The last row went on from the weights of the one above." if earlier else ""),
            "",
            "## Early exits of the target",
            "",
            "Loss in nats a token, read out through the shared norm and LM head; agreement is the "
            "share of positions where the exit's most probable token is the last layer's.",
            "",
            f"| layer | {head} |",
            "|---" * (1 + 2 * len(sources)) + "|",
            *exit_rows,
            "",
            "## The drafter",
            "",
            "On held-out text: the share of positions where drafter and target have the same most "
            "probable token, and 1 - TV. On what the target writes greedily after held-out "
            f"prompts: the same share, and the mean accepted length of greedy chains of {GAMMA} "
            "(next token included). Repetition is the share of the written tokens that end a run "
            "of 8 tokens which the same text already contains.",
            "",
            f"| | agreement | 1 - TV | agreement, written | mean accepted length, γ = {GAMMA} "
            "| repetition |",
            "|---|---|---|---|---|---|",
            *acceptance_rows,
            "",
            "## Intended use and limits",
            "",
            "For trying, testing and measuring speculative decoding: every method, topology and "
            "search of Paceline runs on this pair offline. It is no assistant: the code it writes "
            "only looks like Python, its arithmetic is mostly wrong, greedy text soon repeats "
            "itself, and it knows little beyond the standard library's style. Repetition raises "
            "acceptance, so do not expect its acceptance rates from larger models.",
            "",
        ]
    )


def make(
    out: Path,
    work: Path,
    extra: Sequence[Path],
    target_config: PretrainConfig,
    distill_config: DistillConfig,
    max_documents: int | None = None,
    drafter_only: bool = False,
) -> None:
    """Run the stages that `work` does not hold yet, then write the folders of `out`.

    Args:
        drafter_only: keep the target in `out`, and train its drafter further.
    """
    start, earlier = None, []
    if drafter_only:
        copy_tokenizer(out / "target", work)
        text = prepare(work, extra, target_config.vocab_size, max_documents)
        target, start = Trained(load(out / "target"), 0, 0, 0.0), load(out / "drafter")
        card = (out / "MODEL_CARD.md").read_text(encoding="utf-8").splitlines()
        earlier = [row for row in card if row.startswith(("| target |", "| drafter |"))]
    else:
        text = prepare(work, extra, target_config.vocab_size, max_documents)
        target = pretrain(target_config, text.training, work / "target.pt")
        export(target.model, work / "tokenizer", out / "target")
    drafter = distill(
        target.model, target_config, distill_config, text.training, text.prompts,
        out / "target", work, start,
    )  # fmt: skip
    export(drafter.model, work / "tokenizer", out / "drafter")
    exits, acceptance = {}, {}
    # As the CPU engine computes: in float32, with the weights rounded to bfloat16 as they ship.
    shipped, proposer = (
        new_model(t.model.config, {k: v.bfloat16() for k, v in t.model.state_dict().items()})
        for t in (target, drafter)
    )
    length = min(512, target_config.sequence_length)
    for source, stream in text.held_out.items():
        rows = held_out_rows(stream, 64 if max_documents is None else 4, length)
        exits[source] = measure_exits(shipped, rows)
        acceptance[source] = measure_acceptance(
            shipped, proposer, rows, distill_config.prompt_length
        )
    page = model_card(text, target, drafter, exits, acceptance, distill_config, earlier)
    (out / "MODEL_CARD.md").write_text(page, encoding="utf-8")
    print(page)


def smoke_configs() -> tuple[PretrainConfig, DistillConfig]:
    """Shapes and budgets of `--smoke`, which runs every stage within a minute."""
    target = PretrainConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_layers=4, num_heads=2,
        max_steps=30, batch_size=4, sequence_length=64, checkpoint_seconds=0.0,
    )  # fmt: skip
    drafter = DistillConfig(
        minutes=0.02, max_steps=20, intermediate_size=96, top_k=8, sample_batch=4,
        sequence_length=64, prompt_length=16, checkpoint_seconds=0.0,
    )  # fmt: skip
    return target, drafter


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    defaults, drafter_defaults = PretrainConfig(), DistillConfig()
    parser = argparse.ArgumentParser(
        prog="python -m paceline.train.demo",
        description="Train the demo pair from scratch. Interrupt it at any moment: the same "
        "command resumes where it stopped.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("paceline/demo"), help="folder for the weights"
    )
    parser.add_argument(
        "--extra-corpus", type=Path, action="append", default=[], metavar="FILE",
        help="text beside the standard library (repeatable): jsonl with question and answer "
        "fields or a text field, or plain text",
    )  # fmt: skip
    parser.add_argument("--minutes-target", type=float, default=defaults.minutes)
    parser.add_argument("--minutes-drafter", type=float, default=drafter_defaults.minutes)
    parser.add_argument(
        "--work-dir", type=Path, default=Path("build/demo"), help="checkpoints and caches"
    )
    parser.add_argument(
        "--threads", type=int,
        help="CPU threads (default: PyTorch's choice); on a busy machine set "
        "GOMP_SPINCOUNT=0, or threads that spin while they wait cost most of the speed",
    )  # fmt: skip
    parser.add_argument(
        "--drafter-only", action="store_true",
        help="keep the target in --out and train its drafter further; needs an empty --work-dir",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--smoke", action="store_true", help="tiny models and budgets, to test the pipeline"
    )
    args = parser.parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    for path in args.extra_corpus:
        if not path.is_file():
            parser.error(f"--extra-corpus {path}: no such file")
    if args.smoke:
        os.environ["PACELINE_EAGER"] = "1"  # compiling would take longer than training
        target, drafter = smoke_configs()
        documents = 60
    else:
        target = replace(defaults, minutes=args.minutes_target)
        drafter = replace(drafter_defaults, minutes=args.minutes_drafter)
        documents = None
    target, drafter = replace(target, seed=args.seed), replace(drafter, seed=args.seed)
    make(args.out, args.work_dir, args.extra_corpus, target, drafter, documents, args.drafter_only)


if __name__ == "__main__":
    main()
