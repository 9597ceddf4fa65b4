"""judge.py draft against a server that writes by a script: what is dropped, refused, cached."""

import json
import re
from pathlib import Path

import pytest

import grpo_rubric
import judge
from parts import draft as draft_texts
from parts.files import UserError
from parts.rubrics import read_rubrics
from test_judge import Server, asked, ratings, told
from tiny import error_of, write_rows

pytestmark = pytest.mark.usefixtures("quiet_process")

INPUTS = ["Ann sold 3 boats.", "Ben led audits.", "ann SOLD 3 boats", "Cleo left in May."]
GOOD = ["Names the candidate.", "Says what was sold.", "Ends with a recommendation."]
CRITERIA = [{"criterion": text, "points": 2} for text in GOOD]
CRITERIA += [{"criterion": "Names the candidate!"}]  # a duplicate
CRITERIA += [{"criterion": "Is written in words."}, {"criterion": "Quotes the law of Mars."}]
CRITERIA += [{"criterion": "Invents an employer.", "points": -3}]


class Writer:
    """Each manner's answer begins with its number: the judge rates by that and by the criterion."""

    def __init__(self, inputs=INPUTS, criteria=CRITERIA):
        self.inputs, self.criteria = inputs, criteria

    def __call__(self, request):
        return self.draft(request) or ratings(request, lambda i: self.rate(asked(request), i))

    def draft(self, request):
        system, user = request["messages"][0]["content"], request["messages"][1]["content"]
        if wanted := re.search(r"Write (\d+) new inputs", user):
            texts = (self.inputs * 9)[: int(wanted[1])]
            return json.dumps({"inputs": [{"id": i, "input": t} for i, t in enumerate(texts, 1)]})
        if "criteria that tell" in user:
            return json.dumps({"criteria": self.criteria})
        if system.startswith("Answer"):
            return f"{system[7:]} {user}"

    def rate(self, text, i):
        criterion = re.search(rf"^{i}\. (.*)$", text, re.M)[1]
        answer = re.search(r"<answer-\w+>\n(.*)\n", text)[1]
        good = answer.startswith("as we")
        always = {"Is written in words.": True, "Quotes the law of Mars.": False}
        met = always.get(criterion, not good if criterion.startswith("Invents") else good)
        return "Yes" if met else "No"


