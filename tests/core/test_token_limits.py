"""Which tokens may come, when the output may end, what its text keeps, and the prompt's scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.admission import PrefillPace
from paceline.config import SpeculationConfig
from paceline.engine import Engine, RoundEvent
from paceline.errors import InvalidArgument
from paceline.models.base import Segment
from paceline.request import Request
from paceline.sampling import (
    SamplingParams,
    TokenLogprobs,
    coupled_sample,
    process_logits,
    token_logprobs,
)
from paceline.session import Session

PROMPT = "Question: Tom has 3 bags with 4 apples each. How many apples has he?\nAnswer:"
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 1.0, "seed": 4}}
METHODS = ("ar", "draft_model", "draft_model_tree", "prompt_lookup", "token_recycling", "eagle")


@pytest.fixture(scope="module")
def prompt(demo: Engine) -> list[int]:
    assert demo.tokenizer is not None
    return demo.tokenizer.encode(PROMPT)


def rows_of(demo: Engine, ids: list[int]) -> np.ndarray[Any, Any]:
    """The target's logits after each of these tokens, in one forward."""
    runner = demo.local_target.runner
    sequence = runner.new_sequence()
    rows = runner.forward([Segment(sequence, np.array(ids))]).logits.numpy()
    runner.free(sequence)
    return rows


def textbook(demo: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    """AR one token at a time, without an engine."""
    ids = list(prompt)
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else demo.eos_token_ids)}
    while len(ids) < len(prompt) + params.max_tokens:
        row = rows_of(demo, ids)[-1]
        row = process_logits(row, params, ids, len(prompt), stops)
        ids.append(coupled_sample(row, params, len(ids)))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


def generate(
    demo: Engine, prompt: list[int], params: SamplingParams, methods: tuple[str, ...] = METHODS
) -> dict[str, Session]:
    engine = demo.sibling()
    sessions = {
        m: engine.submit(Request(prompt, params, SpeculationConfig(length="fixed", method=m)))
        for m in methods
    }
    while engine.has_work:
        engine.step()
    assert not any(session.stats.drafter_lost for session in sessions.values())
    return sessions


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_min_tokens_forbids_the_end(
    demo: Engine, prompt: list[int], sampling: dict[str, Any]
) -> None:
    (free,) = generate(demo, prompt, SamplingParams(max_tokens=30, **sampling), ("ar",)).values()
    stop = free.output_ids[3]  # and the end of sequence
    base = SamplingParams(max_tokens=24, stop_token_ids=(stop,), **sampling)
    assert len(textbook(demo, prompt, base)) <= 4
    params = SamplingParams(max_tokens=24, min_tokens=9, stop_token_ids=(stop,), **sampling)
    expected = textbook(demo, prompt, params)
    assert len(expected) > 9
    assert stop not in expected[:9]
    for method, session in generate(demo, prompt, params).items():
        assert session.output_ids == expected, method


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_only_allowed_tokens_come(
    demo: Engine, prompt: list[int], sampling: dict[str, Any]
) -> None:
    allowed = tuple(range(300, 900, 7))
    params = SamplingParams(max_tokens=20, allowed_token_ids=allowed, **sampling)
    expected = textbook(demo, prompt, params)
    assert set(expected) <= set(allowed)
    for method, session in generate(demo, prompt, params).items():
        assert session.output_ids == expected, method


def test_min_tokens_gives_way_to_a_grammar_that_ends(demo: Engine, prompt: list[int]) -> None:
    params = SamplingParams(max_tokens=20, min_tokens=20, regex="(yes|no)!?")
    for method, session in generate(demo, prompt, params, METHODS[:4]).items():
        assert session.text in ("yes!", "no!"), method  # may end before "!", but must not
        assert session.finish_reason == "stop"


def test_what_the_text_keeps(demo: Engine, prompt: list[int]) -> None:
    (whole,) = generate(demo, prompt, SamplingParams(max_tokens=24, ignore_eos=True),
                        ("ar",)).values()  # fmt: skip
    stop = whole.text[6:9]

    def text(**params: Any) -> str:
        sessions = generate(demo, prompt, SamplingParams(max_tokens=24, **params), METHODS[:3])
        (text,) = {session.text for session in sessions.values()}
        return text

    cut = text(ignore_eos=True, stop=(stop,))
    assert cut == whole.text[: whole.text.index(stop)]
    kept = text(ignore_eos=True, stop=(stop,), include_stop_str_in_output=True)
    assert kept == cut + stop
    later = text(ignore_eos=True, stop=(stop,), min_tokens=23)
    assert later.startswith(kept)
    # Special tokens
    assert demo.tokenizer is not None
    (eos,) = demo.eos_token_ids
    name = demo.tokenizer.decode([eos], skip_special_tokens=False)
    assert name
    only: dict[str, Any] = {"allowed_token_ids": (eos,)}
    assert text(**only) == text(**only, skip_special_tokens=False) == ""
    assert text(**only, include_stop_str_in_output=True) == ""
    both = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    assert text(**only, **both) == name
    assert text(**only, ignore_eos=True, skip_special_tokens=False) == name * 24


@pytest.mark.parametrize("method", ["ar", "draft_model", "eagle"])
@pytest.mark.parametrize("chunk", [None, 5])
def test_the_prompts_scores_are_the_targets_own(
    demo: Engine, prompt: list[int], method: str, chunk: int | None
) -> None:
    engine = demo.sibling()
    if chunk is not None:
        engine.scheduler._pace = PrefillPace(chunk, None)
    events: list[RoundEvent] = []
    params = SamplingParams(max_tokens=4, prompt_logprobs=2, logprobs=2)
    request = Request(prompt, params, SpeculationConfig(length="fixed", method=method))
    for _ in range(2):  # the second one finds its prefix in the cache
        session = engine.submit(request, on_event=events.append)
        while engine.has_work:
            engine.step()
        rows = rows_of(demo, session.token_ids)
        told = [token_logprobs(r, t, 2) for r, t in zip(rows, session.token_ids[1:], strict=False)]
        first = TokenLogprobs(prompt[0], None)
        assert session.prompt_logprobs == [first, *told[: len(prompt) - 1]]
        assert [e for event in events for e in event.logprobs] == told[len(prompt) - 1 :]
        events.clear()
    for entry, row in zip(session.prompt_logprobs[1:], rows, strict=False):
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
    (plain,) = generate(demo, prompt, SamplingParams(max_tokens=4), ("ar",)).values()
    assert plain.output_ids == session.output_ids
    assert plain.prompt_logprobs == []


def test_a_prompt_of_one_token_has_a_score_of_none(demo: Engine, prompt: list[int]) -> None:
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    (session,) = generate(demo, prompt[:1], params, ("ar",)).values()
    assert session.prompt_logprobs == [TokenLogprobs(prompt[0], None)]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (9**9,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (5,), "regex": "a"}, "allowed_token_ids"),
        ({"allowed_token_ids": (5,), "stop_token_ids": (5,), "min_tokens": 2}, "allowed_token_ids"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"skip_special_tokens": 1}, "skip_special_tokens"),
        ({"include_stop_str_in_output": None}, "include_stop_str_in_output"),
    ],
)
def test_bad_parameters(demo: Engine, prompt: list[int], given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        demo.sibling().submit(Request(prompt, SamplingParams(**given)))
    assert caught.value.field == field
