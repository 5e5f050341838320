"""The exactness promise on SmolLM2: every lossless method at length, and in every case.

At length: 32 prompts of 128 tokens, each method in its everyday case (tests/chat); together these
have every pair of precision, batch, temperature and place; one to three minutes a method on a core
without AVX-512.

In every case: four precisions, batches of 1 and 8, temperatures 0 and 0.8, in one process, in
actors and from a device; 8 prompts of 16 tokens. A case takes four seconds on such a core, three
hours for all 2,112. A part is chosen by its name, PRECISION-PLACE-batchBATCH-tTEMPERATURE-ROW, and
PACELINE_CHAT_SIZE=32x128 takes as many prompts and tokens (all cases: days):

    PACELINE_CHAT_SIZE=32x128 \\
    make test-nightly PYTEST_ARGS="tests/nightly/test_chat_exactness.py -k q4_1-process-batch8"
"""

from __future__ import annotations

import os

import pytest

from tests.chat.conftest import open_chat
from tests.chat.suite import Case, Chat, all_cases, everyday_cases

SIZE = os.environ.get("PACELINE_CHAT_SIZE") or "8x16"
"""Prompts and tokens."""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def long_chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return open_chat(request, tmp_path_factory, 32, 128)


@pytest.mark.parametrize("case", everyday_cases(), ids=str)
def test_tokens_at_length_are_those_of_ar(case: Case, long_chat: Chat) -> None:
    long_chat.check(case, range(32), 128)


@pytest.fixture(scope="module")
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    num_prompts, num_tokens = map(int, SIZE.split("x"))
    return open_chat(request, tmp_path_factory, num_prompts, num_tokens)


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_tokens_are_those_of_ar(case: Case, chat: Chat) -> None:
    chat.check(case, range(len(chat.prompts)), chat.num_tokens)
