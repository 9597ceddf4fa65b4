"""The notebooks are the first thing a newcomer opens: what is committed was made by running them.

The slow test runs them in a copy of the repository, the fifth with the bundled base. nbclient's command
runs and saves them, the fifth with runs/smollm2:

    jupyter execute --inplace notebooks/3_closed_form.ipynb
"""

import re
import subprocess
import tempfile

import nbformat
import pytest
from nbclient import NotebookClient

from conftest import copy_of_the_repository
from test_docs import NOTEBOOKS, code_cells

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
FIRST = code_cells(NOTEBOOKS[0])[0]  # of all notebooks: it clones on a fresh machine
ADDRESS = r'REPO_URL = "[^"]+"'
# a path that starts at the root of some machine: /home/…, C:\…; none is "/" in a URL or of words
ABSOLUTE = re.compile(
    r"(?<![\w.:/*])/(?:content|home|mnt|private|root|tmp|usr|Users)/|\b[A-Z]:\\\w"
)
BEST = [0.0464, 0.2572, 0.0631, 0.6334]  # π*, as in test_toy_world.py


def shown(notebook, refused=("error",)):
    """All that the cells have shown, as one text; none of the `refused` kinds."""
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    assert not {*refused} & {out.get("name", out.output_type) for out in outputs}
    return "\n".join(str(out.get("data", out.get("text"))) for out in outputs)


def execute(notebook, folder):
    with tempfile.TemporaryDirectory() as history, pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", history)  # no history in the home folder
        where = {"metadata": {"path": str(folder)}}
        options = dict(timeout=1800, kernel_name="python3", record_timing=False)
        NotebookClient(notebook, resources=where, coalesce_streams=True, **options).execute()
    return notebook


@every_notebook
def test_what_is_committed_was_run_from_top_to_bottom(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert code[0].source == FIRST
    check_shown(path, shown(notebook, ("stderr", "error")) + "".join(cell.source for cell in code))


def check_shown(path, text):
    """No path of the machine that it was run on. The closed form: every right way within .001 of π*
    in each probability, every slip farther away."""
    assert not (leak := ABSOLUTE.search(text)), text[leak.start() - 40 : leak.end() + 40]
    if path.name.startswith("3"):
        gaps = {"right": [], "slip": []}
        for kind, numbers in re.findall(r"\| (right|slip) \| .+? ((?:\| [\d.]+ ){4})\|", text):
            numbers = map(float, numbers.split("|")[1:])
            gaps[kind].append(max(abs(x - best) for x, best in zip(numbers, BEST, strict=True)))
        assert len(gaps["right"]) >= 6 and max(gaps["right"]) < 0.001
        assert len(gaps["slip"]) >= 15 and min(gaps["slip"]) > 0.01


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    return copy_of_the_repository(tmp_path_factory.mktemp("copy") / "repo")


SMALL = dict(word.split("=") for word in """steps=2 eval-every=1 n=8 val-episodes=2 group-size=2 samples=1
groups-per-batch=2 max-new-tokens=16 resumes=5 per-cell=5 rollouts=8 batch-size=4""".split())  # fmt: skip


@pytest.mark.slow
@every_notebook
def test_a_notebook_runs(path, copy):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for flag, value in SMALL.items():
            cell.source = re.sub(rf"--{flag} \d+", f"--{flag} {value}", cell.source)
        cell.source = cell.source.replace("steps=2000", "steps=600")  # of the closed form
    check_shown(path, shown(execute(notebook, copy / "notebooks")).replace(str(copy), "/tmp/"))


@pytest.mark.slow
def test_the_first_cell_on_a_fresh_machine(copy, monkeypatch, tmp_path):
    """It clones, installs and changes the folder; without an address it asks for one."""
    for line in ("init -q", "add -A", "-c user.name=x -c user.email=x@x commit -qm x"):
        subprocess.run(["git", "-C", str(copy), *line.split()], check=True)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    published = re.sub(ADDRESS, f'REPO_URL = "{copy.as_uri()}"', FIRST)
    notebook = nbformat.v4.new_notebook()
    then = "from pathlib import Path\n\nimport dpo\nimport show\n\nprint(Path.cwd(), dpo.__file__)"
    notebook.cells = list(map(nbformat.v4.new_code_cell, (published, then)))
    here, stage = shown(execute(notebook, tmp_path)).split()[-2:]
    assert (tmp_path / "feedbackloop/dpo.py").samefile(stage) and here.endswith("feedbackloop")
    notebook.cells = [nbformat.v4.new_code_cell(FIRST)]
    (tmp_path / "else").mkdir()
    with pytest.raises(Exception, match="input"):  # nobody answers here
        execute(notebook, tmp_path / "else")
