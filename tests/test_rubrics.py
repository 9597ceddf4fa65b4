"""parts/rubrics.py: files of rubrics and of answers: what is read, and what is refused where."""

import json
from collections import Counter

import pytest

from conftest import REPO
from parts.files import UserError
from parts.rubrics import read_responses, read_row, read_rubrics

ROW = {"prompt": "p", "rubrics": ["a"]}


def written(tmp_path, rows, name="x.jsonl"):
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path / name


@pytest.mark.parametrize(
    "name, text, splits",
    [
        ("x.json", json.dumps([ROW, ROW | {"task_id": "t"}]), ["", ""]),
        ("x.jsonl", json.dumps(ROW) + "\n\n" + json.dumps(ROW | {"task_id": "t"}), ["", ""]),
        ("x.json", "\ufeff" + json.dumps([ROW, ROW], indent=1), ["", ""]),
        ("x.json", json.dumps({"train": [ROW | {"split": "test"}], "test": [ROW]}), ["train", "test"]),
        ("x.jsonl", "".join(json.dumps(ROW | {"split": s}) + "\n" for s in ("val", "train")), ["validation", "train"]),
    ],
    ids=["list", "JSONL", "indented", "lists", "a key"],
)  # fmt: skip
def test_the_forms_of_a_file(tmp_path, name, text, splits):
    rows = read_rubrics(written(tmp_path, text, name))
    assert [row.split for row in rows] == splits and len({row.task_id for row in rows}) == 2


def test_a_row_has_texts_checks_and_ifeval_pairs(tmp_path, capsys):
    row = ROW | {"task_id": 7, "reference": "r", "level": 3}
    row["rubrics"] = ["Is short.", {"criterion": " Lies.\n", "weight": -2}]
    row["rubrics"] += [{"check": "text:max_chars", "max_chars": 9, "negate": True}]
    row["instruction_id_list"] = ["punctuation:no_comma", "length_constraints:number_words"]
    row["kwargs"] = [{}, {"num_words": 3, "relation": "at least", "keyword": None}]
    (read,) = read_rubrics(written(tmp_path, [row]))
    assert [(c.id, c.kind, c.text or c.check, c.weight, c.negate) for c in read.criteria] == [
        (1, "judge", "Is short.", 1, False),
        (2, "judge", "Lies.", -2, True),
        (3, "check", "text:max_chars", 1, True),
        (4, "check", "punctuation:no_comma", 1, False),
        (5, "check", "length_constraints:number_words", 1, False),
    ]
    assert read.criteria[4].arguments == {"num_words": 3, "relation": "at least"}
    assert (read.task_id, read.reference, read.raw, read.place) == ("7", "r", row, "line 1")
    assert "1 rows; 2 criteria judged, 3 checked; not read: level 1" in capsys.readouterr().out


BAD_ROWS = [  # a row, a word of the message
    ({"rubrics": ["a"]}, "prompt"),
    ({"prompt": " ", "rubrics": ["a"]}, "prompt"),
    ({"prompt": [{"role": "assistant", "content": "a"}], "rubrics": ["a"]}, "prompt"),
    ({"prompt": "p"}, "rubrics"),
    ({"prompt": "p", "rubrics": "a"}, "rubrics"),
    (ROW | {"reference": 3}, "reference"),
    (ROW | {"reference": "\ud800"}, "surrogate"),
    (ROW | {"kwargs": [{}]}, "kwargs"),
    (ROW | {"instruction_id_list": ["punctuation:no_comma"], "kwargs": ["x"]}, "kwargs"),
    (ROW | {"instruction_id_list": "ab", "kwargs": "ab"}, "instruction_id_list"),
    (ROW | {"instruction_id_list": 5, "kwargs": [{}]}, "instruction_id_list"),
    (ROW | {"rubrics": [{"criterion": "a", "weight": 0}]}, "weight"),
    (ROW | {"rubrics": [{"criterion": "a", "weight": -2}]}, "weight"),
    ([1], "object"),
]
BAD_CRITERIA = [
    (" ", "criterion"), (7, "7"), ({"weight": 1}, "criterion"), ({"criterion": 7}, "7"),
    ({"criterion": "a", "check": "punctuation:no_comma"}, "check"),
    ({"criterion": "a", "wieght": 2}, "wieght"), ({"criterion": "a", "points": 2}, "points"),
    ({"criterion": "a", "weight": True}, "weight"), ({"criterion": "a", "weight": "2"}, "weight"),
    ({"criterion": "a", "weight": float("inf")}, "weight"), ({"criterion": "a", "negate": 1}, "negate"),
    ({"criterion": "a", "name": "n"}, "name"), ({"check": "no:such"}, "no:such"),
    ({"check": "punctuation:no_comma", "wieght": 2}, "wieght"), ({"check": 7}, "7"), ({"check": ["x"]}, "no check"),
]  # fmt: skip


