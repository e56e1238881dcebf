"""The chat of the page: answers in Markdown that do no harm, with tokens in their places, and models that change."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from sheepop.checkpoint.model_cache import CachedModel
from sheepop.serve.config import ServerConfig

from .conftest import TEMPLATE, Live, model_of
from .test_inside import chromium, needs_axe, violations

pytestmark = pytest.mark.system
CODE = 'def spin(wool: str, turns=3):\n    return "<b>" * turns  # a comment\n'
TEXT = rf"""# Wool

Wool is **warm** and *light*: see [the page](https://example.org/wool "x"). It costs $5 and $6.

1. Wash it with `soap(3)`

   ```python
   {CODE.replace(chr(10), chr(10) + "   ").rstrip()}
   ```

The scale is $\frac{{1}}{{\sqrt{{d}}}}$, and

$$
\left(\begin{{matrix}}a\\b\\c\\d\end{{matrix}}\right) = \sqrt{{x}}
$$

| breed | price |
|:--|--:|
| Merino | 12 |

An <b>answer</b> \*as text\*: &amp; שלום 👩‍👩‍👦 end"""
BOMBS = [
    r"\def\a{\a\a}\a", r"\def\b#1{#1#1#1#1#1#1#1#1#1#1}\b{\b{\b{\b{x}}}}", r"\frac{1}{" * 200, "{" * 900 + "}" * 900,
    r"\href{javascript:hacked()}{x}", r"\includegraphics{https://evil.example/x.png}", r"\htmlStyle{color: red}{x}",
]  # fmt: skip
HOSTILE = [
    "<script>hacked()</script>", "<img src=x onerror=hacked()>", "![x](https://evil.example/x.png)",
    "[x](javascript:hacked()) [y](data:text/html,<script>hacked()</script>) <javascript:hacked()>",
    "[x](JaVaScRiPt:hacked()) [z](&#106;avascript:hacked())", "<svg/onload=hacked()><style>*{display:none}</style>",
    "```html\n<script>hacked()</script>", "``` \"><img src=x onerror=hacked()>\nx\n```", "x" * 300,
    "👩‍👩‍👦" * 40, "שלום עולם مرحبا " * 10, "[" * 5000, "*_" * 5000, "$" * 4999, "\\(" * 5000, "> " * 3000 + "x",
    "|a" * 500 + "|\n" + "|-" * 500 + "|\n" + "|b" * 500 + "|", "\r\n# a\r\rb\n\x00", "wool " * 200_000,
    *(f"$${bomb}$$" for bomb in BOMBS),
]  # fmt: skip


def stream(text: str, size: int = 3, more: Sequence[dict[str, Any]] = (), is_whole: bool = True) -> str:
    """The events of an answer in pieces of so many characters, each of which is a token."""
    deltas = [{"delta": delta, "finish_reason": None} for delta in more]
    for begin in range(0, len(text), size):
        piece = text[begin : begin + size]
        top = [{"token": piece, "logprob": -0.5}, {"token": "sheep", "logprob": -2.0}]
        tokens = {"content": [{"token": piece, "logprob": -0.5, "top_logprobs": top}]}
        deltas.append({"delta": {"content": piece}, "logprobs": tokens, "finish_reason": None})
    about = {"id": "chatcmpl-1", "system_fingerprint": "fp_1"}
    events = [json.dumps({**about, "choices": [delta]}) for delta in deltas]
    return "".join(f"data: {event}\n\n" for event in [*events, *(["[DONE]"] if is_whole else [])])


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    votes = tmp_path_factory.mktemp("chat") / "votes.jsonl"
    server = Live(ServerConfig(ui=True, votes=str(votes)))
    model_of(server.registry, "chat")  # with Playwright a loop of events runs in this thread
    yield server
    server.close()


@pytest.fixture(scope="module")
def browser(live: Live) -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser: Any, live: Live) -> Iterator[Any]:
    """A page in the chat that may report no error and ask nobody else."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page, wrong = context.new_page(), list[str]()
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(live.url) else wrong.append(asked.url))
    page.goto(f"{live.url}/ui#room=chat&model=chat&max_tokens=24&seed=1")
    page.wait_for_selector("#say")
    yield page
    context.close()
    assert [line for line in wrong if "400 (Bad Request)" not in line] == []


