"""Tools: calls are valid, the same with any drafter, and told as OpenAI's clients read them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jsonschema
import openai
import pytest
import tokenizers

from paceline.config import SpeculationConfig
from paceline.constraints import ConstraintCompiler
from paceline.deployments.openai.output import OutputParser, merged
from paceline.deployments.openai.tools import (
    HERMES,
    LLAMA,
    MAX_CALLS,
    MISTRAL,
    Tool,
    Tools,
    format_of,
    prompt_messages,
)
from paceline.engine import Engine, EngineThread
from paceline.errors import InvalidArgument
from paceline.loading import load_engine
from paceline.model_names import resolve_model
from paceline.rpc.generate_service import ModelInfo
from paceline.sampling import SamplingParams
from paceline.tokenizer import ChatTemplate, chat_template
from tests.chat.suite import is_here
from tests.core.test_forced import COMPACT, record
from tests.deployments.conftest import PROMPTS, eventually
from tests.deployments.http_serving import http_serving
from tests.deployments.test_vllm_keys import ask

METHODS = ("ar", "draft_model", "draft_model_tree", "prompt_lookup")
HERMES_TEMPLATE = """\
{%- if tools %}Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}
Call as <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}assistant: {% if think %}<think>
{% endif %}{% endif %}"""
LLAMA_TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}{"name": function name, "parameters": dictionary}{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}assistant:"""
MISTRAL_TEMPLATE = """\
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{# [TOOL_CALLS] #}assistant:"""
TEMPLATES = {
    "none": "",
    "hermes": HERMES_TEMPLATE,
    "llama": LLAMA_TEMPLATE,
    "mistral": MISTRAL_TEMPLATE,
    "thinking": HERMES_TEMPLATE + "{# <think> #}",
}

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TIME = {
    "type": "object",
    "properties": {"zone": {"$ref": "#/$defs/zone"}},
    "required": ["zone"],
    "additionalProperties": False,
    "$defs": {"zone": {"enum": ["UTC", "CET"]}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function",
     "function": {"name": "get_weather", "description": "Of a city.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "parameters": TIME, "strict": True}},
    {"type": "function", "function": {"name": "ping"}},
]  # fmt: skip
SCHEMAS = {"get_weather": WEATHER, "get_time": TIME, "ping": {"maxProperties": 0}}
ASKED: Any = [{"role": "user", "content": "What is the weather in Rome, and the time?"}]


@pytest.fixture(scope="module")
def target(demo: Engine) -> Iterator[EngineThread]:
    thread = EngineThread(demo.sibling()).start()
    yield thread
    thread.stop()


@contextmanager
def serving(target: EngineThread, template: str) -> Iterator[str]:
    model = ModelInfo(
        name="demo",
        default_speculation=SpeculationConfig(),
        chat_template=ChatTemplate(TEMPLATES[template]),
    )
    with http_serving(target, model) as url:
        yield url


@pytest.fixture(
    scope="module",
    params=[pytest.param("none", marks=pytest.mark.nightly), *list(TEMPLATES)[1:]],
)
def each_url(request: pytest.FixtureRequest, target: EngineThread) -> Iterator[str]:
    """A server for each form of calls."""
    with serving(target, request.param) as url:
        yield url


@pytest.fixture(scope="module")
def url(target: EngineThread) -> Iterator[str]:
    with serving(target, "hermes") as url:
        yield url


@pytest.fixture
def each(target: EngineThread, each_url: str) -> Iterator[openai.OpenAI]:
    yield from client_of(target, each_url)


@pytest.fixture
def client(target: EngineThread, url: str) -> Iterator[openai.OpenAI]:
    yield from client_of(target, url)


def client_of(target: EngineThread, url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unknown", max_retries=0) as client:
        yield client
    assert eventually(lambda: not target.engine.sessions), "sessions leaked"


def check_calls(message: Any) -> list[tuple[str, Any]]:
    """The calls of a message, each valid."""
    calls = []
    for call in message.tool_calls or ():
        assert call.type == "function"
        assert call.id
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, SCHEMAS[call.function.name])
        calls.append((call.function.name, arguments))
    assert len({call.id for call in message.tool_calls or ()}) == len(calls)
    return calls


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.nightly), 1.0])
def test_a_call_is_valid_and_the_same_with_any_drafter(
    each: openai.OpenAI, temperature: float
) -> None:
    answers = []
    for method in METHODS:
        answer = each.chat.completions.create(
            model="demo", messages=ASKED, tools=TOOLS, tool_choice="required",  # type: ignore[arg-type]
            temperature=temperature, seed=3, max_tokens=150, parallel_tool_calls=False,
            extra_body={"speculation": {"method": method}, "return_token_ids": True},
        )  # fmt: skip
        choice: Any = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert len(check_calls(choice.message)) == 1
        answers.append((choice.token_ids, check_calls(choice.message)))
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("patient_masks")
def test_calls_of_generated_functions(target: EngineThread) -> None:
    """200 tools with schemas of their own, asked for in each form: calls are valid and AR's."""
    draw, finished, drafted = random.Random(11), 0, 0
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(target, template)) for template in TEMPLATES]
        for number in range(200):
            wanted = [record(draw, 2) | (COMPACT if number % 2 else {}) for _ in range(2)]
            tools = [
                {"type": "function", "function": {"name": f"call_{i}", "parameters": each}}
                for i, each in enumerate(wanted)
            ]
            request = {
                "messages": [{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}],
                "tools": tools, "max_tokens": 250, "parallel_tool_calls": False, "seed": number,
                "tool_choice": "required", "temperature": number % 3 / 2, "return_token_ids": True,
            }  # fmt: skip
            choices = []
            for method in (*METHODS, "forced", "forced_draft_model", "auto"):
                body = {**request, "speculation": {"method": method}}
                status, told, _ = ask(urls[number % len(urls)], "/v1/chat/completions", body)
                assert status == 200, told
                choices.append(told["choices"][0])
                if method == "forced":
                    drafted += told["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
            assert all(each["token_ids"] == choices[0]["token_ids"] for each in choices), number
            for choice in choices:
                if choice["finish_reason"] == "tool_calls":
                    (call,) = choice["message"]["tool_calls"]
                    schema = wanted[int(call["function"]["name"].removeprefix("call_"))]
                    jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
            finished += choices[0]["finish_reason"] == "tool_calls"
            assert choices[0]["finish_reason"] in ("tool_calls", "length")
    print(f"{finished} of 200 calls ended within the limit; forced drafts had {drafted} tokens")
    assert finished > 150
    assert drafted > 1000


def test_one_call_of_the_named_function(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.create(
            model="demo", messages=ASKED, tools=TOOLS, seed=seed, max_tokens=100,  # type: ignore[arg-type]
            tool_choice={"type": "function", "function": {"name": "get_time"}},
        )  # fmt: skip
        ((name, arguments),) = check_calls(answer.choices[0].message)
        assert name == "get_time"
        assert arguments["zone"] in ("UTC", "CET")
        assert answer.choices[0].finish_reason == "stop"


def test_several_calls_in_one_message(client: openai.OpenAI) -> None:
    """The demo model calls on and on: up to the bound, or the end."""
    answer: Any = client.chat.completions.create(
        model="demo", messages=ASKED, tools=TOOLS[2:], tool_choice="required", temperature=0,  # type: ignore[arg-type]
        max_tokens=400,
    )  # fmt: skip
    assert 1 < len(check_calls(answer.choices[0].message)) <= MAX_CALLS
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.one_of(1, slow=3)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_stream_says_the_same(each: openai.OpenAI, choice: Any) -> None:
    request: dict[str, Any] = {
        "model": "demo", "messages": ASKED, "tools": TOOLS, "tool_choice": choice, "seed": 8,
        "max_tokens": 40, "extra_body": {"return_token_ids": True},
    }  # fmt: skip
    whole: Any = each.chat.completions.create(**request).choices[0]
    chunks = [c.choices[0] for c in each.chat.completions.create(**request, stream=True)]
    content = "".join(c.delta.content or "" for c in chunks)
    assert content == (whole.message.content or "")
    calls: dict[int, dict[str, str]] = {}
    for chunk in chunks:
        for call in chunk.delta.tool_calls or ():
            entry = calls.setdefault(call.index, {"name": "", "arguments": ""})
            entry["name"] += call.function.name or ""
            entry["arguments"] += call.function.arguments or ""
    expected = [
        {"name": call.function.name, "arguments": call.function.arguments}
        for call in whole.message.tool_calls or ()
    ]
    assert list(calls.values()) == expected
    assert chunks[-1].finish_reason == whole.finish_reason
    token_ids = [token for c in chunks for token in getattr(c, "token_ids", ())]
    assert token_ids == whole.token_ids
    if choice == "required":
        assert expected


def test_auto_may_answer_in_words_or_call(client: openai.OpenAI) -> None:
    for seed in range(2):
        answer = client.chat.completions.create(
            model="demo", messages=ASKED, tools=TOOLS, seed=seed, max_tokens=60,  # type: ignore[arg-type]
        )  # fmt: skip
        message = answer.choices[0].message
        assert message.content or check_calls(message)
    none = client.chat.completions.create(
        model="demo", messages=ASKED, tools=TOOLS, seed=0, max_tokens=60, tool_choice="none",  # type: ignore[arg-type]
    )  # fmt: skip
    assert none.choices[0].message.tool_calls is None
    assert none.choices[0].message.content


def test_wrong_tools_are_named(url: str) -> None:
    def tool(**function: Any) -> dict[str, Any]:
        return {"type": "function", "function": function}

    for given, field in (
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [tool()]}, "tools[0].function.name"),
        ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
        ({"tools": [tool(name="a"), tool(name="a")]}, "tools[1].function.name"),
        ({"tools": [tool(name="a", parameters={"type": "array"})]},
         "tools[0].function.parameters.type"),
        ({"tools": [tool(name="a", parameters={"properties": {"x": {"type": "strin"}}})]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice.function.name"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tools"),
        ({"tools": TOOLS, "messages": [{"role": "assistant", "tool_calls": [{}]}]},
         "messages[0].tool_calls[0]"),
        ({"tools": TOOLS, "messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "x", "arguments": "{"}}]}]},
         "messages[0].tool_calls[0].function.arguments"),
    ):  # fmt: skip
        body = {"messages": ASKED, "max_tokens": 1, **given}
        status, told, _ = ask(url, "/v1/chat/completions", body)
        assert (status, told["error"]["param"]) == (400, field), told


def test_responses_call_too(client: openai.OpenAI) -> None:
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    request: dict[str, Any] = {"model": "demo", "input": "The time?", "tools": flat,
                               "tool_choice": "required", "temperature": 0,
                               "parallel_tool_calls": False, "max_output_tokens": 150}  # fmt: skip
    whole = client.responses.create(**request)
    calls = [item for item in whole.output if item.type == "function_call"]
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    events = list(client.responses.create(**request, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == f"response.{whole.status}"
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [e.arguments for e in done] == [call.arguments for call in calls]
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == "".join(call.arguments for call in calls)
    history: list[Any] = [{"role": "user", "content": "The time?"}]
    for call in calls:
        history.append(
            {"type": "function_call", "call_id": call.call_id, "name": call.name,
             "arguments": call.arguments}
        )  # fmt: skip
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "12:00"})
    after = client.responses.create(
        model="demo",
        input=history,
        tools=flat,
        tool_choice="none",
        max_output_tokens=16,  # type: ignore[arg-type]
    )
    assert after.output_text


@pytest.mark.usefixtures("patient_masks")
@pytest.mark.parametrize("template", list(TEMPLATES)[1:])
def test_the_grammar_of_calls_in_text(target: EngineThread, template: str) -> None:
    """With ``auto``, words are free until a call begins, and the call is held to its schema."""
    tokenizer, tools = target.engine.tokenizer, tools_of(TEMPLATES[template])
    assert tokenizer is not None
    form, ending = tools.format, list(target.engine.eos_token_ids[:1])
    good, bad = form.text(CALLS), form.text([("ping", '{"x": 1}')])
    unknown = form.text([("rm", "{}")])
    said = "It is <tool> {here}.\n" if form.marker else ""
    params = SamplingParams(grammar=tools.grammar("maybe" if template == "thinking" else "no"))

    def allowed(text: str) -> bool:
        constraint = target.engine.constraints.compile(params)
        assert constraint is not None
        ids = [*tokenizer.encode(text, add_special_tokens=False), *ending]
        return bool(constraint.num_allowed(ids) == len(ids))

    for text in ("", "Only words.", said + good, form.text(CALLS[1:])):
        assert allowed(text), text
    for text in (said + bad, bad, unknown, said + good[:-3], good + " and words"):
        assert not allowed(text), text


class WithMarker:
    """The demo pair's tokenizer, with a special token that begins calls."""

    def __init__(self, tokenizer: Any) -> None:
        source = json.loads(tokenizer.to_json())
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(source))
        self._tokenizer.add_special_tokens(["[TOOL_CALLS]"])
        self.vocab_size = self._tokenizer.get_vocab_size()

    def to_json(self) -> str:
        return str(self._tokenizer.to_str())

    def token_bytes(self, token_id: int) -> bytes:
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False)).encode()

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.usefixtures("patient_masks")
def test_a_marker_that_is_a_special_token(target: EngineThread) -> None:
    tokenizer = WithMarker(target.engine.tokenizer)
    eos = target.engine.eos_token_ids
    compiler = ConstraintCompiler(tokenizer, tokenizer.vocab_size, eos)  # type: ignore[arg-type]
    (marker,) = tokenizer.encode("[TOOL_CALLS]")
    calls = tokenizer.encode(MISTRAL.text(CALLS))
    assert calls[0] == marker
    words = tokenizer.encode("It is ")
    spelled = [*tokenizer.encode("[TOOL"), *tokenizer.encode("_CALLS]")]
    auto, must = (
        SamplingParams(grammar=tools_of(MISTRAL_TEMPLATE, choice).grammar("no", marker))
        for choice in ("auto", "required")
    )

    def allowed(params: SamplingParams, ids: list[int]) -> bool:
        constraint = compiler.compile(params)
        assert constraint is not None
        return bool(constraint.num_allowed([*ids, eos[0]]) == len(ids) + 1)

    assert allowed(auto, [*words, *calls])
    assert allowed(auto, [*words, *spelled])  # are words
    assert allowed(must, calls)
    assert not allowed(must, words)
    assert not allowed(must, [*spelled, *calls[1:]])
    assert not allowed(auto, [*words, *calls[:-1]])


