"""JSON output under a schema: what each method gains over AR where much of the text is forced.

    python -m benchmarks.json_output
    python -m benchmarks.json_output --target demo --methods forced,forced_draft_model,auto

Twelve requests, each with a schema of its own, are answered with AR and with every method; the
tokens must be AR's. Seconds are processor time on one thread, without the prompt, and include the
masks of the grammar. Ratios are of AR and method on the same request in the same repetition; a
request is asked once before anything is measured, so its grammar is compiled. Drafters that
remember earlier texts would copy the answer, so each method gets an engine of its own for each
request.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from paceline.bench.board import speedup_interval
from paceline.chat import encode_prompt, template_of
from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.loading import limit_threads, load_engine
from paceline.model_names import resolve_model
from paceline.request import Request
from paceline.sampling import SamplingParams

TEXT: dict[str, Any] = {"type": "string", "maxLength": 40}
NUMBER: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9999}


def record(**properties: Any) -> dict[str, Any]:
    """The schema of an object with just these keys."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def array(items: Any) -> dict[str, Any]:
    """The schema of an array of two or three."""
    return {"type": "array", "items": items, "minItems": 2, "maxItems": 3}


ADDRESS = record(street=TEXT, city=TEXT, postal_code=TEXT, country=TEXT)
REQUESTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "customer": (
        "Describe an invented customer of a bookshop.",
        record(first_name=TEXT, last_name=TEXT, email_address=TEXT, shipping_address=ADDRESS),
    ),
    "invoice": (
        "Make up an invoice for garden tools.",
        record(
            invoice_number=NUMBER,
            positions=array(record(description=TEXT, quantity=NUMBER, price_in_cents=NUMBER)),
            total_in_cents=NUMBER,
        ),
    ),
    "event": (
        "A calendar entry for a meeting about the budget, next Tuesday.",
        record(title=TEXT, location=TEXT, start_time=TEXT, end_time=TEXT, participants=array(TEXT)),
    ),
    "recipe": (
        "A recipe for pancakes.",
        record(
            name=TEXT,
            ingredients=array(record(ingredient=TEXT, amount=NUMBER, unit={"enum": ["g", "ml"]})),
            preparation_minutes=NUMBER,
        ),
    ),
    "weather call": (
        "What will the weather be in Lisbon tomorrow? Answer with a call of the function.",
        record(
            name={"const": "get_weather_forecast"},
            arguments=record(city=TEXT, country_code=TEXT, unit={"enum": ["celsius", "kelvin"]}),
        ),
    ),
    "sentiment": (
        "Judge this review: 'The battery lasts two days, but the screen is far too dark.'",
        record(
            sentiment={"enum": ["positive", "negative", "mixed"]},
            praised_features=array(TEXT),
            criticised_features=array(TEXT),
            would_recommend={"type": "boolean"},
        ),
    ),
    "people": (
        "Who is named here? Ada Lovelace wrote to Charles Babbage about the engine.",
        record(people=array(record(given_name=TEXT, family_name=TEXT, mentioned_in_text=NUMBER))),
    ),
    "configuration": (
        "A configuration for a small web server.",
        record(
            host_name=TEXT, port=NUMBER, log_level={"enum": ["debug", "info", "warning"]},
            limits=record(max_connections=NUMBER, timeout_seconds=NUMBER, max_body_bytes=NUMBER),
        ),
    ),
    "flight": (
        "Book a flight from Oslo to Rome for two adults.",
        record(
            departure_airport=TEXT, arrival_airport=TEXT, number_of_adults=NUMBER,
            number_of_children=NUMBER, cabin_class={"enum": ["economy", "business"]},
        ),
    ),
    "quiz": (
        "A quiz question about the planets, with answers.",
        record(
            question_text=TEXT,
            possible_answers=array(record(answer_text=TEXT, is_correct={"type": "boolean"})),
            explanation_for_students=TEXT,
        ),
    ),
    "products": (
        "List two laptops for an online shop.",
        record(products=array(record(
            product_name=TEXT, manufacturer=TEXT, price_in_euros=NUMBER,
            available={"type": "boolean"},
        ))),
    ),
    "diagnosis": (
        "A bicycle's chain jumps under load. What is wrong?",
        record(
            most_likely_cause=TEXT, severity={"enum": ["low", "medium", "high"]},
            required_tools=array(TEXT), estimated_minutes=NUMBER, safe_to_ride={"type": "boolean"},
        ),
    ),
}  # fmt: skip
"""What is asked for, and the schema of the answer."""


def measure(
    target: str, methods: list[str], max_tokens: int, repetitions: int
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """AR's seconds over a method's and its tokens a round, by method, request and repetition.

    Raises:
        AssertionError: other tokens than AR's.
    """
    engine = load_engine(None if target == "demo" else target, dtype="auto")
    assert engine.tokenizer is not None
    template = template_of(resolve_model(target), None)

    def run(on: Engine, question: str, schema: dict[str, Any], method: str) -> tuple[float, Any]:
        assert on.tokenizer is not None
        prompt = encode_prompt(on.tokenizer, template, f"{question} Answer in JSON.")
        params = SamplingParams(max_tokens=max_tokens, json_schema=json.dumps(schema))
        session = on.submit(Request(prompt, params, SpeculationConfig(method=method)))
        while not session.output_ids and not session.finished:
            on.step()
        started = time.process_time()
        while not session.finished:
            on.step()
        if session.error is not None:
            raise session.error
        return time.process_time() - started, session

    found: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for question, schema in REQUESTS.values():
        run(engine, question, schema, "ar")
    for repetition in range(repetitions):
        for number, (name, (question, schema)) in enumerate(REQUESTS.items()):
            for place in range(len(methods)):
                method = methods[(place + number + repetition) % len(methods)]
                plain, expected = run(engine, question, schema, "ar")
                spent, session = run(engine.sibling(), question, schema, method)
                assert session.output_ids == expected.output_ids, f"{method}: other tokens than AR"
                a_round = len(session.output_ids) / session.stats.num_rounds
                found[method][name].append((plain / spent, a_round))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--methods", default="forced,prompt_lookup,suffix_decoding,auto")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    limit_threads(1)
    methods = options.methods.split(",")
    found = measure(options.target, methods, options.max_tokens, options.repetitions)
    print(f"{'method':24} x AR  95 %          tokens a round")
    for method, requests in found.items():
        ratios = [[ratio for ratio, _ in pairs] for pairs in requests.values()]
        low, high = speedup_interval(ratios) or (0.0, 0.0)
        middle = statistics.median(ratio for each in ratios for ratio in each)
        rounds = statistics.mean(tokens for pairs in requests.values() for _, tokens in pairs)
        print(f"{method:24} {middle:4.2f}  {low:4.2f} to {high:4.2f}  {rounds:.2f}")


if __name__ == "__main__":
    main()
