"""What a user does wrong, and the one line that tells him: flag, file, line, the fix; status 2.

Each case is run by the stage's own `main` with `--out` on a finished run and `--overwrite`: the
worst place to fail. `refused` checks three things at once: one line and no traceback, the words
that a new user needs, and that the run which lay there is untouched, file by file. The rows, model
folders and run folders that every stage refuses alike are tabled in test_common_text.py,
test_common_model.py and test_runs.py; here stands what each stage reads by itself.
"""

import hashlib
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import common
import dpo
import ppo
import reward_train
import sft
from parts import files
from tiny import pair_rows, tiny_model, tiny_reward_model, tiny_tokenizer, write_pairs, write_rows

REPO = Path(__file__).resolve().parent.parent
FLAGS = {sft: "--data", reward_train: "--pairs", dpo: "--pairs", ppo: "--prompts"}
ALL = [*FLAGS]  # ppo.py reads prompts and draws its own answers
each_stage = pytest.mark.parametrize("stage", ALL[:3], ids=lambda s: s.__name__)
every_stage = pytest.mark.parametrize("stage", ALL, ids=lambda s: s.__name__)
VOWELS = f"{Path(__file__).with_name('tiny.py')}:share_of_vowels"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch, quiet_process):
    """Relative names in messages, as a user types them."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Models and pairs to be read, and a finished run of each stage to be damaged."""
    folder = tmp_path_factory.mktemp("world")
    world = {
        "policy": tiny_model("llama", folder),
        "reward": tiny_reward_model("llama", folder / "reward"),
        "pairs": write_pairs(folder / "pairs.jsonl", 12),
        "runs": folder / "runs",
    }
    for stage in ALL:
        assert not stage.main(argv_of(stage, world, folder / "runs" / stage.__name__))
    return world


def argv_of(stage, world, out, *flags):
    """A short run; a flag given again replaces its value here."""
    argv = [FLAGS[stage], world["pairs"], "--model", world["policy"]]
    argv += ["--out", str(out), "--steps", "2", "--batch-size", "4"]
    argv += [] if stage is reward_train else ["--max-new-tokens", "4"]
    if stage is ppo:
        argv += ["--rollouts", "4", "--ppo-epochs", "1", "--eval-fraction", "0.2"]
        argv += [] if "--reward-model" in flags else ["--reward-fn", VOWELS]
    return [*argv, *map(str, flags)]


def files_of(folder):
    """Name → hash of every file below the folder."""
    paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def refused(stage, world, capsys, *flags, words=(), mode="--overwrite"):
    """Run over a finished run, which must stay; the one line of the refusal holds the words."""
    run = world["runs"] / stage.__name__
    before = files_of(run)
    argv = argv_of(stage, world, run, *([mode] if mode else []), *flags)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        files.command(lambda: stage.main(argv))
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert said.startswith("error: ") and said.count("\n") == 1, said
    assert "Traceback" not in said and len(said) < 600
    assert files_of(run) == before, "the run that lay there was damaged"
    for word in words:
        assert word in said, f"{word!r} is not in {said!r}"


# ---- rows ----

GOOD = pair_rows(1)[0]
FIX = "fill it in or delete the line"


def message(role, content):
    return [{"role": role, "content": content}]


SFT_ROWS = {
    '{"prompt": "a", "completion": ""}': ['"completion" is empty', FIX],
    '{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}': ["both"],
    '{"completion": "b"}': ['"prompt" is missing', "expected text or a list"],
    '{"messages": "hello"}': ['"messages" holds no assistant turn'],
    '{"messages": [{"role": "user", "content": "x"}]}': ["no assistant turn", "nothing to train"],
    '{"text": " "}': ['expected "prompt" and "completion"', "found ['text']"],
    '{"text": 7}': ['expected "prompt" and "completion"'],
}


@pytest.mark.parametrize("second", SFT_ROWS)
def test_malformed_row(second, world, capsys):
    """A row that cannot be meant is refused with flag, file and line. Skipping it in silence would
    train on less than the user thinks. (test_common_text.py has the table of pairs.)"""
    Path("mine.jsonl").write_text(f"{json.dumps(GOOD)}\n{second}\n")
    words = ["error: --data mine.jsonl:2: ", *SFT_ROWS[second]]
    refused(sft, world, capsys, "--data", "mine.jsonl", words=words)