# --- what the model's text means ------------------------------------------------------------------


def tools_of(template: str, choice: Any = "auto") -> Tools:
    found = Tools.of([Tool.model_validate(t) for t in TOOLS], choice, None, template)
    assert found is not None
    return found


CALLS = [("get_weather", '{"city": "R\\"}{", "unit": "C"}'), ("ping", "{}")]


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL], ids=lambda form: form.name)
def test_pieces_of_any_size_mean_the_same(form: Any) -> None:
    template = {"hermes": HERMES_TEMPLATE, "llama3": LLAMA_TEMPLATE, "mistral": MISTRAL_TEMPLATE}
    tools = tools_of(template[form.name])
    assert tools.format is form
    calls = form.text(CALLS)
    said = "It <is> here [too].\n" if form.marker else ""
    thoughts = "<think>\nwhy < not\n</think>\n\n"
    for thinking, before in (("no", ""), ("maybe", thoughts), ("maybe", "")):
        text = before + said + calls
        for seed in range(20):
            rng, parser, deltas, place = random.Random(seed), OutputParser(tools, thinking), [], 0
            while place < len(text):
                size = rng.choice((1, 2, 5, 30))
                deltas += parser.push(text[place : place + size])
                place += size
            deltas += parser.close()
            message = merged(deltas)
            assert message.get("content", "") == said
            assert message.get("reasoning_content", "") == ("why < not\n" if before else "")
            found = [(c["function"]["name"], c["function"]["arguments"])
                     for c in message["tool_calls"]]  # fmt: skip
            assert found == CALLS


