"""annotate.py in a real Chromium: what a person does there, how it looks."""

import pytest

from case_rows import each, rows_of
from test_annotate import Server, export, item_rows, log_of
from tiny import write_rows

pytestmark = pytest.mark.slow
PAUSE = 330  # ms, a little more than in annotate.js
TIE = '[data-choice="tie"]'


class Tab:
    """A tab of a browser, and the few things that a person does in it."""

    def __init__(self, context, server):
        self.page, self.errors = context.new_page(), []
        self.keys = self.page.keyboard
        self.page.on("console", lambda m: m.type in ("error", "warning") and self.errors.append(m))
        self.page.on("pageerror", lambda error: self.errors.append(error))
        self.page.goto(server.link)
        self.page.wait_for_selector("#start:not([hidden]), #work:not([hidden])")

    def text(self, selector):
        return self.page.inner_text(selector)

    def appear(self, selector):
        self.page.wait_for_selector(f"{selector}:not([hidden])")
        return self.text(selector)

    def start(self, name="ann"):
        self.page.fill("#name", name)
        self.keys.press("Enter")
        self.appear("#work")
        return self

    def press(self, key):
        self.page.wait_for_timeout(PAUSE)
        self.keys.press(key)

    def act(self, action, saved="Saved: "):
        """An action, until the page says so."""
        self.page.wait_for_timeout(PAUSE)
        self.page.evaluate("document.getElementById('saved').textContent = ''")
        action()
        self.page.wait_for_selector(f"#saved:has-text('{saved}')")

    def vote(self, key, saved="Saved: "):
        self.act(lambda: self.keys.press(key), saved)

    def tab_to(self, condition):
        while not self.page.evaluate(f"document.activeElement.{condition}"):
            self.keys.press("Tab")

    def better(self, left, right):
        return left if self.text("#left").startswith("better") else right


@pytest.fixture
def open_tab(browser):
    def make(server, beside=None, **options):
        return Tab(beside.page.context if beside else browser.new_context(**options), server)

    yield make
    for context in browser.contexts:
        context.close()


@pytest.fixture
def serve(tmp_path):
    servers = []

    def make(rows, *flags, **options):
        if rows:
            flags += ("--items", write_rows(tmp_path / "items.jsonl", rows))
        servers.append(Server("--out", tmp_path / "run", *flags, **options))
        return servers[-1]

    yield make
    for server in servers:
        if server.process.poll() is None:
            server.stop()


def test_ten_items_by_keyboard(serve, open_tab, tmp_path):
    tab = open_tab(serve(item_rows(10)))
    page, keys = tab.page, tab.keys
    tab.tab_to("id == 'name'")
    keys.type("Ann")
    keys.press("Enter")
    tab.appear("#work")
    tab.vote(tab.better("Shift+Digit1", "Shift+Digit2"))
    tab.vote(tab.better("ArrowLeft", "ArrowRight"))
    tab.vote("3")
    tab.vote("u", "Undone: tie")
    assert page.locator(".old").get_attribute("data-choice") == "tie"
    assert tab.text("#title") == "Item 3 of 10"
    tab.vote(tab.better("q", "w"))
    keys.press("c")
    keys.type("1 year of kafka, 2 audits")  # votes nothing
    keys.press("Escape")
    tab.tab_to("type == 'checkbox'")
    keys.press("Space")
    page.reload()  # what is written and not sent stays
    tab.appear("#work")
    tab.vote(tab.better("1", "2"))
    for key, dialog in (("g", "#guidelines"), ("Shift+?", "#help")):
        keys.press(key)
        assert page.is_visible(dialog)
        tab.press("2")  # no vote
        keys.press("Escape")
    page.focus("#left")
    for key in ("ArrowLeft", "Control+1", "Alt+1", "Meta+1"):
        tab.press(key)
    assert tab.text("#title") == "Item 5 of 10"
    tab.act(lambda: page.dblclick(TIE))
    tab.act(lambda: [keys.down("b") for _ in range(12)])
    keys.up("b")
    tab.vote("s")
    tab.tab_to(f"dataset.choice == '{tab.better('left', 'right')}'")
    tab.tab_to("dataset.strength == '2'")
    tab.vote("Enter")
    page.click("#show-help")
    page.uncheck("#shortcuts")
    keys.press("Escape")
    page.reload()  # the switch stays as it is (WCAG 2.1.4)
    tab.appear("#work")
    tab.press("1")
    for _ in range(2):
        tab.act(lambda: page.click(TIE))
    assert tab.text("#title") == "Thank you, ann" and tab.errors == []
    events, rows = log_of(tmp_path / "run"), export(tmp_path / "run")
    assert [e["strength"] for e in events if e["choice"] in ("a", "b")] == [3, 2, 1, 2, 2]
    assert [e["reasons"] for e in events if e["comment"]] == [["accuracy"]]
    assert {row["chosen_model"] for row in rows if not row["tie"]} == {"good"}


PRESS = """([key, code, shiftKey]) => document.body.dispatchEvent(
  new KeyboardEvent("keydown", { key, code, shiftKey, bubbles: true }))"""


def test_keys_of_other_keyboards(serve, open_tab, tmp_path):
    """On a French keyboard 1 needs Shift, a Russian one has no Latin letters, and the keypad without
    NumLock scrolls."""
    tab = open_tab(serve(item_rows(6))).start()
    for case in (cases := rows_of("votes", what="key")):
        tab.page.evaluate(PRESS, ["End", "Numpad1", False])
        tab.act(lambda: tab.page.evaluate(PRESS, case["key"]))  # noqa: B023
    strengths = [event["strength"] for event in log_of(tmp_path / "run")]
    assert strengths == [case["strength"] for case in cases]


