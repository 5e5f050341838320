"""Train the length controllers that learn: `specdecpp`, `disco` and `ldlp`.

The target writes texts, by turns greedily and at temperature 1, then draft model and target run
over them once. A label is the chance that a token which the draft model drafts is accepted if all
tokens before it were, ``min(1, p / q)``: at temperature 0 that is 1 or 0, whether both models have
the same argmax.

SpecDec++ reads hidden states that the draft model has behind tokens of its own: its texts are
mixed from the draft model's tokens and the target's (token mixing, arXiv 2405.19715, section 3.2).
DISCO's classifier is fitted to greedy texts. The thresholds of both are chosen by decoding held-out
prompts with each, for the most tokens per cost. LDLP predicts how many tokens of a draft are
accepted: those that are to be expected of a draft model, and with a draft head those of the head's
own rounds. SpecDec++'s head for a draft model with tokens of its own (method `omnidraft`) learns
from that model's rounds, too.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from paceline.config import SpeculationConfig
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.omnidraft import OmniDraft
from paceline.engine import Engine, RoundEvent
from paceline.errors import InvalidArgument
from paceline.methods import METHODS
from paceline.models.base import ModelRunner, Segment
from paceline.rejections import JudgedDraft, RejectionRecorder, packed_rows
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.train.trainer import LOG_FOLDER, Batch, TrainOptions, train
from paceline.types import FloatArray, IntArray, Need

KINDS = ("specdecpp", "disco", "ldlp")
MAX_LENGTH = 20
MISMATCH_WEIGHT = 6.0  # weight of rejected tokens in SpecDec++'s loss
MIX = 0.15  # share of the target's tokens in the texts that SpecDec++'s head reads
EMBEDDING_SIZE = 8  # components that LDLP keeps of a token's embedding
DRAFT_COST = 0.1  # of drafting and verifying one more token, in verifications
THRESHOLDS = {  # that are tried
    "disco": (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8),
    "specdecpp": (0.7, 0.8, 0.9, 0.95, 0.97, 0.99),
}
QUANTILE = 0.7  # that LDLP predicts: a token too few costs more than one too many
_KNOWN = 0.05  # chance that a draft lasts to a text's end, below which its length counts as known
_HIDDEN = frozenset({Need.HIDDEN_STATES})


@dataclass(frozen=True, slots=True, eq=False)
class LabelledRows:
    """Outputs of both models on all texts that the target wrote, one after the other.

    Attributes:
        token_ids: what the target wrote.  # [n]
        accepted: chance that the token which the draft model drafts at place ``i`` is accepted,
            given that those before it were.  # [n]
        drafted: whether the mixed text has that token at place ``i``, and not the target's.  # [n]
        run_before: tokens before place ``i`` that the draft model would have drafted.  # [n]
        run_from: expected accepted tokens of a draft of ``MAX_LENGTH`` from place ``i`` on; -1: the
            text ends first.  # [n]
        mixed_hidden: that the draft model drafts from at ``i``, in the mixed text.  # [n, hidden]
        draft_scores: its top probability and entropy, in the target's text.  # [n, 2]
        target_hidden: that the target chose token ``i`` from.  # [n, hidden]
        is_greedy: 1 for the texts at temperature 0.  # [n]
        is_validation: 1 for a fifth of the texts.  # [n]
    """

    token_ids: IntArray
    accepted: FloatArray
    drafted: IntArray
    run_before: IntArray
    run_from: FloatArray
    mixed_hidden: Tensor
    draft_scores: FloatArray
    target_hidden: Tensor
    is_greedy: IntArray
    is_validation: IntArray


def collect(
    engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int, seed: int = 0
) -> LabelledRows:
    """Let the target write ``num_tokens`` after each prompt, and record both models there.

    Raises:
        InvalidArgument: the engine has no draft model, or a model gives no hidden states.
    """
    drafter = engine.drafters.get("draft_model")
    if not isinstance(drafter, DraftModel):
        raise InvalidArgument("drafter", None, "a draft model in this process")
    parts: list[dict[str, Any]] = []
    for start in tqdm(range(0, len(prompts), 8), desc="writing", unit="batch"):
        numbers = range(start, min(start + 8, len(prompts)))
        params = [text_params(number, num_tokens, seed) for number in numbers]
        config = SpeculationConfig(method="draft_model")
        sessions = engine.generate([prompts[i] for i in numbers], params, config)
        for number, session in zip(numbers, sessions, strict=True):
            random = torch.Generator().manual_seed((seed << 32) + number)
            runners = engine.local_target.runner, drafter.runner
            parts.append(_look(*runners, session, random))
            greedy = params[number - start].temperature == 0
            parts[-1]["is_greedy"] = np.full(num_tokens, greedy, np.int64)
            parts[-1]["is_validation"] = np.full(num_tokens, is_validation(number), np.int64)
    joined: dict[str, Any] = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        joined[name] = torch.cat(values) if torch.is_tensor(values[0]) else np.concatenate(values)
    return LabelledRows(**joined)


def text_params(number: int, num_tokens: int, seed: int) -> SamplingParams:
    """How the target writes text ``number``: greedily or at temperature 1, by turns.

    Of the texts for validation, too, every other one is greedy.
    """
    greedy = (number // 5 + number % 5) % 2 == 0
    return SamplingParams(
        max_tokens=num_tokens, ignore_eos=True, temperature=0.0 if greedy else 1.0,
        seed=(seed << 32) + number,
    )  # fmt: skip


def is_validation(number: int) -> bool:
    """Whether a text is one of the fifth that no weight is fitted to."""
    return number % 5 == 4


def _look(
    target: ModelRunner, drafter: ModelRunner, session: Any, random: torch.Generator
) -> dict[str, Any]:
    ids = np.asarray(session.token_ids, np.int64)
    first, temperature = session.prompt_length, session.params.temperature
    logits, _ = _run(drafter, ids[:-1])
    target_logits, target_hidden = _run(target, ids[:-1])
    p, q = target_logits[first - 1 :], logits[first - 1 :]
    drawn, accepted, overlap = labels(p, q, temperature, random)
    text = torch.from_numpy(ids[first:])
    from_target = torch.rand(len(text), generator=random) < MIX
    mixed = np.concatenate([ids[:first], torch.where(from_target, text, drawn).numpy()])
    _, mixed_hidden = _run(drafter, mixed[:-1])
    log_q = q.log_softmax(-1)
    entropy = -(log_q.exp() * log_q).sum(-1)
    return {
        "token_ids": ids[first:],
        "accepted": accepted.numpy(),
        "drafted": (~from_target).long().numpy(),
        "run_before": hits_before((drawn == text).numpy()),
        "run_from": expected_runs(overlap.double().numpy(), MAX_LENGTH),
        "mixed_hidden": mixed_hidden[first - 1 :],
        "draft_scores": torch.stack([log_q.max(-1).values.exp(), entropy], -1).numpy(),
        "target_hidden": target_hidden[first - 1 :],
    }


def labels(
    target_logits: Tensor, draft_logits: Tensor, temperature: float, random: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """What the draft model drafts at each place, and how likely it is accepted.

    Returns:
        The drafted tokens; ``min(1, p / q)`` for each of them; and the mean of that over all tokens
        that might have been drafted, the overlap of the distributions.  # 3 x [n]
    """
    if not temperature:
        drawn = draft_logits.argmax(-1)
        hits = (target_logits.argmax(-1) == drawn).float()
        return drawn, hits, hits
    p, q = ((logits / temperature).softmax(-1) for logits in (target_logits, draft_logits))
    drawn = torch.multinomial(q, 1, generator=random)
    accepted = (p.gather(1, drawn) / q.gather(1, drawn)).clamp(max=1.0)
    return drawn[:, 0], accepted[:, 0], p.minimum(q).sum(-1)


def hits_before(hits: Any) -> IntArray:
    """The number of hits in a row that end before each place.  # bool [n] -> [n]"""
    before = np.zeros(len(hits), np.int64)
    for i in range(1, len(hits)):
        before[i] = before[i - 1] + 1 if hits[i - 1] else 0
    return before


