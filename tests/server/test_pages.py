"""The page: what it is made of, and what a browser makes of it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from chairlift.metrics.stats import CAUSES
from chairlift.server.pages import pages
from tests.server.chromium import Chromium, find_chromium, open_chromium
from tests.server.openai_fake import FakeServer, serve_fake
from tools.guide import read_guide

HTML = pages.page()
STATIC = Path(pages.__file__).parent / "static"
SCRIPT = "".join(
    (STATIC / f"page{name}.js").read_text() for name in ("_show", "_code", "_api", "_images", "_start", "")
)
BORROWED = [path.read_text() for path in sorted((STATIC / "vendor").glob("*.js"))]
OWN = HTML.replace(BORROWED[0], "").replace(BORROWED[1], "")


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(Starlette(routes=pages.routes))


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_headers_of_the_page_allow_nothing_else(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.text == HTML
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        contents = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", HTML, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
        assert policy.pop(f"{tag}-src") == " ".join(f"'sha256-{digest}'" for digest in digests)
        assert len(contents) == {"script": 8, "style": 1}[tag]
    assert policy.pop("connect-src") == "'self'"
    assert policy.pop("img-src") == "data:"
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert policy.pop("trusted-types") == "dompurify"
    assert set(policy) == {"default-src", "base-uri", "form-action", "frame-ancestors"}
    assert set(policy.values()) == {"'none'"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert client.head(path).status_code == 200
    assert client.post(path).status_code == 405


@pytest.mark.parametrize("path", ["/static/page.html", "/page.html", "/docs/", "/../pages.py", "/docs/%2e%2e/pages.py"])
def test_no_other_path_is_a_file(client: TestClient, path: str) -> None:
    assert client.get(path, follow_redirects=False).status_code != 200


def test_the_policy_follows_the_content() -> None:
    html = "<style>a</style><script>b</script><script>c</script>"
    changed = html.replace("b", "d")
    assert pages.content_security_policy(html).count("'sha256-") == 3
    assert pages.content_security_policy(html) != pages.content_security_policy(changed)
    assert "script-src 'none'; style-src 'none'" in pages.content_security_policy("<p>")


def test_the_page_asks_for_nothing_from_elsewhere() -> None:
    without_the_namespace = OWN.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(
        r"https?://|//[a-z]+\.|\burl\(|@import|<link(?! rel=\"icon\" href=\"data:)|<iframe", without_the_namespace
    )
    assert not re.search(r"\s(src|on[a-z]+|style)=", re.sub("<script>.*</script>", "", OWN, flags=re.DOTALL))
    assert re.findall(r"<(?:script|style)\b[^>]*>", HTML) == ["<style>", *["<script>"] * 8]
    assert not re.search("<!--", OWN)


def test_the_script_writes_text_as_text_only() -> None:
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "srcdoc"):
        assert name not in SCRIPT


def test_every_element_the_script_names_is_there() -> None:
    named = set(re.findall(r'\$\("([a-z]+)"\)', SCRIPT))
    ids = re.findall(r' id="([a-z]+)"', HTML)
    assert named <= set(ids)
    assert len(ids) == len(set(ids))
    assert named >= {"send", "stop", "reset", "system", "temperature", "tokens", "corner", "key"}


def test_every_field_has_a_label_and_the_page_fits_a_phone() -> None:
    for field in re.findall(r"<(?:input|textarea)[^>]*>", HTML):
        before = HTML[: HTML.index(field)]
        assert "aria-label" in field or before.rfind("<label") > before.rfind("</label>")
    assert 'name="viewport" content="width=device-width' in HTML
    assert 'name="color-scheme" content="light dark"' in HTML


def test_the_page_stays_small() -> None:
    assert len(OWN.splitlines()) < 1250
    assert len(HTML) < 200_000
    assert max(map(len, SCRIPT.splitlines())) < 180


_TABLE = """
class Node {
  constructor() { this.children = []; }
  get textContent() { return this.children.map((each) => each.textContent ?? each).join(""); }
  set textContent(text) { this.children = [text ?? ""]; }
  append(...more) { this.children.push(...more); }
}
class Row extends Node {
  get cells() { return this.children; }
  insertCell() { this.append(new Node()); return this.children.at(-1); }
  deleteCell(at) { this.children.splice(at, 1); }
}
class Rows extends Node {
  get rows() { return this.children.flatMap((each) => each instanceof Row ? [each] : each.rows ?? []); }
  insertRow() { this.append(new Row()); return this.children.at(-1); }
  createTHead() { this.append(new Rows()); return this.children.at(-1); }
  createTBody() { return this.createTHead(); }
}
const document = { createElement: (tag) => tag === "table" ? new Rows() : new Node() };
const seed = { type: "integer" };
for (const properties of [{ seed }, { seed: { ...seed, default: 1 } }]) {
  const [table] = fields({}, { properties }).children.slice(-1);
  console.log(JSON.stringify(table.rows.map((row) => row.cells.map((cell) => cell.textContent))));
}
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH to run the page's script")
def test_a_column_that_says_nothing_is_not_shown() -> None:
    functions = [each[0] for each in re.finditer(r"^function (make|resolve|type|fields)\(.*?^}\n", SCRIPT, re.S | re.M)]
    assert len(functions) == 4
    done = subprocess.run(["node", "-e", "".join(functions) + _TABLE], capture_output=True, text=True, timeout=60)
    assert list(map(json.loads, done.stdout.splitlines())) == [
        [["field", "type"], ["seed", "integer"]],
        [["field", "type", "default"], ["seed", "integer", "1"]],
    ], done.stderr


