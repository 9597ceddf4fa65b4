"""docs/gallery.md asks the reader to guess which test catches which slip: it must show the slips that the tests make.

A page of patches is wrong after the next edit of the code, and nothing says so. Here every patch is made again from the
row of tests/test_mutations.py and the source, and the page must hold exactly these.
"""

import re
from pathlib import Path

import pytest

from test_mutations import GALLERY, REPO

PAGE = (REPO / "docs" / "gallery.md").read_text(encoding="utf-8")
ENTRY = re.compile(
    r"^### (\d+)\. (.+?)\n(.*?)```diff\n(.*?)```\n\n<details><summary>.*?</summary>\n\n`([\w.]+)`\n\n(.+?)\n\n</details>",
    re.M | re.S,
)


def hunk(stage, line, broken):
    """The patch of a mutation: the whole lines of the file that hold `line`, and the same lines with it broken."""
    source = (REPO / f"{stage}.py").read_text(encoding="utf-8")
    assert source.count(line) == 1, f"{stage}.py: {line!r} is there {source.count(line)} times"
    start = source.index(line)
    first = source.rfind("\n", 0, start) + 1
    last = source.index("\n", start + len(line.rstrip("\n")) - 1)
    end = start + len(line)
    old, new = source[first:last], source[first:start] + broken + source[end:last]
    indent = len(old) - len(old.lstrip(" "))
    shown = [f"--- {stage}.py", f"+++ {stage}.py"]
    for sign, text in (("-", old), ("+", new)):
        shown += [sign + row[min(indent, len(row) - len(row.lstrip(" "))) :] for row in text.rstrip("\n").split("\n")]  # fmt: skip
    return "\n".join(shown) + "\n"


def expected():
    """[(patch, check)] of the mutations, in their order; a check of test_mutations.py itself by its full name."""
    names = [row[3] if "." in row[3] else f"test_mutations.{row[3]}" for row in GALLERY]
    return [(hunk(*row[:3]), name) for row, name in zip(GALLERY, names, strict=True)]


def test_the_page_shows_the_mutations_and_nothing_else():
    """Both ways, in order and numbered as the tests are: each patch equals the one made from the file as it is today, so its
    "-" lines are found there; the test that the answer names is the one that turns red."""
    shown = [(patch, check) for _, _, _, patch, check, _ in ENTRY.findall(PAGE)]
    wanted = expected()
    for number, (here, there) in enumerate(zip(shown, wanted), 1):
        assert here == there, (
            f"docs/gallery.md, entry {number}: replace it by\n{there[0]}{there[1]}"
        )
    assert len(shown) == len(wanted)
    assert [int(n) for n, *_ in ENTRY.findall(PAGE)] == list(range(1, len(wanted) + 1))
    assert PAGE.count("```diff") == len(wanted), "a patch that is no entry of the gallery"
    assert f"{len(wanted)} slips" in PAGE


def test_every_answer_says_why_and_every_link_leads_somewhere():
    """An answer that only names a test teaches nothing, and a link of the classics that leads nowhere is worse."""
    for number, title, _, _, _, why in ENTRY.findall(PAGE):
        assert len(why.split()) >= 8 and title.strip(), f"entry {number}"
    anchors = set(re.findall(r'<a id="([\w-]+)"', PAGE))
    linked = set(re.findall(r"\(#([\w-]+)\)", PAGE))
    assert len(linked) >= 15 and linked <= anchors
    for target in re.findall(r"\]\((\.\./[\w./-]+)\)", PAGE):
        assert (Path(REPO) / "docs" / target).exists(), target


def test_a_patch_holds_whole_lines():
    """The patch maker on a real row: one line taken away, one put in, both without the file's indent."""
    row = next(row for row in GALLERY if row[0] == "parts/lora")
    patch = hunk(*row[:3]).splitlines()
    assert patch[:2] == ["--- parts/lora.py", "+++ parts/lora.py"]
    assert patch[2:] == ["-module.lora_on = False", "+module.lora_on = True"]
    with pytest.raises(AssertionError, match="0 times"):
        hunk("dpo", "a line that nobody wrote", "pass")
