"""A drafter with tokens of its own that learns as it serves, with the head that ends its drafts.

    python -m benchmarks.omnidraft                 # the demo target, five minutes of one core
    python -m benchmarks.omnidraft --traffic code --seconds 20

The demo target answers word problems, and the drafter with 768 tokens of its own, which learnt from
code, drafts for it. Before and after it has learnt from what it served, it drafts for new prompts:
chains of a fixed length, and drafts that the head of acceptance ends. Nothing of a measurement is
timed: the numbers are the same on every machine with the same kernels' numerics. How far it learns
in the given seconds is not.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.online import prompts_of
from paceline.config import SpeculationConfig
from paceline.demo import OWN_TOKENS_DIR
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.omnidraft import OmniDraft
from paceline.engine import Engine
from paceline.lengths.base import load_head
from paceline.lengths.specdecpp import acceptance_head
from paceline.loading import limit_threads, load_engine
from paceline.models.llama import LlamaRunner
from paceline.rejections import RejectionBuffer, RejectionRecorder
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.train.length_heads import DRAFT_COST, AcceptanceBlocks
from paceline.train.online import ONLINE_DIVERGENCES, OnlineTrainer

LENGTHS: tuple[dict[str, Any], ...] = (
    {"length": "fixed", "num_speculative_tokens": 4},
    {"length": "fixed", "num_speculative_tokens": 8},
    {"length": "specdecpp"},
)


def own_drafter(engine: Engine) -> tuple[OmniDraft, LlamaRunner]:
    """The drafter with tokens of its own, and what runs its model."""
    drafter = engine.drafters["omnidraft"]
    assert isinstance(drafter, OmniDraft)
    assert isinstance(drafter.model, DraftModel)
    assert isinstance(drafter.model.runner, LlamaRunner)
    return drafter, drafter.model.runner


def drafted_and_accepted(
    engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, **knobs: Any
) -> dict[str, float]:
    """Of greedy rounds with these prompts: own tokens drafted and target tokens accepted."""
    drafter, _ = own_drafter(engine)
    before, params = drafter.num_drafted, SamplingParams(max_tokens=tokens, ignore_eos=True)
    config = SpeculationConfig(method="omnidraft", **knobs)
    stats = [session.stats for session in engine.generate(prompts, params, config)]
    rounds, drafted = sum(each.num_rounds for each in stats), drafter.num_drafted - before
    return {
        "drafted": drafted / rounds,
        "accepted": sum(each.num_accepted for each in stats) / rounds,
        "tokens_per_cost": sum(s.num_tokens for s in stats) / (rounds + DRAFT_COST * drafted),
    }


def learn(engine: Engine, prompts: Iterator[list[int]], options: argparse.Namespace) -> int:
    """Serve for some seconds of processor time, and learn from it; returns the updates."""
    drafter, runner = own_drafter(engine)
    context = engine.length_context
    buffer = RejectionBuffer(options.update_interval, options.batch, seconds=3600.0)
    trainer = OnlineTrainer(
        OWN_TOKENS_DIR, buffer,
        divergence=options.divergence, learning_rate=options.lr, ngram_weight=options.ngram_weight,
        head=AcceptanceBlocks.of(load_head(context, "specdecpp", "omnidraft")),
    )  # fmt: skip
    recorder = RejectionRecorder(4096, records=lambda session: True, translator=drafter.translator)
    engine.events.watchers.append(recorder)
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    config = SpeculationConfig(method="omnidraft", length="fixed")
    ends = time.process_time() + options.seconds
    while time.process_time() < ends:
        while len(engine.sessions) < options.sessions:
            engine.submit(Request(next(prompts), params, config))
        engine.step()
        buffer.add(recorder.take())
        if trainer.update() is not None and trainer.num_updates % options.rollout == 0:
            runner.use_weights(runner.read_weights(trainer.weights()))
    runner.use_weights(runner.read_weights(trainer.weights()))
    acceptance_head(context, "omnidraft").use(trainer.head_weights())
    for session_id in list(engine.sessions):
        engine.cancel(session_id)
    engine.events.watchers.remove(recorder)
    return trainer.num_updates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="of one core, to learn in")
    parser.add_argument("--traffic", choices=["questions", "code"], default="questions")
    parser.add_argument("--measured", type=int, default=32, help="prompts to measure on")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--sessions", type=int, default=8, help="at the same time")
    parser.add_argument("--update-interval", type=int, default=64, help="drafts of an update")
    parser.add_argument("--batch", type=int, help="with older ones; default: none")
    parser.add_argument("--rollout", type=int, default=4, help="updates between new weights")
    parser.add_argument("--divergence", choices=ONLINE_DIVERGENCES, default="forward_kl")
    parser.add_argument("--ngram-weight", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    limit_threads(1)
    engine = load_engine(translate=True)
    assert engine.tokenizer is not None
    asked = list(islice(prompts_of(options.traffic, engine.tokenizer, 0), options.measured))
    result: dict[str, Any] = {}

    def measure(when: str) -> None:
        for knobs in LENGTHS:
            name = " ".join(str(value) for value in knobs.values())
            found = drafted_and_accepted(engine, asked, options.tokens, **knobs)
            result[f"{when}, {name}"] = found
            print(
                f"{when:6}  {name:10}  {found['drafted']:5.2f} drafted  "
                f"{found['accepted']:5.2f} accepted a round  {found['tokens_per_cost']:5.3f} tokens"
                f" a verification, with drafted tokens at {DRAFT_COST}", flush=True,
            )  # fmt: skip

    measure("before")
    result["updates"] = learn(engine, prompts_of(options.traffic, engine.tokenizer, 1), options)
    print(f"{result['updates']} updates in {options.seconds:.0f} s")
    measure("after")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