_IMAGES = """
const nodes = {};
const $ = (id) => nodes[id] ??= { replaceChildren(...children) { this.children = children; } };
const make = (tag) => ({ tag, append(...children) { this.children = children; } });
const button = (text, press) => ({ text, press });
class FileReader {
  addEventListener(name, call) { this[name] = call; }
  readAsDataURL(file) {
    if (file.broken) { this.error = new Error(); this.error(); return; }
    this.result = `data:${file.type};base64,${file.name}`;
    this.load();
  }
}
const file = (name, type = "image/png", size = 9) => ({ name, type, size });
const told = [];
takeImages([file("a"), file("b.txt", "text/plain"), file("huge", "image/png", 2 ** 26), file("c")]).then((problems) => {
  const sent = content("what?");
  told.push(problems, sent, textOf(sent), imagesOf(sent), $("pictures").hidden, $("pictures").children.length);
  $("pictures").children[0].children[1].press();
  told.push(content(""));
  $("pictures").children[0].children[1].press();
  told.push(content("text"), $("pictures").hidden, textOf("text"), imagesOf("text"));
  console.log(JSON.stringify(told));
});
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH to run the page's script")
def test_images_are_sent_in_front_of_the_text() -> None:
    script = (STATIC / "page_images.js").read_text().replace('"use strict";', "") + _IMAGES
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=60)
    urls = ["data:image/png;base64,a", "data:image/png;base64,c"]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    problems, sent, text, images, hidden, count, one, none, *last = json.loads(done.stdout)
    assert problems == "b.txt is no image. huge is larger than 32 MiB.", done.stderr
    assert sent == [*parts, {"type": "text", "text": "what?"}] and (text, images) == ("what?", urls)
    assert (hidden, count) == (False, 2)
    assert one == parts[1:], "the removed image is sent"
    assert [none, *last] == ["text", True, "text", []]


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH to run the page's script")
def test_the_scripts_can_be_parsed_together() -> None:
    done = subprocess.run(["node", "--check", "-"], input=SCRIPT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_headings_of_columns_are_not_broken_on_a_phone() -> None:
    assert re.search(r"^th \{ white-space: nowrap; \}$", HTML, re.M)


# In a browser

needs_chromium = pytest.mark.skipif(find_chromium() is None, reason="no chromium on the PATH to show the page in")
PHONE, DESKTOP = (390, 844), (1280, 800)
ONE = ("tiny",)
"""A server with one model, which shows no list of models."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    program = find_chromium()
    assert program is not None
    with open_chromium(program) as browser:
        yield browser


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serve_fake(FakeServer(models=ONE)) as served:
        yield served


@pytest.fixture
def page(chromium: Chromium, fake: FakeServer) -> Iterator[Page]:
    chromium.problems.clear()
    chromium.resize(*DESKTOP)
    chromium.open(f"{fake.url}/")
    opened = Page(chromium)
    opened.browser.wait_for("document.getElementById('corner').textContent")
    yield opened
    assert chromium.problems == []


class Page:
    """A person uses the page and sees the results."""

    def __init__(self, browser: Chromium) -> None:
        self.browser = browser

    def text(self, selector: str) -> list[str]:
        shown = f"[...document.querySelectorAll({json.dumps(selector)})].filter((n) => n.checkVisibility())"
        texts: list[str] = self.browser.value(f"{shown}.map((n) => n.textContent.trim())")
        return texts

    def fill(self, selector: str, text: str) -> None:
        self.browser.value(f"document.querySelector({json.dumps(selector)}).focus()")
        self.browser.value("document.activeElement.select()")
        self.browser.write(text)

    def say(self, text: str, *, wait: bool = True) -> None:
        self.fill("#text", text)
        self.browser.press("Enter")
        if wait:
            self.browser.wait_for("document.querySelector('#stop').hidden")


@needs_chromium
def test_a_conversation_is_shown_and_continued(page: Page, fake: FakeServer) -> None:
    assert page.text("#corner") == ["tiny · 3 running, 2 waiting"]
    page.say("Hello")
    page.fill("#text", "two")
    page.browser.press("Enter", shift=True)
    page.browser.write("lines")
    page.browser.press("Enter")
    page.browser.wait_for("document.querySelectorAll('.figures').length === 2")
    page.browser.wait_for("document.querySelector('#stop').hidden")
    assert page.text(".mine") == ["Hello", "two\nlines"]
    assert page.text(".answer") == ["1: Hello", "3: two\nlines"]
    figures = r"first token \d+\.\d\d s( · \d+\.\d tokens/s)? · (8|12) tokens"
    assert all(re.fullmatch(figures, text) for text in page.text(".figures"))
    assert [turn["content"] for turn in fake.bodies[1]["messages"]] == ["Hello", "1: Hello", "two\nlines"]
    assert page.browser.value("document.querySelector('#text').value") == ""
    page.browser.click("#reset")
    assert page.text(".mine, .answer, .figures") == []
    page.say("anew")
    assert page.text(".answer") == ["1: anew"]