def answers(page: Any, *bodies: str) -> list[Any]:
    """Lets the page get these answers, one after the other; returns what it asks."""
    asked: list[Any] = []

    def fulfil(route: Any) -> None:
        asked.append(route.request.post_data_json)
        route.fulfill(body=bodies[min(len(asked), len(bodies)) - 1], content_type="text/event-stream")

    page.route("**/v1/chat/completions", fulfil)
    return asked


def send(page: Any, message: str) -> None:
    page.fill("#say", message)
    page.keyboard.press("Enter")


def test_an_answer_is_shown_as_markdown_and_its_tokens_stay_where_they_are(page: Any) -> None:
    asked = answers(page, stream(TEXT), stream("!"))
    send(page, "<b>What</b> is *wool*?")
    page.wait_for_selector(".math.display")
    page.wait_for_selector(".hljs-keyword")
    assert page.locator(".asked").inner_text() == "<b>What</b> is *wool*?"
    content = page.locator(".content")
    assert content.locator("h1").inner_text() == "Wool" and content.locator("strong").inner_text() == "warm"
    assert content.locator("pre code").text_content() == CODE
    assert content.locator("td[align=right]").inner_text() == "12" and content.locator(".katex").count() == 2
    link = content.locator("a").evaluate("each => [each.href, each.target, each.rel]")
    assert link == ["https://example.org/wool", "_blank", "noopener noreferrer"]
    last = content.locator("p").last.inner_text()
    assert last == "An <b>answer</b> *as text*: & שלום 👩‍👩‍👦 end"
    assert "$5 and $6" in content.inner_text()

    # Each enclosed piece is a part of its own token, and in code every character belongs to one.
    found = page.evaluate(
        "[...document.querySelectorAll('.tok')].map((each) => [each.dataset.place, each.textContent])"
    )
    pieces = [TEXT[begin : begin + 3] for begin in range(0, len(TEXT), 3)]
    assert all(text in pieces[int(place)] for place, text in found) and len(found) > 80
    inside = "(each) => [...each.querySelectorAll('.tok')].map((tok) => tok.textContent).join('')"
    assert content.locator("pre code").evaluate(inside) == CODE.replace("\n", "")
    assert content.locator("h1").evaluate(inside) == "Wool"

    number = TEXT.index("warm") // 3
    page.locator(f".tok[data-place='{number}']").last.hover()
    tip = page.locator(".written .tip")
    assert tip.locator("small").inner_text().endswith("60.7 %")  # exp(-0.5)
    page.mouse.move(1, 1)
    page.locator(".written").focus()
    page.keyboard.press("ArrowRight")
    assert tip.is_visible()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    content.locator("h1").hover()
    page.locator(f".tok[data-place='{number}']").last.hover()
    tip.get_by_role("button", name="sheep").click()
    page.locator("article:nth-child(2) .content", has_text="sheep!").wait_for()
    begun = TEXT[: 3 * number] + "sheep"
    assert asked[1]["messages"][1:] == [{"role": "assistant", "content": begun}] and asked[1]["continue_final_message"]
    assert page.locator("article").first.get_attribute("class") == "left-out"

    page.get_by_label("Plain text").check()
    assert page.locator(".content").first.inner_text() == TEXT
    assert "plain=yes" in page.url