@every_stage
def test_missing_and_empty_files(stage, world, capsys):
    """A missing file, a folder, an empty file, and a second file, empty, behind a good one."""
    Path("empty.jsonl").write_text("\n \n")
    flag, nothing = FLAGS[stage], "no usable row (the file is empty)"
    refused(stage, world, capsys, flag, "nope.jsonl", words=[f"{flag} nope.jsonl: no such file"])
    empty = f"{flag} empty.jsonl: {'no prompt' if stage is ppo else nothing}"
    refused(stage, world, capsys, flag, "empty.jsonl", words=[empty])
    if stage is not ppo:
        refused(stage, world, capsys, flag, world["pairs"], "empty.jsonl", words=[empty])
    if stage in (reward_train, dpo):
        words = ["--eval-pairs no.jsonl: no"]
        refused(stage, world, capsys, "--eval-pairs", "no.jsonl", words=words)


@every_stage
def test_longer_than_the_model(stage, world, capsys, tmp_path):
    """GPT-2 has a table of positions: one token too many is an IndexError of torch, on a GPU an
    assert of CUDA. Rows are cut to it as to --max-length, and prompts so that an answer still fits,
    both aloud; with no room for any prompt the line names both numbers."""
    policy = tiny_model("gpt2", ".", max_position_embeddings=40, n_layer=1)
    if stage is not ppo:
        assert not stage.main(argv_of(stage, world, tmp_path / "new", "--model", policy))
        said = capsys.readouterr().out
        assert "rows 12, " in said and ("cut 12" if stage is sft else "prompts cut 12") in said
    if stage is not reward_train:
        flags = ("--prompts", world["pairs"], "--model", policy, "--max-new-tokens")
        assert not stage.main(argv_of(stage, world, tmp_path / "cut", *flags, 8))
        assert " prompts cut to 32 tokens" in capsys.readouterr().out
        words = ["--max-new-tokens 40: leaves no room for a prompt in the model's 40 positions"]
        refused(stage, world, capsys, *flags, 40, words=words)


# ---- model folders and tokenizers ----


def copy_of(folder, name, *without):
    """A copy of a model folder, some files left out."""
    shutil.copytree(folder, name)
    for pattern in without:
        for file in Path(name).glob(pattern):
            file.unlink()
    return name


def test_a_folder_that_is_no_reward_model(world, capsys, tmp_path):
    """A random head scored by mistake would be climbed for hours. An adapter folder is half a
    model: where its base has gone, both names are in the line."""
    untrained = ["--reward-model ", "not a reward model; train one with reward_train.py"]
    for stage, *more in ((dpo,), (ppo,), (ppo, "--critic", "rm")):
        flags = ("--prompts", world["pairs"], "--reward-model", world["policy"], *more)
        refused(stage, world, capsys, *flags, words=untrained)
    base = copy_of(world["policy"], "base")
    flags = ("--model", base, "--lora-rank", 2, "--steps", 1)
    assert not reward_train.main(argv_of(reward_train, world, tmp_path / "lora", *flags))
    for name in ("lora", "lora/adapter"):
        words = [f"--model {name}: this is a reward model"]
        refused(dpo, world, capsys, "--model", name, words=words)
    shutil.rmtree(base)
    words = ["--model lora/adapter: cannot be loaded (its base model base: no such folder"]
    refused(sft, world, capsys, "--model", "lora/adapter", words=words)


def with_tokenizer(world, name, tokenizer):
    """A copy of the policy with another tokenizer."""
    copy_of(world["policy"], name, "token*", "*.jinja", "generation*")
    tokenizer.save_pretrained(name)
    return name


@each_stage
def test_a_tokenizer_that_does_not_fit(stage, world, capsys, tmp_path):
    """Tokens added to a tokenizer, the embedding not resized: the first row that uses one would be
    an IndexError. The row is named; a surplus that is never used (Qwen2's class adds one) passes.
    A template that allows no system turn: its jinja error becomes a line with file and row."""
    tokenizer = common.load_tokenizer(world["policy"])
    tokenizer.add_tokens(["<|new|>"])
    more = with_tokenizer(world, "more", tokenizer)
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    strict = tiny_tokenizer(template=refuse + tokenizer.chat_template)
    strict = with_tokenizer(world, "strict", strict)
    new = {**GOOD, "chosen": message("assistant", "The <|new|> one.")}
    system = {**GOOD, "prompt": message("system", "Be kind.") + GOOD["prompt"]}
    for model, row, words in (
        (more, new, ["the token '<|new|>' (id 300)", "300 rows", "resize"]),
        (strict, system, ["the chat template refuses ['system', 'user'", "no system"]),
    ):
        flags = ("--model", model, FLAGS[stage], write_rows("mine.jsonl", [GOOD, row]))
        words = [f"{FLAGS[stage]} mine.jsonl:2: ", *words]
        refused(stage, world, capsys, *flags, words=words)
    assert not stage.main(argv_of(stage, world, tmp_path / "new", "--model", more))


