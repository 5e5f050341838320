"""Whole words from a second output layer, checked by the model itself (MuMo, lossy).

"Accelerating multilingual language models for excessively tokenized languages" (Hong et al. 2024,
arXiv 2401.10660): a tokenizer that was made for other text cuts words into many tokens, and the
model writes them one by one. A second output layer, the only thing that is trained, knows whole
words. Its logits stand beside those of the model's own layer. The ``top_k`` best of this larger
vocabulary are candidates, each a sequence of the model's own tokens; in one forward the model reads
them all and gives each its log-likelihood, and the best one is written.

A longer candidate has a lower likelihood, so it is divided by the number of its tokens to the power
of ``length_power``: with 1 the mean of a token decides. With 0 a word is never better than its own
first token, and without words the text is that of greedy decoding, token by token. Otherwise it is
another text: a word may be written whose first token was not the model's first choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import InvalidArgument
from paceline.models.base import Segment
from paceline.models.llama import LlamaRunner
from paceline.together.reader import check_prompt
from paceline.tree import align, merge, path_to
from paceline.types import Draft, Need

KIND = "words"
_HIDDEN = frozenset({Need.HIDDEN_STATES})


class WordHead(nn.Module):
    """The second output layer: a residual block, and a row for each word.

    Args:
        words: the model's tokens of each word, two or more.
        hidden_size: of the model's states.

    Attributes:
        target: digest of the weights that it was trained beside; empty: not known.
    """

    def __init__(self, words: Sequence[Sequence[int]], hidden_size: int, target: str = "") -> None:
        super().__init__()
        self.words = tuple(tuple(word) for word in words)
        self.target = target
        self.block = nn.Linear(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, len(self.words))

    def forward(self, states: Tensor) -> Tensor:
        """Logits of the words, beside those of the model's own tokens.

        # float32 [n, hidden_size] -> [n, num_words]
        """
        logits: Tensor = self.out(states + F.silu(self.block(states)))
        return logits

    def save(self, file: Path) -> None:
        """Write weights in bfloat16, and the words."""
        from safetensors.torch import save_file

        tensors = {name: value.to(torch.bfloat16) for name, value in self.state_dict().items()}
        tensors["tokens"] = torch.tensor(
            [t for word in self.words for t in word], dtype=torch.int32
        )
        tensors["lengths"] = torch.tensor([len(word) for word in self.words], dtype=torch.int32)
        save_file(tensors, str(file), {"kind": KIND, "target": self.target})

    @staticmethod
    def load(file: Path) -> WordHead:
        """Read what :meth:`save` wrote.

        Raises:
            InvalidArgument: the file is missing or is no such head.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(file), "pt") as opened:
                metadata = opened.metadata() or {}
                if metadata.get("kind") != KIND:
                    raise ValueError(f"its kind is {metadata.get('kind')}")
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            pieces = tensors.pop("tokens").split(tensors.pop("lengths").tolist())
            head = WordHead(
                [piece.tolist() for piece in pieces],
                tensors["block.bias"].shape[0],
                metadata["target"],
            )
            head.load_state_dict({name: value.float() for name, value in tensors.items()})
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise InvalidArgument("words", str(file), f"a head of whole words ({error})") from error
        return head.eval().requires_grad_(False)


@dataclass(frozen=True, slots=True)
class WordStep:
    """What one forward has added to the text.

    Attributes:
        token_ids: one of the model's tokens, or those of a word.
        rank: of the written candidate in the larger vocabulary, from 0.
    """

    token_ids: tuple[int, ...]
    rank: int


@dataclass(frozen=True, slots=True)
class WordText:
    """A text of words and tokens.

    Attributes:
        token_ids: the model's tokens, at most as many as were asked for.
        steps: one for each forward after the prompt's.
    """

    token_ids: tuple[int, ...]
    steps: tuple[WordStep, ...]

    @property
    def num_words(self) -> int:
        """Steps that wrote a word of several tokens."""
        return sum(len(step.token_ids) > 1 for step in self.steps)