def test_thoughts_that_the_prompt_has_opened() -> None:
    parser = OutputParser(None, "yes")
    pieces = "hm</thi", "nk>\n\nyes <tool_call>"
    message = merged([d for piece in pieces for d in parser.push(piece)] + parser.close())
    assert message == {"reasoning_content": "hm", "content": "yes <tool_call>"}
    parser = OutputParser(None, "yes")
    assert merged(parser.push("hm </") + parser.close()) == {"reasoning_content": "hm </"}


def test_templates_that_read_no_tools_get_them_in_words() -> None:
    tools = [Tool.model_validate(tool) for tool in TOOLS]
    call = {"id": "1", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "pong"},
    ]
    messages, given = prompt_messages(history, tools, "")
    assert given is None
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert '"name": "get_weather"' in messages[0]["content"]
    assert messages[2]["content"] == HERMES.text([("ping", "{}")])
    assert "pong" in messages[3]["content"]
    messages, given = prompt_messages(history, tools, HERMES_TEMPLATE)
    assert given is not None
    assert len(given) == 3
    assert "strict" not in given[1]["function"]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {}
    with pytest.raises(InvalidArgument):
        prompt_messages([{"role": "assistant", "content": "", "tool_calls": [1]}], tools, "")


def test_the_form_is_the_templates() -> None:
    assert [format_of(template).name for template in TEMPLATES.values()] == [
        "hermes", "hermes", "llama3", "mistral", "hermes",
    ]  # fmt: skip