@pytest.fixture
def draft(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(server, *flags):
        argv = ["draft", "--task", "Assess a candidate.", "--judge-model", "m"]
        argv += ["--judge-base-url", server.url, "--judge-max-retries", "0"]
        return judge.main([*argv, "--out", "out/d.json", *flags])

    return run


def test_a_task_becomes_a_rubric_file(draft, capsys):
    """4 inputs, one a repetition; of 7 criteria a duplicate, one that every answer meets and one
    that none does are dropped: 3 rows of 4, which grpo_rubric.py takes as they are."""
    with Server(Writer()) as server:
        assert draft(server, "--n", "4") == 0
        first = len(server.requests)
        out = capsys.readouterr().out
        with pytest.raises(UserError, match="--out out/d.json: exists; pass --overwrite"):
            draft(server, "--n", "4")
        before = Path("out/d.json").read_bytes()
        assert draft(server, "--n", "4", "--overwrite") == 0
        assert len(server.requests) == first == 1 + 3 + 12 + 12, "all came from the cache"
    assert Path("out/d.json").read_bytes() == before
    lines = out.strip().split("\n")
    assert lines[0] == "3 inputs with 12 criteria: out/d.json"
    assert lines[-1].startswith("python grpo_rubric.py --data out/d.json --judge-base-url http")
    for line in (
        "1 inputs that repeat another, the first: ann SOLD 3 boats",
        "3 criteria that repeat another, the first: Names the candidate!",
        "3 criteria that every answer meets, the first: Is written in words.",
        "3 criteria that no answer meets, the first: Quotes the law of Mars.",
    ):
        assert f"  {line}\n" in out
    rows = read_rubrics("out/d.json").rows
    assert [row.prompt for row in rows] == [INPUTS[0], INPUTS[1], INPUTS[3]]
    assert [(c.text, c.weight) for c in rows[0].criteria] == [
        *((text, 2) for text in GOOD), ("Invents an employer.", -3),
    ]  # fmt: skip
    args = grpo_rubric.parse_args(lines[-1].split()[2:])
    assert (args.data, args.judge_model) == ("out/d.json", "m")


def test_a_sentence_needs_no_blanks():
    """Chinese, Japanese and Thai have none: every draft in them was refused as no sentence."""
    for text in ("回答提到了两个优点。", "長所を二つ挙げている", "คำตอบระบุจุดแข็งสองข้อ", "Is kind."):
        assert draft_texts.sentence(text) == text
    for text in ("…", "criterion", "Überqualifiziert", "…。", None, 3):
        assert draft_texts.sentence(text) is None


UNUSABLE = [  # what the writer says, and what the command quotes
    (lambda request: "Sure! Here are some inputs.", 'in "Sure! Here are some inputs."'),
    (Writer(inputs=["…"] * 4), "no usable value: 1 (…), 2 (…)"),
    (Writer(criteria=CRITERIA[:4]), "4 criteria; expected 5 to 15"),
    (Writer(criteria=[{"criterion": "…", "points": 2}] * 5), "criterion 1: expected a sentence"),
    (Writer(criteria=[{"criterion": "Is kind.", "points": "2"}] * 5), 'criterion 1: "points" is'),
    (lambda r: "hm" if "<answer-" in asked(r) else Writer()(r), "no JSON object with a list of r"),
]


@pytest.mark.parametrize("answer, words", UNUSABLE)
def test_a_model_that_cannot_draft_is_refused(answer, words, draft, capsys):
    """Counted, with its first reply quoted; no file, and another status than 0."""
    with Server(answer) as server:
        assert draft(server, "--n", "4") == 4
    out = capsys.readouterr().out
    assert out.startswith("no draft: most ") and words in out and "could not be used, the" in out
    assert not Path("out/d.json").exists() and "grpo_rubric.py" not in out


def test_criteria_that_tell_nothing_apart_are_no_draft(draft, capsys):
    with Server(lambda r: ratings(r) if "<answer-" in asked(r) else Writer()(r)) as server:
        assert draft(server, "--n", "4") == 4
    out = capsys.readouterr().out
    assert (
        out.startswith("no draft: no input has criteria left") and not Path("out/d.json").exists()
    )
    assert "18 criteria that every answer meets, the first: Names the candidate." in out


def test_a_part_that_failed_is_counted(draft, capsys):
    """One prompt's criteria come to nothing: the others are written, the status is 4."""
    bad = lambda r: "criteria that tell" in asked(r) and "Ben" in asked(r)  # noqa: E731
    with Server(lambda r: told(503) if bad(r) else Writer()(r)) as server:
        assert draft(server, "--n", "4") == 4
        out = capsys.readouterr().out
        assert out.startswith("2 inputs with 8 criteria")
        assert "1 replies with criteria that could not be used, the first: HTTP 503: later" in out
        server.answer = Writer()
        assert draft(server, "--n", "4", "--overwrite") == 0
    assert capsys.readouterr().out.startswith("3 inputs with 12 criteria")


def test_a_spent_budget_is_no_draft_and_more_goes_on(draft, capsys):
    """The first call spends it; with more, what was answered is not paid for again."""
    price = "--n", "4", "--judge-price", "1000,0", "--judge-budget"
    with Server(Writer()) as server:
        assert draft(server, *price, "0.0001") == 4 and len(server.requests) == 1
        assert "the first: --judge-budget is spent: not asked" in capsys.readouterr().out
        assert draft(server, *price, "1000") == 0 and len(server.requests) == 1 + 3 + 12 + 12
        with pytest.raises(UserError, match="--task: say in words what the model is to do"):
            draft(server, "--task", " ", "--overwrite")
        both = "--n", "4", "--answers", "a.jsonl"
        assert "--answers: not allowed with argument --n" in error_of(draft, server, *both)


def test_answers_of_any_model_are_the_inputs(draft, capsys):
    rows = [("p", "as well"), ("p", "badly"), ("p", "badly"), ("q", "one answer"), ("r", "a b")]
    write_rows(Path("a.jsonl"), [{"prompt": p, "response": text} for p, text in rows])
    with Server(Writer()) as server:
        assert draft(server, "--answers", "a.jsonl", "--dry-run") is None and not server.requests
        assert draft(server, "--answers", "a.jsonl") == 0
        assert len(server.requests) == 1 + 2, "criteria, and a verdict on each answer"
        write_rows(Path("a.jsonl"), [{"prompt": "q", "response": "x"}])
        with pytest.raises(UserError, match="--answers a.jsonl: no prompt with two different"):
            draft(server, "--answers", "a.jsonl", "--overwrite")
    assert "a.jsonl: 1 of 3 prompts have two different answers" in capsys.readouterr().out
    assert [row.prompt for row in read_rubrics("out/d.json").rows] == ["p"]
