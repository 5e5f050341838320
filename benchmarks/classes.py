"""Method auto beside the best single method of each class of requests, decoding for real.

    python -m benchmarks.classes --prompts spec_bench.jsonl
    python -m benchmarks.classes --target demo --batch 1

A class is a category of the file of questions, or one of those made here: edits of code with a
prediction, JSON under a schema, a second turn, random tokens. Each method has an engine of its own
with a model of its own, as a deployment, and no prompt comes twice: what drafters remember is what
they would remember in service. A group is one batch of a class; all methods decode it, one after
the other, in an order that changes. The first group of a class counts for nothing: ``auto`` and the
drafters that remember have seen no such request before. With ``--warmup 5`` five groups count for
nothing, and the numbers are those of the long run.

Seconds are processor time on one thread, with prompts. ``best`` is the method with most tokens per
second over all groups of a class, AR among them: it knows the outcome, which nothing that learns
can. Intervals are 95 % of a bootstrap over groups.

With ``--control`` a second engine decodes every group with AR, too. The two differ only by what the
machine did meanwhile and by where their weights lie in its memory, so their ratio says what a
comparison with AR can show here.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.json_output import REQUESTS
from paceline.bench.suites import read_prompts
from paceline.chat import conversation, encode_chat, encode_prompt, template_of
from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.loading import limit_threads, load_engine
from paceline.memory import keep_loaded
from paceline.model_names import resolve_model
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.tokenizer import ChatTemplate, Tokenizer

SINGLES = ("prompt_lookup", "suffix_decoding", "copyspec")
MORE = {"edit": ("predicted_outputs",), "json": ("forced",)}
"""Methods that only requests of that class can use."""
PLACES = ("Lisbon", "Oslo", "Quito", "Nairobi", "Osaka", "Perth", "Lima", "Turin", "Cork", "Riga")
CONTROL = "ar again"
"""AR on an engine of its own, beside AR."""
GAIN = 0.98
"""Of AR's speed: a request below it was made slower."""
RESAMPLES = 2000


@dataclass(frozen=True)
class Asked:
    """A request of a class, without its method.

    Attributes:
        constraint: fields of :class:`SamplingParams`.
    """

    prompt_ids: list[int]
    prediction: list[int]
    constraint: Mapping[str, Any]


@dataclass
class Timed:
    """What the methods took for one group.

    Attributes:
        num_tokens: of the answers, which are the same with every method.
        seconds: by method.
    """

    num_tokens: int
    seconds: dict[str, float]

    def gain(self, method: str) -> float:
        """Speed of a method over AR's."""
        return self.seconds["ar"] / self.seconds[method]