# ---- numbers that are not finite ----


@pytest.mark.parametrize("lora", [0, 2])
@every_stage
def test_nan_in_the_weights(stage, lora, world, capsys):
    """A folder with one NaN weight is refused before the first step, by an identity of the
    preflight. Trained on, it would be a folder full of NaN after hours."""
    file = Path(copy_of(world["policy"], "broken")) / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.mlp.down_proj.weight"][0, 0] = math.nan
    save_file(weights, file, metadata={"format": "pt"})
    words = ["--model broken: ", " is nan, expected ", "broken weights"]
    refused(stage, world, capsys, "--model", "broken", "--lora-rank", lora, words=words)


@every_stage
def test_nan_while_training(stage, world, capsys, tmp_path):
    """A rate of 1e30 breaks the weights in the first step. The second stops before its update: rows
    named, status 2, nothing not finite in the folder, and no checkpoint of the broken weights."""
    flags = ("--lr", 1e30, "--schedule", "constant", "--warmup", 0, "--steps", 9, "--eval-every", 0)
    with pytest.raises(SystemExit) as stop:
        files.command(lambda: stage.main(argv_of(stage, world, tmp_path / "new", *flags)))
    said = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2
    rows = ["rows [", "] of step "] if stage is ppo else ["rows ", "pairs.jsonl:"]
    for word in ("error: loss ", "not finite; ", *rows, "Lower --lr"):
        assert word in said
    weights = load_file(tmp_path / "new" / "model.safetensors")
    assert all(torch.isfinite(w).all() for w in weights.values())
    assert list((tmp_path / "new" / "checkpoint").glob("step-*")) == []


# ---- arguments ----

COUNT, RATE, SHARE = "a whole number at least 1", "a number above 0", "a number at least 0"
SHARED_NUMBERS = [  # flag, values that it refuses, the range in words
    ("--epochs", "0 -1 1.5 nan", COUNT),
    ("--steps", "0 1e3", COUNT),
    ("--batch-size", "0 all", COUNT),
    ("--micro-tokens", "0", COUNT),
    ("--stop-after", "0", COUNT),
    ("--save-every", "0", COUNT),
    ("--eval-every", "-1", "a whole number at least 0"),
    ("--lora-rank", "-1 0.5", "a whole number at least 0"),
    ("--max-length", "1", "a whole number at least 2"),
    ("--seed", "-1 0.5 9223372036854775808", f"a whole number at least 0 and below {2**63}"),
    ("--lr", "0 -1 nan inf fast", RATE),
    ("--warmup", "1 -0.1 nan", f"{SHARE} and below 1"),
    ("--schedule", "fancy", "cosine"),
    ("--dtype", "fancy", "bf16"),
    ("--save-dtype", "fancy", "bf16"),
]
HALF = ("--label-smoothing", "0.5 -0.1", f"{SHARE} and below 0.5")
LONGEST = ("--max-new-tokens", "0 nan", COUNT)
HELD = ("--eval-fraction", "1 1.5 -0.1", f"{SHARE} and below 1")
OWN_NUMBERS = {
    sft: [LONGEST, HELD],
    reward_train: [HALF, HELD, ("--margin-scale", "-1", SHARE), ("--center-coef", "nan", SHARE)],
    dpo: [LONGEST, HALF, HELD, ("--beta", "0 nan inf", RATE), ("--nll-coef", "-1 nan", SHARE)],
    ppo: [LONGEST, HELD, ("--rollouts", "1", "a whole number at least 2")],
}
OWN_NUMBERS[reward_train] += [("--margin", "fancy", "strength"), ("--ties", "fancy", "drop")]
OWN_NUMBERS[dpo] += [("--simpo-gamma", "nan", SHARE), ("--loss-type", "fancy", "sigmoid_norm")]
OWN_NUMBERS[dpo] += [("--ties", "fancy", "soft")]
OWN_NUMBERS[ppo] += [("--ppo-epochs", "0", COUNT), ("--critic", "fancy", "shared")]
OWN_NUMBERS[ppo] += [(f, "0 nan", RATE) for f in ("--temperature", "--kl-target", "--clip-high")]
COEFFICIENTS = ("--beta", "--entropy-coef", "--no-end-penalty")
OWN_NUMBERS[ppo] += [(flag, "-0.1 inf", SHARE) for flag in COEFFICIENTS]


