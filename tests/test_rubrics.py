"""parts/rubrics.py: files of rubrics and of answers: what is read, and what is refused where.

bad_rubrics.jsonl, bad_answers.jsonl   rows that are refused, each with a word of the message
"""

import json
from collections import Counter

import pytest

from conftest import REPO
from parts.files import read_jsonl
from parts.rubrics import read_responses, read_row, read_rubrics
from tiny import error_of, write_rows

ROW = {"prompt": "p", "rubrics": ["a"]}
TWO = [ROW | {"split": "val"}, ROW | {"split": "train", "task_id": "t"}]


def cases(name):
    return [[*row.values()] for row in read_jsonl(REPO / f"tests/{name}.jsonl")]


@pytest.fixture
def written(tmp_path):
    """A file of rows, or of a text."""

    def write(content, name="x.jsonl"):
        path = tmp_path / name
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            write_rows(path, content)
        return path

    return write


@pytest.mark.parametrize("name, text, splits", [
    ("x.json", json.dumps([ROW, ROW | {"task_id": "t"}]), ["", ""]),
    ("x.jsonl", json.dumps(ROW) + "\n\n" + json.dumps(ROW | {"task_id": "t"}), ["", ""]),
    ("x.json", "\ufeff" + json.dumps([ROW, ROW], indent=1), ["", ""]),
    ("x.json", json.dumps({"train": [ROW | {"split": "test"}], "test": [ROW]}), ["train", "test"]),
    ("x.json", json.dumps(TWO), ["validation", "train"]),
], ids=["list", "JSONL", "indented", "lists", "a key"])  # fmt: skip
def test_the_forms_of_a_file(written, name, text, splits):
    rows = read_rubrics(written(text, name))
    assert [row.split for row in rows] == splits
    assert rows[0].task_id == "row-1" and rows[1].task_id in ("row-2", "t")


def test_a_row_has_texts_checks_and_ifeval_pairs(written, capsys):
    row = ROW | {"task_id": 7, "reference": "r", "level": 3}
    row["rubrics"] = ["Is short.", {"criterion": " Lies.\n", "weight": -2}]
    row["rubrics"] += [{"check": "text:max_chars", "max_chars": 9, "negate": True}]
    row["instruction_id_list"] = ["punctuation:no_comma", "length_constraints:number_words"]
    row["kwargs"] = [None, {"num_words": 3, "relation": "at least", "keyword": None}]
    (read,) = read_rubrics(written([row]))
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


@pytest.mark.parametrize("row, word", cases("bad_rubrics"))
def test_a_bad_row_is_refused(row, word):
    with pytest.raises(ValueError, match=word):
        read_row(row, allow_code=True)


@pytest.mark.parametrize("weight", [float("inf"), 1e9, -1e9])
def test_a_weight_that_hides_all_others_is_refused(weight):
    with pytest.raises(ValueError, match="weight"):
        read_row(ROW | {"rubrics": ["a", {"criterion": "b", "weight": weight}]})


def test_half_a_character_is_refused():
    with pytest.raises(ValueError, match="surrogate"):
        read_row(ROW | {"reference": "\ud800"})


@pytest.mark.parametrize("name, text, words", [
    ("x.jsonl", "", "no row"),
    ("x.json", "", "line 1"),
    ("x.json", "[]", "no row"),
    ("x.jsonl", "Write an advert\n", ":1 JSON"),
    ("x.json", '{"prompt": "p"}\n{"prompt": "q"}', "line 2 .jsonl"),
    ("x.json", '[{"prompt": "p",\n "rubrics": [1}]', "line 2"),
    ("x.jsonl", json.dumps(ROW) + '\n{"prompt": NaN}', ":2 NaN"),
    ("x.json", json.dumps([ROW | {"x": float("nan")}]), "NaN"),
    ("x.json", json.dumps({"train": [], "dev": [ROW]}), "dev row 1 split"),
    ("x.json", '{"train": 5}', "train"),
    ("x.json", "5", "a list"),
    ("x.json", "[5]", "row 1 object"),
    ("x.jsonl", json.dumps(ROW | {"split": "dev"}), "line 1 split"),
    ("x.json", json.dumps([TWO[0], ROW]), "row 2 split"),
    ("x.json", json.dumps([ROW, ROW | {"rubrics": []}]), "row 2 rubrics"),
    ("x.json", json.dumps([ROW | {"task_id": 1}, ROW | {"task_id": "1"}]), "row 2 row 1"),
])  # fmt: skip
def test_a_bad_file_is_refused_with_its_place(written, name, text, words):
    line = error_of(read_rubrics, written(text, name))
    assert [word for word in ["--data", *words.split()] if word not in line] == []


def test_bundled_files_load():
    bundled = read_rubrics(REPO / "data/rubrics.json")
    assert Counter(row.split for row in bundled) == {"train": 300, "validation": 50, "test": 60}
    judged = read_rubrics(REPO / "data/rubrics_judge.json")
    assert {c.kind for row in judged for c in row.criteria} == {"judge"}
    natural = read_rubrics(REPO / "data/ifeval_prompts.jsonl")
    assert [len(natural), sum(len(row.criteria) for row in natural)] == [60, 150]


# ---- answers ----


@pytest.fixture
def rubrics(written):
    triples = ("apx", "bqx", "cqy")
    rows = [{"task_id": i, "prompt": p, "rubrics": [r]} for i, p, r in triples]
    return read_rubrics(written(rows, "rubrics.jsonl"))


def test_answers_find_their_row(written, rubrics, capsys):
    chat = [{"role": "user", "content": "p"}]
    answers = [
        {"prompt": "p", "response": "1", "model": "m", "level": 3},
        {"prompt": chat, "response": [*chat, {"role": "assistant", "content": "2"}]},
        {"task_id": "c", "response": ""},
        {"task_id": "b", "prompt": "q", "answer": "4"},
    ]
    found = read_responses(written(answers), rubrics)
    read = [(row.task_id, answer, model) for row, answer, model in found]
    assert read == [("a", "1", "m"), ("a", "2", None), ("c", "", None), ("b", "4", None)]
    assert "level 1" in capsys.readouterr().out


def test_without_rubrics_each_prompt_is_a_row(written):
    answers = [{"prompt": p, "response": r, "reference": "z"} for p, r in ("p1", "q2", "p3")]
    found = read_responses(written(answers))
    assert [row.task_id for row, *_ in found] == ["1", "2", "1"]
    assert {row.reference for row, *_ in found} == {"z"}


@pytest.mark.parametrize("answer, word", cases("bad_answers"))
def test_an_answer_without_its_row_is_refused(written, rubrics, answer, word):
    line = error_of(read_responses, written([answer]), rubrics)
    assert word in line and "--responses" in line and ":1" in line


@pytest.mark.parametrize("references, word", [("yz", "reference"), ("", "empty")])
def test_answers_without_rubrics_are_refused(written, references, word):
    answers = [{"prompt": "p", "response": "a", "reference": r} for r in references]
    assert word in error_of(read_responses, written(answers))
