"""parts/rubrics.py: files of rubrics and of answers: what is read, and what is refused where."""

import json

import pytest

from conftest import REPO
from parts.files import UserError
from parts.rubrics import read_criterion, read_responses, read_row, read_rubrics

ROW = {"prompt": "p", "rubrics": ["a"]}


def written(tmp_path, rows, name="x.json"):
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path / name


@pytest.mark.parametrize(
    "text, splits",
    [
        (json.dumps([ROW, ROW | {"task_id": "t"}]), {}),
        (json.dumps(ROW) + "\n\n" + json.dumps(ROW | {"task_id": "t"}), {}),
        ("\ufeff" + json.dumps([ROW, ROW], indent=1), {}),
        (json.dumps({"train": [ROW], "test": [ROW]}), {"train": 1, "validation": 0, "test": 1}),
    ],
    ids=["list", "JSONL", "indented", "splits"],
)
def test_the_three_forms_of_a_file(tmp_path, text, splits):
    found = read_rubrics(written(tmp_path, text))
    assert len(found.rows) == 2 and len({row.task_id for row in found.rows}) == 2
    assert {name: len(rows) for name, rows in found.splits.items()} == splits


def test_a_row_has_texts_checks_and_ifeval_pairs(tmp_path):
    row = ROW | {"task_id": 7, "reference": "r", "level": 3}
    row["rubrics"] = ["Is short.", {"criterion": " Lies.\n", "weight": -2, "name": "lie"}]
    row["rubrics"] += [{"check": "text:max_chars", "max_chars": 9, "negate": True}]
    row["instruction_id_list"] = ["punctuation:no_comma", "length_constraints:number_words"]
    row["kwargs"] = [{}, {"num_words": 3, "relation": "at least", "keyword": None}]
    found = read_rubrics(written(tmp_path, [row]))
    (read,) = found.rows
    assert [(c.id, c.kind, c.label, c.weight, c.negate) for c in read.criteria] == [
        (1, "judge", "Is short.", 1, False),
        (2, "judge", "lie", -2, True),
        (3, "check", "text:max_chars", 1, True),
        (4, "check", "punctuation:no_comma", 1, False),
        (5, "check", "length_constraints:number_words", 1, False),
    ]
    assert read.criteria[4].arguments == {"num_words": 3, "relation": "at least"}
    assert (read.task_id, read.reference, read.raw, read.place) == ("7", "r", row, "row 1")
    assert "level 1" in found.describe()


def test_a_row_without_an_id_takes_that_of_no_other(tmp_path):
    found = read_rubrics(written(tmp_path, [ROW | {"task_id": "2"}, ROW]))
    assert len({row.task_id for row in found.rows}) == 2


BAD_ROWS = [  # a row, a word of the message
    ({"rubrics": ["a"]}, "prompt"),
    ({"prompt": " ", "rubrics": ["a"]}, "prompt"),
    ({"prompt": [{"role": "assistant", "content": "a"}], "rubrics": ["a"]}, "prompt"),
    ({"prompt": "p"}, "rubrics"),
    ({"prompt": "p", "rubrics": "a"}, "rubrics"),
    (ROW | {"reference": 3}, "reference"),
    (ROW | {"reference": "\ud800"}, "surrogate"),
    (ROW | {"kwargs": [{}]}, "kwargs"),
    ([1], "object"),
]
BAD_CRITERIA = [
    (" ", "criterion"), (7, "int"), ({"weight": 1}, "criterion"), ({"criterion": 7}, "7"),
    ({"criterion": "a", "check": "punctuation:no_comma"}, "check"),
    ({"criterion": "a", "wieght": 2}, "wieght"), ({"criterion": "a", "points": 2}, "points"),
    ({"criterion": "a", "weight": True}, "weight"), ({"criterion": "a", "weight": "2"}, "weight"),
    ({"criterion": "a", "weight": float("inf")}, "weight"), ({"criterion": "a", "negate": 1}, "negate"),
    ({"criterion": "a", "name": 1}, "name"), ({"check": "no:such"}, "no:such"),
    ({"check": "punctuation:no_comma", "wieght": 2}, "wieght"), ({"check": 7}, "7"),
]  # fmt: skip


@pytest.mark.parametrize("row, word", BAD_ROWS)
def test_a_bad_row_is_refused(row, word):
    with pytest.raises(ValueError, match=word):
        read_row(row)


@pytest.mark.parametrize("criterion, word", BAD_CRITERIA)
def test_a_bad_criterion_is_refused_with_its_number(criterion, word):
    with pytest.raises(ValueError, match=word):
        read_criterion(criterion)
    with pytest.raises(ValueError, match="criterion 2: "):
        read_row(ROW | {"rubrics": ["a", criterion]})


