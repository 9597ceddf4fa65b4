"""parts/viewer.py: the page of `watch.py RUN --html`, on logs of every shape, and what it shows."""

import re

import watch
from parts import viewer
from tiny import error_of, write_rows

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e"


def write_run(folder, rollouts=None, torn=""):
    folder.mkdir()
    curve = [{"reward/mean": k / 20, "length/mean": 40 * (1 + 2 * (k // 6))} for k in range(12)]
    curve[3]["reward/mean"] = float("nan")  # another tool's log may hold it
    write_rows(folder / "metrics.jsonl", [{"step": k} | row for k, row in enumerate(curve)])
    if rollouts:
        write_rows(folder / "rollouts.jsonl", rollouts)
        with open(folder / "rollouts.jsonl", "a") as file:
            file.write(torn)
    return folder


def answers():
    met = [{"id": 1, "verdict": True, "weight": 2.0, "reason": f"names the gap {HOSTILE}"}]
    rows = [{"step": 1 + i // 4, "answer": f"{i}", "reward": i / 8} for i in range(8)]
    rows = [row | {"prompt": "Assess.", "criteria": met} for row in rows]
    rows[0] |= {"answer": HOSTILE + "</answer>", "judge": {"error": "timed out"}}
    said = {"user": "Ask.", "assistant": "Do you know SQL?"}
    said = [{"role": role, "content": content} for role, content in said.items()]
    odd = {"step": 2, "prompt": 5, "answer": ["a"], "reward": "high", "ruler": {"score": None}}
    return [*rows, odd, {"step": 3, "messages": said, "reward": 0.5, "error": None}]


def page_of(run):
    """The page that `watch.py RUN --html` writes."""
    watch.main([str(run), "--html"])
    return (run / "watch.html").read_text(encoding="utf-8")


def test_the_page(tmp_path, capsys):
    """Steps 3 (the last with answers before the alarm and the end) and 1 (the first, for step 0).
    What an answer says is text: no script, no image, no turned direction."""
    run = write_run(tmp_path / "run", answers(), torn='{"step": 3, "pro')
    page = page_of(run)
    assert "watch.html" in capsys.readouterr().out
    assert "R9 length_doubled" in re.search('<ol class="marks">.*?</ol>', page, re.S)[0]
    cards = re.findall("<article.*?</article>", page, re.S)
    assert len(cards) == 5 and "Do you know SQL?" in cards[0]
    (flagged,) = (card for card in cards if "judge_directed" in card)
    for text in ("[U+202E]", "timed out", "names the gap"):
        assert text in flagged
    assert not re.search("<script|<img|\u202e", page) and "Content-Security-Policy" in page


def test_the_steps_whose_answers_are_shown():
    """Of each wanted step, or the last one before it that kept answers: the best two, the worst two
    and the flagged ones, training and validation apart."""
    row = {"prompt": "p", "reward": None}
    rows = [row | {"step": s, "split": x, "answer": f"{s}{x}"} for s in (1, 6) for x in "tv"]
    chosen = viewer.choose(rows, [0, 7])
    assert [row["answer"] for row, _ in chosen] == ["6v", "6t", "1v", "1t"]
    assert [row["answer"] for row, _ in viewer.choose(rows, [5])] == ["1v", "1t"]
    rows = [row | {"step": 1, "answer": x * 100, "reward": i} for i, x in enumerate("abcdefg")]
    kinds = [kinds for _, kinds in viewer.choose(rows, [1])]
    assert [k[0] for k in kinds] == ["best"] * 2 + ["repetition"] * 2 + ["worst"] * 2
    assert viewer.choose([], [1]) == []


def test_folders_without_rollouts_or_with_broken_ones(tmp_path):
    run = write_run(tmp_path / "run")
    assert "This run kept no answers" in page_of(run)
    write_rows(run / "samples.jsonl", [{"step": 0, "prompt": "p", "answer": "only here"}])
    assert "only here" in page_of(run)
    run = write_run(tmp_path / "broken", [{"step": 1, "answer": "a"}], torn="[1]\n")
    assert "rollouts.jsonl:2: " in error_of(page_of, run)
