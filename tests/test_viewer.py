"""parts/viewer.py: the page of `watch.py RUN --html`, on logs of every trainer's shape and in a
browser."""

import json

import pytest

import watch
from conftest import browser_or_skip

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e"


def write_run(folder, rollouts=None, torn=""):
    """A run of twelve steps whose reward rises; `rollouts` as the rows of rollouts.jsonl, `torn`
    as its unfinished end."""
    folder.mkdir()
    rows = [
        {"step": k, "reward/mean": k / 20, "length/mean": 40 * (1 + 2 * (k // 6))}
        for k in range(12)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if rollouts is not None:
        lines = "".join(json.dumps(row) + "\n" for row in rollouts)
        (folder / "rollouts.jsonl").write_text(lines + torn)
    return folder


def answers():
    """Eight answers in the shape of grpo_rubric.py, one hostile; and one episode in the shape of
    grpo_agent.py."""
    met = [{"id": 1, "kind": "judged", "verdict": True, "weight": 2.0, "reason": f"fine {HOSTILE}"}]
    rows = [
        {"step": 1 + i // 4, "prompt": "Assess.", "answer": f"answer {i}", "reward": i / 8, "criteria": met}
        for i in range(8)
    ]  # fmt: skip
    rows[0] |= {"answer": HOSTILE, "flags": ["judge_directed"], "judge": {"error": "timed out"}}
    said = [
        {"role": "user", "content": "Ask."},
        {"role": "assistant", "content": "Do you know SQL?"},
    ]
    return [*rows, {"step": 3, "messages": said, "reward": 0.5, "error": None, "truncated": True}]


def test_page_in_a_browser(tmp_path, capsys):
    """Curves with numbered alarms, answers with criteria; hostile text is text; the filter works,
    and without script all answers are there; no request leaves the page; the last, unfinished line
    of a running run is left out."""
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


def test_folder_without_rollouts(tmp_path):
    """An old folder still gets its curves, and is told what is missing; a sample without a reward
    is shown, too."""
    run = write_run(tmp_path / "run")
    watch.main([str(run), "--html"])
    assert "This run kept no answers" in (run / "watch.html").read_text(encoding="utf-8")
    (run / "samples.jsonl").write_text('{"step": 0, "prompt": "p", "answer": "only here"}\n')
    watch.main([str(run), "--html"])
    assert "only here" in (run / "watch.html").read_text(encoding="utf-8")


def test_broken_rollouts_name_their_line(tmp_path):
    """A complete line that is no answer is damage, not the end of a running run."""
    run = write_run(tmp_path / "run", [{"step": 1, "answer": "a"}], torn="[1]\n")
    with pytest.raises(watch.UserError, match=r"rollouts.jsonl:2: expected an answer"):
        watch.main([str(run), "--html"])
