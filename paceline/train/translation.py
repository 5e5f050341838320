"""The recipe of the small translators: `python -m paceline.train.translation --out FOLDER`.

Two models of the BART kind over one made text pair, German sentences of parts and their English.
The target writes in order. The drafter, Generalised Aggressive Decoding's (Ge et al. 2022, arXiv
2205.10350), fills a block of masks behind what is written, all at once; it is trained as a glancing
transformer (Qian et al. 2021, arXiv 2008.07905): the more of a block it gets wrong, the more of its
tokens it is shown before it learns the others.

A part of a sentence has one or two translations, and which of two the text has is chance. So the
target is unsure between them, and a drafter that fills positions side by side may mix them.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from paceline.config import SpeculationConfig
from paceline.loading import load_engine
from paceline.models.non_autoregressive import everything_visible
from paceline.sampling import SamplingParams
from paceline.train.checkpoints import save_model
from paceline.train.conversations import GERMAN
from paceline.train.pretrain import Trainer, build_optimizers
from paceline.train.tokenizer import train_tokenizer

MASK = "<|mask|>"
MERGED = 640
"""Tokens that are learnt from the made text, single bytes among them."""
BLOCK = 25
"""Tokens of a block that the drafter learns to fill."""
GLANCE = 0.5
"""Share of a block's errors that the drafter is shown."""
CONTEXT = 160
ENGLISH = (
    (
        "The government", "The mayor of Hamburg", "A spokeswoman for the police",
        "The company from Munich", "The young doctor", "My brother", "The new coach",
        "The European Union", "A researcher at the university", "Our neighbour",
        "The newspaper", "The president", "A group of pupils", "The court",
        "The bank in Frankfurt", "A spokesman for the ministry", "The trade union",
        "The manufacturer", "Most of the citizens", "The museum",
    ),
    (
        "presented a plan on Monday,|introduced a plan on Monday,",
        "does not want to raise prices any further,|will not raise prices any further,",
        "has been waiting three weeks for an answer,|has waited for an answer for three weeks,",
        "spoke in Berlin about the future of the city,",
        "lost a lot of money last year,|lost much money in the past year,",
        "urgently needs new staff,|is urgently looking for new staff,",
        "rejected the proposal at first,|first rejected the proposal,",
        "had to close the road for several hours,", "is happy about the great success,",
        "warns of the consequences of the crisis,|warns about what follows from the crisis,",
        "plans to build a new bridge,|is planning a new bridge,",
        "cannot name the costs yet,|cannot say yet what it will cost,",
        "confirmed the report on Friday,", "bought an old house by the lake,",
        "calls for better traffic rules,|demands better rules for traffic,",
        "sells more bicycles every year,|sells more bicycles each year,",
        "invited the children to a party,", "is investigating the accident of Sunday,",
        "reads the news every morning,|reads the news each morning,",
        "published a long study,",
    ),
    (
        "although many people are against it.|even though many people oppose it.",
        "because the weather was so bad.", "to protect the environment.",
        "as a newspaper reports.|according to a newspaper.",
        "after the negotiations had failed.|after the talks broke down.",
        "so that more flats are built.",
        "but no one knows how long it will take.|but how long it will take is unknown.",
        "and that is only the beginning.|and this is just the start.",
        "without asking the neighbours.",
        "as soon as parliament has agreed.|once parliament has agreed.",
        "because the number of tourists is rising.|as the number of tourists is rising.",
        "before winter begins.|before the winter starts.",
        "which has long been common in other countries.", "yet success is uncertain.",
        "she told the press.", "and the family is helping.|and the family helps with it.",
        "if there is enough money.", "since the border has been open again.",
        "while the economy grows slowly.|while the economy is growing slowly.",
        "so there are many questions.|therefore there are many questions.",
    ),
)  # fmt: skip
"""Translations of the parts in ``GERMAN``; ``|`` is between the two of a part."""

Choice = tuple[int, int, int]
"""A sentence: the number of each of its parts."""


def german(choice: Choice) -> str:
    return " ".join(parts[i] for parts, i in zip(GERMAN, choice, strict=True))


def translations(choice: Choice) -> list[str]:
    """All right translations of a sentence."""
    parts = (parts[i].split("|") for parts, i in zip(ENGLISH, choice, strict=True))
    return [" ".join(each) for each in product(*parts)]


def is_held_out(choice: Choice) -> bool:
    """A seventh of all sentences is not trained on."""
    return sum(choice) % 7 == 0


