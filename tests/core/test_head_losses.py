"""The loss of each head, against its formula computed in float64 without the head's own code.

Every term has a weight of its own, and the defaults are checked beside other weights, so a term
that is left out, or weighted otherwise, changes the number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.models.heads import HEADS
from paceline.models.heads.base import Head, HeadBatch, HeadTarget
from paceline.models.heads.moa import step_starts
from paceline.models.heads.xpress import XPress
from paceline.models.llama import LlamaRunner
from tests.core.toy_heads import read
from tests.heads import untrained

Numbers = NDArray[np.float64]
BATCH, LENGTH, SEED = 2, 14, 3


@pytest.fixture(scope="module")
def batch(tiny: LlamaRunner) -> HeadBatch:
    generator = torch.Generator().manual_seed(0)
    return read(tiny, torch.randint(0, tiny.vocab_size, (BATCH, LENGTH), generator=generator))


# --- the terms, by hand ---------------------------------------------------------------------------


def numbers(tensor: torch.Tensor) -> Numbers:
    return tensor.detach().double().numpy()


def log_softmax(logits: Numbers) -> Numbers:
    shifted = logits - logits.max(-1, keepdims=True)
    result: Numbers = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def text(logits: torch.Tensor, token_ids: torch.Tensor, ahead: int) -> float:
    """Cross-entropy with the token ``ahead`` places on, where there is one."""
    scores = log_softmax(numbers(logits))
    terms = [
        -scores[row, place, int(token_ids[row, place + ahead])]
        for row in range(BATCH)
        for place in range(LENGTH - ahead)
    ]
    return float(np.mean(terms))


def teacher(logits: torch.Tensor, target_logits: torch.Tensor) -> float:
    """Cross-entropy with the target's distribution at the same places."""
    p = np.exp(log_softmax(numbers(target_logits)))
    return float(-(p * log_softmax(numbers(logits))).sum(-1).mean())


def feature(given: torch.Tensor, wanted: torch.Tensor) -> float:
    """Smooth L1 with a kink at 1."""
    error = np.abs(numbers(given) - numbers(wanted))
    return float(np.where(error < 1, 0.5 * error**2, error - 0.5).mean())


# --- what each paper adds up ----------------------------------------------------------------------


def medusa(head: Any, batch: HeadBatch, w: dict[str, float]) -> float:
    """Medusa-1: sum over heads of decay^i (text + teacher)."""
    total = 0.0
    for i, logits in enumerate(head.guesses(batch.hidden), 1):
        soft = teacher(logits[:, : LENGTH - i], batch.logits[:, i:])
        hard = text(logits, batch.token_ids, i + 1)
        total += w["decay"] ** i * (w["text"] * hard + w["teacher"] * soft)
    return total


def hydra(head: Any, batch: HeadBatch, w: dict[str, float]) -> float:
    """The mean over heads; head i has logits for the first ``LENGTH - i`` places."""
    total = 0.0
    each = head(batch.hidden, batch.token_ids)
    for i, logits in enumerate(each, 1):
        hard, soft = text(logits, batch.token_ids, i + 1), teacher(logits, batch.logits[:, i:])
        total += w["decay"] ** i * (w["text"] * hard + w["teacher"] * soft)
    return total / len(each)


def blockwise(head: Any, batch: HeadBatch, w: dict[str, float]) -> float:
    each = [text(x, batch.token_ids, i + 2) for i, x in enumerate(head.guesses(batch.hidden))]
    return float(np.mean(each))


def eagle(head: Any, batch: HeadBatch, w: dict[str, float]) -> float:
    """EAGLE's eq. 4 to 6, the mean over the steps that training follows."""
    total, steps = 0.0, int(w["unroll"])
    each = head(batch.hidden[:, :-1], batch.token_ids[:, 1:], steps)
    for step, drafted in enumerate(each):
        drafted = drafted[:, step:]
        total += w["feature"] * feature(drafted, batch.hidden[:, step + 1 :])
        total += w["token"] * teacher(head.logits(drafted), batch.logits[:, step + 1 :])
    return total / steps


