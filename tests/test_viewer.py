"""parts/viewer.py: the page of `watch.py RUN --html`, on logs of every shape and in a browser."""

import pytest

import watch
from conftest import browser_or_skip
from tiny import write_rows

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


def test_page_in_a_browser(tmp_path, capsys):
    sync_playwright, path = browser_or_skip()
    run = write_run(tmp_path / "run", answers(), torn='{"step": 3, "pro')
    watch.main([str(run), "--html"])
    assert "watch.html" in capsys.readouterr().out
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page, asked, said = browser.new_page(), [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
        page.goto((run / "watch.html").as_uri())
        assert page.locator("article").count() == 9 and page.locator("article img").count() == 0
        assert "R9 length_doubled" in page.locator(".marks").first.inner_text()
        page.get_by_label("Kind").select_option("flagged")
        assert page.locator("article:visible").count() == 1
        assert "[U+202E]" in page.locator("article:visible").inner_text()
        page.get_by_label("Kind").select_option("all")
        page.get_by_label("Text").fill("sql")
        assert page.locator("article:visible").count() == 1 and (len(asked), said) == (1, [])
        plain = browser.new_context(java_script_enabled=False).new_page()
        plain.goto((run / "watch.html").as_uri())
        assert plain.locator("article:visible").count() == 9
        browser.close()


def test_what_ruler_said(tmp_path):
    """Its reason and the scores of both orders; where it failed, why, flagged as an error."""
    said = {"score": 0.7, "reason": "names the gap", "pass_scores": [0.8, 0.6], "error": None}
    lost = {"score": None, "reason": None, "pass_scores": None, "error": "HTTP 503: busy"}
    row = {"step": 1, "prompt": "Assess.", "answer": "a"}
    rows = [row | {"reward": 0.7, "ruler": said}, row | {"reward": None, "ruler": lost}, row]
    run = write_run(tmp_path / "run", rows)
    watch.main([str(run), "--html"])
    page = (run / "watch.html").read_text(encoding="utf-8")
    for text in ("RULER 0.80, 0.60", "names the gap", "HTTP 503: busy", "⚑ error"):
        assert page.count(text) == 1, text


def test_folders_without_rollouts_or_with_broken_ones(tmp_path):
    run = write_run(tmp_path / "run")
    watch.main([str(run), "--html"])
    assert "This run kept no answers" in (run / "watch.html").read_text(encoding="utf-8")
    write_rows(run / "samples.jsonl", [{"step": 0, "prompt": "p", "answer": "only here"}])
    watch.main([str(run), "--html"])
    assert "only here" in (run / "watch.html").read_text(encoding="utf-8")
    run = write_run(tmp_path / "broken", [{"step": 1, "answer": "a"}], torn="[1]\n")
    with pytest.raises(watch.UserError, match=r"rollouts.jsonl:2: expected a row"):
        watch.main([str(run), "--html"])
