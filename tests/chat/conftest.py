"""SmolLM2 for the folder, loaded once."""

from __future__ import annotations

import pytest

from tests.chat.suite import Chat, is_here

NUM_PROMPTS, NUM_TOKENS = 4, 32


@pytest.fixture(scope="session")
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return open_chat(request, tmp_path_factory, NUM_PROMPTS, NUM_TOKENS)


def open_chat(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    num_prompts: int,
    num_tokens: int,
) -> Chat:
    """What is made of the model's file stays in pytest's cache, which `make clean` removes."""
    if not is_here():
        pytest.skip("not here: paceline models get smollm2")
    cache = getattr(request.config, "cache", None)
    folder = tmp_path_factory.mktemp("smollm2") if cache is None else cache.mkdir("smollm2")
    return Chat(folder, num_prompts, num_tokens)
