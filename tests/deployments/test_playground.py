"""The playground: what a request for rounds gets, the page's files, and the page in a browser."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from paceline.config import SpeculationConfig
from paceline.deployments import playground
from paceline.engine import Engine, EngineThread
from paceline.rpc.access import Gate
from paceline.rpc.generate_service import ModelInfo
from paceline.rpc.tenants import Tenants
from tests.deployments.conftest import eventually
from tests.deployments.http_serving import http_serving

MODEL = ModelInfo(name="demo", default_speculation=SpeculationConfig(method="draft_model"))
PROMPT = "def fibonacci(n):\n"
KEY = "alice-" * 4


@pytest.fixture(scope="module")
def target(demo: Engine) -> Iterator[EngineThread]:
    thread = EngineThread(demo.sibling()).start()
    yield thread
    thread.stop()


@pytest.fixture(scope="module")
def url(target: EngineThread) -> Iterator[str]:
    with http_serving(target, MODEL) as url:
        yield url


def ask(
    url: str, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        connection.close()


def complete(url: str, path: str = "completions", **body: Any) -> dict[str, Any]:
    """A completion of PROMPT without drafts of random length."""
    place = {"prompt": PROMPT} if path == "completions" else {}
    body = {"max_tokens": 40, "seed": 5, **place, **body}
    headers = {"Content-Type": "application/json"}
    status, _, answer = ask(url, "POST", f"/v1/{path}", body, **headers)
    assert status == 200, answer
    if not body.get("stream"):
        answered: dict[str, Any] = json.loads(answer)
        return answered
    events = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: {")]
    return {"chunks": [json.loads(event) for event in events]}


# --- rounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ar", "draft_model_tree"])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_rounds_say_what_was_drafted(
    url: str, target: EngineThread, path: str, method: str
) -> None:
    chat = {"messages": [{"role": "user", "content": "How many apples – é 🚲 – has Tom?"}]}
    request: dict[str, Any] = {
        **(chat if path.startswith("chat") else {}),
        "temperature": 1.0,
        "speculation": {"method": method} | ({"length": "fixed"} if method != "ar" else {}),
    }
    plain = complete(url, path, **request)["choices"][0]
    whole = complete(url, path, return_rounds=True, return_token_ids=True, **request)["choices"][0]
    chunks = complete(url, path, return_rounds=True, stream=True, **request)["chunks"]
    text = whole["text"] if path == "completions" else whole["message"]["content"]
    rounds = whole["rounds"]
    assert "rounds" not in plain
    assert plain == {k: v for k, v in whole.items() if k not in ("rounds", "token_ids")}
    streamed = [c["choices"][0]["round"] for c in chunks if "round" in c["choices"][0]]
    for each in (rounds, streamed):
        seconds = [r.pop("seconds") for r in each]
        assert seconds[0] > 0 and seconds == sorted(set(seconds))
    assert streamed == rounds
    assert [r["round"] for r in rounds] == list(range(1, len(rounds) + 1))
    assert "".join(text for r in rounds for text in r["texts"]) == text
    assert [token for r in rounds for token in r["token_ids"]] == whole["token_ids"]
    branching = False
    for r in rounds:
        draft, accepted = r["draft"], r["draft"]["accepted_indices"]
        ids, parents = draft["token_ids"], draft["parent_indices"]
        assert len(accepted) == r["num_accepted"]
        assert [ids[node] for node in accepted] == r["token_ids"][: r["num_accepted"]]
        assert [parents[node] for node in accepted] == [-1, *accepted][: len(accepted)]
        assert len(draft["texts"]) == len(ids)
        assert [draft["texts"][n] for n in accepted] == r["texts"][: len(accepted)] or any(
            "\ufffd" in t or not t for t in draft["texts"]
        )
        branching |= parents.count(-1) > 1
    assert branching == (method != "ar")
    assert not eventually(lambda: bool(target.engine.sessions), 0)


def test_auto_says_what_it_chose(url: str) -> None:
    request: dict[str, Any] = {"prompt": "def load(path):\n", "speculation": {"method": "auto"}}
    whole = complete(url, return_explanation=True, return_rounds=True, **request)
    (why,) = whole["explanations"]
    used = sum(drafter["rounds"] for drafter in why["drafters"].values())
    assert 0 < why["ar_rounds"] + used <= len(whole["choices"][0]["rounds"])
    assert {"suffix", "prompt_lookup", "draft_model"} <= why["drafters"].keys()
    assert all(0 <= rate <= 1 for d in why["drafters"].values() for rate in d["acceptance"])
    chunks = complete(url, return_explanation=True, stream=True, **request)["chunks"]
    assert chunks[-1]["explanations"][0]["workload"] == why["workload"]
    request["speculation"] = {"method": "prompt_lookup"}
    assert complete(url, return_explanation=True, **request)["explanations"] == [None]
    assert "explanations" not in complete(url, **request)


# --- the files ------------------------------------------------------------------------------------


def test_files_are_public_cached_and_closed_to_other_origins(
    target: EngineThread, tmp_path: Path
) -> None:
    (tmp_path / "tenants.yaml").write_text(yaml.safe_dump({"tenants": {"alice": {"token": KEY}}}))
    with http_serving(target, MODEL, gate=Gate(tenants=Tenants(tmp_path / "tenants.yaml"))) as url:
        kinds = {"": "text/html", "html": "text/html", "css": "text/css", "js": "text/javascript",
                 "svg": "image/svg+xml", "json": "application/json"}  # fmt: skip
        assert {"/", "/playground/app.js", "/playground/style.css"} < set(playground.PATHS)
        for path in playground.PATHS:
            status, headers, content = ask(url, "GET", path)
            kind = kinds[Path(path).suffix.removeprefix(".")]
            assert (status, headers["content-type"]) == (200, f"{kind}; charset=utf-8"), path
            assert "default-src 'none'" in headers["content-security-policy"]
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            again = {"If-None-Match": f'"other", W/{headers["etag"]}'}
            status, same, nothing = ask(url, "GET", path, **again)
            assert (status, nothing, same["etag"]) == (304, b"", headers["etag"])
            status, head, nothing = ask(url, "HEAD", path)
            assert (status, nothing, head["etag"]) == (200, b"", headers["etag"])
            assert ask(url, "POST", path)[0] == 405
            foreign = set(re.findall(rb"https?://[\w./]+", content))
            assert foreign <= {b"http://www.w3.org/2000/svg"}, path
        # Nothing else has become public with them.
        for path in ("/v1/models", "/playground/", "/playground/../v1/models", "/playground/x.js"):
            assert ask(url, "GET", path)[0] == 401, path


def test_the_catalogue_names_every_method_that_is_served(url: str) -> None:
    known = {row["name"]: row for row in json.loads(ask(url, "GET", "/playground/methods.json")[2])}
    served = json.loads(ask(url, "GET", "/v1/models")[2])["data"][0]["methods"]
    assert set(served) <= set(known)
    assert known["typical_acceptance"]["lossless"] is False
    groups = {name: known[name]["group"] for name in ("ar", "sequoia", "prompt_lookup", "eagle")}
    assert list(groups.values()) == [
        "No drafts", "A draft model", "Text seen before", "Trained heads",
    ]  # fmt: skip


# --- a browser ------------------------------------------------------------------------------------


Open = Callable[..., "Opened"]


class Opened:
    """The page in a browser, and everything that the browser complained about or asked for."""

    def __init__(self, browser: Any, url: str, width: int = 1280, scheme: str = "light") -> None:
        self.url = url
        self.complaints: list[str] = []
        self.foreign: list[str] = []
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        self.page = page = self.context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda m: self.complaints.append(f"{m.type}: {m.text}"))
        page.on("pageerror", lambda e: self.complaints.append(str(e)))
        page.on("requestfailed", lambda r: self.complaints.append(f"failed: {r.url}"))
        page.on("request", lambda r: r.url.startswith(f"{url}/") or self.foreign.append(r.url))
        page.goto(url)

    def loaded(self) -> Opened:
        """When the methods are there."""
        self.page.locator("#method-0 option").first.wait_for(state="attached")
        return self

    def text(self, selector: str, run: int = 0) -> str:
        content: str = self.page.locator(".run").nth(run).locator(selector).text_content()
        return content

    def figure(self, name: str, run: int = 0) -> str:
        return self.text(f"[data-figure={name}]", run)

    def generate(self, **values: Any) -> None:
        """Fill fields in and wait for the runs to end."""
        for name, value in values.items():
            self.page.locator(f"#{name.replace('_', '-')}").fill(str(value))
        self.page.locator("#generate").click()
        self.finished()

    def finished(self) -> None:
        self.page.locator("#results[aria-busy=false]").wait_for()

    def focused(self) -> str:
        named: str = self.page.evaluate(
            "(e => e.id || e.name || e.localName)(document.activeElement)"
        )
        return named

    def boxes(self) -> list[dict[str, float]]:
        """Where the runs are, all at one moment: the page may be scrolling."""
        boxes: list[dict[str, float]] = self.page.evaluate(
            "[...document.querySelectorAll('.run')].map(e => e.getBoundingClientRect().toJSON())"
        )
        return boxes

    def fits(self) -> bool:
        width: int = self.page.evaluate("document.documentElement.scrollWidth")
        return width <= self.page.viewport_size["width"]


@pytest.fixture
def opened(chromium: Any, target: EngineThread) -> Iterator[Open]:
    """Opens pages. They log no error, ask no other host, and leave no session behind."""
    with ExitStack() as stack:
        pages: list[Opened] = []

        def open_page(url: str, **options: Any) -> Opened:
            pages.append(Opened(chromium, url, **options))
            stack.callback(pages[-1].context.close)
            return pages[-1]

        yield open_page
        for page in pages:
            assert page.complaints == []
            assert page.foreign == []
        assert eventually(lambda: not target.engine.sessions), "sessions leaked"


def test_type_and_watch(opened: Open, url: str) -> None:
    page = opened(url).loaded()
    page.page.locator("#prompt").fill(PROMPT)
    page.page.select_option("#method-0", "draft_model_tree")
    page.page.locator("#length").fill("3")
    page.page.locator("#max-tokens").fill("40")
    page.page.locator("#seed").fill("5")
    page.page.locator("#prompt").press("Control+Enter")
    page.finished()
    speculation = {"method": "draft_model_tree", "num_speculative_tokens": 3, "length": "fixed"}
    expected = complete(url, temperature=0.7, speculation=speculation, return_rounds=True)
    choice = expected["choices"][0]
    rounds = choice["rounds"]
    accepted = sum(r["num_accepted"] for r in rounds)
    assert page.text(".output .text") == choice["text"]
    assert page.text(".output .prompt") == PROMPT
    assert page.text("h2") == "draft_model_tree"
    assert page.figure("tokens") == "40"
    assert page.figure("rounds") == str(len(rounds))
    assert page.figure("tau") == f"{40 / len(rounds):.2f}"
    rate = expected["metrics"]["speculative_decoding"]["draft_acceptance_rate"]
    assert page.figure("rate") == f"{100 * rate:.0f} %"
    assert re.fullmatch(r"[\d,]+ ms", page.figure("first"))
    assert float(page.figure("speed").replace(",", "")) > 0
    run = page.page.locator(".run").first
    assert run.locator(".token.accepted").count() == accepted
    assert run.locator(".token.own").count() == 40 - accepted
    assert f"{40 / len(rounds):.2f}" in page.page.locator("#announcement").text_content()

    # Round by round: with the arrow keys, the buttons, and by pointing at a token.
    assert page.text(".place") == f"{len(rounds)} of {len(rounds)}"
    run.locator("input[type=range]").press("Home")
    run.locator("input[type=range]").press("ArrowRight")
    assert page.text(".place") == f"2 of {len(rounds)}"
    run.locator(".tree").press("ArrowRight")
    run.locator(".next").click()
    run.locator(".previous").click()
    for number, step in ((3, None), (5, lambda: run.locator("[data-round='5']").first.hover())):
        if step is not None:
            step()
        assert page.text(".place") == f"{number} of {len(rounds)}"
        this = rounds[number - 1]
        chosen = run.locator(".chosen").all_text_contents()
        assert chosen == this["texts"]
        assert run.locator(".tree .node.accepted").count() == this["num_accepted"]
        nodes = len(this["draft"]["token_ids"])
        assert run.locator(".tree .node.rejected").count() == nodes - this["num_accepted"]
        assert run.locator(".tree .node.own").count() == len(chosen) - this["num_accepted"]
        titles = run.locator(".tree .node.accepted title").all_text_contents()
        assert [int(re.findall(r"token (\d+)", title)[0]) for title in titles] == [
            this["draft"]["token_ids"][node] for node in this["draft"]["accepted_indices"]
        ]


def test_tokens_stream_and_stop(opened: Open, url: str, target: EngineThread) -> None:
    page = opened(url).loaded()
    page.page.select_option("#method-0", "ar")
    page.page.locator("#max-tokens").fill("1500")
    page.page.locator("#generate").click()
    page.page.locator(".run[data-state=running] .token").nth(5).wait_for()
    tall = page.page.locator(".run").first.bounding_box()["height"]
    assert len(target.engine.sessions) == 1
    page.page.locator(".run[data-state=running] .token").nth(60).wait_for()
    assert page.page.locator(".run").first.bounding_box()["height"] == tall  # nothing jumps
    page.page.locator("#stop").click()
    page.finished()
    assert page.text(".state") == "stopped"
    assert eventually(lambda: not target.engine.sessions)
    assert 60 <= int(page.figure("tokens").replace(",", "")) < 1500
    page.complaints = [c for c in page.complaints if c != f"failed: {url}/v1/completions"]
    page.generate(max_tokens=8)  # it goes on
    assert page.figure("tokens") == "8"


def test_compare(opened: Open, url: str) -> None:
    page = opened(url).loaded()
    page.page.locator("#compare").check()
    page.generate(max_tokens=32, seed="")  # the page draws a seed, one for both
    verdict = page.page.locator("#verdict")
    count = page.figure("tokens")  # fewer than 32 where the text ends before
    assert re.fullmatch(
        rf"=Identical: both gave the same {count} tokens\. draft_model is [\d.]+× as fast as ar\.",
        verdict.text_content(),
    )
    assert page.figure("tokens", 1) == count and 0 < int(count) <= 32
    assert [page.text("h2", i) for i in (0, 1)] == ["draft_model", "ar"]
    assert page.text(".output", 0) == page.text(".output", 1)
    left, right = page.boxes()
    assert left["y"] == right["y"] and left["x"] + left["width"] < right["x"]
    # Another method, whose tokens may be others.
    page.page.select_option("#method-0", "speculative_sampling")
    page.generate(temperature=1.5, seed=1)
    assert verdict.text_content().startswith("≠Different from token ")
    assert "speculative_sampling keeps the target’s distribution" in verdict.text_content()
    assert verdict.get_attribute("data-same") == "false"


def test_chat_and_what_the_server_refuses(opened: Open, url: str) -> None:
    page = opened(url).loaded()
    page.page.get_by_label("Chat").check()
    assert page.page.get_by_label("Message").is_visible()
    page.page.locator("#prompt").fill("<b>Tom</b> has 3 apples.")
    page.generate(max_tokens=12)
    assert page.figure("tokens") == "12"
    page.generate(max_tokens=-1)
    assert "max_tokens" in page.page.get_by_role("alert").text_content()
    assert page.text(".state") == "failed"
    page.complaints = [c for c in page.complaints if "status of 400" not in c]
    page.generate(max_tokens=4)
    assert page.page.get_by_role("alert").is_hidden()


def test_the_keyboard_is_enough(opened: Open, url: str) -> None:
    page = opened(url, width=900).loaded()
    keyboard = page.page.keyboard
    keyboard.press("Tab")
    assert page.page.evaluate("document.activeElement.className") == "skip"
    order = []
    for _ in range(11):
        keyboard.press("Tab")
        order.append(page.focused())
        outline = page.page.evaluate(
            "[document.activeElement, document.activeElement.nextElementSibling].some("
            "e => e && getComputedStyle(e).outlineStyle !== 'none')"
        )
        assert outline, order
        if order[-1] == "prompt":
            keyboard.press("Control+A")
            keyboard.type("class <i>A")
        if order[-1] == "method-0":
            keyboard.type("prompt_l")
        if order[-1] == "max-tokens":
            keyboard.press("Control+A")
            keyboard.type("16")
    assert order == [
        "kind", "prompt", "method-0", "compare", "temperature", "seed", "max-tokens", "length",
        "summary", "generate", "stop",
    ]  # fmt: skip
    keyboard.press("Shift+Tab")
    keyboard.press("Enter")
    page.finished()
    assert page.text("h2") == "prompt_lookup"
    assert page.text(".prompt") == "class <i>A"
    assert page.figure("tokens") == "16"
    for wanted in ("stop", "output", "previous", "range"):  # from Generate on
        keyboard.press("Tab")
        named = page.page.evaluate(
            "[document.activeElement.id, document.activeElement.className,"
            " document.activeElement.type].join(' ')"
        )
        assert wanted in named
    keyboard.press("Home")
    assert page.text(".place").startswith("1 of ")
    # Whatever takes input has a name.
    unnamed = page.page.evaluate(
        "[...document.querySelectorAll('input, select, textarea, button, [tabindex]')].filter("
        "e => e.tabIndex >= 0 && !e.labels?.length && !e.ariaLabel && !e.textContent.trim()).length"
    )
    assert unnamed == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(opened: Open, url: str, scheme: str) -> None:
    page = opened(url, width=380, scheme=scheme).loaded()
    assert page.fits()
    page.page.locator("#compare").check()
    page.generate(prompt="x" * 300, max_tokens=24)
    assert page.fits()
    first, second = page.boxes()
    assert first["y"] + first["height"] <= second["y"]
    assert first["width"] > 320
    paper = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper)[:3])) < 384) == (scheme == "dark")


def test_the_server_goes_away(opened: Open, target: EngineThread) -> None:
    with ExitStack() as serving:
        url = serving.enter_context(http_serving(target, MODEL))
        page = opened(url).loaded()
        page.page.select_option("#method-0", "ar")
        page.page.locator("#max-tokens").fill("1500")
        page.page.locator("#generate").click()
        page.page.locator(".run[data-state=running] .token").nth(3).wait_for()
        serving.close()
        page.finished()
    alert = page.page.get_by_role("alert")
    assert alert.is_visible()
    assert alert.text_content().strip()
    assert page.text(".state") == "failed"
    assert page.page.locator(".token").count() > 3  # what came is still there
    page.page.locator("#generate").click()
    page.page.get_by_text("cannot be reached").wait_for()
    assert page.text(".state") == "failed"
    page.complaints.clear()  # the browser's own about connections


@pytest.mark.slow
def test_a_key_for_servers_with_tenants(opened: Open, target: EngineThread, tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text(yaml.safe_dump({"tenants": {"alice": {"token": KEY}}}))
    with http_serving(target, MODEL, gate=Gate(tenants=Tenants(tmp_path / "tenants.yaml"))) as url:
        page = opened(url)
        page.page.get_by_role("alert").wait_for()
        page.page.locator("#key").fill(KEY)
        page.page.locator("#key").press("Tab")
        page.loaded()
        assert page.page.get_by_role("alert").is_hidden()
        page.generate(max_tokens=8)
        assert page.figure("tokens") == "8"
        kept = page.page.evaluate(
            "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        )
        assert "alice" not in kept
        page.complaints = [c for c in page.complaints if "status of 401" not in c]
