"""A real chat model, quantised: sensible answers, and the same tokens with drafts or without.

The whole product (every lossless method, four precisions, batches of 1 and 8, temperatures 0 and
0.8, one process, actors, a device; 32 prompts of 128 tokens) takes days of a core:
tests/nightly/test_chat_exactness.py, and tests/deployments/test_chat_exactness.py with a real
cluster.

* Each method has a case of its own. Precision, batch, temperature and place are chosen so that
  every pair of their values is met, by a rule that depends on nothing but the catalogue
  (:func:`tests.chat.suite.everyday_cases`). Nothing lands without them, of which `make test` runs
  every eleventh. Methods that copy have 32 tokens of each prompt. The others compute a draft in
  every round, which costs several times as much on a CPU: they have 12 tokens of one prompt, or 6
  of each of four. With 32 prompts of 128 tokens they run at night.
* Each method once more in the precision that people have, Q4_1, in a batch with sessions of other
  methods, at both temperatures.
* AR's answers are computed once for each precision and temperature: 32 tokens of each prompt, of
  which a case compares the first ones.

Methods with another acceptance rule than the coupled one promise AR's tokens at temperature 0 only;
above it they must run to the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from paceline.config import SpeculationConfig
from paceline.drafters.draft_model import DraftModel
from paceline.errors import InvalidArgument
from paceline.methods import METHODS
from paceline.models.base import Segment
from paceline.models.packing import Packing
from paceline.request import Request
from paceline.rpc.device import checked_speculation
from paceline.sampling import SamplingParams
from tests.chat.suite import (
    BATCHES,
    LOSSLESS,
    PLACES,
    PRECISIONS,
    TEMPERATURES,
    Answer,
    Case,
    Chat,
    all_cases,
    copies,
    drafts_on_a_device,
    everyday_cases,
    same_tokens_as_ar,
    speculation,
)

EVERYDAY = everyday_cases()
ALONE, TOGETHER, MIXED = 12, 6, 4
"""Tokens of a prompt that is alone, of each of four, and of each among other methods."""
COPYING = 32
"""The same of methods that copy: they cost little, and need a text to copy from."""


# --- the model ------------------------------------------------------------------------------------


def test_weights_stay_as_they_are(chat: Chat) -> None:
    runner = chat.target("q4_1")
    assert runner.fingerprint.numerics_class == "portable"
    assert runner.packed_lm_head.packing is Packing.OCTETS
    assert 134e6 < runner.num_parameters < 136e6


@pytest.mark.slow
def test_the_precisions_are_what_they_say(chat: Chat) -> None:
    found = {precision: chat.target(precision).fingerprint for precision in PRECISIONS}
    assert [found[p].dtype for p in PRECISIONS] == ["float32", "q8_0", "bfloat16", "float32"]
    assert len({fingerprint.weights for fingerprint in found.values()}) >= 3
    assert all(chat.target(precision).batch_invariant for precision in PRECISIONS)


def test_answers_make_sense(chat: Chat) -> None:
    capital = chat.expected("q4_1", 0.0)[3]
    assert capital.finish_reason == "stop"
    assert "Lisbon" in chat.tokenizer.decode(capital.token_ids)
    assert "def count_vowels" in chat.tokenizer.decode(chat.expected("q4_1", 0.0)[1].token_ids)


def test_a_token_has_the_same_logits_however_many_are_verified_with_it(chat: Chat) -> None:
    runner, tokens = chat.target("q4_1"), np.array(chat.prompts[3])

    def logits(size: int) -> torch.Tensor:
        sequence = runner.new_sequence()
        found = []
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            found.append(runner.forward([Segment(sequence, part, logits="all")]).logits)
            runner.commit(sequence, range(len(part)))
        runner.free(sequence)
        return torch.cat(found)

    one = logits(1)
    for size in (2, 3, 5, 8, 16):
        assert torch.equal(logits(size), one), size


# --- tokens ---------------------------------------------------------------------------------------


@pytest.mark.one_of(2, slow=17)
@pytest.mark.parametrize("case", EVERYDAY, ids=str)
def test_tokens_are_those_of_ar(case: Case, chat: Chat) -> None:
    prompts: Sequence[int] = range(len(chat.prompts))
    num_tokens = COPYING if copies(case.method) else TOGETHER
    if case.batch == 1:
        prompts = [EVERYDAY.index(case) % len(chat.prompts)]
        num_tokens = COPYING if copies(case.method) else ALONE
    chat.check(case, prompts, num_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(len(TEMPERATURES)))
def test_methods_that_share_a_batch_have_the_tokens_of_ar(turn: int, chat: Chat) -> None:
    """Every method with Q4_1: as one leaves the batch the next joins, each with its own knobs."""
    engine = chat.engine("q4_1", 8, {"draft_model": DraftModel(chat.drafter)})
    sessions = []
    for i, name in list(enumerate(LOSSLESS))[turn :: len(TEMPERATURES)]:
        # Methods with other rules are compared with AR above, at temperature 0.
        temperature = TEMPERATURES[(i // 2) % 2] if same_tokens_as_ar(name, 0.8) else 0.8
        prompt = (i // 4) % len(chat.prompts)
        case = Case(name, "q4_1", 8, temperature, "process")
        session = engine.submit(
            Request(
                chat.prompts[prompt],
                chat.params(temperature, MIXED)[prompt],
                speculation(name),
                prediction=chat.prediction(case, prompt),
            )
        )
        sessions.append((case, prompt, session))
    while not all(session.finished for _, _, session in sessions):
        engine.step()
    for case, prompt, session in sessions:
        assert session.error is None, case
        answer = Answer(session.output_ids, session.finish_reason, session.stats)
        chat.compare(case, [prompt], MIXED, [answer])


# --- that nothing is forgotten --------------------------------------------------------------------


def test_every_method_has_an_everyday_case() -> None:
    assert sorted(case.method for case in EVERYDAY) == sorted(LOSSLESS)
    lossless = {name for name, method in METHODS.items() if method.lossless}
    # SmolLM2 has no model that fills masks.
    assert set(LOSSLESS) == lossless - {"diffuspec", "generalized_aggressive"}


def test_every_pair_of_values_has_an_everyday_case() -> None:
    values = PRECISIONS, BATCHES, TEMPERATURES, PLACES
    for (i, first), (j, second) in itertools.combinations(enumerate(values, 1), 2):
        for pair in itertools.product(first, second):
            assert any((case[i], case[j]) == pair for case in EVERYDAY), pair


def test_the_product_is_whole() -> None:
    devices = sum(map(drafts_on_a_device, LOSSLESS))
    combinations = len(PRECISIONS) * len(BATCHES) * len(TEMPERATURES)
    assert len(set(all_cases())) == combinations * (2 * len(LOSSLESS) + devices)


@pytest.mark.parametrize("name", [name for name in LOSSLESS if not drafts_on_a_device(name)])
def test_a_device_refuses_methods_that_need_more_than_tokens(name: str) -> None:
    with pytest.raises(InvalidArgument):
        checked_speculation(SpeculationConfig(method=name))


def test_ar_ends_where_a_shorter_generation_ends(chat: Chat) -> None:
    """What cases are compared with is the beginning of AR's answers."""
    engine = chat.engine("q4_1", 8, {})
    for temperature in TEMPERATURES:
        params = [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=TOGETHER)
            for seed in range(len(chat.prompts))
        ]
        sessions = engine.generate(chat.prompts, params, SpeculationConfig(method="ar"))
        for session, answer in zip(sessions, chat.expected("q4_1", temperature), strict=True):
            assert (session.output_ids, session.finish_reason) == answer.starts(TOGETHER)
