"""The pages: their commands parse, their links lead somewhere, docs/metrics.md names what is logged.

The commands are not run: what is held is that a reader who types a line gets no "unrecognized
arguments".
"""

import ast
import contextlib
import importlib
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

PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]
PAGES += [REPO / "data/README.md", *sorted((REPO / "reports").glob("*.md"))]
TRAINERS = ("sft.py", "reward_train.py", "dpo.py", "ppo.py", "grpo_rubric.py", "grpo_agent.py")
STAGES = sorted(path.name for path in REPO.glob("*.py") if path.stem not in ("common", "checks"))
IN_REPO = ("data", "envs", "tests", "docs", "bench", "examples", "reports", "constraints.txt",
           "requirements.txt")  # fmt: skip


# ---- the commands ----


def commands():
    """(page, line) of every command in a shell block of the pages, comments aside."""
    found = []
    for page in PAGES:
        blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
        lines = "".join(blocks).replace("\\\n", " ").splitlines()
        lines = [re.split(r"(?:^|\s)#", line)[0].strip() for line in lines]
        found += [(page.name, line) for line in lines if line]
    return found


def a_readers_folder(folder, text):
    """Our files, and an empty file for every other one that the text names."""
    for name in IN_REPO:
        if not (folder / name).exists():
            (folder / name).symlink_to(REPO / name)
    for name in re.findall(r"[\w./-]+\.(?:jsonl|json|csv|txt|py)\b", text):
        if not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()


def parse(script, words):
    """What the stage reads of the words; SystemExit for a flag that it does not know."""
    stage = importlib.import_module(Path(script).stem)
    if script != "watch.py":
        return stage.parse_args(words[words[:1] == ["values"] :])  # a command of audit.py
    with pytest.raises((UserError, OSError)):  # it has read its flags, and there is no run
        stage.main(words)


@pytest.mark.parametrize("page, line", commands())
def test_a_command_parses(page, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    a_readers_folder(tmp_path, line)
    words = shlex.split(re.split(r" [|>] ", line)[0])
    words = words[next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)) :]
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        launch = get_args_parser().parse_args(words[1:])
        parse(launch.training_script, launch.training_script_args)
    elif words[0] == "make":
        subprocess.run([*words, "-n"], cwd=REPO, capture_output=True, check=True)
    elif words[0].endswith("python") and words[1] in STAGES:
        parse(words[1], words[2:])
    elif words[0].endswith("python") and words[1].startswith("data/"):
        monkeypatch.syspath_prepend(REPO / "data")
        with contextlib.suppress(UserError):  # of an empty file
            importlib.import_module(Path(words[1]).stem).main(words[2:])
    elif words[:2] == ["python", "-c"]:
        ast.parse(words[2])
    elif words[0].endswith("python"):  # -m venv, -m pytest, bench/run.py
        assert words[1] == "-m" or (REPO / words[1]).is_file(), line
    else:
        assert words[0] in ("python3", ".venv/bin/pip", "vllm", "umask", "source", "cp"), line


@pytest.mark.parametrize("script", [name for name in STAGES if name != "watch.py"])
def test_the_headers_commands_parse(script, tmp_path, monkeypatch):
    header = ast.get_docstring(ast.parse((REPO / script).read_text("utf-8")))
    run = re.search(r"^Run\b(.*?)^Writes", header, re.M | re.S)[1]
    lines = re.findall(r"python (\S+\.py)(.*?)(?=\s{3,}|\n|$|\()", run)
    assert lines
    monkeypatch.chdir(tmp_path)
    a_readers_folder(tmp_path, run)
    for name, flags in lines:
        assert name == script
        parse(script, shlex.split(flags))


# ---- the links ----


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(REPO)))
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\((?!http)([^)\s]+)\)", prose):
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if anchor:
            there = file.read_text("utf-8")
            heads = re.findall(r"^#+ (.*)$", there, re.M)
            heads = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]
            assert anchor in heads + re.findall(r'(?:id|name)="([^"]+)"', there), target


