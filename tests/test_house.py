"""The house rules of CONTRIBUTING.md, held by reading the files as syntax trees.

A rule that only stands in a document is kept for a month. Everything here finds the stages by
itself: a new script is held to the same rules on the day it is written.
"""

import ast
import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPO
from parts import files
from tiny import pair_rows, write_pairs, write_rows

# Who may import whom, downwards only: stages, parts/runs.py, common.py, the other parts, checks.
# A name in capitals stands for its list.
LAYERS = """
LOWER          parts: card card_sections counterfactual dialogue families files folders lora means
               memory parallel rounding rows shared_prompt stats tables tokens turns
VERDICTS       parts: pages rates reports verdicts
CHECKS         checks: answers decisions instructions maths programs risky
STAGE          common LOWER parts: identities pairs prompting runs
RL             watch STAGE parts: guard reward_models rollouts sampling texts
JUDGED         LOWER CHECKS parts: grades pages questions responses rubrics server

checks.answers         checks: maths
checks.apart           # a script that runs alone
checks.decisions
checks.maths
checks.programs        checks: maths
checks.risky
checks.instructions    parts: dialogue checks: answers maths programs risky
parts.files
parts.rows             parts: files
parts.tokens           parts: files
parts.dialogue         parts: files rows tokens
parts.means
parts.stats            parts: means
parts.sampling         common LOWER parts: cache
parts.texts
parts.blinding
parts.must_haves       parts: blinding
parts.recipe           parts: files
parts.cache            parts: families files parallel
parts.card             parts: files
parts.card_sections    parts: card files
parts.tables           parts: files
parts.turns            parts: dialogue tokens
parts.counterfactual   parts: files people rows
parts.families         parts: files
parts.folders          parts: dialogue
parts.memory           parts: families parallel
parts.guard            parts: files parallel runs
parts.reports          common parts: reward_models files pages parallel rows
parts.frontier         parts: files pages reports stats
parts.evaluation_page  parts: card_sections frontier pages reports
parts.pages            parts: files
parts.verdicts         parts: pages reports stats
parts.two_groups       parts: means stats
parts.rates            parts: means two_groups files pages stats verdicts
parts.people           parts: files tables
parts.ll144            VERDICTS parts: files people stats
parts.viewer           parts: files pages
parts.parallel         parts: files
parts.rounding         parts: families
parts.lora             parts: dialogue families files parallel rounding
parts.shared_prompt    parts: families files parallel
common                 LOWER
parts.runs             common LOWER
parts.identities       common LOWER
parts.pairs            common LOWER
parts.prompting        common LOWER parts: pairs
parts.rollouts         STAGE parts: guard sampling
sft                    STAGE
reward_train           STAGE parts: reward_models
parts.reward_models    common LOWER
dpo                    STAGE parts: kto
parts.votes            parts: files rows
parts.agreement        parts: pages stats votes
parts.judge_votes      parts: files questions server votes
parts.draw             common LOWER parts: pairs prompting reports sampling stats votes
parts.web              parts: files
parts.criteria         parts: agreement dialogue files rubrics
# annotate.py: ruler.py compares answers, for a model that votes
annotate               ruler parts: agreement criteria draw files judge_votes server
                       votes web
ppo                    RL
# what a judge is asked and replies, what it is asked about, and the file of its grades
parts.questions        parts: dialogue
parts.responses        parts: questions
parts.server           parts: files parallel questions responses
parts.rubrics          CHECKS parts: files questions rows
parts.grades           parts: files pages server stats
parts.draft            JUDGED parts: votes
# judge.py names ruler.py as the home of a command that was its own, for one release
judge                  JUDGED parts: draft
ruler                  JUDGED
grpo_rubric            RL JUDGED judge ruler parts: recipe
# of grpo_rubric the math of a group: the one arrow between stages
grpo_agent             RL grpo_rubric ruler parts: server
envs.interview         checks: risky  # which has the one copy of what may not be asked
envs.inbox
envs.twenty48
watch                  parts: files texts viewer
evaluate               common LOWER parts: evaluation_page frontier prompting reports
                       reward_models sampling votes
rank                   common LOWER parts: blinding must_haves pages people prompting reports
parts.biasguard        parts: files tables
parts.twins            VERDICTS LOWER parts: biasguard blinding people rows
parts.fairness_page    VERDICTS parts: biasguard twins
audit                  VERDICTS LOWER parts: biasguard ll144 people
# audit: `fairness.py audit` goes on for one release
fairness               common VERDICTS LOWER CHECKS parts: biasguard fairness_page people
                       prompting sampling twins
"""