@pytest.mark.parametrize("weight", [0, -2])
def test_a_row_whose_criteria_earn_nothing_is_refused(weight):
    with pytest.raises(ValueError, match="weight"):
        read_row(ROW | {"rubrics": [{"criterion": "a", "weight": weight}]})


@pytest.mark.parametrize(
    "text, words",
    [
        ("", ["x.json", "line 1"]),
        ("[]", ["no row"]),
        ("Write an advert\n", ["JSON"]),
        ('[{"prompt": "p",\n "rubrics": [1}]', ["line 2"]),
        ('{"prompt": "p", "rubrics": ["a"]}\n{"prompt": NaN}', [":2", "NaN"]),
        ('[{"prompt": "p", "rubrics": ["a"], "x": NaN}]', ["NaN"]),
        ('{"train": [], "dev": []}', ["train"]),
        ('{"train": 5}', ["train"]),
        ('{"prompt": "p", "rubrics": ["a"]}\n{"prompt": "q", "rubrics": []}', ["line 2", "rubrics"]),
        ('[{"prompt": "p", "rubrics": ["a"], "task_id": 1}, {"prompt": "q", "rubrics": ["a"], "task_id": "1"}]', ["row 2", "row 1"]),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_its_place(tmp_path, text, words):
    with pytest.raises(UserError) as error:
        read_rubrics(written(tmp_path, text))
    assert all(word in str(error.value) for word in ["--data", *words]), error.value


def test_bundled_files_load():
    bundled = read_rubrics(REPO / "data/rubrics.json")
    assert [len(part) for part in bundled.splits.values()] == [300, 50, 60]
    judged = read_rubrics(REPO / "data/rubrics_judge.json")
    assert {c.kind for row in judged.rows for c in row.criteria} == {"judge"}
    natural = read_rubrics(REPO / "data/ifeval_prompts.jsonl").rows
    assert [len(natural), sum(len(row.criteria) for row in natural)] == [60, 150]


# ---- answers ----


@pytest.fixture
def rubrics(tmp_path):
    rows = [{"task_id": "a", "prompt": "p", "rubrics": ["x"]}]
    rows += [{"task_id": "b", "prompt": "q", "rubrics": ["x"]}]
    rows += [{"task_id": "c", "prompt": "q", "rubrics": ["y"]}]
    return read_rubrics(written(tmp_path, rows, "rubrics.jsonl"))


def test_answers_find_their_row(tmp_path, rubrics, capsys):
    chat = [{"role": "user", "content": "p"}]
    answers = [
        {"prompt": "p", "response": "1", "model": "m", "level": 3},
        {"prompt": chat, "response": [*chat, {"role": "assistant", "content": "2"}]},
        {"task_id": "c", "response": ""},
        {"task_id": "b", "prompt": "q", "step": 3, "answer": "4"},
    ]
    found = read_responses(written(tmp_path, answers), rubrics)
    assert [(row.task_id, answer, model) for row, answer, model in found] == [
        ("a", "1", "m"), ("a", "2", None), ("c", "", None), ("b", "4", None),
    ]  # fmt: skip
    assert "level 1" in capsys.readouterr().out


def test_without_rubrics_each_prompt_is_a_row(tmp_path):
    answers = [{"prompt": p, "response": r, "reference": "z"} for p, r in ("p1", "q2", "p3")]
    found = read_responses(written(tmp_path, answers))
    assert [(row.task_id, row.reference) for row, *_ in found] == [
        ("1", "z"),
        ("2", "z"),
        ("1", "z"),
    ]


@pytest.mark.parametrize(
    "answer, word",
    [
        ({"prompt": "p"}, "response"),
        ({"prompt": "p", "answer": "a"}, "response"),
        ({"prompt": "p", "response": 7}, "7"),
        ({"prompt": "p", "response": [{"role": "user", "content": "a"}]}, "assistant"),
        ({"prompt": "p", "response": [{}]}, "assistant"),
        ({"response": "a"}, "prompt"),
        ({"prompt": "q", "response": "a"}, "2 rows"),
        ({"prompt": "z", "response": "a"}, "0 rows"),
        ({"task_id": "z", "response": "a"}, "task_id"),
        ({"task_id": "a", "prompt": "q", "response": "a"}, "task_id"),
    ],
)
def test_an_answer_without_its_row_is_refused(tmp_path, rubrics, answer, word):
    with pytest.raises(UserError, match=word) as error:
        read_responses(written(tmp_path, [answer]), rubrics)
    assert "--responses" in str(error.value) and ":1" in str(error.value)


def test_answers_to_one_prompt_have_one_reference(tmp_path):
    answers = [{"prompt": "p", "response": "a", "reference": r} for r in "yz"]
    with pytest.raises(UserError, match="reference"):
        read_responses(written(tmp_path, answers))
    with pytest.raises(UserError, match="empty"):
        read_responses(written(tmp_path, ""))