def eagle3(head: Any, batch: HeadBatch, w: dict[str, float]) -> float:
    """The distribution alone, over the tokens that the head can draft."""
    assert batch.layer_states is not None
    given = head.read(head.select(batch.layer_states[:, :-1]))
    total, steps = 0.0, int(w["unroll"])
    for step, drafted in enumerate(head(given, batch.token_ids[:, 1:], steps)):
        wanted = batch.logits[:, step + 1 :][..., head.vocabulary]
        total += teacher(head.some_logits(drafted[:, step:]), wanted)
    return total / steps


def peagle(head: Any, batch: HeadBatch, w: dict[str, float]) -> float:
    """The distribution, of the pairs and of the masks that the seed draws."""
    features, ids = head.select(batch.layer_states[:, :-1]), batch.token_ids[:, 1:]
    anchors, depths = head.masks(LENGTH - 1, torch.Generator().manual_seed(SEED))
    logits = head.logits(head(features, ids, anchors, depths))
    ahead = torch.cat([torch.arange(LENGTH - 1), anchors + depths]) + 1
    return teacher(logits, batch.logits[:, ahead])


def mtp(head: Any, batch: HeadBatch, w: dict[str, float]) -> float:
    """Against the text and the target, step k weighted decay^k."""
    length, total = LENGTH - 4, 0.0
    for step, x in enumerate(head(batch.hidden[:, :length], batch.token_ids[:, 1:-1], 3)):
        logits, wanted = head.logits(x), batch.logits[:, step + 1 : step + 1 + length]
        scores = log_softmax(numbers(logits))
        labels = batch.token_ids[:, step + 2 : step + 2 + length, None].numpy()
        hard = -float(np.take_along_axis(scores, labels, -1).mean())
        each = w["text"] * hard + w["teacher"] * teacher(logits, wanted)
        total += w["decay"] ** step * each
    return total / sum(w["decay"] ** step for step in range(3))


def places_of_blocks(head: Any, batch: HeadBatch) -> tuple[Any, list[tuple[int, int, int, int]]]:
    """Blocks at the places that the seed draws, and (row, block, i, place before token i)."""
    order = torch.randperm(LENGTH - 2, generator=torch.Generator().manual_seed(SEED))
    anchors = (order[: head.options.anchors].sort().values + 1).tolist()
    hidden = head(head.select(batch.layer_states), batch.token_ids, torch.tensor(anchors))
    return hidden[:, :, head.first_place :], [
        (row, block, i, anchor + i)
        for row in range(BATCH)
        for block, anchor in enumerate(anchors)
        for i in range(head.max_depth)
        if anchor + i + 1 < LENGTH
    ]


def dflash(head: Any, batch: HeadBatch, w: dict[str, float]) -> float:
    """Against the text and the target, the i-th token weighted exp(-i / decay)."""
    hidden, places = places_of_blocks(head, batch)
    scores, p = log_softmax(numbers(head.some_logits(hidden))), numbers(batch.logits)
    p, total, weights = np.exp(log_softmax(p)), 0.0, 0.0
    for row, block, i, place in places:
        hard = -scores[row, block, i, int(batch.token_ids[row, place + 1])]
        soft = -(p[row, place] * scores[row, block, i]).sum()
        weight = np.exp(-i / w["decay"])
        total += weight * (w["text"] * hard + w["teacher"] * soft)
        weights += weight
    return float(total / weights)


