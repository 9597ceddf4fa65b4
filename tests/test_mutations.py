"""The "break it" gallery: each entry of docs/gallery.md, a patch of one or two lines."""

import contextlib
import doctest
import functools
import importlib
import inspect
import itertools
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import common
import dpo
import parts
import test_grpo
import test_ppo
from parts import files, runs
from parts.pairs import read_pairs
from tiny import pair_rows, tiny_model, write_rows

REPO = Path(__file__).resolve().parent.parent
MODULES = """parts/files parts/means parts/stats parts/parallel parts/memory parts/lora
parts/shared_prompt common parts/sampling parts/reward_models parts/pairs parts/identities parts/prompting parts/runs parts/guard parts/rollouts
parts/texts parts/recipe checks/maths checks/answers checks/programs checks/risky
checks/instructions watch judge ruler sft
reward_train dpo ppo grpo_rubric grpo_agent evaluate
parts/two_groups parts/rates parts/twins audit fairness""".split()  # in import order
TEXTS = ["Assess this candidate.", "Role: data engineer, python and sql.", "hold", "Ask: kafka?"]
PAGE = (REPO / "docs" / "gallery.md").read_text(encoding="utf-8")
ENTRY = re.compile(  # number, title, module, patch, check, why
    r"^### (\d+)\. (.+)\n[^#]*?```diff\n--- (\S+)\.py\n.*\n((?:[-+].*\n)+)```\n\n"
    r"<details><summary>.*?</summary>\n\n`([\w.]+)`\n\n(.+?)\n\n</details>",
    re.M,
)
SLIPS = ENTRY.findall(PAGE)
CASES = [(f"{n}-{stage}", stage, patch, check) for n, _, stage, patch, check, _ in SLIPS]


def check_shared_prompt(tokenizer, tmp_path):
    """Both answers after one prompt, in one row and in two rows; a Mistral with window 8."""
    model = common.load_policy(tiny_model("mistral", tmp_path, sliding_window=8), trainable=False)
    file = write_rows(tmp_path / "rows.jsonl", pair_rows(4))
    rows = dpo.batch_rows(read_pairs([file], tokenizer, 99, False), range(4), 0)
    one, two = (common.token_logps(model, *rows, shared=shared) for shared in (True, False))
    assert (one - two).abs().max() < 1e-4


def check_docstring_examples(stage):
    result = doctest.testmod(stage)
    assert result.attempted > 0 and result.failed == 0, f"{result.failed} examples differ"


class Stopped(Exception):
    """Thrown where the first update would happen."""


def first_gradient(stage, folder, flags):
    """All gradients that a stage's main() holds before its first update, as one vector."""
    found = []

    def catch(run, where):
        found.extend(p.grad.flatten() for p in run.model.parameters() if p.grad is not None)
        raise Stopped

    runs.Run.update = catch  # of this copy
    runs.stop_signals = lambda: contextlib.nullcontext([0])  # no handlers in the test process
    with pytest.raises(Stopped):
        stage.main([*flags, "--eval-fraction", "0", "--out", str(folder)])
    return torch.cat(found)


