"""annotate.py in a real Chromium: what a person does there, what a hostile text tries there, and how it looks.

Needs the packages playwright and axe-playwright-python, and a Chromium of the system (CHROME_BIN, or one on the PATH).
Without them these tests are skipped; with CI_BROWSER=1 they fail, so that no CI runs without a browser unnoticed.
"""

import http.server
import json
import os
import re
import shutil
import threading
import time

import playwright.sync_api
import pytest

import annotate
from parts import votes as votes_of
from test_annotate import LINUX, Server, item_rows, log_of, write_items

pytestmark = [LINUX, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
MISSING = "no Chromium found: install the package chromium or set CHROME_BIN"
PAUSE = (annotate.TEMPLATES / "annotate.js").read_text().split("const PAUSE = ")[1].split(";")[0]


def missing(reason):
    if os.environ.get("CI_BROWSER") == "1":
        pytest.fail(f"CI_BROWSER=1, but {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed: pip install -r requirements-dev.txt")
    names = ("chromium", "chromium-browser", "google-chrome")
    binary = os.environ.get("CHROME_BIN") or next(filter(None, map(shutil.which, names)), None)
    if not binary:
        missing(MISSING)
    with sync_playwright() as playwright:
        rules = "--host-resolver-rules=MAP evil.test 127.0.0.1"
        running = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox", rules])
        yield running
        running.close()


class Page:
    """A tab with its console and its requests, and the few things that a person does."""

    def __init__(self, context, server, path="/"):
        self.page, self.server = context.new_page(), server
        self.errors, self.requests = [], []
        self.page.on(
            "console", lambda m: m.type in ("error", "warning") and self.errors.append(m.text)
        )
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        self.page.on("request", lambda r: self.requests.append(r.url))
        self.page.goto(f"http://127.0.0.1:{server.port}{path}")

    def start(self, name="ann"):
        self.page.wait_for_selector("#start:not([hidden])")
        self.page.keyboard.press("Tab")
        while self.page.evaluate("document.activeElement.id") != "name":
            self.page.keyboard.press("Tab")
        self.page.keyboard.press("ControlOrMeta+a")
        self.page.keyboard.type(name)
        self.page.keyboard.press("Enter")
        self.page.wait_for_selector("#work:not([hidden]), #end:not([hidden]), #known:not([hidden])")
        if self.page.is_visible("#known"):
            self.page.keyboard.press("Enter")  # continue as
        self.page.wait_for_selector("#work:not([hidden]), #end:not([hidden])")
        return self

    def step(self):
        return int(self.page.evaluate("document.body.dataset.step"))

    def until(self, condition, seconds=30):
        """Wait for a condition in the page's words; playwright's own wait needs eval, which the policy forbids."""
        end = time.monotonic() + seconds
        while not self.holds(condition):
            assert time.monotonic() < end, f"not within {seconds} s: {condition}"
            self.page.wait_for_timeout(20)

    def holds(self, condition):
        try:
            return self.page.evaluate(condition)
        except playwright.sync_api.Error:  # the page is being loaded again
            return False

    def act(self, action, wait=True):
        """Do it when the page listens again, and wait until the server has it."""
        before = self.step()
        self.page.wait_for_timeout(int(PAUSE) + 60)
        action()
        if wait:
            self.until(f"document.body.dataset.step > {before}")

    def press(self, key, wait=True):
        self.act(lambda: self.page.keyboard.press(key), wait)

    def text(self, selector):
        return self.page.inner_text(selector)

    def title(self):
        return self.text("#title")


@pytest.fixture
def open_page(browser):
    """open_page(server, **context options): a tab in a context of its own, closed at the end."""
    contexts = []

    def make(server, path="/", context=None, **options):
        if context is None:
            context = browser.new_context(**options)
            contexts.append(context)
        return Page(context, server, path)

    yield make
    for context in contexts:
        context.close()


@pytest.fixture
def serve(tmp_path):
    """serve(rows, *flags): a running server; stopped at the end."""
    servers = []

    def make(rows=None, *flags, **options):
        items = None if rows is None else write_items(tmp_path / "items.jsonl", rows)
        servers.append(Server(tmp_path / "run", *flags, items=items, **options))
        assert servers[-1].port, servers[-1].text()
        return servers[-1]

    yield make
    for server in servers:
        if server.process.is_alive():
            server.stop()


# ---- a session ----


@pytest.fixture(scope="module")
def keyboard_session(request, browser, tmp_path_factory):
    """A whole session by keyboard alone, with a reload in the middle; (folder, console errors)."""
    from tiny import pair_rows

    folder = tmp_path_factory.mktemp("keyboard")
    rows = [
        {"id": f"i{k}", "task": "assess", "prompt": r["prompt"], "a": r["chosen"], "b": r["rejected"], "a_model": "x", "b_model": "y"}
        for k, r in enumerate(pair_rows(10))
    ]  # fmt: skip
    server = Server(folder / "run", items=write_items(folder / "items.jsonl", rows))
    context = browser.new_context()
    request.addfinalizer(lambda: server.process.is_alive() and server.stop())
    tab = Page(context, server).start()

    def better():
        return "1" if "hold" in tab.text("#left") else "2"

    assert tab.title() == "Item 1 of 10" and tab.page.title() == "Item 1 of 10 · FeedbackLoop"
    tab.press("Shift+Digit" + better())
    assert tab.page.evaluate("document.activeElement.id") == "title"
    assert tab.text("#live").split() == "Saved. Item 2 of 10".split()
    tab.press("ArrowLeft" if better() == "1" else "ArrowRight")
    tab.press("3")
    assert tab.title() == "Item 4 of 10"
    tab.press("u")  # the tie was a slip
    assert tab.title() == "Item 3 of 10" and "Undone." in tab.text("#live")
    tab.press({"1": "q", "2": "w"}[better()])
    before = tab.text("#left"), tab.text("#right"), tab.title()
    tab.page.reload()  # in the middle, without a word about the name
    tab.page.wait_for_selector("#work:not([hidden])")
    assert (tab.text("#left"), tab.text("#right"), tab.title()) == before
    tab.page.wait_for_timeout(int(PAUSE) + 60)
    tab.page.keyboard.press("c")
    tab.page.keyboard.type("1 year of kafka, 2 audits: better")  # votes nothing
    assert (
        tab.page.input_value("#comment") == "1 year of kafka, 2 audits: better" and tab.step() == 5
    )
    tab.page.keyboard.press("Escape")
    tab.press(better())
    tab.page.keyboard.press("g")
    assert tab.page.is_visible("#guidelines-text")
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("Shift+?")
    assert tab.page.is_visible("#help")
    tab.page.keyboard.press("2")  # a dialog is open: no vote
    tab.page.keyboard.press("Escape")
    assert tab.step() == 6
    tab.page.keyboard.press("Tab")  # a tag by keyboard: three texts, then the first box
    while tab.page.evaluate("document.activeElement.type") != "checkbox":
        tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("Space")
    tab.press(better())
    tab.press("b")
    tab.press("s")
    tab.press("t")
    tab.press(better())
    assert tab.title() == "Item 10 of 10"
    tab.page.wait_for_timeout(int(PAUSE) + 60)
    while (
        tab.page.evaluate("document.activeElement.dataset.choice || ''")
        != {"1": "left", "2": "right"}[better()]
    ):
        tab.page.keyboard.press("Tab")  # and the buttons themselves
    tab.press("Enter")
    assert tab.title() == "Thank you, ann" and tab.page.is_visible("#end")
    numbers = tab.text("#numbers")
    errors = tab.errors
    context.close()
    assert server.stop() == 0
    return folder / "run", errors, numbers


def test_a_session_by_keyboard(keyboard_session):
    """Ten items with every key, an undo, a comment, a tag and a reload, and not one touch of the mouse: what the log holds is
    what was pressed, and the console stays silent."""
    folder, errors, numbers = keyboard_session
    assert errors == []
    assert numbers == "You compared 9 pairs: 7 decided, 1 tie, 1 with both bad. You skipped 1."
    events = log_of(folder)
    assert [e["event"] for e in events] == ["vote"] * 3 + ["undo"] + ["vote"] * 4 + ["skip"] + [
        "vote"
    ] * 3
    votes = votes_of.replay(events)
    assert [v["strength"] for v in votes if v["choice"] == "a"][:4] == [3, 2, 1, 2]
    assert {v["choice"] for v in votes} == {"a", "tie", "both_bad"} and len(votes) == 9
    assert [v["comment"] for v in votes if v["comment"]] == ["1 year of kafka, 2 audits: better"]
    assert [v["reasons"] for v in votes if v["reasons"]] == [["accuracy"]]
    assert all(300 < v["ms_active"] <= v["ms_wall"] for v in votes)
    assert {v["guidelines_sha256"] for v in votes} == {votes[0]["guidelines_sha256"]}
    assert len({e["session"] for e in events}) == 2  # before and after the reload


def test_two_tabs_two_people(serve, open_page):
    """Two tabs of one person: the second learns that the first went on, and its vote is not written. Another person in another
    browser sees the same items in another order, and the counter of all moves."""
    server = serve(item_rows(6), "--overlap", "2")
    one = open_page(server).start("ann")
    two = open_page(server, context=one.page.context).start("ann")
    assert one.text("#left") == two.text("#left")
    one.press("1")
    two.press("2")
    assert "another window" in two.text("#banner") and two.title() == one.title() == "Item 2 of 6"
    assert two.text("#left") == one.text("#left") and len(log_of(server.out)) == 1
    two.press("2")
    assert len(log_of(server.out)) == 2 and two.page.is_hidden("#banner")
    ben = open_page(server).start("ben")
    assert ben.title() == "Item 1 of 6" and "2 votes by everyone" in ben.text("#everyone")
    while ben.page.is_visible("#work"):
        ben.press("t")
    assert ben.title() == "Thank you, ben"
    votes = votes_of.replay(log_of(server.out))
    assert len(votes) == 8 and {v["annotator"] for v in votes} == {"ann", "ben"}
    assert [e for e in one.errors + ben.errors if "409" not in e] == []


def test_one_vote_for_each_intention(serve, open_page):
    """A double click, a held key and a held Enter are one vote each; back and forward lose nothing and add nothing."""
    server = serve(item_rows(8))
    tab = open_page(server).start()
    tab.act(lambda: tab.page.dblclick('[data-choice="left"][data-strength="2"]'))
    tab.page.wait_for_timeout(300)
    assert tab.step() == 1
    tab.act(lambda: [tab.page.keyboard.down("1") for _ in range(12)])
    tab.page.wait_for_timeout(int(PAUSE) + 200)
    [tab.page.keyboard.down("1") for _ in range(12)]
    tab.page.keyboard.up("1")
    assert tab.step() == 2
    tab.page.focus('[data-choice="tie"]')
    tab.act(lambda: [tab.page.keyboard.down("Enter") for _ in range(12)])
    tab.page.keyboard.up("Enter")
    tab.page.wait_for_timeout(300)
    assert tab.step() == 3 and len(log_of(server.out)) == 3
    seen = tab.text("#left")
    tab.page.goto("about:blank")
    tab.page.go_back()
    tab.page.wait_for_selector("#work:not([hidden])")
    assert (
        tab.text("#left") == seen and tab.title() == "Item 4 of 8" and len(log_of(server.out)) == 3
    )


def test_keys_that_are_off(serve, open_page):
    """With Ctrl, Alt or Meta a key belongs to the browser; the switch turns single keys off, and stays off after a reload
    (WCAG 2.1.4). The buttons still work."""
    server = serve(item_rows(5))
    tab = open_page(server).start()
    for key in ("Control+1", "Alt+1", "Meta+1", "Control+b"):
        tab.press(key, wait=False)
    tab.page.click("#show-help")
    tab.page.uncheck("#shortcuts")
    tab.page.keyboard.press("Escape")
    for _ in range(2):
        for key in ("1", "2", "3", "t", "b", "s", "ArrowLeft", "c", "g"):
            tab.press(key, wait=False)
        assert (
            tab.step() == 0
            and tab.page.is_hidden("#guidelines")
            and tab.page.is_hidden("main kbd >> nth=0")
        )
        tab.page.reload()
        tab.page.wait_for_selector("#work:not([hidden])")
    tab.act(lambda: tab.page.click('[data-choice="both_bad"]'))
    assert [e["choice"] for e in log_of(server.out)] == ["both_bad"]


def test_offline_and_back(serve, open_page):
    """Five seconds without network: the choice stays on the screen, the page says so, and sends it by itself when it can: one
    vote. A reload in that time loses nothing either."""
    server = serve(item_rows(5))
    tab = open_page(server).start()
    tab.page.context.set_offline(True)
    tab.press("1", wait=False)
    tab.page.wait_for_selector("#banner:not([hidden])")
    assert "Not saved yet" in tab.text("#banner") and tab.page.locator(
        ".chosen"
    ).inner_text().startswith("Clearly")
    tab.press("2", wait=False)  # no second choice while the first one waits
    tab.page.wait_for_timeout(4000)
    assert log_of(server.out) == [] and tab.title() == "Item 1 of 5"
    tab.page.context.set_offline(False)
    tab.until("document.body.dataset.step == 1")
    assert tab.title() == "Item 2 of 5" and tab.page.is_hidden("#banner")
    tab.page.route("**/vote", lambda route: route.abort())
    tab.press("3", wait=False)
    tab.page.wait_for_selector("#banner:not([hidden])")
    tab.page.unroute("**/vote")
    tab.page.reload()
    tab.until("document.body.dataset.step == 2")
    assert [e["choice"] in ("a", "b") for e in log_of(server.out)] == [True, False]


def test_a_lost_acknowledgement(serve, open_page):
    """The vote reaches the disk, the answer gets lost: the retry is the same vote."""
    server = serve(item_rows(4))
    tab = open_page(server).start()

    def swallow(route):
        route.fetch()
        route.abort()

    tab.page.route("**/vote", swallow, times=1)
    tab.press("1")
    assert tab.title() == "Item 2 of 4" and len(log_of(server.out)) == 1


def test_the_server_starts_anew(serve, open_page):
    """Killed and started again on the same port while somebody reads: the page brings the vote over to the new server."""
    server = serve(item_rows(6))
    tab = open_page(server).start()
    tab.press("1")
    server.stop()
    tab.press("2", wait=False)
    tab.page.wait_for_selector("#banner:not([hidden])")
    second = serve(None, "--port", str(server.port))
    tab.until("document.body.dataset.step == 2")
    assert tab.title() == "Item 3 of 6" and len(log_of(second.out)) == 2
    tab.press("u")
    assert tab.title() == "Item 2 of 6"


def test_a_full_disk_is_told(serve, open_page):
    """The annotator reads that the disk is full; nothing is acknowledged, the choice waits, and lands when there is room."""
    server = serve(item_rows(12), limit=5000)
    tab = open_page(server).start()
    for _ in range(12):
        before = tab.step()
        tab.page.fill("#comment", "x" * 600)
        tab.page.keyboard.press("Escape")
        tab.press("1", wait=False)
        tab.until(
            f"document.body.dataset.step > {before} || !document.getElementById('banner').hidden"
        )
        if tab.page.is_visible("#banner"):
            break
    assert "cannot write its file" in tab.text("#banner") and len(log_of(server.out)) == tab.step()
    step = tab.step()
    server.stop()
    serve(None, "--port", str(server.port))
    tab.until(f"document.body.dataset.step == {step + 1}")
    assert len(log_of(server.out)) == step + 1


def test_a_link_with_a_token(serve, open_page):
    """Off this machine: the printed link opens the page, the token leaves the address bar at once and no script can read the
    cookie; without the link there is a sentence and no item."""
    server = serve(item_rows(3), "--allow-host", "tunnel.example")
    token = re.search(r"/\?token=([\w-]+)", server.text())[1]
    stranger = open_page(server)
    assert "open the link" in stranger.text("body") and not stranger.page.query_selector("#work")
    tab = open_page(server, path=f"/?token={token}").start()
    assert tab.page.url == f"http://127.0.0.1:{server.port}/"
    assert tab.page.evaluate("document.cookie") == ""
    tab.press("1")
    assert len(log_of(server.out)) == 1 and not any(
        token in url for url in tab.requests[1:] if "?" not in url
    )


MARKDOWN = """# Head
Two **bold** and *slanted* words, `x = 1`, 2 * 3 * 4.

- one
- two

```python
if a < b:
    print("<b>")
```
\u202etxt.exe"""


def test_markdown_and_code(serve, open_page):
    """Formatted as elements, never as HTML; a switch shows the plain text; a character that reverses
    text is shown by its number."""
    rows = item_rows(1)
    rows[0]["a"][0]["content"] = rows[0]["b"][0]["content"] = MARKDOWN
    rows[0]["b"][0]["content"] += "!"
    tab = open_page(serve(rows)).start()

    def texts(kind):
        return [e.text_content() for e in tab.page.query_selector_all(f"#left {kind}")]

    assert (texts("h3"), texts("strong"), texts("em")) == (["Head"], ["bold"], ["slanted"])
    assert texts("li") == ["one", "two"] and texts("b") == []
    assert texts("code") == ["x = 1", 'if a < b:\n    print("<b>")']
    assert texts(".control") == ["U+202E"] and "2 * 3 * 4" in tab.text("#left")
    tab.page.keyboard.press("Shift+?")
    tab.page.uncheck("#format")
    tab.page.keyboard.press("Escape")
    assert "**bold**" in tab.text("#left") and texts("strong") == []


def test_a_known_name_and_undo(serve, open_page):
    """A pseudonym with votes asks before it goes on; undo restores comment and reasons; arrow keys
    scroll a text that has the focus and do not vote."""
    server = serve(item_rows(6))
    tab = open_page(server).start("ann")
    tab.page.check("#reasons input >> nth=1")
    tab.page.fill("#comment", "too long")
    tab.page.keyboard.press("Escape")
    tab.press("1")
    assert tab.page.input_value("#comment") == ""
    tab.press("u")
    assert tab.page.input_value("#comment") == "too long"
    assert tab.page.is_checked("#reasons input >> nth=1")
    tab.press("1")
    tab.page.focus("#left")
    tab.press("ArrowLeft", wait=False)
    tab.page.wait_for_timeout(300)
    assert tab.step() == 3
    second = open_page(server).page
    second.wait_for_selector("#start:not([hidden])")
    second.fill("#name", "ann")
    second.keyboard.press("Enter")
    second.wait_for_selector("#known:not([hidden])")
    assert second.inner_text("#known-words") == "ann has 1 vote: continue as ann?"
    second.click("#rename")
    assert second.is_hidden("#known") and second.is_visible("#start")
    second.keyboard.press("Enter")
    second.click("#continue")
    second.wait_for_selector("#work:not([hidden])")


@pytest.mark.parametrize("view", ["phone", "200 % zoom", "laptop", "desk"])
def test_the_votes_stay_in_view(serve, open_page, view):
    """However long the answers are, every vote button is in the window, at the top of the page as at
    its end, and takes at most two fifths of it."""
    rows = item_rows(1)
    rows[0] |= LONG
    options = VIEWS.get(view, {"viewport": {"width": 1180, "height": 640}})
    page = open_page(serve(rows), **options).start().page
    height = options["viewport"]["height"]
    for where in (0, 400, 100_000):
        page.evaluate(f"scrollTo(0, {where})")
        for button in page.query_selector_all("#choices button"):
            box = button.bounding_box()
            if where < 100_000:
                assert box["y"] >= 0 and box["y"] + box["height"] <= height, (view, where, box)
    assert page.locator("#choices").bounding_box()["height"] <= 0.4 * height


# ---- looks, sizes, accessibility ----

LONG = {
    "a": [{"role": "assistant", "content": "word " * 900}],
    "b": [{"role": "assistant", "content": "x" * 3000}],
}
RTL = {
    "a": [{"role": "assistant", "content": "שלום עולם, this is mixed"}],
    "b": [{"role": "assistant", "content": "مرحبا"}],
}
VIEWS = {
    "phone": {"viewport": {"width": 320, "height": 640}, "has_touch": True, "is_mobile": True},
    "phone, dark": {
        "viewport": {"width": 390, "height": 844},
        "has_touch": True,
        "is_mobile": True,
        "color_scheme": "dark",
    },
    "200 % zoom": {"viewport": {"width": 640, "height": 400}, "device_scale_factor": 2},
    "desk": {"viewport": {"width": 1280, "height": 800}},
    "desk, dark": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"},
}


def no_sideways(page):
    sizes = page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert sizes[0] <= sizes[1], sizes
    wide = "[...document.querySelectorAll('.words, button, label')].filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth).map(e => e.id || e.textContent)"
    assert page.evaluate(wide) == []


def axe(page):
    """Findings of axe-core that are serious or critical, as (rule, first node)."""
    try:
        from axe_playwright_python.sync_playwright import Axe
    except ImportError:
        missing("axe-playwright-python is not installed: pip install -r requirements-dev.txt")
    found = Axe().run(page).response["violations"]
    return [
        (v["id"], v["nodes"][0]["html"][:120])
        for v in found
        if v["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("view", VIEWS)
def test_fits_and_passes_axe(serve, open_page, view):
    """Start, reading, help, trouble and end: nothing scrolls sideways with 3000 letters without a blank, also at 1.5 lines'
    spacing and 200 % zoom, and axe-core has no serious finding (contrast, names, labels, landmarks) in light and dark."""
    rows = item_rows(3)
    rows[0] |= LONG
    rows[1] |= RTL
    tab = open_page(serve(rows), **VIEWS[view])
    page = tab.page

    def look():
        page.wait_for_timeout(250)  # the fade is over: half-transparent text has half the contrast
        no_sideways(page)
        assert axe(page) == []

    page.wait_for_selector("#start:not([hidden])")
    look()
    tab.start()
    for _ in range(3):
        look()
        page.evaluate(
            "document.body.style.lineHeight = 1.5; document.body.style.letterSpacing = '.12em'; document.body.style.wordSpacing = '.16em'"
        )
        no_sideways(page)
        page.evaluate("document.body.removeAttribute('style')")
        tab.act(lambda: page.click('[data-choice="tie"]'))
    look()
    page.click("#undo")
    page.wait_for_selector("#work:not([hidden])")
    page.click("#show-help")
    look()
    page.keyboard.press("Escape")
    page.route("**/vote", lambda route: route.abort())
    tab.act(lambda: page.click('[data-choice="left"][data-strength="1"]'), wait=False)
    page.wait_for_selector("#banner:not([hidden])")
    look()


def test_layout(serve, open_page):
    """On a phone A stands above B; on a desk side by side with equal height and type, long answers scroll inside, and the
    buttons stay in the same place from item to item. Targets are at least 24 pixels, on a phone 44."""
    rows = item_rows(4)
    rows[0] |= LONG
    server = serve(rows, "--overlap", "2")
    desk, phone = (
        open_page(server, **VIEWS["desk"]).start("ann"),
        open_page(server, **VIEWS["phone"]).start("ben"),
    )
    box = "(s) => { const r = document.querySelector(s).getBoundingClientRect(); return [r.x, r.y, r.width, r.height].map(Math.round); }"
    places = []
    for _ in range(4):
        left, right = (desk.page.evaluate(box, f".card:has(#{side})") for side in ("left", "right"))
        assert (left[1], left[2], left[3]) == (right[1], right[2], right[3]) and left[0] < right[0]
        places.append(desk.page.evaluate(box, "#choices"))
        assert desk.page.evaluate(box, "#comment")[2] >= 300  # room for a sentence
        assert places[-1][1] + places[-1][3] < 800  # in sight without scrolling
        fonts = {
            desk.page.evaluate(f"getComputedStyle(document.getElementById('{s}')).font")
            for s in ("left", "right")
        }
        assert len(fonts) == 1
        desk.press("t")
    assert len({tuple(p) for p in places}) == 1
    left, right = (phone.page.evaluate(box, f".card:has(#{side})") for side in ("left", "right"))
    assert left[1] + left[3] < right[1] and left[0] == right[0]
    small = "(least) => [...document.querySelectorAll('main button, header button, #reasons label')].filter(e => e.offsetHeight && e.offsetHeight < least).map(e => e.textContent)"
    assert phone.page.evaluate(small, 43) == [] and desk.page.evaluate(small, 24) == []


def test_guidelines_open_at_their_start(serve, open_page, tmp_path):
    """A long text in the panel scrolls inside: title and button are in sight, on a phone as on a desk. Where the panel as a whole
    scrolled, the focus on its text pushed the title out, and the way out was below the edge."""
    (tmp_path / "guide.md").write_text("A rule of one line.\n" * 80, encoding="utf-8")
    server = serve(item_rows(2), "--guidelines", str(tmp_path / "guide.md"))
    for view in ("phone", "200 % zoom", "desk"):
        page = open_page(server, **VIEWS[view]).start(view.split()[0].strip(",")).page
        page.click("#show-guidelines")
        height = VIEWS[view]["viewport"]["height"]
        for part in ("#guidelines-title", "#guidelines form button"):
            box = page.locator(part).bounding_box()
            assert box["y"] >= 0 and box["y"] + box["height"] <= height, (view, part, box)
        panel = page.locator("#guidelines").bounding_box()
        assert page.locator("#guidelines-title").bounding_box()["y"] >= panel["y"]
        assert page.evaluate("document.getElementById('guidelines-text').scrollTop") == 0
        page.click("#guidelines form button")
        assert page.is_hidden("#guidelines")


def test_names_for_a_screen_reader(serve, open_page):
    """One h1, landmarks, a language, and a name for each control that says which answer it means."""
    tab = open_page(serve(item_rows(2))).start()
    page = tab.page
    assert (
        page.evaluate("document.documentElement.lang") == "en" and page.locator("h1").count() == 1
    )
    assert page.get_by_role("main").count() == 1 and page.get_by_role("banner").count() == 1
    for name in (
        "A is much better",
        "A is clearly better",
        "A is slightly better",
        "B is much better",
    ):
        assert page.get_by_role("button", name=name).count() == 1
    assert page.get_by_role("group", name="A is better").count() == 1
    assert page.get_by_role("checkbox", name="invented facts").count() == 1
    assert page.get_by_role("textbox", name="Comment").count() == 1
    assert (
        page.get_by_role("group", name="Answer A").inner_text()
        == page.locator("#left").inner_text()
    )


# ---- attacks in the browser ----


class Listener(http.server.BaseHTTPRequestHandler):
    """Another port of this machine: counts who calls, and serves the attacker's page."""

    calls, page = [], b""

    def do_GET(self):
        type(self).calls.append(self.path)
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(type(self).page)

    do_POST = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def stranger():
    """(handler, port) of a server that nobody should call."""
    handler = type("Stranger", (Listener,), {"calls": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield handler, server.server_address[1]
    server.shutdown()


def payloads(port):
    call, run = f"http://127.0.0.1:{port}", "window.__xss=1"
    return [
        f"<img src=x onerror={run}>", f"<svg onload={run}>", f"</script><script>{run}</script>", f"<a href='javascript:{run}'>x</a>",
        f"[x](javascript:{run})", "<a href='data:text/html;base64,PHNjcmlwdD4='>x</a>", f"![x]({call}/markdown)", f"<img src={call}/image>",
        f"<iframe srcdoc='<script>parent.{run}</script>'></iframe>", f"<style>@import '{call}/style';</style>", "<form id=app><button>go</button></form>",
        "<input name=textContent>", "\u202egnp.exe", "nul \x00 here", "👩‍👩‍👧 👍🏽", "{{7*7}}", "{% raw %}", "${7*7}", f"<link rel=stylesheet href={call}/link>",
        f"<script src={call}/script></script>", f"<meta http-equiv=refresh content='0;url={call}/meta'>", "\"'><b>bold</b>", "&lt;b&gt;",
    ]  # fmt: skip


def strip_policy(route):
    reply = route.fetch()
    headers = {k: v for k, v in reply.headers.items() if k.lower() != "content-security-policy"}
    route.fulfill(response=reply, headers=headers)


def patch_inner_html(route):
    reply = route.fetch()
    route.fulfill(response=reply, body=reply.text().replace("textContent", "innerHTML"))


@pytest.mark.parametrize("layer", ["both", "text alone", "policy alone"])
def test_hostile_texts_do_nothing(serve, open_page, stranger, tmp_path, layer):
    """Stored XSS in prompt, answers, ids, tasks, model names, guidelines, tags, comment and pseudonym. Each layer must hold
    alone: with the policy stripped the text is text, and with innerHTML patched in the policy lets nothing run or load."""
    handler, port = stranger
    texts = payloads(port)
    if layer == "policy alone":  # no policy forbids a navigation: there the text layer stands alone
        texts = [text for text in texts if "<meta" not in text]
    everything = "\n".join(texts)
    row = {key: everything for key in ("id", "task", "a_model", "b_model")} | {"gold": None}
    row |= {
        "prompt": [
            {"role": "system", "content": everything},
            {"role": "user", "content": everything},
        ]
    }
    row |= {side: [{"role": "assistant", "content": side + everything}] for side in "ab"}
    large = {
        "id": "large",
        "prompt": [{"role": "user", "content": "x" * 1_000_000}],
        "a": row["a"],
        "b": row["b"],
    }
    (tmp_path / "guide.md").write_text(everything, encoding="utf-8")
    tags = [text for text in texts if "," not in text and "\x00" not in text]
    server = serve(
        [row, large], "--guidelines", str(tmp_path / "guide.md"), "--reasons", ",".join(tags)
    )
    tab = open_page(server)
    page = tab.page
    if layer == "text alone":
        page.route("**/*", strip_policy)
    if layer == "policy alone":
        page.route("**/annotate.js", patch_inner_html)
    page.reload()
    page.wait_for_selector("#start:not([hidden])")
    page.fill("#name", "<img src=x onerror=x()>")
    page.keyboard.press("Enter")
    page.wait_for_selector("#banner:not([hidden])")
    assert "not accepted" in tab.text("#banner")
    tab.start("ann")
    while tab.page.is_visible("#work"):
        shown = page.evaluate(
            "[...document.querySelectorAll('#left, #right')].map(e => e.textContent)"
        )
        if layer != "policy alone":
            assert all(
                "onerror" in text and "U+202E" in text and "javascript:" in text for text in shown
            )
            assert (
                page.evaluate(
                    "document.querySelectorAll('main img, main svg, main iframe, main style, main a, main form form, main link, main b').length"
                )
                == 0
            )
            assert page.evaluate(
                "[...document.querySelectorAll('#reasons label')].map(e => e.textContent)"
            ) == [t.strip() for t in tags]
            assert page.evaluate(
                "document.getElementById('guidelines-text').textContent"
            ) == everything.replace("\x00", "")
        page.fill("#comment", everything.replace("\x00", ""))
        page.keyboard.press("Escape")
        page.evaluate("document.getElementById('title').focus()")
        tab.press("1")
    page.wait_for_timeout(300)
    assert page.evaluate("window.__xss") is None
    assert handler.calls == []
    ours = (f"http://127.0.0.1:{server.port}/", "data:", "about:")
    outside = [url for url in tab.requests if not url.startswith(ours)]
    if (
        layer == "policy alone"
    ):  # the browser names what it refused to load; nothing reached the other port
        assert set(outside) <= {url for url in outside if f":{port}/" in url}
    else:
        assert outside == []
    assert log_of(server.out)[0]["comment"] == everything.replace("\x00", "").strip()


def test_another_site_in_the_same_browser(serve, open_page, stranger):
    """A page on another port (same site for cookies) posts a vote without CORS, with the content type that needs no leave, and
    frames the page for a click: nothing is recorded, nothing is shown."""
    handler, port = stranger
    server = serve(item_rows(3))
    target = f"http://127.0.0.1:{server.port}"
    body = json.dumps({"annotator": "ann", "session": "abcdefgh"})
    handler.page = f"""<iframe id=f src="{target}/"></iframe><script>
        window.results = [];
        const send = (path, options) => fetch("{target}" + path, options).then((r) => results.push(r.type), () => results.push("refused"));
        Promise.all([
          send("/vote", {{method: "POST", mode: "no-cors", headers: {{"Content-Type": "text/plain"}}, body: '{body}'}}),
          send("/next", {{method: "POST", headers: {{"Content-Type": "application/json"}}, body: '{body}'}}),
          send("/", {{}}), send("/annotate.js", {{}})]).then(() => window.finished = true);
        </script>""".encode()
    tab = open_page(server)
    page = tab.page
    statuses = []
    page.on("response", lambda r: statuses.append((r.url, r.status)))
    page.goto(f"http://127.0.0.1:{port}/attack")
    tab.until("window.finished")
    assert page.evaluate("results").count("refused") >= 3 and "basic" not in page.evaluate(
        "results"
    )
    assert not any(s == 200 for url, s in statuses if "/vote" in url or "/next" in url)
    frame = page.frames[1]
    assert frame.url.startswith("chrome-error://") or "Compare" not in frame.content()
    assert not (server.out / "annotations.jsonl").exists()
    assert "ann" not in server.text().split("http://")[1]


def test_a_rebound_name(serve, open_page):
    """evil.test resolves to 127.0.0.1 (DNS rebinding): the page of that name gets 400 and no token."""
    server = serve(item_rows(3))
    tab = open_page(server)
    for name in ("evil.test", "EVIL.test"):
        reply = tab.page.goto(f"http://{name}:{server.port}/")
        assert reply.status == 400 and "token" not in tab.page.content()


def test_blind_in_the_page(serve, open_page):
    """What the page holds in the end, memory and storage included, names no model, no id and no gold."""
    rows = item_rows(8, gold={1, 3})
    for row in rows:
        row |= {
            "id": "secret-" + row["id"],
            "a_model": "checkpoint-alpha",
            "b_model": "checkpoint-beta",
        }
    tab = open_page(serve(rows)).start()
    for _ in range(8):
        tab.press("1")
    held = tab.page.content() + tab.page.evaluate(
        "JSON.stringify([localStorage, sessionStorage, state])"
    )
    assert not re.search("checkpoint|secret|alpha|gold|item-0", held)
