"""parts/files.py: what a user gets wrong first: a file in another format, or none. (An unknown flag:
test_bad_input.py.)

bad_files.jsonl   the bytes of a file and what is said of it
"""

from case_rows import each
from parts import files
from tiny import error_of


@each("bad_files")
def test_a_file_that_is_no_jsonl_is_named(content, said, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(content.encode("latin-1"))
    assert said in error_of(list, files.read_jsonl(path, flag="--pairs"))


def test_a_file_that_is_not_there_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "no.jsonl"):
        line = error_of(list, files.read_jsonl(path, flag="--pairs"))
        assert f"--pairs {path}: no such file" in line
