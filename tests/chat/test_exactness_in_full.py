"""Each lossless method on SmolLM2 in its everyday case (tests/chat/suite.py), with four prompts of
24 tokens."""

from __future__ import annotations

import pytest

from tests.chat.conftest import NUM_PROMPTS, open_chat
from tests.chat.suite import Case, Chat, everyday_cases

NUM_TOKENS = 24

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return open_chat(request, tmp_path_factory, NUM_PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("case", everyday_cases(), ids=str)
def test_tokens_are_those_of_ar(case: Case, chat: Chat) -> None:
    chat.check(case, range(NUM_PROMPTS), NUM_TOKENS)