def write_words(
    runner: LlamaRunner,
    head: WordHead | None,
    prompt_ids: Sequence[int],
    max_tokens: int,
    *,
    top_k: int = 10,
    length_power: float = 1.0,
    stop_ids: frozenset[int] = frozenset(),
) -> WordText:
    """Write ``max_tokens`` tokens, or up to the first of ``stop_ids``.

    Args:
        head: None: no words, which is greedy decoding.
        top_k: candidates of a step.
        length_power: weighs words against tokens, see the module.

    Raises:
        InvalidArgument: a number is out of its range, the prompt does not fit, or the head is for
            another model.
    """
    words = () if head is None else head.words
    check_prompt(prompt_ids, max_tokens + max(map(len, words), default=1), runner)
    if not 1 <= top_k <= runner.vocab_size:
        raise InvalidArgument("top_k", top_k, f"1 to {runner.vocab_size}")
    if not length_power >= 0.0:
        raise InvalidArgument("length_power", length_power, "0 or more")
    if head is not None:
        check_head(head, runner)
    sequence = runner.new_sequence()
    written: list[int] = []
    steps: list[WordStep] = []
    try:
        segment = Segment(sequence, np.asarray(prompt_ids, np.int64), logits="last")
        result = runner.forward([segment], _HIDDEN)
        logits, state = result.logits[-1], result.extras[Need.HIDDEN_STATES][-1]
        runner.commit(sequence, range(len(prompt_ids)))
        while len(written) < max_tokens and not stop_ids.intersection(written[-1:]):
            chains = [Draft.chain(c) for c in _candidates(logits, state, head, top_k)]
            tree = merge(chains)
            segment = Segment(sequence, tree.token_ids, tree.parent_indices)
            result = runner.forward([segment], _HIDDEN)
            likelihood = torch.cat([logits[None], result.logits]).float().cpu().log_softmax(-1)
            places = [align(chain, tree) for chain in chains]
            scores = [_score(likelihood, tree, nodes.tolist(), length_power) for nodes in places]
            best = int(np.argmax(scores))  # the first of equals: the one with the higher logit
            last = int(places[best][-1])
            runner.commit(sequence, path_to(tree.parent_indices, last))
            logits, state = result.logits[last], result.extras[Need.HIDDEN_STATES][last]
            steps.append(WordStep(tuple(chains[best].token_ids.tolist()), best))
            written += steps[-1].token_ids
    finally:
        runner.free(sequence)
    return WordText(tuple(written[:max_tokens]), tuple(steps))


def check_head(head: WordHead, runner: LlamaRunner) -> None:
    """Raise InvalidArgument unless states and tokens of the head are those of the model."""
    hidden, tokens = head.block.in_features, {t for word in head.words for t in word}
    if hidden != runner.config.hidden_size or max(tokens, default=0) >= runner.vocab_size:
        raise InvalidArgument(
            "words",
            f"a head for states of {hidden}",
            f"one for the model's {runner.config.hidden_size} and {runner.vocab_size} tokens",
        )


def _candidates(
    logits: Tensor, state: Tensor, head: WordHead | None, top_k: int
) -> list[tuple[int, ...]]:
    """The ``top_k`` best of tokens and words; of equals a token comes before a word."""
    both = logits.float().cpu()
    if head is not None:
        both = torch.cat([both, head(state[None].float().cpu())[0]])
    best = both.sort(descending=True, stable=True).indices[:top_k].tolist()
    size = len(logits)
    return [(i,) if i < size or head is None else head.words[i - size] for i in best]


def _score(likelihood: Tensor, tree: Draft, nodes: Sequence[int], length_power: float) -> float:
    """Log-likelihood of a path, over its length to the power.

    Args:
        likelihood: at the last committed token, and at each node.  # [1 + num_nodes, vocab_size]
    """
    total = 0.0
    for node in nodes:
        parent, token = int(tree.parent_indices[node]), int(tree.token_ids[node])
        total += float(likelihood[parent + 1, token])
    return float(total / len(nodes) ** length_power)
