"""annotate.py in a real Chromium: what a person does there, how it looks."""

import random
import re
import socket
import time

import pytest

from conftest import REPO
from parts import files
from test_annotate import Server, export, item_rows, log_of
from tiny import table, write_rows

pytestmark = pytest.mark.slow
PAUSE = 330  # ms, a little more than in annotate.js
TIE = '[data-choice="tie"]'


class Page:
    """A tab with its console, and the few things that a person does."""

    def __init__(self, context, server):
        self.page, self.errors = context.new_page(), []
        bad = "error", "warning"
        self.page.on("console", lambda m: m.type in bad and self.errors.append(m.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(f"http://127.0.0.1:{server.port}/")
        self.keys = self.page.keyboard

    def appear(self, selector):
        self.page.wait_for_selector(f"{selector}:not([hidden])")
        return self.text(selector)

    def reload(self):
        self.page.reload()
        self.appear("#work")

    def start(self, name="ann"):
        self.page.fill("#name", name)
        self.keys.press("Enter")
        self.appear("#work")
        return self

    def until(self, step):
        """Wait for a step; playwright's own wait needs eval, which the policy forbids."""
        for _ in range(1000):
            try:
                if self.step() >= step:
                    return
            except Exception as error:  # noqa: BLE001
                assert "navigat" in str(error) or "destroyed" in str(error)  # loaded again
            self.page.wait_for_timeout(30)
        raise AssertionError(step)

    def tab_to(self, condition):
        while not self.page.evaluate(f"document.activeElement.{condition}"):
            self.keys.press("Tab")

    def step(self):
        return self.page.evaluate("+document.body.dataset.step || 0")

    def act(self, action, wait=True):
        before = self.step()
        self.page.wait_for_timeout(PAUSE)
        action()
        if wait:
            self.until(before + 1)

    def press(self, key, wait=True):
        self.act(lambda: self.keys.press(key), wait)

    def nothing(self, *keys):
        before = self.step()
        for key in keys:
            self.press(key, wait=False)
        self.page.wait_for_timeout(200)
        assert self.step() == before

    def text(self, selector):
        return self.page.inner_text(selector)

    def better(self, left, right):
        return left if self.text("#left").startswith("better") else right


@pytest.fixture
def open_page(browser):
    def make(server, beside=None, **options):
        context = beside.page.context if beside else browser.new_context(**options)
        return Page(context, server)

    yield make
    for context in browser.contexts:
        context.close()


@pytest.fixture
def session(tmp_path):
    """The folder of the votes."""
    return tmp_path / "run"


@pytest.fixture
def serve(tmp_path, session):
    servers = []

    def make(rows, *flags, **options):
        if rows:
            flags += ("--items", write_rows(tmp_path / "items.jsonl", rows))
        servers.append(Server("--out", session, *flags, **options))
        return servers[-1]

    yield make
    for server in servers:
        if server.process.poll() is None:
            server.stop()


def test_a_session_by_keyboard(serve, open_page, session):
    tab = open_page(serve(item_rows(10)))
    page, keys = tab.page, tab.keys
    tab.appear("#start")
    tab.tab_to("id == 'name'")
    keys.type("ann")
    keys.press("Enter")
    tab.appear("#work")
    assert page.title() == "Item 1 of 10 · FeedbackLoop"
    assert page.get_by_role("button", name="A is much better").count() == 1
    tab.press(tab.better("Shift+Digit1", "Shift+Digit2"))
    assert tab.text("#live").split() == "Saved. Item 2 of 10".split()
    tab.press(tab.better("ArrowLeft", "ArrowRight"))
    tab.press("3")
    tab.press("u")  # the tie was a slip
    assert tab.text("#title") == "Item 3 of 10" and "Undone." in tab.text("#live")
    tab.press(tab.better("q", "w"))
    before = tab.text("main")
    tab.reload()
    assert tab.text("main") == before
    keys.press("c")
    keys.type("1 year of kafka, 2 audits")  # votes nothing
    keys.press("Escape")
    tab.tab_to("type == 'checkbox'")
    keys.press("Space")
    given = page.locator("#comment").input_value, page.locator("#reasons input").first.is_checked
    for wanted in (("1 year of kafka, 2 audits", True), ("", False)):
        tab.press(tab.better("1", "2"))
        if wanted[1]:
            tab.press("u")  # brings back what was written
        assert tuple(get() for get in given) == wanted
    for key, dialog in (("g", "#guidelines"), ("Shift+?", "#help")):
        keys.press(key)
        assert page.is_visible(dialog)
        tab.nothing("2")
        keys.press("Escape")
    page.focus("#left")
    tab.nothing("ArrowLeft", "Control+1", "Alt+1", "Meta+1")
    tab.act(lambda: page.dblclick(TIE))
    tab.act(lambda: [keys.down("b") for _ in range(12)])
    page.wait_for_timeout(PAUSE)
    keys.down("b")
    keys.up("b")
    tab.press("s")
    assert tab.text("#title") == "Item 8 of 10"
    tab.tab_to(f"dataset.choice == '{tab.better('left', 'right')}'")
    tab.tab_to("dataset.strength == '2'")
    tab.act(lambda: [keys.down("Enter") for _ in range(12)])
    keys.up("Enter")
    page.click("#show-help")
    page.uncheck("#shortcuts")
    keys.press("Escape")
    tab.reload()  # the switch stays as it is (WCAG 2.1.4)
    tab.nothing("1", "t", "ArrowLeft", "s")
    tab.act(lambda: page.click('[data-choice="both_bad"]'))
    tab.act(lambda: page.click(TIE))
    assert tab.text("#title") == "Thank you, ann" and tab.errors == []
    assert tab.text("#numbers") == "You compared 9 pairs. You skipped 1."
    events = log_of(session)
    assert [e["strength"] for e in events if e["choice"] in ("a", "b")] == [3, 2, 1, 2, 2, 2]
    assert [e["reasons"] for e in events if e["comment"]] == [["accuracy"]] * 2
    assert all(200 < e["ms_active"] <= e["ms_wall"] for e in events)
    rows = export(session)
    assert {row["chosen_model"] for row in rows if not row["tie"]} == {"good"} and len(rows) == 7


def test_corrections_by_keyboard(serve, open_page, session):
    """The better answer may be corrected before it is chosen; a correction of the other one is not
    dropped in silence, and an undone vote brings it back."""
    rows = item_rows(3)
    tab = open_page(serve(rows)).start()
    page, keys = tab.page, tab.keys
    side, key, digit, worse = tab.better(("left", "e", "1", "2"), ("right", "r", "2", "1"))
    before = tab.text(f"#{side}")
    keys.press(key)
    look(page)
    assert page.evaluate("document.activeElement.id") == f"{side}-edit"
    keys.press("Control+End")
    keys.type(", with 3 audits 2b")  # votes nothing
    keys.press("Escape")
    tab.nothing(worse, "3", "s")
    assert "You corrected answer" in tab.text("#banner")
    tab.press(digit)
    assert page.is_hidden(f"#{side}-edit") and page.is_visible(f"#{side}")
    tab.press("u")
    text = f"{before}, with 3 audits 2b"
    assert page.input_value(f"#{side}-edit") == text
    page.click(f"[data-edit={side}]")  # discarded
    tab.press(digit)
    tab.press("u")
    assert page.is_hidden(f"#{side}-edit")
    keys.press(key)
    page.fill(f"#{side}-edit", " ")
    keys.press("Escape")
    tab.nothing(digit)
    assert "is empty" in tab.text("#banner")
    page.fill(f"#{side}-edit", text)
    keys.press("Escape")
    tab.press(digit)
    assert [e["edit"] for e in log_of(session)] == [text, None, None, None, text]
    assert [row["source"] for row in export(session)] == ["human", "edit"]
    assert tab.errors == []


def test_what_is_being_written_is_kept(serve, open_page):
    """A comment was lost by `u`, a correction by a reload, and an open one was in the way of `u`."""
    tab = open_page(serve(item_rows(3))).start()
    page, keys = tab.page, tab.keys
    tab.press("3")
    first = tab.text("#left")
    keys.press("c")
    keys.type("a comment")
    keys.press("Escape")
    page.check("#reasons input")
    keys.press("e")
    page.fill("#left-edit", "a correction")

    def written():
        comment, edit = page.input_value("#comment"), page.input_value("#left-edit")
        return comment, page.is_checked("#reasons input"), edit

    for _ in range(2):
        assert written() == ("a comment", True, "a correction")
        tab.reload()
    keys.press("Escape")
    tab.press("u")
    assert page.is_hidden("#left-edit") and page.input_value("#comment") == ""
    tab.press("3")
    assert written() == ("a comment", True, "a correction")
    tab.press("1")
    assert page.is_hidden("#left-edit") and page.input_value("#comment") == ""
    tab.press("u")  # what was sent comes from the server
    assert (
        written() == ("a comment", True, "a correction") and tab.text("#left-label") == "Answer A"
    )
    page.click("[data-edit=left]")
    assert tab.text("#left") == first and tab.errors == []


def test_line_ends_are_no_correction(serve, open_page, session):
    """A text field turns the line ends of Windows into others."""
    rows = item_rows(2)
    for row in rows:
        row["a"][0]["content"], row["b"][0]["content"] = "one\r\ntwo\r\n", "one\rthree"
    tab = open_page(serve(rows)).start()
    for key in ("1", "2"):
        for letter in "er":
            tab.keys.press(letter)
            tab.keys.press("Escape")
        tab.press(key)
    assert [vote["edit"] for vote in log_of(session)] == [None, None] and tab.errors == []


# key | code | is Shift down | choice | strength
KEYS = table("""
1         | Digit1  | False | left   | 2
!         | Digit1  | True  | left   | 3
1         | Numpad1 | False | left   | 2
End       | Numpad1 | False | None   | None
ArrowDown | Numpad2 | False | None   | None
PageDown  | Numpad3 | False | None   | None
&         | Digit1  | False | left   | 2
1         | Digit1  | True  | left   | 2
7         | Digit2  | True  | None   | None
ы         | KeyS    | False | skip   | None
И         | KeyB    | True  | both_bad | 0
لا        | KeyB    | False | both_bad | 0
a         | KeyQ    | False | None   | None
'         | KeyQ    | False | None   | None
Process   | KeyS    | False | None   | None
""")
PRESS = """([key, code, shiftKey]) => document.body.dispatchEvent(
  new KeyboardEvent("keydown", { key: String(key), code, shiftKey, bubbles: true }))"""


def test_keys_of_other_keyboards(serve, open_page, session):
    """The keypad scrolls without NumLock, and it voted. On a French keyboard 1 needs Shift, and was
    much better; on a Russian one letters did nothing."""
    tab, n_votes = open_page(serve(item_rows(len(KEYS)))).start(), 0
    for *key, choice, strength in KEYS:
        tab.act(lambda key=key: tab.page.evaluate(PRESS, key), wait=choice is not None)
        tab.page.wait_for_timeout(100)
        new_votes = log_of(session)[n_votes:]
        n_votes += len(new_votes)
        assert len(new_votes) == (choice is not None), key
        for vote in new_votes:
            wanted = None if choice == "skip" else vote["shown"].get(choice, choice)
            assert (vote["choice"], vote["strength"]) == (wanted, strength), key


@pytest.mark.parametrize("name", ("desk, dark", "phone, dark"))
def test_criteria_by_keyboard(serve, open_page, tmp_path, session, name):
    criteria = ["Names a gap in the profile.", "Is rude. " * 20, "Asks no risky question."] * 3
    rows = [{"task_id": i, "prompt": "Assess.", "rubrics": criteria, "response": "word " * 90,
             "reference": "SQL is missing."} for i in "xyz"]  # fmt: skip
    data = write_rows(tmp_path / "mine.jsonl", rows)
    tab = open_page(serve(None, "--criteria", data), **VIEWS[name]).start()
    page, keys = tab.page, tab.keys
    assert "SQL is missing." in tab.text("#prompt") and page.is_hidden("#reasons")
    look(page)
    tab.nothing("1", "y", "n", "Enter")
    assert "Criterion 4 has no rating" in tab.text("#banner")
    keys.press("ArrowUp")
    keys.press("3")  # of the third criterion, which was a no
    for _ in range(6):
        keys.press("t")
    look(page)
    tab.press("Enter")
    tab.press("u")
    assert page.locator(".criterion :checked").evaluate_all("all => all.map(e => e.value)") == [
        "yes", "yes", *["none"] * 7
    ]  # fmt: skip
    page.click(".criterion:last-child label:has([value=no])")
    tab.act(lambda: page.click('[data-choice="rated"]'))
    tab.press("s")
    for _ in range(9):
        keys.press("2")
    tab.press("Enter")  # on the button that has the focus
    assert tab.text("#numbers") == "You rated 2 answers. You skipped 1." and tab.errors == []
    first = log_of(session)[2]
    assert [*first["ratings"].values()] == ["yes", "yes", *[None] * 6, "no"]


def test_trouble_and_back(serve, open_page, session):
    server = serve(item_rows(8))
    tab = open_page(server).start()
    page = tab.page
    page.context.set_offline(True)
    tab.press("1", wait=False)
    assert "Not saved yet" in tab.appear("#banner") and "Clearly" in tab.text(".chosen")
    tab.nothing("2")  # no second choice while the first one waits
    assert log_of(session) == []
    page.context.set_offline(False)
    tab.until(1)
    assert page.is_hidden("#banner")
    page.route("**/vote", lambda route: (route.fetch(), route.abort()), times=1)
    tab.press("1")  # on the disk, but the answer got lost
    page.route("**/vote", lambda route: route.abort())
    tab.press("3", wait=False)
    tab.appear("#banner")
    page.unroute("**/vote")
    page.reload()
    tab.until(3)
    server.stop()
    tab.press("b", wait=False)
    tab.appear("#banner")
    serve(None, port=server.port)
    tab.until(4)
    tab.press("u")
    assert tab.text("#title") == "Item 4 of 8"
    assert [e["choice"] for e in log_of(session)][2:] == ["tie", "both_bad", None]


def test_no_vote_on_an_item_that_was_not_on_the_screen(serve, open_page, session):
    """The page of a stopped server voted on the items of the next one, at the same address."""
    server = serve(item_rows(4))
    tab = open_page(server).start()
    server.stop()
    rows = item_rows(4)
    for row in rows:
        row["a"][0]["content"] += ", new"
    serve(rows, port=server.port)
    tab.press("1", wait=False)
    tab.page.wait_for_selector("#trouble:has-text('other items')")
    assert "Not saved: the server has other items" in tab.text("#banner")
    assert "new" in tab.text("#left") + tab.text("#right") and log_of(session) == []
    tab.press("1")
    assert len(log_of(session)) == 1


def test_two_tabs_and_another_person(serve, open_page, session):
    """A pseudonym belongs to the browser that used it first, also after a restart at another port:
    others vote and undo under it only with its key."""
    server = serve(item_rows(6), "--overlap", "2")
    one = open_page(server)
    two, ben = open_page(server, beside=one), open_page(server)
    one.start()
    two.start()
    one.press("1")
    two.press("2")
    assert "another window" in two.text("#banner") and len(log_of(session)) == 1
    assert two.text("#title") == "Item 2 of 6" and two.text("#left") == one.text("#left")

    def enter(tab, name):
        tab.page.fill("#name", name)
        tab.keys.press("Enter")
        tab.appear("#known")
        return tab.text("#known-words")

    assert "ann belongs to another browser" in enter(ben, "Ann"), "a name in capitals is no other"
    look(ben.page)
    ben.page.fill("#key", "guessed")
    ben.keys.press("Enter")
    ben.page.wait_for_selector("#known-words:has-text('That is not the key')")
    assert "ann belongs to another browser" in ben.appear("#known")
    ben.page.click("#rename")
    ben.start("ben")
    assert ben.text("#title") == "Item 1 of 6" and "1 vote in total" in ben.text("#everyone")
    server.stop()
    server = serve(None)
    again, other = open_page(server, beside=one), open_page(server)
    assert enter(again, "ann") == "ann has 1 vote: continue as ann?"
    again.page.click("#continue")
    again.appear("#work")
    again.press("s")
    assert "1 vote in total" in again.text("#everyone"), "a skip is no vote"
    again.keys.press("?")
    again.page.click("#show-key")
    key = again.text("#own-key")
    enter(other, "ann")
    other.page.fill("#key", key)
    other.keys.press("Enter")
    other.appear("#work")
    other.press("u")
    assert other.text("#title") == "Item 2 of 6" and other.errors[1:] == []


MARKDOWN = """# Head
Two **bold** and *slanted* words, `x = 1`, 2 * 3 * 4.

- one
  1. inner **part**
     - deepest
- two

| Skill | Ann |
|-------|----:|
| SQL   | 5   |
Ben | 1 |

```python
if a < b:
    print("<b>")
```Then hire.
\u202etxt.exe

```

שלום, x"""


def test_markdown_and_code(serve, open_page):
    """Tables are tables, nested lists nest, and every mark stays in its place."""
    rows = item_rows(1)
    rows[0]["a"][0]["content"], rows[0]["b"][0]["content"] = MARKDOWN, MARKDOWN + "!"
    rows[0]["prompt"][0]["content"] = "שלום עולם\n\nHello.\n\n- אחד"
    tab = open_page(serve(rows)).start()

    def texts(kind):
        return tab.page.locator(f"#left :is({kind})").all_text_contents()

    assert texts("h3, strong, em, b") == ["# Head", "**bold**", "*slanted*", "**part**"]
    assert texts("ul > li > div > ol > li > div > ul > li") == ["-deepest"]
    assert texts("thead th") == ["|Skill", "|Ann|"]
    assert texts("tbody td") == ["|SQL", "|5|", "Ben", "|1|"]
    code = 'if a < b:\n    print("<b>")\n```Then hire.\nU+202Etxt.exe\n\n'
    assert texts("code") == ["`x = 1`", code]
    assert texts(".control") == ["U+202E"] and "2 * 3 * 4" in tab.text("#left")
    directions = "all => all.map(e => getComputedStyle(e).direction)"
    found = tab.page.locator("#left > :is(p, pre)").evaluate_all(directions)
    assert found == ["ltr", "ltr", "rtl"]  # of the text, not of the page
    # a text from right to left begins at the right edge of the card, not in its middle
    edges = """all => all.map(e => {
      const box = e.getBoundingClientRect(), card = document.querySelector("#prompt").getBoundingClientRect();
      return [box.left - card.left, card.right - box.right];
    })"""
    hebrew, hello, item = tab.page.locator("#prompt :is(p, li):not(li p)").evaluate_all(edges)
    assert hebrew[1] == item[1] == hello[0] < 30 and min(hebrew[0], item[0], hello[1]) > 100
    tab.keys.press("Shift+?")
    tab.page.uncheck("#format")
    tab.keys.press("Escape")
    assert "**bold**" in tab.text("#left") and texts("strong") == []


ESCAPED = r"""
```{"fit": true}```
```\ncode\n```Then hire her.
```Here is the plan: hire her\nline\n```
~~~struck words~~~\nNext
~~~\n```\n~~~ end\n~~~\nafter
````md\n```\ninner\n```\n````
```\nunclosed
- item\n  ```sql\n  SELECT 1;\n  ```\n  end
- item\n```\nnot in the item\n```
> quote\n> ```\n> code\n> ```\n>> deeper\nlazy
1. a\n1. b\n   - c\n\n     still c\n10) d\n* e\n\t* f
- - - - - - - - - - - - deep
-\n- \n1.\n*
**open *both* `never closed
***a*** **b *c* d** \\*e\\* f*g*h **i**j ** k ** * l *
`` ` `` and ``` `` ``` and `a``b`
| a | b\n|---|---\n| 1 | 2 | 3 |\n|\n||\n| \\| | `x|y` |\ntext
a | b\n|-|-|\n- x | y\n|:-:|
| only a head |\n|---
|\n|-|
# One\n####### seven\n#none\n## \n    # indented
$$x_i * y * z$$ \\(a*b*c\\) \\[ \\frac{1}{2} \\] 2*3*4
<b>x</b> <script>alert(1)</script> <!-- c --> &lt; [x](javascript:1) ![i](u)
---\ntitle: x\n---\n***\n___\n===
שלום **עולם**\n1. אחד\n- مرحبا\n| א | ב |\n|---|---|\n| 1 | 2 |
a\r\nb\rc\n\n\r\n```\r\nx\r\n```\r\nz
nul\x00 tag\U000e0041 zwsp\u200b shy\u00ad bidi\u202e bom\ufeff filler\u3164 line\u2028
👩‍💻 👨‍👩‍👧 é e\u0301
GB \U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f hide \U0001f3f4\U000e0068\U000e0069\U000e007f
""".strip().split("\n")
ANSWERS = [x.encode("latin-1", "backslashreplace").decode("unicode_escape") for x in ESCAPED]
PIECES = r"""` ``` ~~~ * ** *** | || - + 1. 12) > # ## \ [x](y) <b> & word a_b 2*3 --- |--- :-: x| \| é א"""
HIDING = re.compile(  # as in markdown.js, from the code charts; first the flags of Great Britain
    "\U0001f3f4\U000e0067\U000e0062(?:\U000e0065\U000e006e\U000e0067|\U000e0073\U000e0063\U000e0074"
    "|\U000e0077\U000e006c\U000e0073)\U000e007f|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u180e\u200b\u200e\u200f"
    "\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
RENDER = """([texts, shown]) => texts.map((text) => {
  const made = document.body.appendChild(document.createElement("div"));
  render(made, text, true);
  made.className = "words";
  const result = shown ? made.innerText : made.textContent;
  made.remove();
  return result;
})"""


def random_markdown(rng):
    pieces = [*PIECES.split(" "), " ", " ", "\n", "\n", "\n\n", "\n  ", "\n    ", "\t", "\r\n"]
    return "".join(rng.choices(pieces, k=rng.randint(1, 60)))


def test_every_character_is_shown(serve, open_page):
    """People vote on what they see: a rendering is its source, blanks aside, whatever the Markdown;
    a line that opened or closed a fence used to be dropped with its text. Texts of 200,000 signs
    that open everything and close nothing take seconds, not minutes."""
    rng = random.Random(0)
    real = [row["answer"] for row in files.read_jsonl(REPO / "tests/answers.jsonl")]
    texts = [MARKDOWN, *ANSWERS, *real]
    chaos = [random_markdown(rng) for _ in range(3000)]
    long = [
        sign * (200_000 // len(sign)) for sign in ("`", "*a ", "**", "- ", "| ", "> ", "a`", "\n-")
    ]
    page = open_page(serve(item_rows(1))).page
    start = time.monotonic()
    for part, inner in ((texts, True), (chaos, False), (long, False)):
        for text, result in zip(part, page.evaluate(RENDER, [part, inner]), strict=True):
            source = HIDING.sub(lambda x: x[0] if x[0][1:] else f"U+{ord(x[0]):04X}", text)
            assert "".join(result.split()) == "".join(source.split()), text[:300]
    assert time.monotonic() - start < 120


def view(width, height, **options):
    return {"viewport": {"width": width, "height": height}, **options}


PHONE, DARK = {"has_touch": True, "is_mobile": True}, {"color_scheme": "dark"}
VIEWS = {
    "phone": view(320, 640, **PHONE),
    "phone, dark": view(390, 844, **PHONE, **DARK),
    "200 % zoom": view(640, 400, device_scale_factor=2),
    "desk, dark": view(1280, 800, **DARK),
}
WIDE = """[document.documentElement, ...document.querySelectorAll('.words, button, label')]
  .filter(e => e.clientWidth && e.scrollWidth > e.clientWidth + 1).map(e => e.id || e.textContent)"""
SMALL = """least => [...document.querySelectorAll('main button, header button, #reasons label')]
  .filter(e => e.offsetHeight && e.offsetHeight < least).map(e => e.textContent)"""
SPACED = "line-height: 1.5; letter-spacing: .12em; word-spacing: .16em"


def look(page):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page.wait_for_timeout(250)  # the fade is over: half-transparent text has half the contrast
    assert page.evaluate(WIDE) == []
    found = axe.Axe().run(page).response["violations"]
    assert [(v["id"], v["nodes"][0]["html"]) for v in found] == []


@pytest.mark.parametrize("name", VIEWS)
def test_looks(serve, open_page, tmp_path, name):
    (tmp_path / "guide.md").write_text("A rule of one line.\n" * 80, encoding="utf-8")
    answers = ("word " * 900, "x" * 3000), ("שלום עולם, mixed", "مرحبا"), (MARKDOWN, "short")
    rows = item_rows(3)
    for row, (a, b) in zip(rows, answers):
        row["a"][0]["content"], row["b"][0]["content"] = a, b
    width, height = VIEWS[name]["viewport"].values()
    tab = open_page(serve(rows, "--guidelines", str(tmp_path / "guide.md")), **VIEWS[name])
    page, places = tab.page, set()

    def box(selector):
        return tuple(round(x) for x in page.locator(selector).bounding_box().values())

    def inside(selector):
        _, y, _, tall = box(selector)
        return y >= 0 and y + tall <= height

    tab.appear("#start")
    look(page)
    tab.start()
    look(page)
    for _ in rows:
        page.evaluate(f"document.body.style = '{SPACED}'")
        assert page.evaluate(WIDE) == []
        page.evaluate("document.body.removeAttribute('style')")
        places.add(box("#choices"))
        for where in (400, 0):
            page.evaluate(f"scrollTo(0, {where})")
            assert inside("#choices") and box("#choices")[3] <= 0.4 * height
        (x, y, wide, tall), right = box(".card:has(#left)"), box(".card:has(#right)")
        if width < 800:
            assert right[0] == x and right[1] > y + tall
        else:
            assert right[0] > x and right[1:] == (y, wide, tall)
        tab.act(lambda: page.click(TIE))
    assert height != 800 or len(places) == 1
    look(page)
    tab.act(lambda: page.click("#undo"))
    assert page.evaluate(SMALL, 43 if "phone" in name else 24) == []
    page.click("#show-guidelines")
    assert inside("#guidelines-title") and inside("#guidelines form button")
    look(page)
    page.click("#guidelines form button")
    page.click("#show-help")
    look(page)
    tab.keys.press("Escape")
    page.route("**/vote", lambda route: route.abort())
    tab.act(lambda: page.click(TIE), wait=False)
    tab.appear("#banner")
    look(page)


@pytest.fixture
def stranger():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener.getsockname()[1]
        with pytest.raises(BlockingIOError):
            listener.accept()


def without_policy(route):
    reply = route.fetch()
    headers = {k: v for k, v in reply.headers.items() if k.lower() != "content-security-policy"}
    route.fulfill(response=reply, headers=headers)


def with_inner_html(route):
    reply = route.fetch()
    route.fulfill(response=reply, body=reply.text().replace("textContent", "innerHTML"))


@pytest.mark.parametrize("layer", ["text", "policy"])
def test_hostile_texts_do_nothing(serve, open_page, stranger, tmp_path, session, layer):
    call, run = f"http://127.0.0.1:{stranger}", "window.__xss=1"
    texts = [
        f"<img src=x onerror={run}>", f"<svg onload={run}>", f"</script><script>{run}</script>",
        f"<a href='javascript:{run}'>x</a>", f"[x](javascript:{run})", f"![x]({call}/markdown)",
        f"<img src={call}/image>", f"<iframe srcdoc='<script>parent.{run}</script>'></iframe>",
        f"<style>@import '{call}/style';</style>", "<form id=app><button>go</button></form>",
        "<input name=textContent>", "\u202egnp.exe", "nul \x00 here", "{{7*7}}", "{% raw %}",
        f"<link rel=stylesheet href={call}/link>", f"<script src={call}/script></script>",
        "\"'><b>bold</b>", "&lt;b&gt;",
    ]  # fmt: skip
    if layer == "text":  # no policy forbids a navigation: there the text layer stands alone
        texts.append(f"<meta http-equiv=refresh content='0;url={call}'>")
    everything = "\n".join(texts)
    shown = everything.replace("\x00", "")
    (tmp_path / "guide.md").write_text(everything, encoding="utf-8")
    row = dict.fromkeys(("id", "task", "a_model", "b_model"), everything)
    row["prompt"] = [{"role": role, "content": everything} for role in ("system", "user")]
    row |= {side: [{"role": "assistant", "content": side + everything}] for side in "ab"}
    tab = open_page(serve([row], "--guidelines", str(tmp_path / "guide.md")))
    page = tab.page
    change = {"text": ("**/*", without_policy), "policy": ("**/annotate.js", with_inner_html)}
    page.route(*change[layer])
    page.reload()
    page.fill("#name", "<img src=x onerror=x()>")
    tab.keys.press("Enter")
    assert "not accepted" in tab.appear("#banner")
    tab.start()
    if layer == "text":
        for answer in page.locator("#left, #right").all_text_contents():
            assert all(word in answer for word in ("onerror", "U+202E", "javascript:"))
        made = "main :is(img, svg, iframe, style, a, form form, link, b)"
        assert page.locator(made).count() == 0
        assert page.text_content("#guidelines-text") == shown
    page.fill("#comment", shown)
    tab.keys.press("Escape")
    tab.press("1")
    page.wait_for_timeout(300)
    assert page.evaluate("window.__xss") is None
    assert log_of(session)[0]["comment"] == shown.strip()