@needs_chromium
def test_settings_reach_the_server(page: Page, fake: FakeServer) -> None:
    page.say("before")
    page.browser.click("#settings summary")
    page.fill("#system", "Be kind.")
    page.fill("#temperature", "0.7")
    page.fill("#tokens", "33")
    page.say("after")
    first, second = fake.bodies
    assert (first["temperature"], first["max_tokens"], first["model"], first["stream"]) == (0, 512, "tiny", True)
    assert (second["temperature"], second["max_tokens"]) == (0.7, 33)
    assert second["messages"][0] == {"role": "system", "content": "Be kind."}


@needs_chromium
@pytest.mark.parametrize("way", ["button", "key"])
def test_stop_ends_the_answer_and_keeps_it(page: Page, fake: FakeServer, way: str) -> None:
    page.say("endless", wait=False)
    page.browser.wait_for("document.querySelector('.answer')?.textContent.length > 20")
    assert page.text("#stop, #send") == ["Stop"]
    page.browser.click("#stop") if way == "button" else page.browser.press("Escape")
    assert fake.left.wait(60)
    page.browser.wait_for("document.querySelector('#stop').hidden")
    assert page.text(".figures")[0].endswith(" tokens · stopped")
    assert page.text("#problem") == []
    page.say("more")
    assert page.text(".answer")[1] == "3: more"
    assert fake.bodies[1]["messages"][1]["content"].startswith("on on on")


@needs_chromium
def test_markup_in_answers_stays_text(page: Page) -> None:
    attack = "<img src=x onerror='document.title=1'><script>document.title=2</script><style>*{display:none}</style>"
    page.say(attack)
    assert page.text(".answer") == [f"1: {attack}"]
    assert page.browser.value("document.querySelectorAll('main :is(img, script, style)').length") == 0
    assert page.browser.value("document.title") == "Chairlift"


@needs_chromium
def test_the_policy_holds_in_the_browser(page: Page) -> None:
    page.browser.value("window.refused = new Promise((next) => addEventListener('securitypolicyviolation', next)); 0")
    for attempt in (
        "document.body.insertAdjacentHTML('beforeend', '<img src=data:, onerror=\"document.title=1\">')",
        "document.body.append(Object.assign(document.createElement('script'), { textContent: 'document.title = 2' }))",
        "new DOMParser().parseFromString('<p>', 'text/html')",
        "trustedTypes.createPolicy('other', {})",
    ):
        tried = f"(() => {{ try {{ {attempt}; return 'done'; }} catch (error) {{ return error.name; }} }})()"
        assert page.browser.value(tried) == "TypeError", attempt
    page.browser.value("refused.then(() => true)")
    page.browser.value("Object.assign(document.createElement('a'), { href: 'javascript:document.title = 4' }).click()")
    assert page.browser.value("fetch('http://127.0.0.2:9/').then(() => 'sent', (error) => error.name)") == "TypeError"
    assert page.browser.value("document.title") == "Chairlift"
    assert any("Content Security Policy" in problem for problem in page.browser.problems)
    page.browser.problems.clear()


@needs_chromium
@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("fail 429 rate_limit_exceeded", "scripted rate_limit_exceeded; try again in 7 s"),
        ("fail 500 internal_error", "scripted internal_error"),
    ],
)
def test_a_refused_message_comes_back(page: Page, fake: FakeServer, message: str, told: str) -> None:
    page.say("Hello")
    page.say(message)
    page.browser.wait_for("!document.querySelector('#problem').hidden")
    assert page.text("#problem") == [told]
    assert page.text(".mine") == ["Hello"]
    assert page.browser.value("document.querySelector('#text').value") == message
    page.say("again")
    assert page.text("#problem") == []
    assert page.text(".answer") == ["1: Hello", "3: again"]


@needs_chromium
@pytest.mark.parametrize(
    ("message", "told"), [("break", "the engine died"), ("cut", "The connection was lost before the answer ended.")]
)
def test_an_answer_that_breaks_off_is_kept_and_told(page: Page, message: str, told: str) -> None:
    page.say(message, wait=False)
    page.browser.wait_for("!document.querySelector('#problem').hidden")
    assert page.text("#problem") == [told]
    assert page.text(".answer") == ["ab"]