def dflash2(head: Any, batch: HeadBatch, w: dict[str, float]) -> float:
    """DFlash's, and the selector's among the likeliest tokens, the target's argmax with them."""
    hidden, places = places_of_blocks(head, batch)
    raw, states = numbers(head.some_logits(hidden)), numbers(hidden)
    selector, count = head.candidate_selector, head.options.candidates
    first, second = numbers(selector.predecessor_codebook), numbers(selector.successor_codebook)
    project, total, weights = numbers(selector.hidden_projection.weight), 0.0, 0.0
    for row, block, i, place in places:
        scores = log_softmax(raw[row, block, i])
        p = np.exp(log_softmax(numbers(batch.logits[row, place])))
        hard = -scores[int(batch.token_ids[row, place + 1])]
        best, ranked = int(p.argmax()), [int(t) for t in np.argsort(-scores)[:count]]
        if best not in ranked:
            ranked[-1] = best
        read = first[int(batch.token_ids[row, place])] * (project @ states[row, block, i])
        among = log_softmax(raw[row, block, i][ranked] + second[ranked] @ read)
        chosen = -among[ranked.index(best)]
        weight = np.exp(-i / w["decay"])
        each = w["text"] * hard - w["teacher"] * (p * scores).sum() + w["selector"] * chosen
        total += weight * each
        weights += weight
    return float(total / weights)


def dspark(head: Any, batch: HeadBatch, w: dict[str, float]) -> float:
    """0.1 text + 0.9 |p - q| + the confidence head's cross-entropy with 1 - |p - q| / 2."""
    hidden, places = places_of_blocks(head, batch)
    base, states = numbers(head.some_logits(hidden)), numbers(hidden)
    p = np.exp(log_softmax(numbers(batch.logits)))
    first, second = head.markov_head.markov_w1.weight, head.markov_head.markov_w2.weight
    proj, total, weights = head.confidence_head.proj, 0.0, 0.0
    for row, block, i, place in places:
        before = numbers(first)[int(batch.token_ids[row, place])]
        scores = log_softmax(base[row, block, i] + numbers(second) @ before)
        distance = np.abs(p[row, place] - np.exp(scores)).sum()
        read = np.concatenate([states[row, block, i], before])
        sure = 1 / (1 + np.exp(-(numbers(proj.weight)[0] @ read + numbers(proj.bias)[0])))
        accepted = 1 - distance / 2
        error = -accepted * np.log(sure) - (1 - accepted) * np.log(1 - sure)
        hard = -scores[int(batch.token_ids[row, place + 1])]
        weight = np.exp(-i / w["decay"])
        total += weight * (w["text"] * hard + w["distance"] * distance + w["confidence"] * error)
        weights += weight
    return float(total / weights)


