"""The notebooks are the first thing a newcomer opens: what is committed was made by running them.

The slow test runs them in a copy of the repository, the fifth with the bundled base; this command runs
and saves them, the fifth with runs/smollm2:

    python tests/test_notebooks.py 3_closed_form.ipynb    # no name: all of them
"""

import ast
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from conftest import REPO, copy_of_the_repository
from test_docs import a_readers_folder, parse

FOLDER = REPO / "notebooks"
NAMES = [path.name for path in sorted(FOLDER.glob("*.ipynb"))]
# a path that starts at the root of some machine: /home/…, C:\…; none is "/" in a URL or of words
ABSOLUTE = re.compile(r"(?<![\w.:/*])/(?:bin|content|home|mnt|opt|private|root|srv|tmp|usr|var|work|Users)/|\b[A-Z]:\\\w")  # fmt: skip
BEST = [0.0464, 0.2572, 0.0631, 0.6334]  # π*, as in test_toy_world.py


def read(name):
    return nbformat.read(FOLDER / name, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(notebook):
    outputs = (out for cell in code(notebook) for out in cell.outputs)
    forms = (out.get("data", {"": out.get("text", "")}).values() for out in outputs)
    return "\n".join(str(text) for texts in forms for text in texts)


def commands(notebook):
    for cell in code(notebook):
        source = re.sub(r"^%.*$", "", cell.source, flags=re.M)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "stage":
                yield node.args[0].id, node.args[1].value


@pytest.mark.parametrize("name", NAMES)
def test_commands_parse_and_links_exist(name, tmp_path, monkeypatch):
    notebook = read(name)
    assert code(notebook)[0].source == code(read(NAMES[0]))[0].source  # one first cell for all
    monkeypatch.chdir(tmp_path)
    for module, line in commands(notebook):
        a_readers_folder(tmp_path, line)
        parse(f"{module}.py", shlex.split(line))
    for target in re.findall(r"\]\((\.\./[\w./-]*)\)", str(notebook.cells)):
        assert (FOLDER / target).exists(), target


@pytest.mark.parametrize("name", NAMES)
def test_what_is_committed_was_run_from_top_to_bottom(name):
    notebook = read(name)
    counts = [cell.execution_count for cell in code(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    assert not {"stderr", "error"} & {out.get("name", out.output_type) for out in outputs}
    check_shown(name, shown(notebook))
    assert not ABSOLUTE.search("\n".join(cell.source for cell in notebook.cells))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    return copy_of_the_repository(tmp_path_factory.mktemp("copy") / "repo")


def execute(notebook, folder):
    options = dict(timeout=1800, kernel_name="python3", record_timing=False, coalesce_streams=True)
    with tempfile.TemporaryDirectory() as history, pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", history)  # no history in the home folder
        patch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
        NotebookClient(notebook, resources={"metadata": {"path": str(folder)}}, **options).execute()
    kinds = {output.output_type for cell in code(notebook) for output in cell.outputs}
    assert "error" not in kinds
    return notebook


SMALL = {"steps": 2, "eval-every": 1, "n": 8, "val-episodes": 2, "group-size": 2, "samples": 1}
SMALL |= {"groups-per-batch": 2, "max-new-tokens": 16, "resumes": 5, "per-cell": 5}
SMALL |= {"rollouts": 8, "batch-size": 4}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name, copy):
    notebook = read(name)
    for cell in code(notebook):
        for flag, value in SMALL.items():
            cell.source = re.sub(rf"--{flag} \d+", f"--{flag} {value}", cell.source)
        cell.source = cell.source.replace("steps=2000", "steps=600")  # of the closed form
    check_shown(name, shown(execute(notebook, copy / "notebooks")), str(copy))


def check_shown(name, text, *leaks):
    leaks += str(REPO), sys.prefix, os.path.expanduser("~") + "/"
    assert not [leak for leak in leaks if leak in text]
    found = ABSOLUTE.search(text)
    assert not found, text[found.start() - 40 : found.end() + 40]
    if name.startswith("3"):
        check_closed_form(text)


def check_closed_form(text):
    """Every right way within .001 of π* in each probability, every slip farther away."""
    rows = re.findall(r"^\| (right|slip) \| .+? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", text, re.M)  # fmt: skip
    gaps = {"right": [], "slip": []}
    for kind, *numbers in rows:
        apart = [abs(float(x) - best) for x, best in zip(numbers, BEST, strict=True)]
        gaps[kind].append(max(apart))
    assert len(gaps["right"]) >= 6 and max(gaps["right"]) < 0.001
    assert len(gaps["slip"]) >= 15 and min(gaps["slip"]) > 0.01
    assert "**π\\***, on paper | 0.0464 | 0.2572 | 0.0631 | 0.6334" in text


@pytest.mark.slow
def test_the_first_cell_on_a_fresh_machine(copy, monkeypatch, tmp_path):
    git = ["git", "-C", str(copy), "-c", "user.name=x", "-c", "user.email=x@example.com"]
    for line in ("init -q", "add -A", "commit -q -m published"):
        subprocess.run([*git, *line.split()], check=True, stdout=subprocess.DEVNULL)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    first, places = code(read(NAMES[0]))[0].source, [tmp_path / name for name in ("fresh", "else")]
    published = re.sub(r'REPO_URL = "[^"]+"', f'REPO_URL = "{copy.as_uri()}"', first)
    then = "from pathlib import Path\n\nimport dpo\nimport show\n\nprint(Path.cwd(), dpo.__file__)"
    notebooks = [nbformat.v4.new_notebook(), nbformat.v4.new_notebook()]
    for notebook, place, sources in zip(notebooks, places, ((published, then), (first,))):
        notebook.cells = list(map(nbformat.v4.new_code_cell, sources))
        place.mkdir()
    here, stage = shown(execute(notebooks[0], places[0])).split()[-2:]
    assert (places[0] / "feedbackloop/dpo.py").samefile(stage) and here.endswith("feedbackloop")
    with pytest.raises(Exception, match="address of your copy"):
        execute(notebooks[1], places[1])
    assert list(places[1].iterdir()) == []


def test_the_address_is_set_in_all_notebooks_at_once(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import set_address

    for name in NAMES:
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    with pytest.raises(SystemExit, match="--help: expected what git clones"):
        set_address.main("--help", tmp_path)
    address = "https://github.com/me/feedbackloop.git"
    set_address.main(address, tmp_path)
    for name in NAMES:
        old, new = ((folder / name).read_text(encoding="utf-8") for folder in (FOLDER, tmp_path))
        placeholder = set_address.ADDRESS.search(old)[0]
        assert new == old.replace(placeholder, rf"REPO_URL = \"{address}\"") and address in new


def save(name):
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_the_repository(Path(folder) / "repo")
        (copy / "runs").mkdir()
        (copy / "runs/smollm2").symlink_to(REPO / "runs/smollm2")
        notebook = execute(read(name), copy / "notebooks")
    for cell in code(notebook):  # the bar of a long run is no result
        bars = [re.search(r"\dit/s[],]|s/it[],]", out.get("text", "")) for out in cell.outputs]
        cell.outputs = [out for out, bar in zip(cell.outputs, bars) if not bar]
    check_shown(name, shown(notebook), str(copy))
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, FOLDER / name)


if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        save(name)
        print(f"notebooks/{name}: run and saved")