@needs_chromium
def test_the_oldest_turns_make_room(chromium: Chromium) -> None:
    with serve_fake(FakeServer(models=ONE, room=40)) as fake:
        chromium.open(f"{fake.url}/")
        page = Page(chromium)
        chromium.wait_for("document.getElementById('corner').textContent")
        for index in range(3):
            page.say(f"{index} two three four five six seven eight")
            chromium.wait_for(f"document.querySelectorAll('.answer').length === {index + 1}")
            chromium.wait_for("document.querySelector('#stop').hidden")
        assert page.text("#problem") == []
        assert len(page.text(".answer")) == 3
        assert {body["max_tokens"] for body in fake.bodies} == {10}
        assert len(fake.bodies[-1]["messages"]) == 3
        assert fake.bodies[-1]["messages"][0]["content"].startswith("1 two")
        assert page.text(".dropped") == ["The messages above are no longer sent: the model takes 40 tokens."]
        after = chromium.value("document.querySelector('.dropped').nextElementSibling.textContent")
        assert after.startswith("1 two")


@needs_chromium
def test_a_server_with_keys_asks_for_one(chromium: Chromium) -> None:
    with serve_fake(FakeServer(models=ONE, key="secret")) as fake:
        chromium.open(f"{fake.url}/")
        page = Page(chromium)
        chromium.wait_for("!document.querySelector('#door').hidden")
        assert page.text("footer, #chat, #api") == []
        page.fill("#key", "wrong")
        chromium.press("Enter")
        chromium.wait_for("document.querySelector('#refused').textContent")
        assert page.text("#refused") == ["This key is not accepted."]
        page.fill("#key", "secret")
        chromium.press("Enter")
        chromium.wait_for("document.querySelector('#corner').textContent.includes('running')")
        page.say("Hello")
        assert page.text(".answer") == ["1: Hello"]
        assert chromium.value("[localStorage.length, sessionStorage.getItem('key'), document.cookie]") == [
            0,
            "secret",
            "",
        ]


@needs_chromium
def test_load_is_asked_for_only_while_somebody_looks(page: Page, fake: FakeServer) -> None:
    page.browser.value(
        "window.later = []; window.setTimeout = (call, wait) => later.push([call, wait]);"
        " window.clearTimeout = () => { later.length = 0; };"
        " document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.browser.wait_for("later.length === 1")
    assert page.browser.value("later[0][1]") == 2000
    page.browser.value("Object.defineProperty(document, 'hidden', { get: () => hiding, configurable: true }); 0")
    page.browser.value("window.hiding = true; 0")
    asked = fake.paths.count("/load")
    page.browser.value("later.pop()[0]()")
    assert (page.browser.value("later.length"), fake.paths.count("/load")) == (0, asked)
    page.browser.value("hiding = false; document.dispatchEvent(new Event('visibilitychange'))")
    page.browser.wait_for("later.length === 1")
    assert fake.paths.count("/load") == asked + 1
    fake.loading = True
    page.browser.value("later.pop()[0]()")
    assert page.text("#corner") == ["the server is not ready"]


@needs_chromium
@pytest.mark.parametrize("path", ["/docs", "/#api"])
def test_the_page_describes_the_routes_of_the_document(page: Page, fake: FakeServer, path: str) -> None:
    page.browser.open(fake.url + path)
    page.browser.wait_for("document.querySelectorAll('#api details').length === 2")
    assert page.text("#api summary") == [
        "POST/v1/completions Complete a text",
        "GET/health Whether requests make progress",
    ]
    page.browser.click("#api summary")
    rows = page.browser.value(
        "[...document.querySelectorAll('#api tbody tr')].map((r) => [...r.cells].map((c) => c.innerText.trim()))"
    )
    assert rows == [
        ["prompt", "string or list of string", "required"],
        ["seed", "integer", ""],
        ["top_k", "integer ≥ -1", ""],
        ["top_p", "number 0…1\n<b>nucleus", "1"],
    ]
    assert f"curl -N {fake.url}/v1/chat/completions" in page.text("#api pre")[0]
    assert page.text("footer") == []
    page.browser.click("nav a")
    page.browser.wait_for("document.querySelector('#bottom').checkVisibility()")
    assert page.text("#api") == []


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("width", "height"), [PHONE, (320, 568), DESKTOP])
def test_all_controls_are_on_the_screen_at_every_size(
    page: Page, fake: FakeServer, width: int, height: int, dark: bool
) -> None:
    page.browser.resize(width, height, phone=width < 600, dark=dark)
    page.say("say " + "unbreakable" * 40)
    page.browser.click("#settings summary")
    controls = (
        "[...document.querySelectorAll('footer :is(button, input, textarea)')].filter((n) => n.checkVisibility())"
    )
    outside = "((r) => r.left < 0 || r.right > innerWidth || r.top < 0 || r.bottom > innerHeight)"
    assert page.browser.value(f"{controls}.length") == 7
    assert page.browser.value(f"{controls}.filter((n) => {outside}(n.getBoundingClientRect())).map((n) => n.id)") == []
    assert page.browser.value("document.querySelector('main').clientHeight") > 100
    for path in ("", "/docs"):
        assert page.browser.value("document.documentElement.scrollWidth <= innerWidth")
        assert page.browser.value("document.documentElement.scrollHeight <= innerHeight")
        page.browser.open(fake.url + path)
    background = page.browser.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == dark