def modules_allowed(layers):
    """{module: the modules that it may import}; `parts: a b` is parts.a parts.b."""
    allowed = {}
    for line in re.findall("^[^#\n]+", re.sub("\n +", " ", layers), re.M):
        name, *imports = line.split()
        allowed[name], folder = set(), ""
        for word in imports:
            if word.endswith(":"):
                folder = word.replace(":", ".")
            else:
                allowed[name] |= allowed[word] if word.isupper() else {folder + word}
    return allowed


ARROWS = modules_allowed(LAYERS)
LINES = dict(  # of each file; what is not here has at most 500
    common=900, sft=350, reward_train=400, dpo=420, ppo=600, grpo_rubric=750, grpo_agent=750,
    annotate=600, judge=750, ruler=400, watch=600, evaluate=850, rank=400, audit=700, fairness=850,
    runs=600,
)  # fmt: skip
# wandb only where it is asked for, inside a function; those of the second line come with the first
RUNTIME = """torch transformers tokenizers safetensors flask numpy tqdm requests wandb
werkzeug jinja2 markupsafe urllib3 huggingface_hub""".split()


def names(*patterns):
    return [str(x.relative_to(REPO)) for pattern in patterns for x in sorted(REPO.glob(pattern))]


STAGES = [name for name in names("*.py") if name != "common.py"]
FILES = ["common.py", *STAGES, *names("parts/*.py", "checks/*.py", "envs/*.py")]
SCRIPTS = names("data/*.py", "docs/*.py", "reports/*.py", "bench/*.py")
TRAINERS = ["dpo.py", "ppo.py", "reward_train.py", "sft.py"]
MOVED = [*TRAINERS, "grpo_rubric.py", "grpo_agent.py"]  # they stand on Run
# the rules' titles, from number 3 on
SECTIONS = "the math|the arguments|the data|the models|preflight|the loop|save|the guard".split("|")


def module(name):
    """The dotted name under which a file is imported."""
    return name.removesuffix(".py").replace("/", ".")


def text_of(name):
    return (REPO / name).read_text(encoding="utf-8")


def tree_of(name):
    return ast.parse(text_of(name), filename=name)


def function(tree, name):
    return next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)


# ---- importing ----

WATCH_IMPORT = """
import os, sys
repo, *names = sys.argv[1:]
seen = []

def hook(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        path = os.path.abspath(os.fsdecode(path)) if not isinstance(path, int) else ""
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        data = path.startswith(repo + os.sep) and not path.endswith((".py", ".pyc"))
        if data or (writes and not path.startswith(("/dev/", "/proc/"))):
            seen.append(path)
    elif event in ("socket.connect", "subprocess.Popen", "os.system"):
        seen.append(f"{event} {arguments}")

import torch, tqdm, numpy  # what they do on import is not ours
sys.path.insert(0, repo)
sys.argv = ["a notebook", "--no-such-flag"]
threads = torch.get_num_threads()
sys.addaudithook(hook)
for name in names:
    __import__(name)
    print(f"{name} opened {seen}") if seen else None
    seen.clear()
assert torch.get_num_threads() == threads, "importing changed the number of threads"
"""


def test_importing_does_nothing(tmp_path):
    """`from dpo import dpo_loss` is a supported way to take code away. A script that parses flags
    at import dies of the caller's flags, one that reads its data at import needs our folder:
    nothing may be printed, opened, started."""
    wanted = map(module, FILES)
    command = [sys.executable, "-B", "-c", WATCH_IMPORT, str(REPO), *wanted]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


HELP = """
import runpy, sys
folder, heavy, *scripts = sys.argv[1:]
sys.path.insert(0, folder)  # as `python script.py` does
for script in scripts:
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(f"{folder}/{script}", run_name="__main__")
    except SystemExit as stop:
        assert stop.code in (0, None), stop.code
    found = {m.split(".")[0] for m in sys.modules} & set(heavy.split())
    assert not found, f"{script} --help imported {found}"
"""


@pytest.mark.parametrize("light", [True, False], ids=["the others", "trainers"])
def test_help_is_quick_and_useful(light, tmp_path):
    """`--help` must answer before the reader gives up. transformers costs seconds, so it is
    imported where a model is loaded, and torch only by what trains. Counted in modules, not in
    seconds."""
    heavy = "transformers flask wandb datasets" + " torch" * light
    scripts = [name for name in STAGES if (name in MOVED) != light]
    command = [sys.executable, "-c", HELP, str(REPO), heavy, *scripts]
    environment = {"PATH": "/usr/bin:/bin", "COLUMNS": "100"}
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("usage:") == len(scripts)