# --- a model that people use ----------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_calls_what_it_is_asked_for() -> None:
    """Its chat template knows no tools, so the system's message describes them."""
    if not is_here():
        pytest.skip("not here: paceline models get smollm2")
    thread = EngineThread(load_engine("smollm2", dtype="auto")).start()
    info = ModelInfo(
        name="smollm2",
        default_speculation=SpeculationConfig(method="prompt_lookup"),
        chat_template=chat_template(resolve_model("smollm2")),
    )
    asked: Any = [{"role": "user", "content": "What is the weather in Paris in F?"}]
    try:
        with (
            http_serving(thread, info) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="unknown", timeout=300) as client,
        ):
            found = []
            for method in ("ar", "prompt_lookup", "suffix_decoding"):
                answer = client.chat.completions.create(
                    model="smollm2", messages=asked, tools=TOOLS[:2], tool_choice="required",  # type: ignore[arg-type]
                    temperature=0, max_tokens=120, parallel_tool_calls=False,
                    extra_body={"speculation": {"method": method}, "return_token_ids": True},
                )  # fmt: skip
                choice: Any = answer.choices[0]
                found.append((choice.token_ids, check_calls(choice.message)))
            assert all(each == found[0] for each in found)
            ((name, arguments),) = found[0][1]
            assert name == "get_weather"
            assert arguments["city"] == "Paris"
    finally:
        thread.stop()
