"""The pages: their commands parse, their links lead somewhere.

The commands are not run: what is held is that a reader who types a line gets no "unrecognized
arguments". The headers of the stages and the notebooks are pages, too.
"""

import ast
import contextlib
import importlib
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from conftest import REPO
from parts.files import UserError

PAGES = [
    path for folder in (".", "docs", "data", "reports") for path in (REPO / folder).glob("*.md")
]
NOTEBOOKS = sorted((REPO / "notebooks").glob("*.ipynb"))
STAGES = sorted(path.name for path in REPO.glob("*.py") if path.stem not in ("common", "checks"))
IN_REPO = "data envs tests docs bench examples reports constraints.txt requirements.txt".split()


# ---- the commands ----


def code_cells(path):
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def commands():
    """(page, line) of every command in a shell block of the pages, comments aside, of the headers
    below "Run", and of `stage(dpo, "--pairs …")` in the notebooks."""
    for page in PAGES:
        blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
        for line in "".join(blocks).replace("\\\n", " ").splitlines():
            if line := re.split(r"(?:^|\s)#", line)[0].strip():
                yield page.name, line
    for name in STAGES:
        header = ast.get_docstring(ast.parse((REPO / name).read_text("utf-8")))
        run = re.search(r"^Run\b(.*?)^Writes", header, re.M | re.S)[1]
        lines = re.findall(rf"python {re.escape(name)}.*?(?=\s{{3,}}|\n|$|\()", run)
        assert lines, name
        yield from ((name, line) for line in lines)
    for path in NOTEBOOKS:
        source = re.sub(r"^%.*$", "", "\n".join(code_cells(path)), flags=re.M)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "stage":
                yield path.name, f"python {node.args[0].id}.py {node.args[1].value}"


def a_readers_folder(folder, text):
    """Our files, and an empty file for every other one that the text names."""
    for name in IN_REPO:
        (folder / name).symlink_to(REPO / name)
    for name in re.findall(r"[\w./-]+\.(?:jsonl|json|csv|txt|py)\b", text):
        if not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()


def parse(script, words):
    """What the stage reads of the words; SystemExit for a flag that it does not know."""
    stage = importlib.import_module(Path(script).stem)
    if script == "watch.py":
        with pytest.raises((UserError, OSError)):  # it has read its flags, and there is no run
            stage.main(words)
    else:
        stage.parse_args(words[words[:1] == ["values"] :])  # a command of audit.py


@pytest.mark.parametrize("page, line", [*commands()])
def test_a_command_parses(page, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a_readers_folder(tmp_path, line)
    line = re.sub(r"^([A-Z_]+=\S+ )*", "", line)  # of the environment
    program, *words = shlex.split(re.split(r" [|>] ", line)[0])
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        launch = get_args_parser().parse_args(words)
        parse(launch.training_script, launch.training_script_args)
    elif program == "make":
        subprocess.run([program, *words, "-n"], cwd=REPO, capture_output=True, check=True)
    elif not program.endswith("python"):
        assert program in "python3 .venv/bin/pip vllm umask source cp".split(), line
    elif words[0] in STAGES:
        parse(*words[:1], words[1:])
    elif words[0].startswith("data/"):
        monkeypatch.syspath_prepend(REPO / "data")
        with contextlib.suppress(UserError):  # of an empty file
            importlib.import_module(Path(words[0]).stem).main(words[1:])
    else:  # -c CODE, -m venv, -m pytest, bench/run.py
        assert words[0] in ("-c", "-m") or (REPO / words[0]).is_file(), line


# ---- the links ----


@pytest.mark.parametrize("page", PAGES + NOTEBOOKS, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\((?!http)([^)\s]+)\)", prose):
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        heads = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.M) if anchor else []
        heads = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]
        assert not anchor or anchor in heads, target


@pytest.mark.parametrize("stage", ["ppo", "grpo_rubric", "grpo_agent", "audit"])
def test_help_fits_seventy_lines(stage, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(stage).main(["--help"])
    assert capsys.readouterr().out.count("\n") <= 70
