"""Living documentation: what README.md and docs/ tell a reader to type is typed here, and what
they state is computed again.

Every command of a fenced shell block runs, in a copy of the project with few rows in its data and a
reader's own files, in the order of its page; SMALL adds the flags that make it small, and where
fairness.py has none `shop` lowers its constants. A hub name such as Qwen/Qwen2.5-0.5B-Instruct is a
folder of that name in the copy, so that the command is the printed one. What cannot run here stands
in NOT_RUN with its reason, and is parsed. Elsewhere: docstring examples of the stages, the box
against the loop, flags that nobody reads, and docs/metrics.md for sft, reward_train, dpo and ppo in
test_house.py; for grpo_rubric.py and judge.py in test_grpo_judge.py and test_judge.py; the alarms'
table in test_watch.py; the full demo in test_demo.py.
"""

import ast
import doctest
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fairness
from conftest import REPO, browser_or_skip
from parts import files, twins
from test_annotate import Rater, Server
from test_demo import small_copy
from test_draft import Writer
from test_grpo_judge import Rule
from test_house import SCRIPTS, STAGES, check_metrics, metric_rows
from tiny import read_json, write_rows

sys.path[:0] = [str(REPO / "reports"), str(REPO / "docs")]
import fill_numbers  # noqa: E402

PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]


def table(text):
    return [tuple(part.strip() for part in line.split("→")) for line in text.strip().splitlines()]


# what a line must match to be left unrun, and why; how it is looked at instead stands in
# `test_what_cannot_run_is_parsed`
NOT_RUN = table(r"""
make demo → minutes: test_demo.py runs it at toy size
make test → it is what runs this test
make format → rewrites the project
python3 -m venv|\.venv/bin/pip → needs the package index
\.venv/bin/python -m pytest → a part of the tests
python docs/screenshots\.py → a test of its own takes the pictures where there is a Chromium
vllm serve → needs vLLM and a GPU
torchrun → needs several GPUs; test_distributed.py runs two processes on a CPU
python bench/memory\.py → test_memory.py runs it for the promises of docs/scale.md
(python )?bench/run\.py → needs half an hour of a quiet machine, and TRL
""")
TRAIN = "--steps 2 --batch-size 4 --eval-every 0 --device cpu"
SHORT = "--max-new-tokens 4"
DRAW = "--steps 2 --group-size 2 --groups-per-batch 2 --device cpu --max-new-tokens"
TWINS = "--names-per-cell 2 --resumes 2"
# the first that matches adds its flags; a line that nothing matches fails
SMALL = table(rf"""
grpo_agent\.py play → --episodes 8
grpo_agent\.py → {DRAW} 8 --val-episodes 2 --test-episodes 2
grpo_rubric\.py.* --judge-base-url → {DRAW} 4 --eval-every 0 --judge-base-url JUDGE
grpo_rubric\.py → {DRAW} 4 --eval-every 0
ppo\.py → {TRAIN} {SHORT} --rollouts 4
dpo\.py.*--stop-after → {TRAIN} {SHORT} --stop-after 1
(dpo|sft)\.py → {TRAIN} {SHORT}
reward_train\.py → {TRAIN}
evaluate\.py reward → --pairs few_pairs.jsonl
evaluate\.py compare.* --bon 0 → --n 4 --max-new-tokens 8
evaluate\.py compare → --n 4 --samples 1 --bon 2 --max-new-tokens 8
evaluate\.py human →
rank\.py →
audit\.py|fairness\.py text →
fairness\.py twins → {TWINS}
fairness\.py → {TWINS}
judge\.py → --judge-base-url JUDGE
annotate\.py draw → --limit 4 --max-new-tokens 8
annotate\.py judge → --judge-base-url JUDGE
annotate\.py|watch\.py|reports/fill_numbers\.py|python -c|grep →
""")
GOES_ON = r"--resume|annotate\.py (export|agreement|judge|--out)|^umask"
HUB = r"\b[A-Z]\w+/[A-Z][\w.-]+"  # Qwen/Qwen2.5-0.5B