@needs_chromium
def test_an_empty_chat_offers_questions_that_a_click_asks(page: Page, fake: FakeServer) -> None:
    offered = page.text("#examples button")
    assert len(offered) == 4 and len(set(offered)) == 4
    page.browser.click("#examples button:nth-child(2)")
    page.browser.wait_for("document.querySelectorAll('.figures').length && document.querySelector('#stop').hidden")
    assert page.text(".mine") == [offered[1]] and fake.bodies[0]["messages"][-1]["content"] == offered[1]
    assert page.text("#examples button") == []
    page.browser.click("#reset")
    assert page.text("#examples button") == offered


def test_the_demo_model_is_asked_what_it_knows() -> None:
    offered = re.search(r"^  bundled: (\[.*\])", (STATIC / "page_start.js").read_text(), re.M)
    assert offered is not None
    known = {question for entry in read_guide() for question in entry.questions}
    assert set(json.loads(offered[1])) <= known


@needs_chromium
def test_a_refused_first_message_leaves_the_questions(page: Page) -> None:
    page.say("fail 500 internal_error")
    page.browser.wait_for("!document.querySelector('#problem').hidden")
    assert len(page.text("#examples button")) == 4
    assert page.text("#limit") == ["at most 512 tokens per answer · 4,096 tokens in all"]


@needs_chromium
def test_the_limits_of_length_are_shown(page: Page) -> None:
    assert page.text("#limit") == ["at most 512 tokens per answer · 4,096 tokens in all"]
    page.say("Hello")
    assert page.text("#limit") == ["at most 512 tokens per answer · 9 of 4,096 tokens used"]
    page.browser.click("#settings summary")
    page.fill("#tokens", "33")
    assert page.text("#limit") == ["at most 33 tokens per answer · 9 of 4,096 tokens used"]
    page.say(_script(_event({"content": "no"}), _event({}, "length")))
    assert page.text(".figures")[-1].endswith(" · cut at the limit of 33 tokens")


@needs_chromium
@pytest.mark.parametrize(("width", "height"), [PHONE, (820, 1180), DESKTOP])
def test_the_settings_are_beside_the_conversation(page: Page, width: int, height: int) -> None:
    page.browser.resize(width, height)
    page.say("say-at-once text")
    box = (
        "(({ top, left, right, bottom, width }) => ({ top, left, right, bottom, width }))"
        "(document.querySelector('%s').getBoundingClientRect())"
    )
    before = page.browser.value(box % ".answer")
    page.browser.click("#settings summary")
    settings, after = page.browser.value(box % "#settings fieldset"), page.browser.value(box % ".answer")
    assert settings["right"] == width and settings["top"] == 0 and settings["bottom"] == height
    assert (after["top"], after["bottom"]) == (before["top"], before["bottom"]), "nothing is pushed up"
    if (width, height) == DESKTOP:
        assert settings["left"] >= after["right"]
    else:
        assert after == before and (settings["width"] == width) == ((width, height) == PHONE)
    for focused in ("#system", "#text"):
        page.browser.value("document.querySelector('#settings').open = true; 0")
        page.fill(focused, "Be kind.")
        page.browser.press("Escape")
        assert page.text("#settings fieldset") == []
        assert page.browser.value("document.activeElement.textContent") == "Settings"


@needs_chromium
@pytest.mark.parametrize("lists_room", [True, False], ids=["loaded", "unloaded"])
def test_one_of_several_models_is_chosen_and_kept(chromium: Chromium, lists_room: bool) -> None:
    with serve_fake(FakeServer(models=("tiny", "little"), lists_room=lists_room)) as fake:
        chromium.open(f"{fake.url}/")
        page = Page(chromium)
        chromium.wait_for("document.querySelector('#models').options.length === 2")
        chromium.wait_for("document.querySelector('#corner').textContent === '3 running, 2 waiting'")
        page.say("first")
        chromium.value("$('models').value = 'little'; $('models').dispatchEvent(new Event('change'))")
        chromium.wait_for("model === 'little'")
        page.say("second")
        chromium.open(f"{fake.url}/")
        chromium.wait_for("document.querySelector('#models').value === 'little'")
        chromium.value("sessionStorage.clear()")
    assert [body["model"] for body in fake.bodies] == ["tiny", "little"]
    assert ["max_tokens" in body for body in fake.bodies] == [lists_room] * 2


@needs_chromium
def test_a_long_name_of_a_model_is_cut_off_and_the_load_is_not(page: Page) -> None:
    page.browser.resize(*PHONE)
    page.browser.value("model = 'organisation/' + 'very-long-name-'.repeat(12); look()")
    page.browser.wait_for("document.querySelector('#corner span').title.length > 99")
    name, load = page.browser.value(
        "[...document.querySelectorAll('#corner span')].map((n) => [n.scrollWidth > n.clientWidth, n.clientHeight])"
    )
    assert name[0] and not load[0] and load[1] < 30
    assert page.browser.value("document.querySelector('#corner').getBoundingClientRect().right <= innerWidth")


