"""annotate.py judge: a model votes in both orders, beside people and never mixed with them."""

import json

import pytest

import annotate
import evaluate
from parts import agreement, files, votes
from parts.files import UserError
from test_annotate import Rater, item_rows, log_of, make, stopped
from test_grpo_judge import Rule
from test_judge import completion
from tiny import write_rows


@pytest.fixture
def session(tmp_path):
    """Six items, one of them gold, on which ann prefers "better" throughout."""
    app = make(tmp_path / "run", item_rows(6, gold={5}), "--overlap 2")
    Rater(app).vote_all(Rater.better)
    return stopped(app)


def ask(folder, model="some/judge", **judge):
    with Rule(**judge) as server:
        flags = f"judge --judge-model {model} --judge-base-url {server.url} --judge-max-retries 0"
        annotate.main([*flags.split(), "--out", str(folder)])
        return len(server.asked)


def likes_better(answer):
    return 0.9 if answer.startswith("better") else 0.1


def first_place(asked):
    """A reply that scores the place alone."""
    scores = [{"id": i, "score": 0.9 - n / 2, "reason": "x"} for n, i in enumerate(asked.attempts)]
    return 200, {}, completion(json.dumps({"scores": scores}))


def test_votes_of_a_model_are_marked_and_left_out(session, tmp_path, capsys):
    """Asked twice per item, once in its life: the log says what is done. People's rows, numbers
    and open items are as they were without it; with --judge its pairs stand alone."""
    annotate.main(["export", "--out", str(session)])
    before = (session / "prefs.jsonl").read_bytes()
    people = agreement.agreement(log_of(session))
    assert ask(session, score=likes_better) == 12 and ask(session, score=likes_better) == 0
    assert (
        "6 votes of model-some-judge, 0 ties because the order decided" in capsys.readouterr().out
    )
    judged = [event for event in log_of(session) if event["judge"]]
    assert {(e["judge"], e["annotator"]) for e in judged} == {("some/judge", "model-some-judge")}
    assert [e["strength"] for e in judged] == [3] * 6 and sum(map(bool, (e["gold_pass"] for e in judged))) == 1  # fmt: skip
    assert agreement.agreement(votes.by_people(log_of(session))) == people
    for command in ("agreement", "export"):
        annotate.main([command, "--out", str(session)])
        assert "left out: 6 votes of models" in capsys.readouterr().out
    assert (session / "prefs.jsonl").read_bytes() == before
    annotate.main(["export", "--judge", "--out", str(session)])
    rows = list(files.read_jsonl(session / "rlaif.jsonl"))
    assert {(row["source"], row["chosen_model"]) for row in rows} == {("judge", "good")}
    assert len(rows) == 5 and (session / "prefs.jsonl").read_bytes() == before
    annotate.main(["agreement", "--judge", "--out", str(session)])
    text = capsys.readouterr().out
    assert "gold: 1/1 = 100 %" in text and "5/5 = 100 %" in text and "assess" in text
    rater = Rater(annotate.make_app(annotate.parse_args(["--out", str(session), "--overlap", "2"]),
                                    votes.load_items(session / "items.jsonl")), "ben")  # fmt: skip
    assert (rater.state["all"], rater.state["everyone"]) == (6, 6), "not the model's six"
    status, data = rater.post("/next", {"annotator": "model-some-judge", "key": "x"})
    assert status == 409 and "belongs to another browser" in data["error"]
    human = f"human --votes {session}/annotations.jsonl --out {tmp_path} --overwrite"
    for flags, n in {"": 1, "--judge": 2}.items():
        evaluate.main([*human.split(), *flags.split()])
        report = json.loads((tmp_path / "report.json").read_bytes())
        assert len(report["annotators"]) == n and report["left_out"]["judge_votes"] == 12 - 6 * n


def test_one_vote_an_item_is_no_agreement(tmp_path, capsys):
    """Rows of one vote say "agreement": 1.0 (a null would keep `datasets` from loading the file), and
    nothing said that nobody had agreed with anybody."""
    app = make(tmp_path, item_rows(3), "--overlap 2")
    Rater(app, "ann").vote_all(Rater.better)
    argv = ["export", "--out", str(stopped(app))]
    annotate.main(argv)
    words = "agreement: not measured in {} of 3 items: one vote an item; their rows say 1.0"
    assert words.format(3) in capsys.readouterr().out
    app = make(tmp_path, item_rows(3), "--overlap 2")
    Rater(app, "ben").vote("left")
    annotate.main(argv)
    assert words.format(2) in capsys.readouterr().out
    Rater(app, "ben").vote_all(Rater.better)
    annotate.main(argv)
    assert "agreement: not measured" not in capsys.readouterr().out


def test_a_vote_that_the_order_decides_is_a_tie(session, capsys):
    ask(session, script=first_place)
    judged = [event for event in log_of(session) if event["judge"]]
    assert {(e["choice"], e["strength"], e["by_place"]) for e in judged} == {("tie", 0, True)}
    assert "6 ties because the order decided" in capsys.readouterr().out
    annotate.main(["agreement", "--judge", "--out", str(session)])
    assert "the order decided, a tie: 6/6 = 100 %" in capsys.readouterr().out


def test_what_a_model_cannot_vote_on(session, tmp_path, capsys):
    """A reply that cannot be read is no vote, and asked again by the next call."""
    ask(session, script=lambda asked: (200, {}, completion("no idea")))
    assert "6 items without a vote, to be asked again" in capsys.readouterr().out
    assert not any(event.get("judge") for event in log_of(session))
    assert ask(session, score=likes_better) == 12
    new = tmp_path / "drawn"
    new.mkdir()
    write_rows(new / "items.jsonl", item_rows(3))
    assert ask(new, score=likes_better) == 6, "before anybody has voted"
    with pytest.raises(UserError, match="no items.jsonl there; annotate.py draw writes one"):
        ask(tmp_path / "typo", score=likes_better)  # else the bundled items are judged, and paid
    make(session, item_rows(6, gold={5}), "--overlap 0")
    with pytest.raises(UserError, match="another server is using this folder"):
        ask(session, score=likes_better)


def test_a_models_votes_are_its_own(session, capsys):
    """Two models whose names begin alike were one: the second was asked nothing, and its votes were
    said to be there. Other instructions changed nothing either."""
    names = *(f"meta-llama/Meta-Llama-3.1-{n}B-Instruct" for n in (8, 70)), "some/judge"
    assert [ask(session, model, score=likes_better) for model in names] == [12] * 3
    assert len({e["annotator"] for e in log_of(session) if e["judge"]}) == 3
    with pytest.raises(UserError, match="a person or another model votes here as model-some-judge"):
        ask(session, "some-judge", score=likes_better)
    own = session / "own.txt"
    own.write_text("The shorter one wins.")
    with pytest.raises(UserError, match="--ruler-rubric: .* voted here by other instructions"):
        ask(session, f"{names[0]} --ruler-rubric {own}", score=likes_better)


@pytest.mark.parametrize("command", ["export --judge", "agreement --judge", "export --sft"])
def test_models_vote_on_pairs_alone(command, tmp_path):
    """export --judge wrote an empty rated.jsonl over that of people."""
    write_rows(tmp_path / "args.json", [{"stage": "annotate", "args": {"criteria": True}}])
    name, flag = command.split()
    with pytest.raises(UserError, match=f"{flag}: .* compares no answers"):
        annotate.parse_args([name, flag, "--out", str(tmp_path)])
