"""The page: what it is made of, and what a browser makes of it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from chairlift.server import pages
from tests.server.chromium import Chromium, find_chromium, open_chromium
from tests.server.openai_fake import FakeServer, serve_fake

HTML = pages.page()
SCRIPT = re.findall("<script>(.*?)</script>", HTML, re.DOTALL)[0]


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(Starlette(routes=pages.routes))


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_headers_allow_the_page_and_nothing_else(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.text == HTML
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        contents = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", HTML, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
        assert policy.pop(f"{tag}-src") == " ".join(f"'sha256-{digest}'" for digest in digests)
        assert len(contents) == 1
    assert policy.pop("connect-src") == "'self'"
    assert policy.pop("img-src") == "data:"
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
    without_the_namespace = HTML.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(
        r"https?://|//[a-z]+\.|url\(|@import|<link(?! rel=\"icon\" href=\"data:)|<iframe", without_the_namespace
    )
    assert not re.search(r"\s(src|on[a-z]+|style)=", re.sub("<script>.*</script>", "", HTML, flags=re.DOTALL))
    assert re.findall(r"<(?:script|style)\b[^>]*>", HTML) == ["<style>", "<script>"]


def test_text_can_only_become_text() -> None:
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
    assert len(HTML.splitlines()) < 400
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


def test_headings_of_columns_are_not_broken_on_a_phone() -> None:
    assert re.search(r"^th \{ white-space: nowrap; \}$", HTML, re.M)


# In a browser

needs_chromium = pytest.mark.skipif(find_chromium() is None, reason="no chromium on the PATH to show the page in")
PHONE, DESKTOP = (390, 844), (1280, 800)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    program = find_chromium()
    assert program is not None
    with open_chromium(program) as browser:
        yield browser


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serve_fake(FakeServer()) as served:
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
    """What a person does and sees."""

    def __init__(self, browser: Chromium) -> None:
        self.browser = browser

    def text(self, selector: str) -> list[str]:
        shown = f"[...document.querySelectorAll({json.dumps(selector)})].filter((n) => n.checkVisibility())"
        texts: list[str] = self.browser.value(f"{shown}.map((n) => n.textContent)")
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
def test_a_conversation(page: Page, fake: FakeServer) -> None:
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
    page.browser.click("summary")
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
    page.browser.value("document.body.insertAdjacentHTML('beforeend', '<img src=data:, onerror=\"document.title=1\">')")
    page.browser.value("refused.then(() => true)")
    page.browser.value(
        "document.body.append(Object.assign(document.createElement('script'), { textContent: 'document.title = 2' }))"
    )
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
    ("message", "told"), [("break", "the engine died"), ("cut", "The connection ended before the answer did.")]
)
def test_an_answer_that_breaks_off_is_kept_and_told(page: Page, message: str, told: str) -> None:
    page.say(message, wait=False)
    page.browser.wait_for("!document.querySelector('#problem').hidden")
    assert page.text("#problem") == [told]
    assert page.text(".answer") == ["ab"]


@needs_chromium
def test_the_oldest_turns_make_room(chromium: Chromium) -> None:
    with serve_fake(FakeServer(room=40)) as fake:
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


@needs_chromium
def test_a_server_with_keys_asks_for_one(chromium: Chromium) -> None:
    with serve_fake(FakeServer(key="secret")) as fake:
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
def test_the_api_is_described(page: Page, fake: FakeServer, path: str) -> None:
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
def test_everything_is_on_the_screen(page: Page, fake: FakeServer, width: int, height: int, dark: bool) -> None:
    page.browser.resize(width, height, phone=width < 600, dark=dark)
    page.say("say " + "unbreakable" * 40)
    page.browser.click("summary")
    controls = "[...document.querySelectorAll('button, input, textarea')].filter((n) => n.checkVisibility())"
    outside = "((r) => r.left < 0 || r.right > innerWidth || r.top < 0 || r.bottom > innerHeight)"
    assert page.browser.value(f"{controls}.length") == 6
    assert page.browser.value(f"{controls}.filter((n) => {outside}(n.getBoundingClientRect())).map((n) => n.id)") == []
    assert page.browser.value("document.querySelector('main').clientHeight") > 100
    for path in ("", "/docs"):
        assert page.browser.value("document.documentElement.scrollWidth <= innerWidth")
        assert page.browser.value("document.documentElement.scrollHeight <= innerHeight")
        page.browser.open(fake.url + path)
    background = page.browser.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == dark