# ---- the commands ----


def commands():
    found = []
    for page in PAGES:
        blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
        lines = "".join(blocks).replace("\\\n", " ").splitlines()
        lines = [re.split(r"(?:^|\s)#", line)[0].strip() for line in lines]
        found += [(page.name, line) for line in lines if line]
    return found


LINES = commands()


def why_not(line):
    return next((why for pattern, why in NOT_RUN if re.match(pattern, line)), None)


def script_of(line):
    words = shlex.split(line)
    python = words[0] in ("python", ".venv/bin/python") and words[1].endswith(".py")
    return (words[1], words[2:]) if python else None


def module(script):
    name = Path(script).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, REPO / script)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str((REPO / script).parent))  # as `python script.py` does
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def out_of(line):
    if found := re.search(r"--out (\S+)", line):
        return found[1]
    if re.search(r"grpo_agent\.py play|--dry-run|watch\.py", line):  # they show, and write nothing
        return None
    if script_of(line):
        script, words = script_of(line)
        return getattr(module(script).parse_args(words), "out", None)
    return re.search(r"runs/\w+|$", line)[0] or None


def reader_files(copy):
    """A reader's own files, in every format that the pages speak of."""
    import datasets
    import pandas

    pairs = list(files.read_jsonl(REPO / "data/prefs_train.jsonl"))[:400:20]
    write_rows(copy / "few_pairs.jsonl", pairs)
    keys = ("prompt", "chosen", "rejected")
    write_rows(copy / "mine.jsonl", [{key: row[key] for key in keys} for row in pairs])
    prompts = list(files.read_jsonl(REPO / "data/prompts.jsonl"))[:1600:100]
    write_rows(copy / "my_prompts.jsonl", [{"prompt": row["prompt"]} for row in prompts])

    page = (REPO / "docs/adapt.md").read_text("utf-8")
    (copy / "my_task.py").write_text(re.search(r"```python\n(# my_task.py\n.*?)```", page, re.S)[1])
    own = json.loads(re.search(r"```json\n(\[.*?)```", page, re.S)[1])  # the page's own row
    rubrics, rated, rows = read_json(REPO / "data/rubrics_judge.json")[:8], [], []
    texts = "Strengths: charting.\nGaps: home visits.\nRecommendation: hold.", "How old are you?"
    for i, row in enumerate(rubrics):
        row.pop("split", None)
        ratings = {n: ("no", "yes")[(i + n) % 2] for n in range(1, len(row["rubrics"]) + 1)}
        rated.append(row | {"response": texts[i % 2], "ratings": ratings})
        rows += [{key: row[key] for key in ("task_id", "prompt")} | {"response": x} for x in texts]
    files.write_json(copy / "mine.json", rubrics + own)
    files.write_json(copy / "rated.json", rated)
    write_rows(copy / "answers.jsonl", rows)

    people = {"hired": [0, 1] * 30, "advanced": [0, 0, 1, 1] * 15, "race": [*"baa"] * 20}
    people |= {"score": [i % 7 for i in range(60)], "sex": [*"MF"] * 30, "role": [*"xxxyyy"] * 10}
    people |= {"race_ethnicity": ["White", "Black", "Asian"] * 20}
    people |= {"qualified": [0, 1, 1] * 20}
    pandas.DataFrame(people).to_csv(copy / "people.csv", index=False)
    (copy / "role.txt").write_text("Role: head content editor\nMust have: search ads, copy\n")
    profiles = [f"Asha Booker, {i} years. Used copy and sold {i} items." for i in range(6)]
    table = pandas.DataFrame({"id": range(6), "profile": profiles})
    table.to_csv(copy / "candidates.csv", index=False)

    prompts = [f"Note {i}: " for i in range(40)]
    table = pandas.DataFrame({"prompt": prompts, "chosen": "Skills: audits.", "rejected": "No."})
    table.to_csv(copy / "mine.csv", index=False)
    renamed = table.set_axis(["question", "better", "worse"], axis=1)
    renamed.to_csv(copy / "renamed.csv", index=False)
    table.to_json(copy / "array.json", orient="records")
    table.to_parquet(copy / "mine.parquet")
    datasets.Dataset.from_pandas(table).save_to_disk(copy / "saved")
    # of `make real-model`, and of the hub
    for name in {"runs/smollm2", *(name for _, line in LINES for name in re.findall(HUB, line))}:
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).symlink_to(copy / "data" / "tiny-base")