def some_sentence(rng: random.Random, held_out: bool) -> Choice:
    """A sentence that is held out, or one that is not."""
    while True:
        first, second, third = (rng.randrange(len(parts)) for parts in GERMAN)
        if is_held_out((first, second, third)) == held_out:
            return first, second, third


def some_text(rng: random.Random, held_out: bool) -> list[Choice]:
    """One or two sentences."""
    return [some_sentence(rng, held_out) for _ in range(rng.randint(1, 2))]


class Pairs:
    """The made text as rows of tokens."""

    def __init__(self) -> None:
        words = [*(part for parts in GERMAN for part in parts)]
        words += [part for parts in ENGLISH for both in parts for part in both.split("|")]
        self.tokenizer = train_tokenizer([f"{word} {word}" for word in words], MERGED)
        self.tokenizer.add_special_tokens({"additional_special_tokens": [MASK]})
        self.end, self.start = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        self.mask = self.tokenizer.get_vocab()[MASK]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def batch(self, rng: random.Random, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sources and their translations with an end, padded.

        # int64 [count, longest source], int64 [count, longest target]
        """
        sources, targets = [], []
        for _ in range(count):
            text = some_text(rng, held_out=False)
            sources.append(self.encode(" ".join(map(german, text))))
            english = " ".join(rng.choice(translations(choice)) for choice in text)
            targets.append([*self.encode(english), self.end])
        return self._padded(sources), self._padded(targets)

    def _padded(self, rows: Sequence[list[int]]) -> torch.Tensor:
        tensors = [torch.tensor(row) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=self.start)


def new_translator(pairs: Pairs, decoder_layers: int) -> Any:
    """A random model with two encoder layers, width 64."""
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=len(pairs.tokenizer), d_model=64, encoder_layers=2, encoder_ffn_dim=128,
        decoder_layers=decoder_layers, decoder_ffn_dim=128, encoder_attention_heads=4,
        decoder_attention_heads=4, max_position_embeddings=CONTEXT, dropout=0.0,
        pad_token_id=pairs.start, bos_token_id=pairs.end, eos_token_id=pairs.end,
        decoder_start_token_id=pairs.start, forced_eos_token_id=None, init_std=0.05,
        dtype=torch.bfloat16,
    )  # fmt: skip
    return BartForConditionalGeneration(config)


def shifted(start: int, targets: torch.Tensor) -> torch.Tensor:
    """What a decoder reads to write ``targets`` in order.  # int64 [rows, length]"""
    return F.pad(targets[:, :-1], (1, 0), value=start)


class Glancing:
    """Blocks of masks, and what the drafter learns of them.

    Args:
        pairs: made text.
        model: the drafter in training.
    """

    def __init__(self, pairs: Pairs, model: Any) -> None:
        self.pairs, self.model = pairs, model

    def logits(
        self, sources: torch.Tensor, states: Any, tokens: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Of every position, which sees all up to the end of its row's block.

        # int64 [rows, source], states, int64 [rows, length], int64 [rows] -> [rows, length, vocab]
        """
        seen = torch.arange(tokens.shape[1]) < lengths[:, None]
        found: torch.Tensor = self.model(
            encoder_outputs=states,
            attention_mask=sources != self.pairs.start,
            decoder_input_ids=tokens,
            decoder_attention_mask=everything_visible(seen),
            use_cache=False,
        ).logits
        return found

    def loss(self, rng: random.Random, sources: torch.Tensor, targets: torch.Tensor) -> Any:
        """Cross entropy of the masked tokens that are not shown."""
        pairs, (rows, longest) = self.pairs, targets.shape
        ends = (targets != pairs.start).sum(1)
        begins = torch.tensor([rng.randrange(int(end)) for end in ends])
        places = torch.arange(longest)
        masked = (places >= begins[:, None]) & (places < begins[:, None] + BLOCK)
        # A block may reach beyond the end: its masks are there, but nothing is learnt of them.
        lengths = begins + BLOCK + 1
        labels = torch.where(masked & (targets != pairs.start), targets, -100)
        # The token of place i lies at i + 1, behind the decoder's start token.
        tokens = F.pad(targets.masked_fill(masked, pairs.mask), (1, BLOCK), value=pairs.mask)
        tokens[:, 0] = pairs.start
        states = self.model.get_encoder()(sources, attention_mask=sources != pairs.start)
        with torch.no_grad():
            first = self.logits(sources, states, tokens, lengths)[:, 1 : longest + 1].argmax(-1)
        wrong = ((first != labels) & (labels >= 0)).sum(1)
        share = GLANCE * wrong / (labels >= 0).sum(1)
        shown = (labels >= 0) & (torch.rand(rows, longest) < share[:, None])
        tokens[:, 1 : longest + 1] = torch.where(shown, targets, tokens[:, 1 : longest + 1])
        labels = labels.masked_fill(shown, -100)
        logits = self.logits(sources, states, tokens, lengths)[:, 1 : longest + 1]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(out: Path, steps: int, batch: int = 32, seed: int = 0) -> None:
    """Train and write both models; the same call goes on from its checkpoints after a kill."""
    pairs = Pairs()
    for name, decoder_layers in (("target", 2), ("drafter", 2)):
        torch.manual_seed(seed)
        model = new_translator(pairs, decoder_layers).float().train()
        (out / name).mkdir(parents=True, exist_ok=True)
        trainer = Trainer(
            out / f"{name}.pt", model, build_optimizers(model, 0.02, 5e-3),
            minutes=10.0, max_steps=steps, warmup=0.05, checkpoint_seconds=20.0, label=name,
        )  # fmt: skip
        glancing = Glancing(pairs, model)

        def loss_of_step(
            step: int, _progress: float, name: str = name, model: Any = model,
            glancing: Glancing = glancing,
        ) -> tuple[torch.Tensor, float, int]:  # fmt: skip
            rng = random.Random(seed + step)
            torch.manual_seed(seed + step)
            sources, targets = pairs.batch(rng, batch)
            if name == "drafter":
                loss = glancing.loss(rng, sources, targets)
            else:
                logits = model(
                    sources, attention_mask=sources != pairs.start,
                    decoder_input_ids=shifted(pairs.start, targets), use_cache=False,
                ).logits  # fmt: skip
                labels = targets.masked_fill(targets == pairs.start, -100)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return loss, float(loss.detach()), targets.numel()

        trainer.run(loss_of_step)
        model.eval()
        if name == "drafter":
            model.config.mask_token_id = pairs.mask
        like = out / "tokenizer"
        pairs.tokenizer.save_pretrained(like)
        model.config.dtype = torch.bfloat16
        model.config.save_pretrained(like)
        save_model(model, like, out / name)
        shutil.rmtree(like)


@dataclass(frozen=True, slots=True)
class Quality:
    """What a method makes of held-out texts.

    Attributes:
        right: share of texts of which every sentence is one of its translations.
        same: share of texts that are those of AR.
        num_tokens, num_rounds: of a text, on average.
    """

    right: float
    same: float
    num_tokens: float
    num_rounds: float


def measure(
    folder: Path, speculation: SpeculationConfig, *, count: int = 50, seed: int = 1
) -> Quality:
    """Greedy translations of held-out texts by the target in ``folder``, with its drafter."""
    engine = load_engine(folder / "target", folder / "drafter")
    assert engine.tokenizer is not None
    rng = random.Random(seed)
    texts = [some_text(rng, held_out=True) for _ in range(count)]
    prompts = [engine.tokenizer.encode(" ".join(map(german, text))) for text in texts]
    params = SamplingParams(max_tokens=CONTEXT // 2)
    sessions = engine.generate(prompts, params, speculation)
    plain = engine.generate(prompts, params, SpeculationConfig(method="ar"))
    right = 0
    for text, session in zip(texts, sessions, strict=True):
        found = engine.tokenizer.decode(session.output_ids).removesuffix("<|endoftext|>")
        right += found in {" ".join(each) for each in product(*map(translations, text))}
    return Quality(
        right / count,
        sum(a.output_ids == b.output_ids for a, b in zip(sessions, plain, strict=True)) / count,
        sum(len(session.output_ids) for session in sessions) / count,
        sum(session.stats.num_rounds for session in sessions) / count,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="gets `target` and `drafter`")
    parser.add_argument("--steps", type=int, default=900)
    args = parser.parse_args()
    train(args.out, args.steps)
    print("ar", measure(args.out, SpeculationConfig(method="ar")))
    exact = SpeculationConfig(method="generalized_aggressive", length="fixed")
    print("generalized_aggressive", measure(args.out, exact))
    for tau in (1.0, 3.0):
        loose = SpeculationConfig.model_validate(
            {"method": "generalized_aggressive_tolerance", "tolerance_tau": tau}
            | {"allow_lossy": True}
        )
        print(f"generalized_aggressive_tolerance, tau {tau}", measure(args.out, loose))


if __name__ == "__main__":
    main()