def xpress(head: Any, batch: HeadBatch, w: dict[str, float]) -> float:
    """One error, of the logits given the text, of those of the Jacobi passes, and of the bare ones:
    best x cross-entropy with the target's best token + overlap x what rejection sampling rejects.
    """
    hidden, places = places_of_blocks(head, batch)
    order = torch.randperm(LENGTH - 2, generator=torch.Generator().manual_seed(SEED))
    anchors = (order[: head.options.anchors].sort().values + 1).tolist()
    whole = head(head.select(batch.layer_states), batch.token_ids, torch.tensor(anchors))
    base, states = numbers(head.some_logits(hidden)), numbers(whole)
    refiner, start = head.refiner_head, head.first_place
    p = np.exp(log_softmax(numbers(batch.logits)[..., numbers(head.vocabulary).astype(int)]))
    tokens = head.vocabulary.tolist()
    down_h, down_g, embed, in_proj, mix, mlp_gate, mlp_up, mlp_down, readout = map(numbers, (
        refiner.down_h.weight, refiner.down_g.weight, refiner.token_embed.weight,
        refiner.in_proj.weight, refiner.mix_l, refiner.mlp_gate.weight, refiner.mlp_up.weight,
        refiner.mlp_down.weight, refiner.readout.weight,
    ))  # fmt: skip

    def refined(row: int, block: int, drafted: list[int]) -> Numbers:
        """Logits of a block, place by place."""
        ids, anchor, x = batch.token_ids[row].tolist(), anchors[block], states[row, block]
        before = [*ids[anchor - start : anchor + 1], *drafted]
        kept: list[Numbers] = []
        rows = []
        for place in range(head.options.block_size):
            seen = [down_h @ x[place], down_g @ x.mean(0), embed[before[place]]]
            kept.append(in_proj @ np.concatenate(seen))
            mixed = kept[place] + sum(mix[:, place, j] * kept[j] for j in range(place + 1))
            gate = mlp_gate @ mixed
            fed = gate / (1 + np.exp(-gate)) * (mlp_up @ mixed)
            last = mixed + mlp_down @ fed
            rows.append(readout @ last)
        return base[row, block] + np.stack(rows[start:])

    def error(logits: Callable[[int, int], Numbers]) -> float:
        total = weights = 0.0
        for row, block, i, place in places:
            scores = log_softmax(logits(row, block)[i])
            overlap = np.minimum(p[row, place], np.exp(scores)).sum()
            best = -scores[int(p[row, place].argmax())]
            text = -scores[tokens.index(int(batch.token_ids[row, place + 1]))] if w["text"] else 0
            weight = np.exp(-i / w["decay"])
            total += weight * (w["overlap"] * (1 - overlap) + w["best"] * best + w["text"] * text)
            weights += weight
        return float(total / weights)

    def text_of(row: int, block: int) -> list[int]:
        first = anchors[block] + 1
        given = batch.token_ids[row, first : first + head.max_depth - 1].tolist()
        return given + [0] * (head.max_depth - 1 - len(given))  # without a loss

    rounds, chosen = [], {(r, b): base[r, b] for r in range(BATCH) for b in range(len(anchors))}
    for _ in range(head.options.consistency_passes):
        drafts = {key: [tokens[t] for t in x.argmax(-1)[:-1]] for key, x in chosen.items()}
        chosen = {key: refined(*key, draft) for key, draft in drafts.items()}
        rounds.append(error(lambda row, block, now=chosen: now[row, block]))  # type: ignore[misc]
    given = {key: refined(*key, text_of(*key)) for key in chosen}
    return (
        error(lambda row, block: given[row, block])
        + w["consistency"] * float(np.mean(rounds))
        + w["base"] * error(lambda row, block: base[row, block])
    )


def chimera(head: Any, batch: HeadBatch, w: dict[str, float]) -> float:
    total = 0.0
    for ahead in range(1, 5):
        predicted = head(batch.hidden, batch.token_ids, ahead)[:, ahead:]
        squared = ((numbers(predicted) - numbers(batch.hidden[:, ahead:])) ** 2).mean()
        logits = head.target.logits(head.joined(batch.hidden[:, :-ahead], predicted))
        total += w["hidden"] * squared + w["token"] * teacher(logits, batch.logits[:, ahead:])
    return float(total / 4)


def falcon(head: Any, batch: HeadBatch, w: dict[str, float]) -> float:
    phase = int(torch.randint(2, (), generator=torch.Generator().manual_seed(SEED)))
    drafted = head(batch.hidden[:, :-1], batch.token_ids[:, 1:], phase)
    logits, wanted = head.target.logits(drafted), batch.logits[:, 1:]
    said = torch.cat([batch.token_ids[:, :1], wanted.argmax(-1)], 1)
    padded = torch.cat([logits, logits[:, -1:]], 1)  # the last place has no token after it
    hard = text(padded, said, 1)
    soft = teacher(logits, wanted)
    token = w["soft"] * soft + (1 - w["soft"]) * hard
    return w["feature"] * feature(drafted, batch.hidden[:, 1:]) + w["token"] * token


def moa(head: Any, batch: HeadBatch, w: dict[str, float]) -> float:
    assert batch.layer_states is not None
    phase = int(torch.randint(8, (), generator=torch.Generator().manual_seed(SEED)))
    assert step_starts(LENGTH, 8, phase)[-1] > 0, "more than one step"
    drafted = head(batch.layer_states[:, :-1], batch.token_ids[:, 1:], phase)
    soft = teacher(head.target.logits(drafted), batch.logits[:, 1:])
    return soft + w["feature"] * feature(drafted, batch.hidden[:, 1:])