@every_stage
def test_a_flag_outside_its_range(stage):
    """Flag, value and range in one line; NaN compares with nothing and must not slip through. A
    misspelt flag, and one without its value, too: argparse prints forty lines of usage."""
    for flag, values, words in SHARED_NUMBERS + OWN_NUMBERS[stage]:
        for value in values.split():
            with pytest.raises(files.UserError) as caught:
                stage.parse_args([flag, value])
            said = str(caught.value)
            assert said.startswith(f"argument {flag}: ") and f"'{value}'" in said
            assert words in said and said.endswith("; --help lists the flags") and "\n" not in said
    near = (["--lrr", "1"], "--lrr, did you mean --lr")
    for flags, words in (near, (["--lr"], "--lr: expected one argument")):
        with pytest.raises(files.UserError, match=f"{words}.*; --help lists the flags"):
            stage.parse_args(flags)


@every_stage
def test_what_is_not_there(stage, world, capsys, monkeypatch):
    """A device that is not there, or no device at all; a package that is not installed: asked for
    at the start, not after the old run was removed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    for name in ("cuda", "tpu9", "meta"):
        words = [f"--device {name}: expected auto, cpu, cuda, cuda:1 or mps ("]
        refused(stage, world, capsys, "--device", name, words=words)
    words = ["wandb", "; install it with pip"]
    refused(stage, world, capsys, "--wandb-project", "mine", words=words)


CROSSED = [
    (dpo, ["--label-smoothing", 0.1, "--loss-type", "ipo"], ["--loss-type ipo has none"]),
    (dpo, ["--ties", "soft", "--loss-type", "hinge"], ["--loss-type hinge cannot learn from ties"]),
    (dpo, ["--gold", VOWELS], ["--gold and ", "add --prompts FILE"]),
    (dpo, ["--reward-model", "x"], ["--reward-model", "add --prompts FILE"]),
    (ppo, ["--reward-model", "x", "--reward-fn", "g.py:f"], ["a reward is needed, and only one"]),
    (ppo, ["--critic", "rm"], ["--critic rm: there is no --reward-model to copy", "shared"]),
    (ppo, ["--max-length", 4], ["--max-length 4: leaves no room", "--max-new-tokens 4", "raise"]),
    (sft, ["--gold", VOWELS], ["--gold and ", "add --prompts FILE"]),
    (sft, ["--init-config", "c.json", "--lora-rank", 2], ["leave --lora-rank out"]),
    (reward_train, ["--margin", "strength"], ["--margin strength: ", ':1 has no "strength"']),
]


@pytest.mark.parametrize("stage, flags, words", CROSSED)
def test_flags_that_do_not_fit_together(stage, flags, words, world, capsys):
    """A flag that would be ignored is refused: its user believes that it acts."""
    refused(stage, world, capsys, *flags, words=words)


CONFIGS = {  # content of config.json: words of the line
    None: "no such folder",
    '{"model_type": "vit"}': "cannot be loaded (",
    '{"model_type": "gpt2", "vocab_size": 99, "n_layer": 1}': "no place in the embedding of 99 rows",
}


@pytest.mark.parametrize("text", CONFIGS)
def test_init_config(text, world, capsys):
    """From scratch: what is wrong with the folder, in one line; a vocabulary that is too small is
    named with the row."""
    if text is not None:
        copy_of(world["policy"], "c", "*.safetensors")
        Path("c/config.json").write_text(text)
    flag = "--data " if "99" in str(text) else "--init-config c: "
    refused(sft, world, capsys, "--init-config", "c", words=[flag, CONFIGS[text]])


# ---- functions of the user ----

GOLD = """from __future__ import annotations; from dataclasses import dataclass
def short(prompts, answers, rows): return [1.0]
def none(prompts, answers, rows): return None
def infinite(prompts, answers, rows): return [0.5] * (len(answers) - 1) + [float("inf")]
def text(prompts, answers, rows): return ["good"] * len(answers)
def raises(prompts, answers, rows): return {}["missing"]
value = 3
@dataclass
class Score:
    value: float
