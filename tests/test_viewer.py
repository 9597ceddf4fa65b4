"""parts/viewer.py: the page of `watch.py RUN --html`, on logs of every shape and in a browser."""

import watch
from conftest import watched
from parts import viewer
from tiny import error_of, write_rows

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e"


def write_run(folder, rollouts=None, torn=""):
    folder.mkdir()
    curve = [{"reward/mean": k / 20, "length/mean": 40 * (1 + 2 * (k // 6))} for k in range(12)]
    write_rows(folder / "metrics.jsonl", [{"step": k} | row for k, row in enumerate(curve)])
    if rollouts:
        write_rows(folder / "rollouts.jsonl", rollouts)
        with open(folder / "rollouts.jsonl", "a") as file:
            file.write(torn)
    return folder


def answers():
    met = [{"id": 1, "kind": "judged", "verdict": True, "weight": 2.0, "reason": f"fine {HOSTILE}"}]
    row = {"prompt": "Assess.", "criteria": met}
    rows = [row | {"step": 1 + i // 4, "answer": f"{i}", "reward": i / 8} for i in range(8)]
    rows[0] |= {"answer": HOSTILE, "flags": ["judge_directed"], "judge": {"error": "timed out"}}
    said = {"user": "Ask.", "assistant": "Do you know SQL?"}
    said = [{"role": role, "content": content} for role, content in said.items()]
    return [*rows, {"step": 3, "messages": said, "reward": 0.5, "error": None, "truncated": True}]


def page_of(run):
    """The page that `watch.py RUN --html` writes."""
    watch.main([str(run), "--html"])
    return (run / "watch.html").read_text(encoding="utf-8")


def test_page_in_a_browser(tmp_path, browser, capsys):
    run = write_run(tmp_path / "run", answers(), torn='{"step": 3, "pro')
    page_of(run)
    assert "watch.html" in capsys.readouterr().out
    page = browser.new_page()
    requests, messages = watched(page)
    page.goto((run / "watch.html").as_uri())
    assert page.locator("article").count() == 9 and page.locator("article img").count() == 0
    assert "R9 length_doubled" in page.locator(".marks").first.inner_text()
    kind, visible = page.get_by_label("Kind"), page.locator("article:visible")
    kind.select_option("flagged")
    assert visible.count() == 1 and "[U+202E]" in visible.inner_text()
    kind.select_option("all")
    page.get_by_label("Text").fill("sql")
    assert visible.count() == 1 and (len(requests), messages) == (1, [])
    plain = browser.new_context(java_script_enabled=False).new_page()
    plain.goto((run / "watch.html").as_uri())
    assert plain.locator("article:visible").count() == 9


def test_what_ruler_said(tmp_path):
    """Its reason and the scores of both orders; where it failed, why, flagged as an error."""
    said = {"score": 0.7, "reason": "names the gap", "pass_scores": [0.8, 0.6], "error": None}
    lost = {"score": None, "reason": None, "pass_scores": None, "error": "HTTP 503: busy"}
    row = {"step": 1, "prompt": "Assess.", "answer": "a"}
    rows = [row | {"reward": 0.7, "ruler": said}, row | {"reward": None, "ruler": lost}, row]
    page = page_of(write_run(tmp_path / "run", rows))
    for text in ("RULER 0.80, 0.60", "names the gap", "HTTP 503: busy", "⚑ error"):
        assert page.count(text) == 1, text


def test_a_verdict_and_what_it_earns(tmp_path):
    """The judge said no to a fault: no, green, nothing taken off; older logs say met or not."""
    fault = {"id": 1, "kind": "judge", "criterion": "Asks about age.", "weight": -4, "reason": "r"}
    criteria = [fault | {"verdict": v, "credit": not v} for v in (False, True)]
    criteria += [fault | {"verdict": None, "credit": None}, fault | {"verdict": True, "weight": 2}]
    row = {"step": 1, "prompt": "Assess.", "answer": "a", "reward": 0.5, "criteria": criteria}
    card = viewer.card_of(row | {"flags": []}, [])
    cells = [[cells[2], cells[2].tone, *cells[3:5]] for cells in card["table"]["rows"]]
    assert cells == [["no", "green", -4, 0], ["yes", "red", -4, -4],
                     ["unrated", "grey", -4, "–"], ["met", "green", 2, 2]]  # fmt: skip


def test_folders_without_rollouts_or_with_broken_ones(tmp_path):
    run = write_run(tmp_path / "run")
    assert "This run kept no answers" in page_of(run)
    write_rows(run / "samples.jsonl", [{"step": 0, "prompt": "p", "answer": "only here"}])
    assert "only here" in page_of(run)
    run = write_run(tmp_path / "broken", [{"step": 1, "answer": "a"}], torn="[1]\n")
    assert "rollouts.jsonl:2: expected a row" in error_of(page_of, run)