def check_micro_batches(stage, llama_folder, reward_folder, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", pair_rows(6))
    flags = {
        "dpo": f"--pairs {file} --model {llama_folder} --nll-coef 1 --max-new-tokens 2",
        "reward_train": f"--pairs {file} --model {reward_folder}",
        "sft": f"--data {file} --model {llama_folder} --max-new-tokens 2",
    }[stage.__name__]
    flags = [*flags.split(), "--batch-size", "6", "--micro-tokens"]
    whole, apart = (first_gradient(stage, tmp_path / n, [*flags, n]) for n in ("1000000", "1"))
    assert whole.abs().max() > 1e-3
    assert (whole - apart).abs().max() < 1e-5 * max(1, whole.abs().max())


def check_preflight(llama_folder, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", pair_rows(6))
    flags = ["--pairs", file, "--model", llama_folder, "--max-new-tokens", "2"]
    try:
        first_gradient(dpo, tmp_path / "out", flags)
    except files.UserError as error:
        raise AssertionError(f"preflight: {error}") from error


@pytest.fixture(scope="session")
def fixtures(tokenizer, llama_folder, reward_folder, folders, reward_folders, tmp_path_factory):
    long = tiny_model("llama", tmp_path_factory.mktemp("agent"), max_position_embeddings=512)
    known = dict(tokenizer=tokenizer, llama_folder=llama_folder, reward_folder=reward_folder)
    return known | {
        "policy": (common.load_policy(long, trainable=False), common.load_tokenizer(long)),
        "folders": folders,
        "reward_folders": reward_folders,
        "world": test_ppo.make_world(tmp_path_factory.mktemp("ppo")),
        "graded": test_grpo.make_graded(tmp_path_factory.mktemp("grpo")),
    }


def load_modules(monkeypatch, broken_one=None, patch=None):
    """{name: fresh copy} of the modules, one with a slip made; they import each other's copies."""
    copies = {}
    for path in MODULES:
        name, short = path.replace("/", "."), path.rpartition("/")[2]
        module = copies[name] = types.ModuleType(name)
        module.__file__ = str(REPO / f"{path}.py")
        monkeypatch.setitem(sys.modules, name, module)
        if name != short:  # `from parts import runs` asks the package first
            monkeypatch.setattr(parts, short, module, raising=False)
        exec(compiled(path, patch if path == broken_one else None), module.__dict__)
    return copies


@functools.cache
def compiled(path, patch=None):
    source = (REPO / f"{path}.py").read_text(encoding="utf-8")
    if patch:
        old, new = ([x[1:] for x in patch.splitlines() if x[0] == sign] for sign in "-+")
        whole_lines = "^( *)" + r"\n(?:\1)?".join(map(re.escape, old)) + "$"
        found = re.findall(whole_lines, source, re.M)
        wrong = f"docs/gallery.md: {path}.py holds the line to take away {len(found)} times"
        assert len(found) == 1, f"{wrong}, correct the entry: {old[0]}"
        text = "\n".join(found[0] + line for line in new)
        source = re.sub(whole_lines, lambda _: text, source, flags=re.M)
    return compile(source, str(REPO / f"{path}.py"), "exec")


def run_check(check, stage, copies, fixtures, tmp_path, monkeypatch):
    """Run a check, or a test of another file with every value of its parametrize marks, on the
    copies."""
    file, name = check.split(".")
    home = importlib.import_module(file)
    for alias, value in list(vars(home).items()):  # `import a as b`, `from a import b`
        if isinstance(value, types.ModuleType) and value.__name__ in copies:
            monkeypatch.setattr(home, alias, copies[value.__name__])
        elif getattr(value, "__module__", None) in copies and hasattr(value, "__qualname__"):
            new = getattr(copies[value.__module__], value.__qualname__, value)
            monkeypatch.setattr(home, alias, new)
    function, choices = getattr(home, name), []
    for mark in getattr(function, "pytestmark", []):
        assert mark.name == "parametrize", f"{check}: the gallery cannot apply the mark {mark.name}"
        names, values = [n.strip() for n in mark.args[0].split(",")], mark.args[1]
        choices.append([dict(zip(names, v if len(names) > 1 else (v,))) for v in values])
    known = {**fixtures, "monkeypatch": monkeypatch, "stage": copies.get(stage.replace("/", "."))}
    for n, combination in enumerate(itertools.product(*choices)):
        known["tmp_path"] = tmp_path / str(n)
        known["tmp_path"].mkdir()
        values = {**known, **{k: v for choice in combination for k, v in choice.items()}}
        function(**{key: values[key] for key in inspect.signature(function).parameters})


RED = (AssertionError, pytest.fail.Exception)  # a crash is no verdict: the check itself must say no


@pytest.mark.parametrize("entry, stage, patch, check", CASES, ids=[f"{c[0]}-{c[3]}" for c in CASES])
def test_slip_turns_its_check_red(
    entry, stage, patch, check, fixtures, tmp_path, monkeypatch, capsys
):
    copies = load_modules(monkeypatch, stage, patch)
    with pytest.raises(RED):
        run_check(check, stage, copies, fixtures, tmp_path, monkeypatch)


OF_A_STAGE = ("check_micro_batches", "check_docstring_examples")  # asked of one stage
CHECKS = sorted({(c[3], c[1] if c[3].endswith(OF_A_STAGE) else "") for c in CASES})


@pytest.mark.parametrize("check, stage", CHECKS)
def test_check_is_green_on_the_code_as_it_is(check, stage, fixtures, tmp_path, monkeypatch, capsys):
    run_check(check, stage, load_modules(monkeypatch), fixtures, tmp_path, monkeypatch)


def test_preflight_cannot_see_swapped_sides(fixtures, tmp_path, monkeypatch, capsys):
    """Swapped sides still start at log 2, so a green preflight is no proof."""
    patch = next(patch for _, _, patch, _ in CASES if "+z = rejected_rewards - chosen" in patch)
    copies = load_modules(monkeypatch, "dpo", patch)
    run_check("test_mutations.check_preflight", "dpo", copies, fixtures, tmp_path, monkeypatch)


def test_the_page_is_whole(monkeypatch):
    assert [int(entry[0]) for entry in SLIPS] == list(range(1, PAGE.count("```diff") + 1))
    assert f"{len(SLIPS)} slips" in PAGE
    assert all(len(why.split()) >= 8 for *_, why in SLIPS)
    with pytest.raises(AssertionError, match="correct the entry: nobody wrote this"):
        load_modules(monkeypatch, "dpo", "-nobody wrote this\n+pass\n")