def good(prompts, answers, rows): return [Score(1.0).value] * len(answers)
"""
BROKEN = {"leaves.py": "raise SystemExit", "broken.py": "def f(:", "needs.py": "import no_package"}
FUNCTIONS = {
    "no.py:f": ["expected FILE:FUNCTION with an existing Python file"],
    "g.py:value": ["g.py has no function 'value'"],
    "g.jsonl:f": ["expected FILE:FUNCTION with an existing Python file"],
    "leaves.py:f": ["SystemExit", "leaves.py, line 1"],
    "broken.py:f": ["broken.py:f: SyntaxError", "line 1"],
    "needs.py:f": ["ModuleNotFoundError", "no_package", "line 1"],
    "g.py:short": ["expected 8 finite numbers or None, found [1.0]"],
    "g.py:none": ["found None"],
    "g.py:infinite": ["expected 8 finite numbers or None, found [0.5", "inf]"],
    "g.py:text": ["'good'"],
    "g.py:raises": ["KeyError: 'missing'", "g.py, line 6"],
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_of_the_user(function, world, capsys):
    """A user's own reward or score: where it is wrong, index and value, or the line of his file;
    before anything of the old run is touched. Two for --gold: the others are the same code."""
    Path("g.py").write_text(GOLD)
    Path("g.jsonl").write_text("{}")
    for name, text in BROKEN.items():
        Path(name).write_text(text + "\n")
    words = FUNCTIONS[function]
    refused(ppo, world, capsys, "--reward-fn", function, words=["--reward-fn", *words])
    if function in ("g.py:value", "g.py:short"):
        words = [word.replace("expected 8", "expected 12") for word in words]
        for stage in (sft, dpo):
            flags = ("--prompts", world["pairs"], "--gold", function)
            refused(stage, world, capsys, *flags, words=["--gold", *words])


def test_a_good_gold_function_and_an_empty_prompt(world, tmp_path):
    """A dataclass in the user's file looks its module up by name; "" is a prompt like another."""
    Path("g.py").write_text(GOLD)
    flags = ("--prompts", write_rows("empty.jsonl", [{"prompt": ""}]), "--gold", "g.py:good")
    for stage in (sft, dpo):
        assert not stage.main(argv_of(stage, world, tmp_path / stage.__name__, *flags))
        assert '"val/gold": 1.0' in (tmp_path / stage.__name__ / "metrics.jsonl").read_text()


def test_prompts(world, capsys):
    """A prompt file with a row that is no prompt, without the split, or held out whole."""
    bad = write_rows("mine.jsonl", [{"prompt": "fine"}, {"text": "no"}])
    moon = write_rows("split.jsonl", [{"prompt": "a", "split": "moon"}, {"prompt": "b"}])
    two = write_rows("two.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    cases = [(stage, ["--prompts", bad], '--prompts mine.jsonl:2: "prompt"') for stage in FLAGS]
    cases += [(ppo, ["--prompts", moon], '--prompts split.jsonl: no row has "split": "train"')]
    held = "--prompts two.jsonl: all 2 prompts are held out"
    cases += [(ppo, ["--prompts", two, "--eval-fraction", 0.999], held)]
    for stage, flags, words in cases:
        if stage is not reward_train:
            refused(stage, world, capsys, *flags, words=[words])
    argv = ["--model", world["policy"], "--prompts", two, "--out", "new"]
    with pytest.raises(files.UserError, match="only one.*--reward-model FOLDER .*--reward-fn FILE"):
        ppo.main(argv)


# ---- run folders, and the command itself ----


@every_stage
def test_the_run_of_a_stage_is_guarded(stage, world, capsys, tmp_path):
    """Each input of a stage is one that --resume compares and that --out may not hold; a run of
    another stage is named. (test_runs.py has the table of messages.)"""
    data, model = shutil.copy(world["pairs"], "own.jsonl"), copy_of(world["policy"], "own")
    inputs = {FLAGS[stage]: data, "--model": model}
    if stage in (dpo, ppo):
        inputs |= {"--prompts": data, "--reward-model": copy_of(world["reward"], "rm")}
    flags = [each for pair in inputs.items() for each in pair]
    assert not stage.main(argv_of(stage, world, tmp_path / "run", *flags, "--steps", 1))
    for path in inputs.values():
        out = path if Path(path).is_dir() else "."
        words = [f"--out {out}: it contains the input"]
        refused(stage, world, capsys, "--out", out, *flags, words=words)
    for path in {*inputs.values()}:
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        with open(file, "a") as handle:
            handle.write("\n")
    with pytest.raises(files.UserError) as caught:
        stage.main(argv_of(stage, world, tmp_path / "run", *flags, "--steps", 1, "--resume"))
    for path in inputs.values():
        assert f"{path} has changed" in str(caught.value)
    other = ALL[ALL.index(stage) - 1]
    with pytest.raises(files.UserError, match=f"made by {stage.__name__}.py"):
        other.main(argv_of(other, world, world["runs"] / stage.__name__, "--resume"))
