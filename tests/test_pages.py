"""parts/pages.py: what a text in a report can do, what a reader sees, and what leaves the page."""

import pytest

from conftest import watched
from parts import pages
from parts.pages import Light, card, interval_plot, line_plot, number, section, table

HOSTILE = (
    "</style></script><img src='https://evil.example/x' onerror='alert(1)'>\u202e{{7*7}}\x1b[2J"
)


def report(text="A"):
    wins = {"value": 0.84, "low": 0.78, "high": 0.88}
    points = [(k, 0.4 + k / 100, 0.35 + k / 100, 0.45 + k / 100) for k in range(20)]
    models = [[f"{name} {text}", number(wins, 1, percent=True), 41.5] for name in ("DPO", "PPO")]
    grid = [["Women", Light(f"none {text}", "green", f"d 0.02 {text}"), Light("difference", "red")]]
    plots = [
        line_plot(f"Score {text}", {f"DPO {text}": points}, text, "y", [(3, f"jump {text}")]),
        interval_plot(f"Wins {text}", [(f"DPO {text}", *wins.values())], 0.5, (0.45, 0.55), text),
    ]
    models = table(["model", f"wins {text}", "tokens"], models, text)
    hashes = table(["file", "hash"], [[text, text]])
    return [
        section(f"Who wins {text}", f"DPO. {text}", models, plots, "answer"),
        section("Is anyone harmed", "No.", table(["group", "Base", "DPO"], grid), level="answer"),
        section("Answers", cards=[card(text, [(f"prompt {text}", text)], kinds=["best"])]),
        section("Method", [text, "By hand."], hashes, (), "appendix"),
    ]


@pytest.fixture
def visit(tmp_path, browser):
    def open_page(text="A", *more, slip="By hand.", width=1280, scheme="light"):
        path = tmp_path / "page.html"
        pages.write_page(path, text, report(text), *more)
        html = path.read_text(encoding="utf-8").replace("By hand.", slip)
        path.write_text(html, encoding="utf-8")
        window = {"width": width, "height": 800}
        page = browser.new_context(viewport=window, color_scheme=scheme).new_page()
        requests, messages = watched(page)
        page.goto(path.as_uri())
        return page, html, requests, messages

    return open_page


def test_hostile_text_is_text_in_every_slot(visit):
    good, *_ = visit("A", "A", "let fine = 1")
    elements = good.locator("*").count()
    bad, html, requests, messages = visit(HOSTILE, HOSTILE, "let fine = 1")
    assert (len(requests), messages) == (1, []) and bad.locator("*").count() == elements
    assert "\u202e" not in html and "\x1b" not in html and "<img" not in html
    assert html.count("{{7*7}}[U+001B]") == html.count("[U+202E]") > 15


def test_policy_refuses_what_slips_in(visit):
    slip = "<script>document.title = 'evil'</script><img src='https://evil.example/x'>"
    page, _, _, (script, image) = visit("A", "", "document.title = 'ran'", slip=slip)
    assert page.title() == "ran" and "script-src" in script
    assert "img-src" in image and "has been blocked" in image


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_and_width(visit, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page, *_ = visit("B", width=width, scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = axe.Axe().run(page).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []


def test_on_a_phone_a_bar_and_its_value_do_not_touch(browser, tmp_path):
    """At 390 px "items that DPO wins, ties ½60.0 % [38.7, 78.1]": no space was left between them."""
    names = ["items that " + "DPO " * n + "wins" for n in range(1, 12)]
    plot = interval_plot("a", [(name, 0.6, 0.387, 0.781) for name in names], percent=True)
    pages.write_page(tmp_path / "page.html", "T", [section("S", plots=[plot], level="answer")])
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto((tmp_path / "page.html").as_uri())
    gaps = page.evaluate("""[...document.querySelectorAll(".intervals tbody tr")].map(row => {
        const words = document.createRange()
        words.selectNodeContents(row.querySelector("th"))
        const value = row.querySelector(".n").getBoundingClientRect()
        return value.left - words.getBoundingClientRect().right
    })""")
    assert len(gaps) == 11 and min(gaps) >= 8


def test_first_screen_and_print(visit, tmp_path):
    page, *_ = visit()
    order = ("section p", "figure:not(.table)", "main > .table")
    top = [page.locator(selector).first.bounding_box()["y"] for selector in order]
    assert top == sorted(top) and top[0] < 200
    assert not page.get_by_text("By hand.").is_visible()
    page.pdf(path=tmp_path / "page.pdf", format="A4")
    assert 1 <= (tmp_path / "page.pdf").read_bytes().count(b"/Type /Page\n") <= 3


def test_what_is_folded_on_a_screen_is_printed(visit):
    """Limits, tables and a verdict's numbers stood behind a click, and paper has none."""
    page, *_ = visit()
    for media, visible in (("screen", False), ("print", True)):
        page.emulate_media(media=media)
        for text in ("By hand.", "d 0.02 A", "hash", "prompt A"):
            assert page.get_by_text(text, exact=True).last.is_visible() == visible, (media, text)
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_printed_report(capsys):
    pages.print_report("Which model is better?", report())
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["Which model is better?", "", "Who wins A", "DPO. A"]
    assert lines[-2:] == ["group  Base    DPO", "Women  none A  difference"]
    assert "DPO A  84.0 % [78.0, 88.0]  41.500" in lines and len(lines) <= 40
    pages.print_report(HOSTILE, report(HOSTILE))
    assert "\x1b" not in capsys.readouterr().out


def test_the_answer_is_printed_before_its_lesser_tables(capsys):
    """With three runs the tables took every line, and no sentence of the answer was printed."""
    big = table(["run", "cost"], [[f"r{i}", i] for i in range(15)])
    texts = [f"sentence {i}." for i in range(30)]
    for n, tables, words in ((12, [big] * 3, "2 tables"), (30, [big], "15 sentences")):
        pages.print_report("t", [section("q", texts[:n], tables=tables, level="answer")])
        lines = capsys.readouterr().out.splitlines()
        assert "sentence 0." in lines and len(lines) <= pages.LINES
        assert any(line.startswith("r14") for line in lines)
        assert lines[-1] == f"More on the page: {words}"
    assert "sentence 29." not in lines


def test_tables_and_plots():
    with pytest.raises(ValueError, match="six columns"):
        section("x", "", table(list("abcdefg"), []), level="answer")
    rows = [["7", 1, "< 0.001", "9 of 10"], ["8", None, "–", "none"]]
    assert table(["", "n", "p", "word"], rows)["numeric"] == [False, True, True, False]
    points = {"a": [(0, 0.0), (1, 0.5), (2, None), (4, 1.0)]}
    plot = line_plot("t", points, marks=[(2, "one"), (2, "two")])
    assert plot["lines"][0]["path"] == "M0.0,100.0L25.0,50.0L100.0,0.0"
    assert plot["marks"] == [{"at": 50.0, "text": "x 2: one; two"}]
    assert line_plot("t", {"a": [(0, None)]}) is None and interval_plot("t", []) is None
    rows = [("a", 0.2, 0.1, 0.3), ("b", 0.1, -0.1, 0.3), ("c", 0.2, None, None), ("d", None, 0, 1)]
    drawn = interval_plot("t", rows, zero=0)["rows"]
    again = interval_plot("t", rows, zero=0, open_rows={"a"})["rows"]  # no finding by its test
    assert [row["full"] for row in again] == [False, False, True]
    assert [(row["name"], row["full"]) for row in drawn] == [("a", True), ("b", False), ("c", True)]