# Answers: Markdown, reasoning, calls, trees, figures


def _event(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **more.pop("choice", {})}
    return {"choices": [choice], **more}


def _script(*events: dict[str, Any]) -> str:
    return "script " + json.dumps(events)


def _call(name: str, arguments: str, index: int = 0) -> list[dict[str, Any]]:
    head = {"index": index, "id": f"call0000{index}", "type": "function", "function": {"name": name, "arguments": ""}}
    return [
        _event({"tool_calls": [head]}),
        _event({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}),
    ]


@needs_chromium
def test_markdown_becomes_nodes_of_a_short_list(page: Page) -> None:
    fence = "```python\nx = 1 < 2\n```"
    page.say(
        f"say-at-once # Title\n\n*a* **b** `c` <https://d.example>\n\n{fence}\n\n|a|b|\n|:-|-:|\n|1|2|\n\n- one\n- two"
    )
    shown = page.browser.value("[...document.querySelectorAll('.answer *')].map((n) => n.tagName.toLowerCase())")
    assert {"h1", "em", "strong", "code", "a", "pre", "table", "th", "td", "ul", "li"} <= set(shown)
    assert page.text(".codehead span") == ["python"]
    assert page.text(".answer pre") == ["x = 1 < 2"]
    assert page.browser.value("document.querySelectorAll('.answer td')[1].align") == "right"
    link = page.browser.value("(({ href, target, rel }) => [href, target, rel])(document.querySelector('.answer a'))")
    assert link == ["https://d.example/", "_blank", "noopener noreferrer nofollow"]


ATTACKS = [
    "<script>document.title = 1</script>",
    "<img src=x onerror='document.title=2'>",
    "[a](javascript:document.title=3)",
    "[a](JaVaScRiPt&colon;document.title=4) [b](data:text/html,<script>document.title=5</script>)",
    "<javascript:document.title=6> [c](vbscript:x)",
    "![x](http://127.0.0.2:9/x.png)",
    '<a href="javascript:document.title=7">b</a><svg/onload=document.title=8><iframe srcdoc="<p>">',
    '<style>*{display:none}</style><form action="//127.0.0.2"><input name=attributes></form>',
    "```<img/src/onerror=document.title=9>\ncode\n```",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=document.title=10&gt;'>",
    '|<b onclick="document.title=11">|x|\n|-|-|\n|[q](https://e.example "\\" onclick=document.title=12")|y|',
]


@needs_chromium
def test_nothing_in_an_answer_runs_or_asks(page: Page, fake: FakeServer) -> None:
    page.browser.value(
        "window.refused = []; addEventListener('securitypolicyviolation', (e) => refused.push(e.type)); 0"
    )
    bad = (
        "[...document.querySelectorAll("
        "'#chat article :is(script, style, img, iframe, svg, math, form, input, object)')].length"
        " + [...document.querySelectorAll('#chat article *')].filter((n) => [...n.attributes].some((a) =>"
        " /^on|^style$|^id$|^name$/.test(a.name) || /^(javascript|data|vbscript)/i.test(a.value))).length"
    )
    for attack in ATTACKS:
        page.say(f"say-at-once {attack}")
        page.say(_script(_event({"reasoning_content": attack}), _event({"content": attack}), *_call(attack, attack)))
    links = page.browser.value("[...document.querySelectorAll('article a[href]')].map((a) => a.protocol)")
    assert set(links) == {"http:", "https:"}
    assert page.browser.value(bad) == 0
    assert page.browser.value("[document.title, refused.length]") == ["Chairlift", 0]
    page.browser.value("sessionStorage.setItem('kept', 1); location.reload()")
    page.browser.wait_for("document.querySelectorAll('article').length === 22 && document.readyState === 'complete'")
    assert page.browser.value(bad) == 0
    assert page.browser.value("document.title") == "Chairlift"


@needs_chromium
@pytest.mark.parametrize(
    "text",
    [
        "word *emphasis* `code` " * 4500,
        "```\n" + "a line of code\n" * 7000,
        "- an item\n" * 10000,
        "[" * 100_000,
        "> " * 50_000,
        "*a **b " * 15_000,
        '{"a": [' + "1," * 50_000 + "1]}",
    ],
    ids=["words", "code", "list", "brackets", "quotes", "stars", "json"],
)
def test_long_answers_are_shown_in_time(page: Page, fake: FakeServer, text: str) -> None:
    fake.room = 1_000_000
    events = [_event({"content": text[at : at + 5000]}) for at in range(0, len(text), 5000)]
    page.fill("#text", _script(*events, {"choices": [], "usage": {"completion_tokens": 25_000}}))
    begun = page.browser.value("performance.now()")
    page.browser.press("Enter")
    page.browser.wait_for("document.querySelector('.figures')?.textContent.includes('25000 tokens')")
    page.browser.wait_for("document.querySelector('#stop').hidden")
    assert page.browser.value("performance.now()") - begun < 30_000
    assert len(page.text(".answer")[0]) > 1000