def expected_runs(accepted: FloatArray, longest: int) -> FloatArray:
    """How many tokens of a draft from each place on are accepted, in the mean.

    Args:
        accepted: chance of each place, given that the places before were accepted.  # [n]
        longest: length of the draft.

    Returns:
        -1 where the draft is likely to last until the text's end.  # [n]
    """
    count = len(accepted)
    runs = np.full(count, -1.0)
    for i in range(count):
        alive = np.cumprod(accepted[i : i + longest])
        if i + longest <= count or alive[-1] < _KNOWN:
            runs[i] = alive.sum()
    return runs


def _run(runner: ModelRunner, token_ids: IntArray) -> tuple[Tensor, Tensor]:
    """Logits and hidden states after every token.  # [n, vocab], [n, hidden] float32"""
    sequence = runner.new_sequence()
    try:
        result = runner.forward([Segment(sequence, token_ids)], _HIDDEN)
    finally:
        runner.free(sequence)
    hidden = result.beside_logits(Need.HIDDEN_STATES)
    if hidden is None:
        raise InvalidArgument("target", type(runner).__name__, "a model with hidden states")
    return result.logits.float().cpu(), hidden.float().cpu()


class AcceptanceBlocks(nn.Module):
    """SpecDec++'s acceptance head: residual blocks and a linear layer."""

    @staticmethod
    def of(weights: Mapping[str, FloatArray]) -> AcceptanceBlocks:
        """The head with the weights of :class:`paceline.lengths.specdecpp.AcceptanceHead`."""
        model = AcceptanceBlocks(weights["out.weight"].shape[1])
        model.load_state_dict(
            {name: torch.from_numpy(weights[name]) for name in model.state_dict()}
        )
        return model

    def __init__(self, size: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(3))
        for block in self.blocks:
            nn.init.zeros_(block.weight)  # type: ignore[arg-type]
        self.out = nn.Linear(size, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.silu(block(x))
        logits: Tensor = self.out(x)
        return logits[:, 0]


class _Lengths(nn.Module):
    """LDLP: three layers over a hidden state and a token's embedding."""

    def __init__(self, size: int, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, EMBEDDING_SIZE)
        nn.init.normal_(self.embedding.weight, std=0.1)
        sizes = (size + EMBEDDING_SIZE, 64, 32, 1)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        x = torch.cat([hidden, self.embedding(token_ids)], -1)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i + 1 < len(self.layers):
                x = F.relu(x)
        return x[:, 0]


class LengthHeadRows(Protocol):
    """The rows that a head is fitted to: what became of tokens, and the target's states there."""

    @property
    def token_ids(self) -> IntArray: ...

    @property
    def accepted(self) -> FloatArray: ...

    @property
    def target_hidden(self) -> Tensor: ...

    @property
    def is_validation(self) -> IntArray: ...


class LengthHeadTask:
    """One length controller's head; see :class:`paceline.train.trainer.Task`.

    Such a head drafts nothing, so the criterion is its negated loss on the validation texts.

    Args:
        loss: the loss of ``model`` on some rows.
        index: rows to train on.
        weights: the tensors of ``model`` to save.
    """

    criterion = "negative_loss"

    def __init__(
        self,
        name: str,
        model: nn.Module,
        loss: Callable[[Tensor], Tensor],
        rows: LengthHeadRows,
        index: IntArray,
        metadata: dict[str, str],
        weights: Callable[[], dict[str, Tensor]],
    ) -> None:
        self.name, self.model, self._loss = name, model, loss
        self._training = torch.from_numpy(index[rows.is_validation[index] == 0])
        self._validation = torch.from_numpy(index[rows.is_validation[index] == 1])
        self._metadata, self._weights = metadata, weights
        self.num_rows = len(self._training)
        digest = hashlib.sha256(rows.token_ids.tobytes() + rows.accepted.tobytes())
        digest.update(rows.target_hidden.numpy().tobytes())
        self.settings: Mapping[str, Any] = {**metadata, "data": digest.hexdigest()[:16]}

    def loss(self, batch: Batch) -> Tensor:
        return self._loss(self._training[batch.rows])

    def evaluate(self) -> dict[str, float]:
        return {self.criterion: -float(self._loss(self._validation))}

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        weights = {name: value.half().contiguous() for name, value in self._weights().items()}
        save_file(weights, str(folder / f"{self.name}.safetensors"), self._metadata)

    def describe_rows(self, rows: IntArray) -> str:
        return f"tokens {self._training[rows].tolist()} of the target's texts"


def specdecpp_task(
    rows: LabelledRows | TranslatedRounds, metadata: dict[str, str]
) -> LengthHeadTask:
    """Weighted cross entropy with soft labels, on the draft model's own tokens (section 3.2)."""
    accepted = torch.from_numpy(rows.accepted).float()
    model = AcceptanceBlocks(rows.mixed_hidden.shape[1])

    def loss(index: Tensor) -> Tensor:
        return weighted_cross_entropy(model(rows.mixed_hidden[index]), accepted[index])

    index = np.flatnonzero(rows.drafted)
    return LengthHeadTask("specdecpp", model, loss, rows, index, metadata, model.state_dict)


def weighted_cross_entropy(logits: Tensor, accepted: Tensor) -> Tensor:
    """Cross-entropy with chances of acceptance; rejection weighs ``MISMATCH_WEIGHT`` times as much.

    Divided by the sum of the weights.  # [n], [n] -> scalar
    """
    kept, lost = accepted, MISMATCH_WEIGHT * (1 - accepted)
    each = -(kept * F.logsigmoid(logits) + lost * F.logsigmoid(-logits))
    return each.sum() / (kept + lost).sum()


def disco_task(rows: LabelledRows, metadata: dict[str, str], seed: int) -> LengthHeadTask:
    """Logistic regression on hits; the depth of each token is drawn from its possible ones."""
    random = np.random.default_rng(seed)
    depth = random.integers(1, np.minimum(rows.run_before + 1, MAX_LENGTH) + 1)
    x = torch.from_numpy(
        np.column_stack([rows.draft_scores, np.log(depth)]).astype(np.float32)
    )  # the columns of paceline.lengths.disco.features
    accepted = torch.from_numpy(rows.accepted).float()
    model = nn.Linear(x.shape[1], 1)

    def loss(index: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(x[index])[:, 0], accepted[index])

    def weights() -> dict[str, Tensor]:
        return {"weight": model.weight.data[0], "bias": model.bias.data}

    index = np.flatnonzero(rows.is_greedy)
    return LengthHeadTask("disco", model, loss, rows, index, metadata, weights)


def ldlp_task(
    rows: LabelledRows | HeadRounds, metadata: dict[str, str], vocab_size: int
) -> LengthHeadTask:
    """A quantile of the number of accepted tokens that follow a token, by its pinball loss."""
    if isinstance(rows, HeadRounds):
        known, after = np.arange(len(rows.accepted)), rows.accepted
    else:  # token i, predicted from the state that chose it; the draft begins at i + 1
        known, after = np.flatnonzero(rows.run_from[1:] >= 0), rows.run_from[1:]
    wanted = torch.from_numpy(after).float()
    tokens = torch.from_numpy(rows.token_ids)
    model = _Lengths(rows.target_hidden.shape[1], vocab_size)

    def loss(index: Tensor) -> Tensor:
        missing = wanted[index] - model(rows.target_hidden[index], tokens[index])
        return torch.maximum(QUANTILE * missing, (QUANTILE - 1) * missing).mean()

    def weights() -> dict[str, Tensor]:
        state = dict(model.state_dict())
        return {"embedding": state.pop("embedding.weight"), **state}

    return LengthHeadTask("ldlp", model, loss, rows, known, metadata, weights)


# --- rounds of a draft head -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class HeadRounds:
    """Rounds with the longest chains of a method with a draft head.

    Attributes:
        token_ids: the last committed token before each round.  # [num_rounds]
        accepted: tokens of the chain that were accepted.  # [num_rounds]
        target_hidden: that the target chose that token from.  # [num_rounds, hidden]
        is_validation: 1 for the rounds of a fifth of the texts.  # [num_rounds]
    """

    token_ids: IntArray
    accepted: FloatArray
    target_hidden: Tensor
    is_validation: IntArray


def collect_rounds(
    engine: Engine, kind: str, prompts: Sequence[Sequence[int]], num_tokens: int, seed: int = 0
) -> HeadRounds:
    """Let a draft head of this kind draft its longest chains, and record what becomes of them.

    Raises:
        InvalidArgument: no method has such a head, or the engine has no such head.
    """
    able = {m.head: m.name for m in reversed(list(METHODS.values())) if m.head and m.lossless}
    if kind not in able:
        raise InvalidArgument("head", kind, f"one of {', '.join(sorted(able))}")
    config = SpeculationConfig(
        method=able[kind], shape="chain", length="fixed", num_speculative_tokens=MAX_LENGTH
    )
    tokens: list[int] = []
    accepted: list[int] = []
    validation: list[int] = []
    hidden: list[Tensor] = []
    for number, prompt in enumerate(tqdm(prompts, desc="drafting", unit="text")):
        rounds: list[tuple[int, int]] = []  # drafted, accepted

        def note(event: RoundEvent, rounds: list[tuple[int, int]] = rounds) -> None:
            if event.outcome is not None:
                rounds.append((event.outcome.draft.num_nodes, event.outcome.num_accepted))

        params = text_params(number, num_tokens, seed)
        session = engine.submit(Request(prompt, params, config), on_event=note)
        while engine.has_work:
            engine.step()
        if session.error is not None:
            raise session.error
        _, states = _run(engine.local_target.runner, np.asarray(session.token_ids[:-1], np.int64))
        longest, length = max(drafted for drafted, _ in rounds), session.prompt_length
        for drafted, count in rounds:
            # Not the first round, whose length nothing predicts, nor one that the text's end cut.
            if length > session.prompt_length and (drafted == longest or count < drafted):
                tokens.append(session.token_ids[length - 1])
                accepted.append(count)
                validation.append(is_validation(number))
                hidden.append(states[length - 2])
            length += count + 1
    if not hidden:
        raise InvalidArgument("head", kind, "a head that drafts on these prompts")
    return HeadRounds(
        np.array(tokens), np.array(accepted, np.float64), torch.stack(hidden),
        np.array(validation, np.int64),
    )  # fmt: skip


# --- rounds of a draft model with tokens of its own -----------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class TranslatedRounds:
    """What became of the tokens that method `omnidraft` drafted, in the draft model's tokens.

    Attributes:
        token_ids: the token before each drafted one.  # [n]
        accepted: 1 for those that were accepted, 0 for the first rejected one.  # [n]
        mixed_hidden: that the draft model drafted from.  # [n, hidden]
        is_validation: 1 for the rounds of a fifth of the texts.  # [n]
    """

    token_ids: IntArray
    accepted: FloatArray
    mixed_hidden: Tensor
    is_validation: IntArray

    @property
    def drafted(self) -> IntArray:
        """All of them."""
        return np.ones(len(self.token_ids), np.int64)

    @property
    def target_hidden(self) -> Tensor:
        """What the digest of the data reads."""
        return self.mixed_hidden


def collect_translated(
    engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int, seed: int = 0
) -> TranslatedRounds:
    """Let method `omnidraft` draft its longest chains, and record what becomes of their tokens.

    Raises:
        InvalidArgument: the engine has no draft model with tokens of its own.
    """
    drafter = engine.drafters.get("omnidraft")
    if not isinstance(drafter, OmniDraft) or drafter.translator is None:
        raise InvalidArgument("drafter", None, "a draft model with tokens of its own")
    recorder = RejectionRecorder(
        1 << 30, records=lambda session: True, window=1 << 30, translator=drafter.translator
    )
    engine.events.watchers.append(recorder)
    config = SpeculationConfig(
        method="omnidraft", length="fixed", num_speculative_tokens=MAX_LENGTH
    )
    tokens: list[Tensor] = []
    accepted: list[Tensor] = []
    validation: list[int] = []
    hidden: list[Tensor] = []
    try:
        for number, prompt in enumerate(tqdm(prompts, desc="drafting", unit="text")):
            engine.generate([prompt], text_params(number, num_tokens, seed), config)
            judged = [draft for draft in recorder.take() if isinstance(draft, JudgedDraft)]
            ids, rows, places = packed_rows(judged)
            states = [_run(drafter.model.runner, row)[1] for row in ids.numpy()]
            for draft, row, place in zip(judged, rows.tolist(), places.tolist(), strict=True):
                index, labels_of_draft = draft.judged(place)
                tokens.append(ids[row][index])
                accepted.append(labels_of_draft)
                hidden.append(states[row][index])
                validation += [is_validation(number)] * len(index)
    finally:
        engine.events.watchers.remove(recorder)
    if not validation:
        raise InvalidArgument("head", "omnidraft", "a draft model that drafts on these prompts")
    return TranslatedRounds(
        torch.cat(tokens).numpy(), torch.cat(accepted).numpy(), torch.cat(hidden),
        np.array(validation, np.int64),
    )  # fmt: skip


# --- thresholds -----------------------------------------------------------------------------------


def tokens_per_cost(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    draft_cost: float = DRAFT_COST,
    method: str = "draft_model",
    **knobs: Any,
) -> float:
    """Greedy tokens for each verification, where drafting a token costs ``draft_cost`` of one.

    Tokens that a draft model drafts in a vocabulary of its own count before they are translated.
    """
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    config = SpeculationConfig(method=method, **knobs)
    own = engine.drafters[method]
    before = own.num_drafted if isinstance(own, OmniDraft) else 0
    stats = [session.stats for session in engine.generate(prompts, params, config)]
    drafted = sum(s.num_drafted for s in stats)
    if isinstance(own, OmniDraft):
        drafted = own.num_drafted - before
    return sum(s.num_tokens for s in stats) / (
        sum(s.num_rounds for s in stats) + draft_cost * drafted
    )


def best_threshold(
    engine: Engine,
    file: Path,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    draft_cost: float,
    method: str = "draft_model",
) -> float:
    """The one of ``THRESHOLDS`` with the most tokens per cost on these prompts.

    Of those within a hundredth of the best, the one nearest to a half: other prompts differ more.
    The engine that decodes shares the models, and reads ``file`` from a folder of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / file.relative_to(file.parents[method == "omnidraft"])
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(file.read_bytes())
        trial = Engine(
            engine.target, {method: engine.drafters[method]},
            tokenizer=engine.tokenizer, eos_token_ids=engine.eos_token_ids,
            length_context=replace(engine.length_context, heads=Path(folder)),
        )  # fmt: skip
        found = {
            threshold: tokens_per_cost(
                trial,
                prompts,
                num_tokens,
                draft_cost,
                method,
                length=file.stem,
                stop_threshold=threshold,
            )
            for threshold in THRESHOLDS[file.stem]
        }
    good = [t for t, tokens in found.items() if tokens >= 0.99 * max(found.values())]
    return min(good, key=lambda threshold: abs(threshold - 0.5))


def add_threshold(file: Path, threshold: float) -> None:
    """Write a threshold into the file of a controller, as its default."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(str(file), "pt") as opened:
        metadata = opened.metadata()
    part = file.with_suffix(".tmp")
    save_file(load_file(str(file)) | {"threshold": torch.tensor([threshold])}, str(part), metadata)
    part.replace(file)


# --- all of it ------------------------------------------------------------------------------------


def train_length_head(
    engine: Engine,
    kind: str,
    out: Path,
    prompts: Sequence[Sequence[int]],
    *,
    head: str | None = None,
    num_tokens: int = 128,
    epochs: int = 12,
    draft_cost: float = DRAFT_COST,
    seed: int = 0,
) -> dict[str, Any]:
    """Train one controller (or all of :data:`KINDS`) and write ``out/<kind>.safetensors``.

    The weights with the best validation loss are kept. Checkpoint and plot of each kind are in
    ``out/training/<kind>``.

    Args:
        head: train LDLP for methods with a draft head of this kind, into ``out/<head>``; with
            "omnidraft", train SpecDec++'s head for the draft model with tokens of its own.
        draft_cost: what drafting and verifying one more token costs, in verifications; decides
            thresholds.

    Returns:
        The file, its bytes and the validation loss of each kind.

    Raises:
        InvalidArgument: an unknown kind; an engine that gives no training data; too few prompts.
    """
    kinds = KINDS if kind == "all" else (kind,)
    method = "omnidraft" if head == "omnidraft" else "draft_model"
    if head is not None:
        (only,) = kinds = ("specdecpp" if head == "omnidraft" else "ldlp",)
        if kind not in ("all", only):
            raise InvalidArgument("kind", kind, f"{only}, the only one that fits {head}")
        out = out / head
    if not set(kinds) <= set(KINDS):
        raise InvalidArgument("kind", kind, f"all, {', '.join(KINDS)}")
    if len(prompts) < 10:
        raise InvalidArgument("prompts", len(prompts), "at least 10: a fifth is for validation")
    if not 0 < draft_cost < math.inf:
        raise InvalidArgument("draft_cost", draft_cost, "a number above 0")
    rows: LabelledRows | HeadRounds | TranslatedRounds
    if head is None:
        rows = collect(engine, prompts, num_tokens, seed)
    elif head == "omnidraft":
        rows = collect_translated(engine, prompts, num_tokens, seed)
    else:
        rows = collect_rounds(engine, head, prompts, num_tokens, seed)
    vocab_size = engine.target.vocab_size
    result: dict[str, Any] = {}
    for name in kinds:
        hidden = rows.target_hidden.shape[1]
        # The context of length controllers knows the size of the draft model with shared tokens.
        drafter_hidden = rows.mixed_hidden.shape[1] if isinstance(rows, LabelledRows) else 0
        if isinstance(rows, TranslatedRounds):
            hidden = 0  # it reads nothing of the target
        metadata = {
            "kind": name,
            "vocab_size": str(vocab_size),
            "target_hidden_size": str(hidden),
            "drafter_hidden_size": str(drafter_hidden),
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # for the first weights
            if name == "specdecpp":
                assert not isinstance(rows, HeadRounds)
                task = specdecpp_task(rows, metadata)
            elif name == "ldlp":
                assert not isinstance(rows, TranslatedRounds)
                task = ldlp_task(rows, metadata, vocab_size)
            else:
                assert isinstance(rows, LabelledRows)
                task = disco_task(rows, metadata, seed)
        epoch = math.ceil(task.num_rows / 256)
        trained = train(
            task,
            TrainOptions(
                out=out,
                log=out / LOG_FOLDER / name,
                steps=epochs * epoch,
                batch_size=256,
                learning_rate=0.02 if name == "disco" else 1e-3,
                seed=seed,
                eval_every=epoch,
                patience=epochs + 1,  # never stops early, and keeps the best
            ),
        )
        file = out / f"{name}.safetensors"
        result[name] = {
            "file": str(file),
            "bytes": file.stat().st_size,
            "validation_loss": round(-trained.metrics[task.criterion], 4),
        }
        if name in THRESHOLDS:
            held_out = [p for i, p in enumerate(prompts) if is_validation(i)]
            threshold = best_threshold(engine, file, held_out, num_tokens, draft_cost, method)
            add_threshold(file, threshold)
            result[name]["threshold"] = threshold
    result["num_positions"] = len(rows.token_ids)
    if not isinstance(rows, HeadRounds):
        result["acceptance_rate"] = round(float(rows.accepted.mean()), 4)
    else:
        result["mean_accepted"] = round(float(rows.accepted.mean()), 4)
    return result


def training_prompts(engine: Engine, count: int, length: int = 64) -> list[list[int]]:
    """Beginnings of standard library modules outside the benchmark's prompts."""
    from paceline.train.corpus import split

    assert engine.tokenizer is not None
    training, _ = split()
    step = max(1, len(training) // count)
    prompts = []
    for i, document in enumerate(training[::step]):
        middle = len(document.text) * (i % 7) // 8  # do not always take a file's first lines
        ids = engine.tokenizer.encode(document.text[middle : middle + 8 * length])
        if len(ids) >= length:
            prompts.append(ids[:length])
    return prompts[:count]