class Requests:
    """Makes requests of each class; each is made once.

    Args:
        prompts: file of questions, or None.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, prompts: Path | None, seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._random = random.Random(seed)
        self.classes: dict[str, Iterator[Asked]] = {}
        if prompts is not None:
            texts: dict[str, list[str]] = defaultdict(list)
            for prompt in read_prompts(prompts):
                texts[prompt.category].append(prompt.text)
            for category, of_category in texts.items():
                self._random.shuffle(of_category)
                self.classes[category] = map(self._question, of_category)
            self.classes["second turn"] = self._second_turns(texts)
        self.classes |= {
            "edit": self._edits(), "json": self._json(), "random": self._random_tokens(),
        }  # fmt: skip

    def _question(self, text: str) -> Asked:
        return Asked(encode_prompt(self._tokenizer, self._template, text), [], {})

    def _second_turns(self, texts: Mapping[str, Sequence[str]]) -> Iterator[Asked]:
        questions = [text for of_category in texts.values() for text in of_category[-20:]]
        self._random.shuffle(questions)
        for text in questions:
            if self._template is not None and len(text) < 2000:
                turns = [text, "Thank you. Explain the most important point once more."]
                answer = "Here is what I found: " + " ".join(text.split()[-30:])
                messages = conversation(turns, [answer])
                yield Asked(encode_chat(self._tokenizer, self._template, messages), [], {})

    def _edits(self) -> Iterator[Asked]:
        functions = [
            function
            for module in (statistics, random, json, argparse, inspect, itertools)
            for function in vars(module).values()
            if inspect.isfunction(function) and function.__module__ == module.__name__
        ]
        self._random.shuffle(functions)
        for function in functions:
            source = inspect.getsource(function)
            names = [name for name in function.__code__.co_varnames if len(name) > 2]
            if names and 200 < len(source) < 1500:
                name = self._random.choice(names)
                text = f"Rename {name} to new_{name} in this code:\n\n```python\n{source}```\n"
                answer = source.replace(name, f"new_{name}")
                prediction = self._tokenizer.encode(f"```python\n{answer}```", False)
                prompt = encode_prompt(self._tokenizer, self._template, text)
                yield Asked(prompt, prediction, {})

    def _json(self) -> Iterator[Asked]:
        asked = [(q, s, place) for place in PLACES for q, s in REQUESTS.values()]
        self._random.shuffle(asked)
        for question, schema, place in asked:
            text = f"{question} It is for a customer in {place}. Answer in JSON."
            prompt = encode_prompt(self._tokenizer, self._template, text)
            yield Asked(prompt, [], {"json_schema": json.dumps(schema)})

    def _random_tokens(self) -> Iterator[Asked]:
        while True:
            length = self._random.randrange(16, 128)
            ids = [self._random.randrange(self._tokenizer.vocab_size) for _ in range(length)]
            yield Asked(ids, [], {})


def methods_of(kind: str, singles: Sequence[str], control: bool = False) -> list[str]:
    """The methods that are compared for a class."""
    return ["ar", *singles, *MORE.get(kind, ()), "auto", *([CONTROL] if control else [])]


def decode(
    engine: Engine, group: Sequence[Asked], method: str, max_tokens: int
) -> tuple[float, list[list[int]]]:
    """Decode a group as one batch; processor seconds, and the tokens of each request."""
    config = SpeculationConfig(method="ar" if method == CONTROL else method)
    began = time.process_time()
    sessions = []
    for asked in group:
        params = SamplingParams(max_tokens=max_tokens, **asked.constraint)
        prediction = asked.prediction if method in ("auto", "predicted_outputs") else []
        sessions.append(
            engine.submit(Request(asked.prompt_ids, params, config, prediction=prediction))
        )
    while engine.has_work:
        engine.step()
    seconds = time.process_time() - began
    for session in sessions:
        if session.error is not None:
            raise session.error
    return seconds, [session.output_ids for session in sessions]


def measure(
    engines: Mapping[str, Engine],
    kind: str,
    requests: Iterator[Asked],
    batch: int,
    num_groups: int,
    methods: Sequence[str],
    max_tokens: int,
    warmup: int = 1,
) -> list[Timed]:
    """Time ``methods`` on groups of a class, of which the first ``warmup`` do not count.

    Raises:
        AssertionError: a method's tokens are not AR's.
    """
    found: list[Timed] = []
    for number in range(warmup + num_groups):
        group = list(itertools.islice(requests, batch))
        if len(group) < batch:
            break
        seconds: dict[str, float] = {}
        tokens: dict[str, list[list[int]]] = {}
        for place in range(len(methods)):
            method = methods[(place + number) % len(methods)]
            seconds[method], tokens[method] = decode(engines[method], group, method, max_tokens)
        for method in methods:
            assert tokens[method] == tokens["ar"], f"{kind}, {method}: other tokens than AR"
        if number >= warmup:
            found.append(Timed(sum(map(len, tokens["ar"])), seconds))
    return found


def speed(timed: Sequence[Timed], method: str) -> float:
    """Tokens per second over groups."""
    return sum(each.num_tokens for each in timed) / sum(each.seconds[method] for each in timed)


def best_of(timed: Sequence[Timed]) -> str:
    """The single method that is fastest over groups."""
    singles = [method for method in timed[0].seconds if method not in ("auto", CONTROL)]
    return max(singles, key=lambda method: speed(timed, method))


def interval(timed: Sequence[Timed], over: str, of: str = "auto") -> tuple[float, float]:
    """95 % of the speed of a method over that of another one, for other groups of the kind."""
    rng = np.random.default_rng(0)
    shares = []
    for chosen in rng.integers(len(timed), size=(RESAMPLES, len(timed))):
        drawn = [timed[i] for i in chosen]
        shares.append(speed(drawn, of) / speed(drawn, over))
    low, high = np.percentile(shares, (2.5, 97.5))
    return float(low), float(high)


def compared(timed: Sequence[Timed], of: str, over: str) -> dict[str, float]:
    """A method's share of another one's speed with its interval; its groups at ``GAIN``."""
    low, high = interval(timed, over, of)
    share = speed(timed, of) / speed(timed, over)
    kept = statistics.mean(each.gain(of) >= GAIN for each in timed)
    return {"share": share, "share_low": low, "share_high": high, "kept": kept}


def shown(each: Mapping[str, float]) -> str:
    """A share and its interval."""
    return f"{each['share']:4.2f} ({each['share_low']:4.2f} to {each['share_high']:4.2f})"


def report(batch: int, found: Mapping[str, list[Timed]], singles: Sequence[str]) -> dict[str, Any]:
    """Print the table of a batch size, and return its numbers."""
    print(f"\nbatch {batch}\n{'class':16} groups  AR tok/s  best{'':17}x AR   auto  auto / best")
    rows: dict[str, Any] = {}
    for kind, timed in found.items():
        best = best_of(timed)
        ar, top, auto = (speed(timed, method) for method in ("ar", best, "auto"))
        beside_best = compared(timed, "auto", best)
        print(
            f"{kind:16} {len(timed):6} {ar:9.1f}  {best:20} {top / ar:4.2f}   {auto / ar:4.2f}  "
            f"{shown(beside_best)}"
        )
        rows[kind] = {
            "groups": len(timed), "ar": ar, "best": best, "best_x": top / ar, "auto_x": auto / ar,
            **beside_best,
            "all_x": {m: speed(timed, m) / ar for m in timed[0].seconds},
        }  # fmt: skip
    everything = [each for timed in found.values() for each in timed]
    usual = max(("ar", *singles), key=lambda m: speed(everything, m))
    beside_usual = compared(everything, "auto", usual)
    rows["all"] = {"best": usual, **beside_usual}
    print(
        f"all: auto {shown(beside_usual)} x {usual}, the best single method over all, and "
        f"{speed(everything, 'auto') / speed(everything, 'ar'):.2f} x AR; "
        f"{beside_usual['kept']:.0%} of groups at {GAIN} x AR or above",
        flush=True,
    )
    if CONTROL in everything[0].seconds:
        rows["control"] = control = compared(everything, CONTROL, "ar")
        print(
            f"AR beside itself: {shown(control)}; "
            f"{control['kept']:.0%} of groups at {GAIN} x AR or above",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--prompts", type=Path, help="questions in Spec-Bench's format")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 4, 2], help="by batch size")
    parser.add_argument("--warmup", type=int, default=1, help="groups that do not count")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--methods", help="single methods, with commas between")
    parser.add_argument("--classes", help="only these, with commas between")
    parser.add_argument("--control", action="store_true", help="also compare AR with itself")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    options = parser.parse_args()
    limit_threads(1)
    head = ("eagle", "draft_model") if options.target == "demo" else ("eagle3",)
    singles = tuple(options.methods.split(",")) if options.methods else (*SINGLES, *head)
    target = None if options.target == "demo" else options.target
    names = dict.fromkeys(
        name for kind in ("", *MORE) for name in methods_of(kind, singles, options.control)
    )
    engines = {method: load_engine(target, dtype="auto") for method in names}
    keep_loaded()  # as a replica does: to look through all of it stops a request for 0.1 s
    tokenizer = engines["ar"].tokenizer
    assert tokenizer is not None
    template = template_of(resolve_model(options.target), None)
    results: dict[str, Any] = {}
    requests = Requests(tokenizer, template, options.prompts, options.seed)
    for place, batch in enumerate(options.batch):
        groups = options.groups[min(place, len(options.groups) - 1)]
        found = {}
        for kind, asked in requests.classes.items():
            if options.classes and kind not in options.classes.split(","):
                continue
            methods = methods_of(kind, singles, options.control)
            timed = measure(
                engines, kind, asked, batch, groups, methods, options.max_tokens, options.warmup
            )
            if timed:
                found[kind] = timed
        if found:
            results[str(batch)] = report(batch, found, singles)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