class Shop:
    """The copy of the project, the judge's address, and which lines have run in it."""

    def __init__(self, copy, judge):
        self.copy, self.judge, self.done = copy, judge, set()

    def run(self, n):
        if n in self.done:
            return
        self.done.add(n)
        line = LINES[n][1]
        flags = next((flags for pattern, flags in SMALL if re.search(pattern, line)), None)
        assert flags is not None, f"no entry of SMALL or NOT_RUN for: {line}"
        out = out_of(line)
        fed_by_its_own = any(w.startswith(f"{out}/") for w in shlex.split(line))
        if out and not re.search(GOES_ON, line) and not fed_by_its_own:
            old = self.copy / out  # another page's run of that name
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
        self.execute(f"{line} {flags}".replace("JUDGE", self.judge).strip())
        if out:
            assert (self.copy / out).exists(), f"{line}\nwrote no {out}"

    def execute(self, line):
        found = script_of(line)
        serves = found and found[0] == "annotate.py"
        serves = serves and not re.search(r"annotate\.py (draw|export|agreement|judge)", line)
        if serves:
            return self.session(found[1])
        if found and "/" not in found[0]:  # here: importing torch costs more than the command
            status = module(found[0]).main(found[1])
            assert status in (0, None), status
        else:
            shell = re.sub(r"^python ", f"{sys.executable} ", line)
            subprocess.run(["bash", "-c", shell], cwd=self.copy, check=True, timeout=600)

    def session(self, words):
        server = Server(*words, folder=self.copy)
        for name in ("ann", "ben"):
            rater = Rater(server.poster(), name)
            while "--criteria" in words and rater.state["item"]:
                rater.vote("rated", ratings=dict.fromkeys(rater.state["item"]["criteria"], "yes"))
            if not rater.state["item"]:
                continue
            rater.vote("left", edit="Skills: audits.\nFit: no evidence.")
            rater.vote_all(lambda r: ("right", "left")[r.state["item"]["item"] % 2])
        assert server.stop() == 0


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    copy = small_copy(tmp_path_factory.mktemp("reader"))
    shutil.copy(REPO / "data/prompts.jsonl", copy / "data")  # fill_numbers.py quotes one of them
    reader_files(copy)

    class Judge(Rule):
        def answer(self, body):
            return Writer().draft(body) or super().answer(body)

    def meets(task, criterion, answer):
        return len(criterion + answer) % 2 == 0

    few = {(fairness, "INTERVIEWS"): 8, (fairness, "MAX_NEW_TOKENS"): 8}
    few |= {(twins, "DRAWS"): 200, (twins, "PERMUTATIONS"): 400}
    with (
        Judge(meets, score=lambda answer: len(answer) % 5 / 5) as judge,
        pytest.MonkeyPatch.context() as patch,
    ):
        for (home, name), value in few.items():
            patch.setattr(home, name, value)
        yield Shop(copy, judge.url)


RUN = [n for n, (_, line) in enumerate(LINES) if not why_not(line)]


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_process", "fast_half_products")
@pytest.mark.parametrize("n", RUN, ids=lambda n: f"{LINES[n][0]}: {LINES[n][1][:60]}")
def test_every_command_of_the_pages_runs(n, shop, monkeypatch):
    monkeypatch.chdir(shop.copy)
    demo = [i for i in RUN if "--out runs/demo/" in LINES[i][1]]
    for i in [*demo, n]:
        shop.run(i)


