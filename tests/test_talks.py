"""annotate.py draw --env: whole conversations side by side, and what their votes train."""

import re

import pytest

import annotate
import common
import dpo
import grpo_agent
from parts import files, talks, votes
from test_annotate import Rater, log_of, make, stopped
from test_judge_votes import ask
from tiny import error_of, tiny_model

INTERVIEW = "--env envs/interview.py:Interview"


def draw(folder, flags):
    annotate.main(["draw", "--out", str(folder), "--device", "cpu", *flags.split()])
    return votes.load_items(folder / "items.jsonl")


@pytest.fixture
def interviews(tmp_path, monkeypatch):
    monkeypatch.chdir(annotate.TEMPLATES.parent.parent)
    flags = f"{INTERVIEW} --model fixed --model-b uniform --limit 4"
    return draw(tmp_path / "run", flags), tmp_path / "run"


def test_two_policies_meet_the_same_candidate(interviews):
    """One seed, one candidate: both episodes open alike; each ends with its interviewer's summary."""
    items, _ = interviews
    assert len(items) == 4
    for item in items.values():
        assert (item["a_model"], item["b_model"], item["task"]) == ("fixed", "uniform", "interview")
        assert [m["role"] for m in item["prompt"]] == ["user"]
        for side in "ab":
            roles = [message["role"] for message in item[side]]
            assert roles == ["assistant", "user"] * (len(roles) // 2) + ["assistant"]
            assert "summary" in item[side][-1]["content"].lower()


def test_votes_on_conversations_become_rows_that_dpo_reads(interviews, capsys):
    """A pair at the turn where they part, and from there every turn as good or bad: what stands
    before it is in both and cannot be either."""
    items, folder = interviews
    app = make(folder, list(items.values()))
    rater = Rater(app)
    assert rater.send(rater.body("left", edit="Better."))[0] == 400
    while state := rater.state["item"]:
        assert isinstance(state["left"], list) and "fixed" not in str(rater.state)
        fixed = next(i for i in items.values() if i["a"] in (state["left"], state["right"]))
        rater.vote("left" if state["left"] == fixed["a"] else "right")
    annotate.main(["export", "--out", str(stopped(app))])
    assert "turns.jsonl" in capsys.readouterr().out
    pairs = list(files.read_jsonl(folder / "prefs.jsonl", common.check_pair))
    turns = list(files.read_jsonl(folder / "turns.jsonl", dpo.check_thumb))
    assert pairs and all(row["chosen_model"] == "fixed" and "drop" not in row for row in pairs)
    for row in pairs:
        item = items[row["item_id"]]
        whole = [*item["prompt"], *item["a"]]
        n = len(row["prompt"])
        assert row["prompt"] == whole[:n] and row["chosen"] == whole[n : n + 1]
        assert row["rejected"] == [*item["prompt"], *item["b"]][n : n + 1] != row["chosen"]
    assert {row["label"] for row in turns} == {True, False}
    for row in turns:
        n, side = len(row["prompt"]), "a" if row["label"] else "b"
        assert any([*i["prompt"], *i[side]][: n + 1] == [*row["prompt"], *row["completion"]]
                   for i in items.values())  # fmt: skip
    before = (folder / "turns.jsonl").read_bytes()
    ask(folder, score=lambda talk: len(talk) % 97 / 97)
    annotate.main(["export", "--judge", "--out", str(folder)])
    assert "rlaif-turns.jsonl" in capsys.readouterr().out
    assert (folder / "turns.jsonl").read_bytes() == before, "those of people, as prefs.jsonl is"


def test_one_policy_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(annotate.TEMPLATES.parent.parent)
    model = tiny_model("llama", tmp_path, max_position_embeddings=2048)
    items = draw(tmp_path / "one", f"{INTERVIEW} --model {model} --limit 2 --max-new-tokens 4")
    assert len(items) == 2 and {i["a_model"] for i in items.values()} == {str(model)}
    for flags, words in {
        f"{INTERVIEW} --model fixed --limit 2": "no two episodes that differ",
        f"{INTERVIEW} --top-p 0.9": "--top-p has no effect",
        "--env envs/interview.py:Nobody": "has no function",
    }.items():
        assert words in error_of(draw, tmp_path / "x", flags)
    assert log_of(tmp_path / "x") == []
    monkeypatch.setattr(grpo_agent, "play", None)  # known before an hour of episodes
    (tmp_path / "file").write_text("")
    policies = f"{INTERVIEW} --model fixed --model-b"
    line = error_of(draw, tmp_path / "file" / "x", f"{policies} uniform")
    assert re.search("--out .*file/x: .*choose another --out", line)
    assert "--model-b none: no such folder" in error_of(draw, tmp_path / "y", f"{policies} none")


def test_a_turn_without_words_is_no_row():
    """A policy that ends at once says nothing: dpo.py refused the whole file for that turn."""
    silent, asks, tells = (
        {"role": "assistant", "content": text} for text in ("", "Audits?", "END")
    )
    two = {"role": "user", "content": "Two."}
    item = {"id": "x", "prompt": [two], "a": [silent, two, tells], "b": [asks, two, tells]}
    vote = {"item_id": "x", "choice": "b", "strength": 2, "gold_pass": None, "repeat_of": None}
    rows = talks.to_turns({"x": item}, [vote | {"annotator": "ann", "ts_server": ""}])
    assert [(row["completion"][0]["content"], row["label"]) for row in rows] == [
        ("Audits?", True), ("END", True), ("END", False),
    ]  # fmt: skip
    assert votes.to_prefs({"x": item}, [vote | {"annotator": "ann", "ts_server": ""}]) == []