def longspec(head: Any, batch: HeadBatch, _w: dict[str, float]) -> float:
    phase = int(torch.randint(8, (), generator=torch.Generator().manual_seed(SEED)))
    drafted = head(batch.layer_states[:, :-1], batch.token_ids[:, 1:], phase)  # type: ignore[index]
    return teacher(head.target.logits(drafted), batch.logits[:, 1:])


def pseudo(head: Any, batch: HeadBatch, w: dict[str, float]) -> float:
    """KL(target, guess) at every place, the i-th guess weighted decay^i."""
    places = torch.arange(LENGTH - 3)
    logits, total = head.guesses(batch.token_ids, places), 0.0
    for i in range(3):
        wanted = batch.logits[:, places + 1 + i]
        soft = teacher(logits[:, :, i], wanted) - teacher(wanted, wanted)
        total += w["decay"] ** (i + 1) * soft
    return total


Expected = Callable[[Any, HeadBatch, dict[str, float]], float]
# Head, options, the formula, and its weights as the paper or the options have them.
CASES: dict[str, tuple[str, dict[str, Any], Expected, dict[str, float]]] = {
    "medusa": ("medusa", {}, medusa, {"text": 1, "teacher": 0, "decay": 0.8}),
    "medusa, distilled": (
        "medusa", {"text_weight": 0.3, "teacher_weight": 0.7, "decay": 0.5}, medusa,
        {"text": 0.3, "teacher": 0.7, "decay": 0.5},
    ),
    "blockwise": ("blockwise", {}, blockwise, {}),
    "hydra": ("hydra", {}, hydra, {"text": 1, "teacher": 0, "decay": 1}),
    "hydra, distilled": (
        "hydra", {"text_weight": 0.3, "teacher_weight": 0.7, "decay": 0.5}, hydra,
        {"text": 0.3, "teacher": 0.7, "decay": 0.5},
    ),
    "hydra_pp": ("hydra_pp", {}, hydra, {"text": 0, "teacher": 1, "decay": 1}),
    "eagle": ("eagle", {}, eagle, {"feature": 1, "token": 0.1, "unroll": 1}),
    "eagle, unrolled": (
        "eagle", {"feature_weight": 0.4, "token_weight": 0.7, "unroll": 3}, eagle,
        {"feature": 0.4, "token": 0.7, "unroll": 3},
    ),
    "eagle3": ("eagle3", {"vocabulary": 40}, eagle3, {"unroll": 3}),
    "eagle3, published": (
        "eagle3", {"published": True, "vocabulary": 40, "num_layers": 2}, eagle3, {"unroll": 3},
    ),
    "peagle": ("peagle", {"num_layers": 1}, peagle, {}),
    "mtp": ("mtp", {}, mtp, {"text": 1, "teacher": 0, "decay": 0.6}),
    "mtp, distilled": (
        "mtp", {"text_weight": 0.3, "teacher_weight": 0.7, "decay": 0.5}, mtp,
        {"text": 0.3, "teacher": 0.7, "decay": 0.5},
    ),
    "dflash": ("dflash", {}, dflash, {"text": 1, "teacher": 0, "decay": 7}),
    "dflash, distilled": (
        "dflash", {"text_weight": 0.3, "teacher_weight": 0.7, "decay": 2, "block_size": 5}, dflash,
        {"text": 0.3, "teacher": 0.7, "decay": 2},
    ),
    "dflash2": (
        "dflash2", {}, dflash2, {"text": 1, "teacher": 0, "selector": 1, "decay": 4},
    ),
    "dflash2, weighted": (
        "dflash2",
        {"text_weight": 0.3, "teacher_weight": 0.7, "selector_weight": 0.4, "decay": 2},
        dflash2, {"text": 0.3, "teacher": 0.7, "selector": 0.4, "decay": 2},
    ),
    "dspark": ("dspark", {}, dspark, {"text": 0.1, "distance": 0.9, "confidence": 1, "decay": 4}),
    "dspark, weighted": (
        "dspark",
        {"text_weight": 0.4, "distance_weight": 0.2, "confidence_weight": 0.3, "decay": 2},
        dspark, {"text": 0.4, "distance": 0.2, "confidence": 0.3, "decay": 2},
    ),
    "xpress": (
        "xpress", {"refiner_rank": 8}, xpress,
        {"best": 0.1, "overlap": 0.9, "text": 0, "consistency": 0.3, "base": 0.6, "decay": 4},
    ),
    "xpress, weighted": (
        "xpress",
        {
            "best_weight": 0.3, "overlap_weight": 0.4, "text_weight": 0.2, "decay": 2,
            "consistency_weight": 0.5, "consistency_passes": 2, "base_weight": 0.7,
            "refiner_rank": 8, "block_size": 5, "from_anchor": True,
        },
        xpress,
        {"best": 0.3, "overlap": 0.4, "text": 0.2, "consistency": 0.5, "base": 0.7, "decay": 2},
    ),
    "xpress, of some tokens": (
        "xpress", {"refiner_rank": 8, "block_size": 6, "vocabulary": 40}, xpress,
        {"best": 0.1, "overlap": 0.9, "text": 0, "consistency": 0.3, "base": 0.6, "decay": 4},
    ),
    "fspad": ("fspad", {}, eagle, {"feature": 1, "token": 0.1, "unroll": 1}),
    "dovetail": ("dovetail", {}, eagle, {"feature": 1, "token": 0.1, "unroll": 1}),
    "chimera": ("chimera", {}, chimera, {"hidden": 1, "token": 1}),
    "chimera, weighted": (
        "chimera", {"hidden_weight": 0.3, "token_weight": 0.7}, chimera,
        {"hidden": 0.3, "token": 0.7},
    ),
    "falcon": ("falcon", {}, falcon, {"feature": 1, "token": 0.1, "soft": 0.9}),
    "falcon, weighted": (
        "falcon", {"feature_weight": 0.4, "token_weight": 0.7, "soft_weight": 0.25}, falcon,
        {"feature": 0.4, "token": 0.7, "soft": 0.25},
    ),
    "moa": ("moa", {}, moa, {"feature": 1}),
    "moa, weighted": ("moa", {"feature_weight": 0.3}, moa, {"feature": 0.3}),
    "longspec": ("longspec", {}, longspec, {}),
    "linearized": ("linearized", {}, eagle, {"feature": 1, "token": 0.1, "unroll": 1}),
    "ppd": ("ppd", {"places": 0}, pseudo, {"decay": 0.8}),
    "hidden_transfer": (
        "hidden_transfer", {"places": 0, "decay": 0.5}, pseudo, {"decay": 0.5},
    ),
}  # fmt: skip


def test_every_head_has_a_case() -> None:
    assert {kind for kind, *_ in CASES.values()} == set(HEADS)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_the_loss_is_the_papers(case: str, tiny_folder: Path, batch: HeadBatch) -> None:
    kind, options, expected, weights = CASES[case]
    head: Head = untrained(kind, HeadTarget.from_folder(tiny_folder), seed=1, noise=0.1, **options)
    if isinstance(head, XPress):  # tokens decide, so that each pass chooses others
        head.refiner_head.token_embed.weight *= 100
    head.bind(tiny_folder)
    head.eval()
    given = replace(batch, generator=torch.Generator().manual_seed(SEED))
    loss, _ = head.loss(given)
    assert float(loss) == pytest.approx(expected(head, batch, weights), rel=1e-5)
    # Each term of the formula is large enough to be missed.
    for name, weight in weights.items():
        if weight and name != "unroll":
            other = expected(head, batch, weights | {name: 0.9 * weight})
            assert abs(other / float(loss) - 1) > 1e-4, name