@pytest.mark.parametrize("name", FILES)
def test_arrows_point_only_as_designed(name):
    """A cycle cannot be imported at all, and a stage that imports another stage cannot be copied
    out alone. Imports inside functions count, too."""
    assert module(name) in ARROWS, f"{name} is not in the table of CONTRIBUTING.md"
    tree, used = tree_of(name), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "stages are scripts: no relative import"
            of_folder = node.module in ("parts", "checks", "envs")
            used |= {f"{node.module}.{a.name}" for a in node.names} if of_folder else {node.module}
    own = {name for name in used if name in ARROWS or name.startswith(("parts", "checks", "envs"))}
    assert own <= ARROWS[module(name)], sorted(own - ARROWS[module(name)])
    others = {name.split(".")[0] for name in used - own} - {*sys.stdlib_module_names, *RUNTIME}
    assert not others, sorted(others)
    top = {a.name for n in tree.body if isinstance(n, ast.Import) for a in n.names}
    assert "wandb" not in top


# ---- height and width ----


@pytest.mark.parametrize("name", FILES)
def test_a_file_fits_in_one_sitting(name):
    """One question, one file: what grows beyond its lines is two questions."""
    lines = len(text_of(name).splitlines())
    assert lines <= LINES.get(Path(name).stem, 500), f"{name} has {lines} lines"


@pytest.mark.parametrize("name", FILES)
def test_width_and_height(name):
    """100 columns; only blocks of flags and tables, one row per line, are wider. `main` has at most
    70 lines, every other function at most 60; a loss may have more, its docstring is the lesson."""
    text, flags = text_of(name), False
    for number, line in enumerate(text.split("\n"), 1):
        flags = (flags or line.strip() == "# fmt: off") and line.strip() != "# fmt: on"
        wide = flags and line.strip().startswith(("#", "add(", '"'))  # a flag, a row of a table
        assert wide or len(line) <= 100, f"{name}:{number} has {len(line)} columns"
    math = re.search(r"# ---- 3\. the math ----(.*?)# ---- 4\.|$", text, re.S)[1] or ""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and f"def {node.name}(" not in math:
            lines = node.end_lineno - node.lineno + 1
            assert lines <= (70 if node.name == "main" else 60), f"{node.name} has {lines} lines"


@pytest.mark.parametrize(
    "name, most", [("sft.py", 31), ("reward_train.py", 33), ("dpo.py", 37), ("grpo_agent.py", 45)]
)
def test_number_of_flags(name, most):
    """Trainers share 23 flags; with its own dpo.py has 37 at most, the plainer two fewer."""
    shared = flags_of("parts/runs.py")
    assert len(shared) == 23 and len(shared) + len(flags_of(name)) <= most


# ---- the script on the page ----


@pytest.mark.parametrize("name", STAGES)
def test_order_of_the_sections(name):
    """`diff reward_train.py dpo.py` is a lecture only while both keep the same order. The rules `#
    ---- 3. the math` rise, and each is called what SECTIONS calls it."""
    text = text_of(name)
    rules = re.findall(r"^ *# -{2,} (\d+)\. (.*?) -{2,}$", text, re.M)
    numbers = [int(n) for n, _ in rules]
    assert numbers == sorted({3, 4, 5, 8, 9, *numbers})
    assert [title for _, title in rules] == [SECTIONS[n - 3] for n in numbers]
    guard = tree_of(name).body[-1]
    assert isinstance(guard, ast.If) and "__main__" in ast.unparse(guard.test)


@pytest.mark.parametrize("name", STAGES)
def test_same_function_for_the_same_job(name):
    """The reader who knows one stage finds the same names in the next. Trainers have all five."""
    tree = tree_of(name)
    wanted = ["parse_args", "main"]
    if name in TRAINERS:
        wanted = ["parse_args", "load_data", "load_models", "preflight", "main"]
    order = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in wanted]
    assert order == wanted
    for each in ("parse_args", "main"):  # callable from a notebook and from a test, with a list
        arguments = function(tree, each).args
        assert [a.arg for a in arguments.args] == ["argv"] and len(arguments.defaults) == 1


@pytest.mark.parametrize("name", STAGES)
def test_the_header_is_what_the_code_does(name):
    """Objective, box, conventions, what is left out, how to run it, what it writes: in this order,
    in every stage. The numbers (1) (2) … of the box and the comments `# (1) …` in `main` (of
    evaluate.py, whose commands are functions, in the file) are the same, in the same order; a step
    that moved must be renumbered in both."""
    tree, text = tree_of(name), text_of(name)
    header, main = ast.get_docstring(tree), ast.get_source_segment(text, function(tree, "main"))
    words = "Objective|Algorithm|Conventions|Left out|Run|Writes|Reference|Axes"
    found, wanted = re.findall(rf"^({words})\b", header, re.M), words.split("|")
    assert header.startswith(f"{name}: ") and found[:6] == wanted[:6]
    assert found == [word for word in wanted if word in found]
    box = re.search(r"^Algorithm(.*?)^(?=\S)", header, re.M | re.S)[1]
    promised = [int(n) for n in re.findall(r"\((\d+)\) ", box)]
    assert promised == list(range(1, len(promised) + 1)) and promised
    body = main if re.search(r"# \(\d+\)", main) else text
    assert [int(n) for n in re.findall(r"^\s*# \((\d+)\)", body, re.M)] == promised