BAD_ROWS += [(ROW | {"rubrics": ["a", c]}, f"criterion 2: .*{word}") for c, word in BAD_CRITERIA]


@pytest.mark.parametrize("row, word", BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_a_bad_row_is_refused(row, word):
    with pytest.raises(ValueError, match=word):
        read_row(row)


BAD_FILES = [  # name, text, what is told
    ("x.jsonl", "", ["no row"]),
    ("x.json", "", ["line 1"]),
    ("x.json", "[]", ["no row"]),
    ("x.jsonl", "Write an advert\n", [":1", "JSON"]),
    ("x.json", '{"prompt": "p"}\n{"prompt": "q"}', ["line 2", ".jsonl"]),
    ("x.json", '[{"prompt": "p",\n "rubrics": [1}]', ["line 2"]),
    ("x.jsonl", '{"prompt": "p", "rubrics": ["a"]}\n{"prompt": NaN}', [":2", "NaN"]),
    ("x.json", '[{"prompt": "p", "rubrics": ["a"], "x": NaN}]', ["NaN"]),
    ("x.json", '{"train": [], "dev": [{"prompt": "p", "rubrics": ["a"]}]}', ["dev row 1", "split"]),
    ("x.json", '{"train": 5}', ["train"]),
    ("x.json", "5", ["a list"]),
    ("x.json", "[5]", ["row 1", "object"]),
    ("x.jsonl", '{"prompt": "p", "rubrics": ["a"], "split": "dev"}', ["line 1", "split"]),
    ("x.jsonl", '{"prompt": "p", "rubrics": ["a"], "split": "val"}\n{"prompt": "q", "rubrics": ["a"]}', ["line 2", "split"]),
    ("x.jsonl", '{"prompt": "p", "rubrics": ["a"]}\n{"prompt": "q", "rubrics": []}', ["line 2", "rubrics"]),
    ("x.json", '[{"prompt": "p", "rubrics": ["a"], "task_id": 1}, {"prompt": "q", "rubrics": ["a"], "task_id": "1"}]', ["row 2", "row 1"]),
]  # fmt: skip


@pytest.mark.parametrize("name, text, words", BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_bad_file_is_refused_with_its_place(tmp_path, name, text, words):
    with pytest.raises(UserError) as error:
        read_rubrics(written(tmp_path, text, name))
    assert all(word in str(error.value) for word in ["--data", *words]), error.value


def test_bundled_files_load():
    bundled = read_rubrics(REPO / "data/rubrics.json")
    assert Counter(row.split for row in bundled) == {"train": 300, "validation": 50, "test": 60}
    judged = read_rubrics(REPO / "data/rubrics_judge.json")
    assert {c.kind for row in judged for c in row.criteria} == {"judge"}
    natural = read_rubrics(REPO / "data/ifeval_prompts.jsonl")
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
        {"task_id": "b", "prompt": "q", "answer": "4"},
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
        ({"prompt": "p", "response": 7}, "7"),
        ({"prompt": "p", "response": [{"role": "user", "content": "a"}]}, "assistant"),
        ({"prompt": "p", "response": [{}]}, "assistant"),
        ({"response": "a"}, "prompt"),
        ({"prompt": "q", "response": "a"}, "2 rows"),
        ({"prompt": "z", "response": "a"}, "0 rows"),
        ({"prompt": 3, "response": "a"}, "prompt"),
        ({"task_id": "z", "response": "a"}, "task_id"),
        ({"task_id": "a", "prompt": "q", "response": "a"}, "task_id"),
    ],
)
def test_an_answer_without_its_row_is_refused(tmp_path, rubrics, answer, word):
    with pytest.raises(UserError, match=word) as error:
        read_responses(written(tmp_path, [answer]), rubrics)
    assert "--responses" in str(error.value) and ":1" in str(error.value)


@pytest.mark.parametrize("text, word", [("yz", "reference"), ("", "empty")])
def test_answers_without_rubrics_are_refused(tmp_path, text, word):
    answers = [{"prompt": "p", "response": "a", "reference": r} for r in text]
    with pytest.raises(UserError, match=word):
        read_responses(written(tmp_path, answers))