def test_reasoning_and_calls_are_folded_and_sent_back(page: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Cork"}'}}
    more = [
        {"reasoning_content": "I need "},
        {"reasoning_content": "<i>rain</i>."},
        {"tool_calls": [{"index": 0, **call}]},
    ]
    asked = answers(page, stream("", more=more), stream("It rains."))
    page.get_by_text("Settings", exact=True).click()
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    page.get_by_label("Tools").fill("[{")
    send(page, "Rain?")
    page.locator("#status.bad", has_text="Tools: this is not JSON").wait_for()
    page.get_by_label("Tools").fill(json.dumps([tool]))
    send(page, "Rain?")
    thought = page.locator(".answer details", has_text="Reasoning")
    thought.wait_for()
    assert thought.get_attribute("open") is None and thought.locator("pre").text_content() == "I need <i>rain</i>."
    assert page.locator(".answer details", has_text="Calls weather").locator("pre").text_content() == '{"city": "Cork"}'
    page.get_by_role("button", name="Send").wait_for()
    send(page, "Well?")
    page.locator(".content", has_text="It rains.").wait_for()
    assert asked[0]["tools"] == [tool]
    (kept,) = (each for each in asked[1]["messages"] if each["role"] == "assistant")
    assert kept["tool_calls"][0]["function"] == call["function"]


def test_a_model_that_thinks_and_calls_is_shown_folded(browser: Any, tmp_path: Path) -> None:
    """The engine writes after a pattern, and the server tells its reasoning, words and calls apart by the template."""
    (tmp_path / "thinks.jinja").write_text(TEMPLATE + "<think>{# up to </think>, and <tool_call> #}")
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Cork"}}\n</tool_call>'
    pattern = re.escape(f"I need rain.</think>One moment.\n{call}")
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    server = Live(ServerConfig(ui=True, chat_template=str(tmp_path / "thinks.jinja")), models=["chat"])
    context = browser.new_context()
    page = context.new_page()
    try:
        ask = "**/v1/chat/completions"
        page.route(ask, lambda to: to.continue_(post_data={**to.request.post_data_json, "guided_regex": pattern}))
        page.goto(f"{server.url}/ui#" + urlencode({"room": "chat", "max_tokens": 200, "tools": json.dumps([tool])}))
        page.wait_for_selector("#say")
        send(page, "Rain?")
        page.locator(".answer details", has_text="Calls weather").wait_for()
        page.get_by_role("button", name="Send").wait_for()
        thought, made = page.locator(".answer details").all()
        assert thought.locator("summary").inner_text() == "Reasoning" and not thought.locator("pre").is_visible()
        assert thought.locator("pre").text_content() == "I need rain."
        assert json.loads(made.locator("pre").text_content()) == {"city": "Cork"}
        assert page.locator(".content").inner_text() == "One moment."
    finally:
        context.close()
        server.close()


def test_nothing_that_a_model_writes_can_run_load_or_hang(page: Any) -> None:
    page.evaluate("() => { window.hacked = () => { throw new Error('hacked'); }; }")
    show = """async (text) => {
      const [{ answer }, { load }] = [await import("/ui/answer.js"), await import("/ui/markdown.js")];
      await load();
      const body = document.createElement("div");
      body.className = "written";
      document.getElementById("view").replaceChildren(body);
      const shown = answer(body, { isPlain: () => false });
      const size = Math.ceil(text.length / 20);
      for (let at = 0; at < text.length; at += size) {
        const piece = text.slice(at, at + size);
        shown.add(piece, [[piece, -1, []]]);
        await new Promise(requestAnimationFrame);
      }
      shown.end();
      for (let each = 0; each < 5; each++) await new Promise((done) => setTimeout(done, 20));
      const links = [...body.querySelectorAll("a")].map((each) => each.getAttribute("href")).filter(Boolean);
      const attributes = [...body.querySelectorAll("*")].flatMap((each) => each.getAttributeNames());
      return { text: body.textContent, links, attributes: attributes.filter((each) => each.startsWith("on")),
        loads: body.querySelectorAll("img, script, iframe, style, link, object, form").length,
        formulas: body.querySelectorAll(".katex").length, wide: document.documentElement.scrollWidth };
    }"""
    for text in HOSTILE:
        found = page.evaluate(show, text)
        assert (found["attributes"], found["loads"]) == ([], 0), text[:80]
        assert all(link.startswith("https://") for link in found["links"]), text[:80]
        assert found["wide"] <= 1280, text[:80]
        if text.startswith("<"):  # the words are shown as they are
            assert found["text"].strip() == text
    for bomb in BOMBS[:3]:  # too many expansions, or an end that is missing
        assert page.evaluate(show, f"$${bomb}$$")["formulas"] == 0
    assert page.evaluate(show, "$$x$$")["formulas"] == 1


def test_a_growing_answer_is_drawn_once_a_frame_and_keeps_its_finished_blocks(page: Any) -> None:
    found = page.evaluate("""async () => {
      const [{ answer }, { load }] = [await import("/ui/answer.js"), await import("/ui/markdown.js")];
      await load();
      const body = document.createElement("div"), counts = [];
      document.getElementById("view").replaceChildren(body);
      const shown = answer(body, { isPlain: () => false }), content = body.firstChild;
      const drawn = async (times) => { while (counts.length < times) await new Promise(requestAnimationFrame); };
      new MutationObserver((found) => counts.push(found.length)).observe(content, { childList: true });
      for (const piece of ["# One\\n\\n", "two ", "three ", "four"]) shown.add(piece);
      const before = content.childElementCount;
      await drawn(1);
      const [first, last] = content.children;
      for (const piece of [" five", " six"]) shown.add(piece);
      await drawn(2);
      return [before, counts, first.isConnected, last.isConnected, content.innerText];
    }""")
    assert found == [0, [2, 1], True, False, "One\n\ntwo three four five six"]


def test_an_unclosed_fence_is_code_from_its_first_line(page: Any) -> None:
    asked = answers(page, stream("Look:\n\n```python\nx = 1  # $a$ **b**\n", is_whole=False))
    send(page, "Code?")
    page.locator("#status.bad", has_text="The answer broke off").wait_for()
    assert page.locator(".content pre code").text_content() == "x = 1  # $a$ **b**\n"
    # An answer that broke off is not part of the conversation.
    send(page, "Again?")
    page.wait_for_selector("article:nth-child(2) .content pre")
    assert [each["content"] for each in asked[1]["messages"]] == ["Again?"]


def test_old_messages_leave_a_context_that_is_full(page: Any) -> None:
    for number in range(4):
        send(page, f"{number} {'sheep ' * 12}")
        page.wait_for_selector(f"article:nth-child({number + 1}) .tok")
        page.get_by_role("button", name="Send").wait_for()
    page.locator("#status", has_text="it no longer reads the first").wait_for()
    assert page.locator("article").count() == 4 and page.locator("article.left-out").count() == 0


def test_a_model_that_is_replaced_meanwhile_is_told_in_both_tabs(page: Any, live: Live) -> None:
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("#say")
    for tab in (page, other):
        send(tab, "Hi")
        tab.get_by_role("button", name="Send").wait_for()
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Most tokens").fill("150")
    send(page, "Long")
    page.wait_for_selector("article:nth-child(2) .tok")
    other.evaluate("fetch('/ui/reload', { method: 'POST' })")
    page.get_by_role("button", name="Send").wait_for(timeout=60_000)
    assert page.locator("article.left-out").count() == 0  # the answer was finished by the model that had begun it
    page.get_by_label("Most tokens").fill("8")
    for tab in (page, other):
        send(tab, "Hi")
        tab.locator("#status", has_text="chat was loaded again meanwhile").wait_for()


def test_an_arena_with_one_model_offers_others(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHEEPOP_MODELS", str(tmp_path))
    entry = CachedModel(tmp_path / "lamb")
    entry.directory.mkdir(parents=True)
    (entry.directory / "config.json").write_text("{}")
    entry.write_record({"name": "model"})
    server = Live(ServerConfig(ui=True, votes=str(tmp_path / "votes.jsonl")), models=["plain"])
    try:
        page = browser.new_page()
        page.goto(f"{server.url}/ui#room=arena")
        page.get_by_role("heading", name="A second model is needed").wait_for()
        assert page.locator("pre").inner_text() == "sheepop eval arena plain MODEL"
        assert page.request.post(f"{server.url}/ui/arena/models", data={"name": "../x"}).status == 404
        page.get_by_role("button", name="Load model").click()
        page.fill("#say", "Wool")
        page.get_by_role("button", name="Ask both").click()
        page.get_by_role("button", name="Equally good").click()
        page.get_by_text("Saved in").wait_for()
        names = page.locator(".answer h3 b").all_inner_texts()
        assert sorted(names) == ["model", "plain"]
        assert page.locator(".written .plain").count() == 2  # without a chat template text is continued, not Markdown
        page.close()
    finally:
        server.close()


@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_state_of_the_chat_breaks_a_rule_of_accessibility(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    answers(page, stream(TEXT, more=[{"reasoning_content": "Well."}]))
    page.get_by_label("Probabilities").check()
    page.get_by_label("Compare with").select_option("chat")
    send(page, "Wool?")
    page.wait_for_selector(".math.display")
    page.locator(".tok").nth(4).hover()
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