# ---- the numbers in the logs ----


def metric_rows():
    """docs/metrics.md as {stage: keys}: the first column of the tables below `## every trainer`
    and `## dpo.py`."""
    tables, text = {}, (REPO / "docs/metrics.md").read_text("utf-8")
    for title, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.M | re.S):
        if stage := re.match(r"`?(every trainer|\w+\.py)`?", title):
            cells = " ".join(re.findall(r"^\| *(`.*?) *\|", body, re.M))
            tables[stage[1]] = set(re.findall(r"`([^`]+)`", cells))
    return tables


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_process")
@pytest.mark.parametrize("name", TRAINERS)
def test_metrics_page_is_the_log(name, tmp_path, reward_folder, monkeypatch):
    """A key that nobody explains is noise, a row for a key that is gone is worse: two steps, with
    evaluations."""
    monkeypatch.chdir(REPO)
    model = tiny_model("llama", tmp_path / "model", max_position_embeddings=1024)  # of a mailbox
    pairs = write_pairs(tmp_path / "pairs.jsonl", n=32)
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": r["prompt"]} for r in pair_rows(16)])
    check = {"check": "length_constraints:number_words", "num_words": 5, "relation": "at least"}
    rubrics = [
        {"prompt": f"Say {word}.", "rubrics": [check, f"It says {word}."]} for word in "abcdefgh"
    ]
    files.write_json(tmp_path / "rubrics.json", rubrics)
    gold = f"--gold {REPO}/tests/tiny.py:share_of_vowels"
    short, group = "--max-new-tokens 6", "--group-size 2 --groups-per-batch 2 --beta 0.01"
    with Rule(lambda *_: True, score=lambda answer: len(answer) % 5 / 5) as server:
        judge = f"--judge-model rule --judge-base-url {server.url}"
        runs = {
            "sft.py": [f"--data {pairs} --eval-fraction 0.2 --prompts {prompts} {gold} {short}"],
            "reward_train.py": [f"--pairs {pairs}"],
            "dpo.py": [f"--pairs {pairs} --prompts {prompts} {gold} {short}"],
            "ppo.py": [f"--prompts {prompts} --reward-model {reward_folder} {gold} {short} --rollouts 4"],
            "grpo_rubric.py": [
                f"--data {tmp_path}/rubrics.json --chat --reward rubric --reward ruler {judge} {gold} {group} {short}"
            ],
            "grpo_agent.py": [
                f"--env envs/{env} --val-episodes 2 {group} {short} {more}"
                for env, more in {
                    "interview.py:Interview": f"--reward ruler {judge}",
                    "twenty48.py:TwentyFortyEight": "",
                    "inbox.py:Inbox": "",
                }.items()
            ],
        }  # fmt: skip
        logged = set()
        for i, flags in enumerate(runs[name]):
            out = tmp_path / str(i)
            flags += f" --model {model} --out {out} --device cpu --steps 2 --eval-every 1"
            importlib.import_module(Path(name).stem).main(shlex.split(flags))
            logged |= {key for row in files.read_jsonl(out / "metrics.jsonl") for key in row}
    tables = metric_rows()
    explained = tables[name] | tables["every trainer"] - {"peak_mem_mb"}  # of a GPU
    if name.startswith("grpo"):
        explained |= tables["judge.py"]
    if name == "grpo_agent.py":  # the page: "as for grpo_rubric.py, but without"
        others = re.compile(r"epoch$|reward/(<part>|lost)|val/gold|test/")
        explained |= tables["grpo_rubric.py"]
        explained = {key for key in explained if not others.match(key)} - {"text/*"}
    for key in [key for key in explained if "<" in key]:
        start = key.partition("<")[0]
        logged = {
            key if re.fullmatch(rf"{start}[^/]+", x) and x not in explained else x for x in logged
        }
    assert sorted(logged - explained) == [], "logged, but without a row in docs/metrics.md"
    assert sorted(explained - logged) == [], "a row in docs/metrics.md, but never logged"
