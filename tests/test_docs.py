"""The pages: their commands parse, their links lead somewhere, docs/metrics.md names what is logged.

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
from judge_server import Rule
from parts import files
from parts.files import UserError
from tiny import pair_rows, tiny_model, write_pairs, write_rows

PAGES = [
    path for folder in (".", "docs", "data", "reports") for path in (REPO / folder).glob("*.md")
]
NOTEBOOKS = sorted((REPO / "notebooks").glob("*.ipynb"))
STAGES = sorted(path.name for path in REPO.glob("*.py") if path.stem not in ("common", "checks"))
IN_REPO = ("data", "envs", "tests", "docs", "bench", "examples", "reports", "constraints.txt",
           "requirements.txt")  # fmt: skip


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
        assert program in ("python3", ".venv/bin/pip", "vllm", "umask", "source", "cp"), line
    elif words[0] in STAGES:
        parse(*words[:1], words[1:])
    elif words[0].startswith("data/"):
        monkeypatch.syspath_prepend(REPO / "data")
        with contextlib.suppress(UserError):  # of an empty file
            importlib.import_module(Path(words[0]).stem).main(words[1:])
    elif words[0] == "-c":
        ast.parse(words[1])
    else:  # -m venv, -m pytest, bench/run.py
        assert words[0] == "-m" or (REPO / words[0]).is_file(), line


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


# ---- the numbers in the logs ----


def metric_rows(stage):
    """The keys of docs/metrics.md: first column of the tables below `## every trainer` and of the
    section that names the stage."""
    page = (REPO / "docs/metrics.md").read_text("utf-8")
    sections = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    (every,) = (body for title, body in sections if title == "every trainer")
    (own,) = (body for title, body in sections if f"`{stage}.py`" in title)
    return set(re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (`.*?) \|", every + own, re.M))))


def is_row_of(row, key):
    """Is it the row of a logged key? `reward/<part>` is of every part."""
    return re.fullmatch(re.sub(r"<\w+>", "[^/]+", row), key)


STEPS = "--device cpu --steps 2 --eval-every 1"
GOLD = "--prompts p.jsonl --gold tiny.py:share_of_vowels --max-new-tokens 6"
GROUP = "--group-size 2 --groups-per-batch 2 --beta 0.01 --reward ruler --max-new-tokens 6"
RUNS = {
    "sft": ["sft --data pairs.jsonl --eval-fraction 0.2 " + GOLD],
    "reward_train": ["reward_train --pairs pairs.jsonl"],
    "dpo": ["dpo --pairs pairs.jsonl " + GOLD],
    "ppo": ["ppo --rollouts 4 --reward-model reward " + GOLD],
    "grpo_agent": [
        f"grpo_rubric --data r.json --chat --reward rubric --gold tiny.py:share_of_vowels {GROUP}",
        f"grpo_agent --env envs/interview.py:Interview --val-episodes 2 {GROUP}",
        f"grpo_agent --env envs/twenty48.py:TwentyFortyEight --val-episodes 2 {GROUP}",
        f"grpo_agent --env envs/inbox.py:Inbox --val-episodes 2 {GROUP}",
    ],
}


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_process")
@pytest.mark.parametrize("name", RUNS)
def test_metrics_page_is_the_log(name, tmp_path, reward_folder, monkeypatch):
    """A key that nobody explains is noise, a row for a key that is gone is worse: two steps, with
    evaluations."""
    a_readers_folder(tmp_path, "")
    monkeypatch.chdir(tmp_path)
    model = tiny_model("llama", ".", max_position_embeddings=1024)  # of a mailbox
    Path("reward").symlink_to(reward_folder)
    Path("tiny.py").symlink_to(REPO / "tests/tiny.py")
    write_pairs("pairs.jsonl", n=32)
    write_rows("p.jsonl", [{"prompt": row["prompt"]} for row in pair_rows(16)])
    check = {"check": "length_constraints:number_words", "num_words": 5, "relation": "at least"}
    rubrics = [{"prompt": f"Say {c}.", "rubrics": [check, f"It says {c}."]} for c in "abcdefgh"]
    files.write_json("r.json", rubrics)
    logged = set()
    with Rule(lambda *_: True, score=lambda answer: len(answer) % 5 / 5) as server:
        judge = f"--judge-model rule --judge-base-url {server.url}"
        for i, run in enumerate(RUNS[name]):
            stage, *flags = f"{run} --model {model} --out {i} {STEPS}".split()
            flags += judge.split() * ("ruler" in flags)
            importlib.import_module(stage).main(flags)
            logged |= {key for row in files.read_jsonl(f"{i}/metrics.jsonl") for key in row}
    rows = metric_rows(name) - {"peak_mem_mb"}  # of a GPU
    new = [key for key in logged if not any(is_row_of(row, key) for row in rows)]
    old = [row for row in rows if not any(is_row_of(row, key) for key in logged - (rows - {row}))]
    assert (new, old) == ([], []), "without a row in docs/metrics.md; never logged"