def test_what_cannot_run_is_parsed(monkeypatch):
    from torch.distributed.run import get_args_parser

    monkeypatch.delenv("MAKEFLAGS", raising=False)  # of `make test PY=python`, which has no venv
    command = ["make", "-n", "-B", "demo"]
    made = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
    looked = []
    for _, line in LINES:
        if not why_not(line):
            continue
        words = shlex.split(line)
        if words[0] == "torchrun":
            launch = get_args_parser().parse_args(words[1:])
            stage = module(launch.training_script)
            assert stage.parse_args(launch.training_script_args).model, line
        elif words[0] == "make":
            subprocess.run([*words, "-n"], cwd=REPO, capture_output=True, check=True)
        elif re.match(r"python3 -m venv|\.venv/bin/pip", line):
            assert line in made.splitlines(), line
        elif script_of(line):
            module(words[1]).parse_args(words[2:])
        else:  # a test file that exists; a folder or a hub name to serve
            assert words[0] == "vllm" or (REPO / words[-1]).exists(), line
        looked.append(line)
    assert len(looked) + len(RUN) == len(LINES)


@pytest.mark.parametrize("script", STAGES)
def test_the_headers_commands_parse(script):
    header = ast.get_docstring(ast.parse((REPO / script).read_text("utf-8")))
    run = re.search(r"^Run\b(.*?)^Writes", header, re.M | re.S)[1]
    lines = re.findall(r"python (\S+\.py)(.*?)(?=\s{3,}|\n|$|\()", run)
    assert lines
    for name, flags in lines:
        assert name == script
        module(script).parse_args(shlex.split(flags))


# ---- examples, flags, links ----


EXAMPLES = [name for name in SCRIPTS if ">>>" in (REPO / name).read_text("utf-8")]


@pytest.mark.parametrize("script", EXAMPLES)
def test_examples_outside_the_stages(script):
    result = doctest.testmod(module(script))
    assert result.failed == 0 and result.attempted > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
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


def table_cells(line):
    """The cells of a row of a table; of other lines []."""
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []


def test_every_rule_says_when_it_was_checked():
    """A page of rules is stale the day after it is written: each row has the month of its last
    check, or `never` and the mark of what was taken over unchecked; the title promises no date."""
    text = (REPO / "docs/law.md").read_text("utf-8")
    rows = [row for row in map(table_cells, text.split("\n")) if len(row) == 4]
    heads = [row for row in rows if row[2] == "last check"]
    rules = [row for row in rows if row not in heads and not set(row[2]) <= set("-:")]
    assert len(heads) == 2 and len(rules) > 15 and not re.search(r"\d", text.split("\n")[0])
    for _, said, checked, source in rules:
        assert source, said
        if checked == "never":
            assert said.startswith("†"), said
        else:
            assert re.fullmatch(r"[A-Z][a-z]+ 20\d\d", checked) and not said.startswith("†"), said
    assert "have **not checked ourselves**" in text


# ---- numbers ----


def test_numbers_of_the_pages_are_those_of_the_reports():
    """README.md, docs/adapt.md and docs/scale.md say what reports/, the scripts' lines and the
    formulas say. Stale: run `python reports/fill_numbers.py`."""
    for page in fill_numbers.PAGES:
        text = (REPO / page).read_text("utf-8")
        assert "<!-- numbers:" in text and fill_numbers.filled(text) == text, page
        marks = len(re.findall(r"<!-- numbers:[\w-]+ -->\n", text))
        assert text.count("<!-- numbers:") == text.count("<!-- /numbers -->") == marks