def test_trouble_and_back(serve, open_tab, tmp_path):
    """Two tabs, another browser under the same name, offline, a lost reply, a server that is killed and
    started again: one vote each, none lost."""
    server = serve(item_rows(8))
    tab = open_tab(server).start()
    two, page = open_tab(server, beside=tab).start(), tab.page
    tab.vote("1")
    two.press("2")
    two.page.wait_for_selector("#trouble:has-text('another window')")
    assert two.text("#title") == "Item 2 of 8" and two.text("#left") == tab.text("#left")
    ben = open_tab(server)
    ben.page.fill("#name", "Ann")  # a name in capitals is no other
    ben.keys.press("Enter")
    assert "another browser" in ben.appear("#banner")
    page.context.set_offline(True)
    tab.press("1")
    assert "Not saved yet" in tab.appear("#banner") and "Clearly" in tab.text(".chosen")
    tab.press("2")  # no second choice while the first one waits
    assert len(log_of(tmp_path / "run")) == 1
    tab.act(lambda: page.context.set_offline(False))
    page.route("**/vote", lambda route: (route.fetch(), route.abort()), times=1)
    tab.vote("1")  # on the disk, but the reply got lost
    page.route("**/vote", lambda route: route.abort())
    tab.press("3")
    tab.appear("#banner")
    page.unroute("**/vote")
    tab.act(page.reload)
    server.process.kill()
    server.process.wait()
    tab.press("b")
    tab.appear("#banner")
    tab.act(lambda: serve(None, port=server.port))
    tab.vote("u", "Undone: both bad")
    choices = [e["choice"] for e in log_of(tmp_path / "run")]
    assert len(choices) == 6 and choices[3:] == ["tie", "both_bad", None]


WIDE = """[document.documentElement, ...document.querySelectorAll('.words, button, label')]
  .filter(e => e.clientWidth && e.scrollWidth > e.clientWidth + 1).map(e => e.id || e.textContent)"""


@each("votes", what="view")
def test_looks(serve, open_tab, name, options):
    """Nothing scrolls sideways, the votes and their reasons stay in sight, and axe finds nothing."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    rows = item_rows(1, a="word " * 900, b="x" * 3000)
    rows[0]["prompt"] = "Assess.\nRole: chef, https://x.y\nnote: none\nשלום עולם"
    tab, (width, height) = open_tab(serve(rows), **options), options["viewport"].values()
    page = tab.page

    def look():
        assert page.evaluate(WIDE) == []
        found = axe.Axe().run(page).response["violations"]
        assert [(v["id"], v["nodes"][0]["html"]) for v in found] == []

    def inside(selector):
        box = page.locator(selector).bounding_box()
        return box["y"] >= 0 and box["y"] + box["height"] <= height

    look()
    tab.start()
    look()
    assert page.locator("#prompt b").all_text_contents() == ["Role:"]
    assert inside("#choices") and inside("#reasons label >> nth=0")
    left, right = (page.locator(f".card:has(#{s})").bounding_box() for s in ("left", "right"))
    assert (left["x"] == right["x"]) if width < 768 else (left["height"] == right["height"])
    tab.act(lambda: page.click(TIE))
    look()
    tab.act(lambda: page.click("#undo"), "Undone")
    for dialog in ("guidelines", "help"):
        page.click(f"#show-{dialog}")
        assert inside(f"#{dialog} form button >> nth=0") or height < 600
        look()
        page.click(f"#{dialog} form button >> nth=0")


def without_policy(route):
    reply = route.fetch()
    headers = {k: v for k, v in reply.headers.items() if k.lower() != "content-security-policy"}
    route.fulfill(response=reply, headers=headers)


def with_inner_html(route):
    reply = route.fetch()
    route.fulfill(response=reply, body=reply.text().replace("textContent", "innerHTML"))


@pytest.mark.parametrize("layer", ["text", "policy"])
def test_hostile_texts_do_nothing(serve, open_tab, tmp_path, layer):
    """Either layer alone holds: texts are shown as text, and the policy forbids all else."""
    everything = "\n".join(*(row["texts"] for row in rows_of("votes", what="hostile")))
    (tmp_path / "guide.md").write_text(everything, encoding="utf-8")
    row = dict.fromkeys(("id", "task", "a_model", "b_model"), everything)
    row["prompt"] = [{"role": role, "content": everything} for role in ("system", "user")]
    row |= {side: [{"role": "assistant", "content": side + everything}] for side in "ab"}
    tab = open_tab(serve([row], "--guidelines", tmp_path / "guide.md"))
    page, requests = tab.page, []
    page.on("request", lambda request: requests.append(request.url))
    change = {"text": ("**/*", without_policy), "policy": ("**/annotate.js", with_inner_html)}
    page.route(*change[layer])
    page.reload()
    tab.start()
    if layer == "text":
        for answer in page.locator("#left, #right").all_text_contents():
            assert answer[1:] == everything
        assert page.locator("main :is(img, svg, iframe, style, a, form form, link, b)").count() == 0
    page.fill("#comment", everything)
    tab.keys.press("Escape")
    tab.press("1")
    page.wait_for_timeout(500)
    assert page.evaluate("window.__xss") is None
    assert layer == "policy" or not any("stranger" in url for url in requests)
    assert log_of(tmp_path / "run")[0]["comment"] == everything.strip()