# ---- flags ----


def flags_of(name):
    """Flag's name in the namespace of every add_argument in a file."""
    flags = set()
    for node in ast.walk(tree_of(name)):
        called = getattr(node, "func", None)
        if getattr(called, "attr", "") == "add_argument" or getattr(called, "id", "") == "add":
            texts = [a.value for a in node.args if isinstance(getattr(a, "value", None), str)]
            dest = [k.value.value for k in node.keywords if k.arg == "dest"]
            names = dest or [text for text in texts if text.startswith("--")] or texts
            flags |= {name.lstrip("-").replace("-", "_") for name in names[:1]}
    return flags


def reads_of(*names):
    """Names read as `args.name` (or getattr(args, "name")) anywhere in these files."""
    read = set()
    for node in (node for name in names for node in ast.walk(tree_of(name))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = getattr(node.value, "id", getattr(node.value, "attr", None))
            read |= {node.attr} if owner in ("args", "options") else set()  # args.lr, self.args.lr
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "getattr":
            read |= {getattr(node.args[1], "value", None)}
    return read


@pytest.mark.parametrize("name", [*FILES, *SCRIPTS])
def test_every_flag_is_read(name):
    """A flag that nobody reads is a lie in the help. Each `--some-flag` has an `args.some_flag` in
    the same file; the flags that all trainers share may be read in the plumbing or in every
    trainer."""
    read = reads_of(name)
    if name == "parts/runs.py":
        by_all = (reads_of(path, "parts/rollouts.py") for path in MOVED)
        read |= set.intersection(*by_all) | reads_of("parts/parallel.py")
    elif name in FILES:
        read |= reads_of("parts/runs.py", "parts/parallel.py", "parts/prompting.py")
    assert flags_of(name) <= read


@pytest.mark.parametrize("name", FILES)
def test_float64_is_made_on_the_cpu(name):
    """A Mac's GPU has no float64: `x.double()` there ends the run."""
    text = text_of(name)
    for line in re.findall(r".*(?<!\.cpu\(\))\.double\(\).*", text):
        assert "> 0)" in line or "== 0)" in line or "equal" in line or "cdf = " in line, line


# ---- examples ----


@pytest.mark.parametrize("name", FILES)
def test_docstring_examples(name):
    """Examples worked by hand are the first thing a reader believes. They run, and there is at
    least one."""
    result = doctest.testmod(importlib.import_module(module(name)))
    assert result.failed == 0
    plain = ("lora", "memory", "rollouts", "shared_prompt", "turns")
    assert result.attempted > 0 or name in [f"parts/{stem}.py" for stem in plain]


# ---- documents ----


def metric_rows(text):
    """docs/metrics.md as {stage: keys}: the first column of the tables below `## every trainer`
    and `## dpo.py`."""
    tables = {}
    for title, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.M | re.S):
        if stage := re.match(r"`?(every trainer|\w+\.py)`?", title):
            cells = " ".join(re.findall(r"^\| *(`.*?) *\|", body, re.M))
            tables[stage[1]] = set(re.findall(r"`([^`]+)`", cells))
    return tables


def check_metrics(logged, explained):
    """A key that nobody explains is noise, a row for a key that is gone is worse."""
    assert sorted(logged - explained) == [], "logged, but without a row in docs/metrics.md"
    assert sorted(explained - logged) == [], "a row in docs/metrics.md, but never logged"


@pytest.mark.parametrize("name", TRAINERS)
def test_metrics_page_is_the_log(name, tmp_path, llama_folder, reward_folder):
    """Every key in metrics.jsonl has a row in docs/metrics.md, and every row a key: two steps on
    sixteen pairs, with an evaluation."""
    pairs = write_pairs(tmp_path / "pairs.jsonl", n=32)
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": r["prompt"]} for r in pair_rows(16)])
    draws = f"--prompts {prompts} --gold {REPO}/tests/tiny.py:share_of_vowels --max-new-tokens 4"
    own = {
        "sft.py": f"--data {pairs} {draws}",
        "reward_train.py": f"--pairs {pairs}",
        "dpo.py": f"--pairs {pairs} {draws}",
        "ppo.py": f"{draws} --reward-model {reward_folder} --rollouts 8",
    }[name]
    argv = (
        f"{own} --model {llama_folder} --out {tmp_path}/run --batch-size 4 --steps 2 --device cpu"
    )
    argv += " --eval-every 1 --eval-fraction 0.25"
    importlib.import_module(module(name)).main(argv.split())
    logged = {key for row in files.read_jsonl(tmp_path / "run/metrics.jsonl") for key in row}
    tables = metric_rows(text_of("docs/metrics.md"))
    check_metrics(logged, tables["every trainer"] | tables[name])