@needs_chromium
def test_text_that_comes_in_pieces_ends_as_text_that_comes_at_once(page: Page) -> None:
    text = (
        "# A\n\ntext [x] and\r\nmore\n\n1. one\n\n   two\n2. three\n\n"
        "```js\na\n\nb\n```\n> q\n\n|a|\n|-|\n|b|\n\nend\n===\n\n"
        "[x]: https://e.example\n"
    )
    page.say(_script(*(_event({"content": piece}) for piece in text)))
    page.say(_script(_event({"content": text})))
    first, second = page.browser.value("[...document.querySelectorAll('.answer')].map((n) => n.innerHTML)")
    assert first == second
    assert 'href="https://e.example"' in first


@needs_chromium
def test_reasoning_is_folded_and_goes_back_to_the_server(page: Page, fake: FakeServer) -> None:
    usage = {"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 6}}
    thoughts = [_event({"reasoning_content": "first "}), _event({"reasoning": "then"}), _event({"content": "so"})]
    page.say(_script(*thoughts, {"choices": [], "usage": usage}))
    assert page.text(".thoughts > summary") == ["Reasoning"]
    assert not page.browser.value("document.querySelector('.thoughts').open")
    assert page.browser.value("document.querySelector('.thought').textContent.trim()") == "first then"
    assert page.text(".answer") == ["so"]
    assert page.text(".figures")[0].endswith("9 tokens, 6 of them reasoning")
    page.say("more")
    assert fake.bodies[1]["messages"][1]["reasoning_content"] == "first then"


@needs_chromium
def test_calls_are_shown_and_their_results_sent(page: Page, fake: FakeServer) -> None:
    page.browser.click("#settings summary")
    page.browser.click("#settings details summary")
    page.fill("#functions", "[{")
    page.say("Hello")
    assert page.text("#problem")[0].startswith("The tools in the settings is not valid JSON: ")
    assert page.browser.value("document.querySelector('#text').value") == "Hello"
    page.fill("#functions", json.dumps([{"name": "weather", "parameters": {"type": "object"}}]))
    page.browser.value("Object.assign(document.querySelector('#effort'), { value: 'low' }); 0")
    exact = '{"place": "Ulm", "id": 12345678901234567890}'
    broken = {"tool_call_errors": ["the third was broken"]}
    calls = [*_call("weather", exact), *_call("odd", "no JSON", 1)]
    page.say(_script(*calls, _event({}, "tool_calls", choice=broken)))
    assert fake.bodies[0]["tools"][0]["function"]["name"] == "weather"
    assert fake.bodies[0]["reasoning_effort"] == "low"
    assert page.text(".call > summary") == ["calls weather", "calls odd"]
    assert page.text(".call .leaf") == ['place: "Ulm"', "id: 12345678901234567890"]
    assert page.text(".call > .plain") == ["no JSON"]
    assert "Not a valid call: the third was broken" in page.text("article .hint")
    page.fill(".results textarea", '{"sky": ["rain"]}')
    page.browser.click(".results button")
    page.browser.wait_for("document.querySelectorAll('article').length === 2 && document.querySelector('#stop').hidden")
    sent = fake.bodies[1]["messages"]
    assert [each["role"] for each in sent] == ["user", "assistant", "tool", "tool"]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": exact}
    assert sent[1]["content"] is None
    assert sent[2] == {"role": "tool", "tool_call_id": "call00000", "content": '{"sky": ["rain"]}'}
    assert page.text("form.results") == []


@needs_chromium
def test_json_is_a_tree_that_opens_piece_by_piece(page: Page) -> None:
    value = {"deep": {"er": {"est": [None, True, "<b>"]}}, "many": list(range(250)), "number": 1}
    text = json.dumps(value).replace('"number": 1', '"number": 1.50')
    page.say(f"say-at-once {text}")
    assert page.text(".answer > .json > details > summary") == ["{3}"]
    assert page.text(".answer .leaf") == ["number: 1.50"]
    page.browser.value(
        "[...document.querySelectorAll('.tree')].find((n) => n.textContent.startsWith('many')).open = true"
    )
    page.browser.wait_for("document.querySelectorAll('.answer .leaf').length === 101")
    page.browser.value("[...document.querySelectorAll('.tree button')].at(-1).click()")
    assert len(page.text(".answer .leaf")) == 201
    page.browser.click(".json > button")
    assert page.text(".answer .plain") == [text]
    assert page.text(".answer .tree") == []


@needs_chromium
def test_a_reply_shows_where_its_time_went(page: Page) -> None:
    timing = {
        "queue_ms": 1.0,
        "causes_ms": {"decode": 300.0, "waiting_slots": 2100.5, "host": 0.01},
        "preempted_by": [],
    }
    page.say(_script(_event({"content": "late"}), _event({}, "stop", timing=timing)))
    assert page.text(".why > summary") == ["Where the time went: 88 % all rows of the batch were taken"]
    page.browser.click(".why summary")
    assert page.text(".why td") == [
        "all rows of the batch were taken",
        "2.10 s",
        "",
        "generating its tokens",
        "300.0 ms",
        "",
    ]


def test_every_cause_has_words() -> None:
    causes = re.search(r"^const CAUSES = \{(.*?)^\};", SCRIPT, re.S | re.M)
    assert causes is not None
    assert set(re.findall(r"^  (\w+):", causes[1], re.M)) == set(CAUSES)


@needs_chromium
def test_a_reload_keeps_conversation_and_settings(page: Page, fake: FakeServer) -> None:
    reload = "window.old = true; location.reload()"
    page.browser.click("#settings summary")
    page.fill("#system", "Be kind.")
    page.say("say-at-once **bold**")
    page.say(_script(*_call("f", "{}")))
    page.browser.value(reload)
    page.browser.wait_for("!window.old && document.querySelectorAll('article').length === 2")
    assert page.text(".answer strong") == ["bold"]
    assert len(page.text(".figures")) == 2
    assert page.text("form.results label") == ["Result of f"]
    page.browser.wait_for("document.getElementById('corner').textContent")
    page.say("endless", wait=False)
    page.browser.wait_for("[...document.querySelectorAll('.answer')].at(-1).textContent.length > 20")
    page.browser.value(reload)
    page.browser.wait_for("!window.old && document.querySelectorAll('article').length === 3")
    assert page.text(".figures")[-1] == "the page was closed before the answer ended"
    assert page.text(".answer")[-1].startswith("on on")
    fake.started.clear()
    page.say("silent", wait=False)
    assert fake.started.wait(60)
    page.browser.value(reload)
    page.browser.wait_for("!window.old && document.querySelector('#text').value === 'silent'")
    page.say("after")
    contents = [each["content"] for each in fake.bodies[-1]["messages"]]
    assert contents[0] == "Be kind." and contents[2] == "**bold**" and contents[-1] == "after"
    page.browser.click("#reset")
    page.browser.value(reload)
    page.browser.wait_for("!window.old && document.querySelector('#hello')?.checkVisibility()")
    assert page.text("article, .mine") == []


@needs_chromium
def test_broken_or_too_long_storage_does_no_harm(page: Page) -> None:
    page.browser.value("sessionStorage.setItem('x', 'x'.repeat(5 * 2 ** 20 - 2000)); 0")
    page.say("say-at-once " + "y" * 3000)
    assert page.text("#unkept") != []
    page.browser.value("sessionStorage.removeItem('x'); 0")
    page.say("again")
    assert page.text("#unkept") == []
    page.browser.value("left = true; sessionStorage.setItem('conversation', '{'); window.old = true; location.reload()")
    page.browser.wait_for("!window.old && document.querySelector('#hello').checkVisibility()")
    assert page.text("#problem") == []


@pytest.mark.full
@needs_chromium
def test_the_again_button_asks_the_same_question_once_more(page: Page, fake: FakeServer) -> None:
    page.say("one")
    page.say("two")
    page.browser.click("article:last-of-type .again")
    page.browser.wait_for("document.querySelectorAll('article .again').length === 2")
    page.browser.wait_for("document.querySelector('#stop').hidden")
    assert fake.bodies[2] == fake.bodies[1]
    assert page.text(".mine") == ["one", "two"]
    page.browser.click("article .again")
    page.browser.wait_for("document.querySelectorAll('article .again').length === 1")
    assert page.text(".mine") == ["one"]
    assert fake.bodies[3] == fake.bodies[0]


@pytest.mark.nightly
@needs_chromium
def test_copy_gives_the_text_and_code_as_written(page: Page, fake: FakeServer) -> None:
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    page.browser.call("Browser.grantPermissions", origin=fake.url, permissions=permissions)
    asked = 'say-at-once it\'s "quoted" \\n 😀 **bold**'
    page.say(asked)
    page.browser.click(".bar button")
    page.browser.wait_for("document.querySelector('.bar button').textContent === 'Copied'")
    assert page.browser.value("navigator.clipboard.readText()") == asked.removeprefix("say-at-once ")
    page.browser.click(".bar button:nth-child(2)")
    programs = {}
    for index in (1, 2, 3):
        page.browser.click(f".tabs button:nth-child({index})")
        programs[index] = page.text(".programs pre")[0]
    commands = {1: ["sh", "-c", programs[1]], 2: [sys.executable, "-c", programs[2]], 3: ["node", "-e", programs[3]]}
    for index, command in commands.items():
        if shutil.which("curl" if index == 1 else command[0]) is None:
            continue
        if index == 3:
            command[2] = f"(async () => {{ {programs[3]} }})()"
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "bold" in done.stdout, done.stderr
        assert fake.bodies[-1] == {
            "model": "tiny",
            "messages": fake.bodies[0]["messages"],
            "max_tokens": 512,
            "temperature": 0,
        }
    page.browser.click(".bar button:nth-child(2)")
    assert page.text(".programs") == []
