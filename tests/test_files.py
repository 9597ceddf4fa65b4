"""parts/files.py: what a user gets wrong first: a file in another format, or none."""

from pathlib import Path

import pytest

from parts import files
from parts.files import UserError
from tiny import error_of

WRONG = [  # content of pairs.jsonl; the name that is read; what is said
    (b'{"prompt": "a", "chosen": "b", \n', "pairs.jsonl", "pairs.jsonl:1: not valid JSON"),
    (b'"prompt": "a", "chosen": "b"}\n', "pairs.jsonl", "pairs.jsonl:1: not valid JSON"),
    (b"Write an advert\n", "pairs.jsonl", "pairs.jsonl:1: not valid JSON"),
    (b'[{"prompt": "a"}]\n', "pairs.jsonl", "pairs.jsonl:1: expected an object per line"),
    ('{"prompt": "a"}'.encode("utf-16"), "pairs.jsonl", "pairs.jsonl:1: "),
    (b'{"prompt": ' + b"[" * 100_000, "pairs.jsonl", "pairs.jsonl:1: "),
    (b"", "pair.jsonl", "--pairs pair.jsonl: no such file"),
    (b"", "..", r"--pairs \.\.: no such file"),
]


@pytest.mark.parametrize("content, name, said", WRONG, ids=range(len(WRONG)))
def test_a_file_that_is_no_jsonl_is_named(content, name, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=said):
        list(files.read_jsonl(name, flag="--pairs"))


def test_an_unknown_flag_is_refused():
    parser = files.parser("train.py [flags]", "Train.")
    parser.add_argument("--lr")
    assert "--lrr" in error_of(parser.parse_args, ["--lrr=1"])