def test_no_number_of_the_readme_is_typed():
    text = (REPO / "README.md").read_text("utf-8")
    blocks = (r"<!-- numbers:.*?<!-- /numbers -->", r"^```.*?^```", r"`[^`\n]*`")
    for cut in (*blocks, r"\[\d{4}\.\d{5}\]\(\S+\)"):
        text = re.sub(cut, "", text, flags=re.M | re.S)
    text = text.replace("Python 3.10", "")
    assert re.findall(r"\d+(?:\.\d+)? ?%|\d\.\d|\[\d", text) == []


@pytest.mark.slow
def test_pictures_can_be_taken_again(tmp_path):
    import screenshots

    browser_or_skip()
    screenshots.main(["--out", str(tmp_path)])
    taken, kept = ({f.name: f.stat().st_size for f in x.glob("*.png")} for x in (tmp_path, REPO / "docs/img"))  # fmt: skip
    pages = ("annotate", "fairness", "report", "watch-grpo", "watch-ppo")
    both = {f"{page}-{window}.png" for page in pages for window in ("laptop", "phone")}
    assert kept.keys() == both | {"fairness-dark.png", "report-dark.png"}
    # those of watch.py need the runs of make demo
    assert {name for name in kept if not name.startswith("watch-")} <= taken.keys() <= kept.keys()
    assert all(20_000 < size < 150_000 for size in [*taken.values(), *kept.values()]), taken


# ---- the log of grpo_agent.py ----


@pytest.mark.usefixtures("quiet_process")
def test_metrics_page_is_the_log_of_the_agents(llama_folder, tmp_path, monkeypatch):
    import grpo_agent

    monkeypatch.chdir(REPO)
    logged = set()
    short = """--device cpu --steps 2 --beta 0.01 --group-size 2 --groups-per-batch 2
        --val-episodes 2 --test-episodes 0 --eval-every 1 --max-new-tokens 6 --max-length 256"""
    with Rule(score=lambda answer: len(answer) % 5 / 5) as server:
        ruler = f"--reward env --reward ruler:0.5 --judge-model rule --judge-base-url {server.url}"
        for env, more in {
            "interview.py:Interview": ruler,
            "twenty48.py:TwentyFortyEight": "",
        }.items():
            out = tmp_path / env
            flags = f"--env envs/{env} --model {llama_folder} --out {out} {short} {more}"
            grpo_agent.main(flags.split())
            logged |= {key for row in files.read_jsonl(out / "metrics.jsonl") for key in row}
    for kind, name in re.findall(r"(\S+/)(<\w+>)", "env/baseline/<name> env/baseline_reward/<name> env/fault/<kind> env/kind/<kind>"):  # fmt: skip
        logged = {kind + name if key.startswith(kind) else key for key in logged}
    tables = metric_rows((REPO / "docs" / "metrics.md").read_text(encoding="utf-8"))
    rubric = tables["grpo_rubric.py"] - {
        "val/gold",
        "val/gold_low",
        "val/gold_high",
        "reward/<part>",
        "reward/lost/<part>",
    }
    others = re.compile("epoch|reward/lost|pass_rate|test/n")
    rubric = {key for key in rubric if not others.match(key)}
    judge = {key for key in tables["judge.py"] if not key.startswith("judge/canary")}
    own = tables["grpo_agent.py"] - {"text/*"}
    check_metrics(logged, (tables["every trainer"] - {"epoch"}) | rubric | judge | own)


def test_the_faq_has_the_commands_of_make_demo():
    """docs/faq.md promises the demo without make; the two lists drift at the first new flag."""
    command = ["make", "-n", "-B", "demo", "PY=.venv/bin/python"]
    made = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
    made = re.findall(r"^\.venv/bin/python \w+\.py .*", made, re.M)
    made = [re.split(r" > | \|\| ", line)[0] for line in made]  # a person reads on after status 3
    told = (REPO / "docs" / "faq.md").read_text("utf-8")
    assert made == re.findall(r"^\.venv/bin/python \w+\.py .*", told, re.M) and len(made) >= 3
