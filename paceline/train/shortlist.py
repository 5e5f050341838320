"""Fit the shortlist of a chat model's `eagle3`: `python -m paceline.train.shortlist`.

It reads conversations that `python -m paceline.train.smollm2` has written, drafts at the tokens of
their answers, and writes what :mod:`paceline.models.heads.shortlist` describes beside the head.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from paceline.errors import InvalidArgument, PacelineError
from paceline.gguf_folder import model_folder
from paceline.loading import limit_threads
from paceline.model_names import resolve_model
from paceline.models.heads.base import HeadTarget, load_head
from paceline.models.heads.eagle import MEASURED_DEPTH
from paceline.models.heads.eagle3 import Eagle3
from paceline.models.heads.shortlist import RANK, LowRankLogits, fit_shortlist, save_shortlist
from paceline.smollm2 import HEADS_DIR
from paceline.train.chat_head import ChatBatch, Talk, read_talks, write_features

LENGTH = 1024
"""Tokens of a conversation that count."""
MOST = 128
"""Conversations at most: their states, five for each token of an answer, are in memory together."""


def fit(folder: Path, model: str, conversations: Path, rank: int = RANK) -> LowRankLogits:
    """Fit the shortlist of a saved head, and write it beside the head.

    Args:
        folder: of an ``eagle3``.
        model: its target.
        conversations: folder of :func:`paceline.train.conversations.write_conversations`; gets the
            target's features.

    Raises:
        InvalidArgument: the folder has no conversations, the head is of another kind or has the
            layer of published drafters, or the rank is too high.
        ModelNotFound: there is no such head.
    """
    target = HeadTarget.from_folder(model_folder(resolve_model(model)))
    head = load_head(Eagle3, folder, target)
    if not isinstance(head, Eagle3):
        raise InvalidArgument("head", str(folder), "an eagle3 without the option published")
    write_features(conversations, model, head.options.features, LENGTH)
    training, held_out = read_talks([conversations], LENGTH, head.options.features)
    talks = [*training, *held_out]
    if not talks:
        raise InvalidArgument("conversations", str(conversations), "a folder with conversations")
    some = talks[:: -(-len(talks) // MOST)]
    states = torch.cat([states_of(head, talk) for talk in tqdm(some, desc="states", unit="talk")])
    made = fit_shortlist(states, head.output_rows, rank)
    save_shortlist(folder, made)
    return made


@torch.no_grad()
def states_of(head: Eagle3, talk: Talk) -> Tensor:
    """What the output layer reads while chains are drafted from each token of the answers.

    # [num_states, hidden_size]
    """
    batch = ChatBatch.of([talk])
    features = head.read(batch.features[:, :-1].float())
    states = []
    for depth, drafted in enumerate(head(features, batch.tokens[:, 1:], MEASURED_DEPTH)):
        seen = batch.places >= depth
        states.append(head.norm(drafted[batch.rows[seen], batch.places[seen]]))
    return torch.cat(states)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m paceline.train.shortlist",
        description="Fit the shortlist of likely tokens of an eagle3 head, and write it beside the "
        "head. It is used from the next load on.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--head", type=Path, default=HEADS_DIR / "eagle3", help="its folder")
    parser.add_argument("--model", default="smollm2", help="its target")
    parser.add_argument(
        "--conversations", type=Path, default=Path("build/smollm2/conversations"),
        help="folder that python -m paceline.train.smollm2 has written",
    )  # fmt: skip
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--threads", type=int, help="CPU threads; by default all")
    args = parser.parse_args(argv)
    if args.threads is not None:
        limit_threads(args.threads)
    try:
        made = fit(args.head, args.model, args.conversations, args.rank)
    except PacelineError as error:
        parser.error(str(error))
    print(f"{args.head}: rank {args.rank}, logits less than {made.margin:.2f} below the highest")


if __name__ == "__main__":
    main()
