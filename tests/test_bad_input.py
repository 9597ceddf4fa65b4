"""What a user does wrong, and the one line that tells him: flag, file, line, what was expected, what to do; exit status 2.

Each case is run by the stage's own `main`, as the command line runs it, with `--out` on a finished run and `--overwrite`: the
worst place to fail. `refused` therefore checks three things at once: one line and no traceback, the words that a new user
needs, and that the run which lay there is untouched, file by file.
"""

import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
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
from tiny import (
    pair_rows,
    tiny_model,
    tiny_reward_model,
    tiny_tokenizer,
    write_pairs,
    write_rows,
)

REPO = Path(__file__).resolve().parent.parent
STAGES = [sft, reward_train, dpo]
ALL = [*STAGES, ppo]  # ppo.py reads prompts and draws its own answers
each_stage = pytest.mark.parametrize("stage", STAGES, ids=lambda s: s.__name__)
every_stage = pytest.mark.parametrize("stage", ALL, ids=lambda s: s.__name__)
VOWELS = f"{Path(__file__).with_name('tiny.py')}:share_of_vowels"


def data_flag(stage):
    return {sft: "--data", ppo: "--prompts"}.get(stage, "--pairs")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """Relative names in messages, as a user types them; and the signal handlers of the trainers are given back."""
    monkeypatch.chdir(tmp_path)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


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
    argv = [data_flag(stage), world["pairs"], "--model", world["policy"]]
    argv += ["--out", str(out), "--steps", "2", "--batch-size", "4"]
    argv += [] if stage is reward_train else ["--max-new-tokens", "4"]
    if stage is ppo:
        argv += ["--rollouts", "4", "--ppo-epochs", "1", "--eval-fraction", "0.2"]
        argv += [] if "--reward-model" in flags else ["--reward-fn", VOWELS]
    return [*argv, *map(str, flags)]


def files_of(folder):
    """Name → hash of every file below the folder."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(Path(folder).rglob("*"))
        if p.is_file()
    }


def refused(stage, world, capsys, *flags, resume=False):
    """Run over a finished run; returns the one line of the refusal."""
    run = world["runs"] / stage.__name__
    before = files_of(run)
    argv = argv_of(stage, world, run, *flags, "--resume" if resume else "--overwrite")
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        files.command(lambda: stage.main(argv))
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert said.startswith("error: ") and said.count("\n") == 1, said
    assert "Traceback" not in said and len(said) < 600
    assert files_of(run) == before, "the run that lay there was damaged"
    return said


def says(line, *words):
    for word in words:
        assert word in line, f"{word!r} is not in {line!r}"


# ---- files and rows ----

GOOD = pair_rows(1)[0]
FIX = "fill it in or delete the line"


def changed(**columns):
    row = {**GOOD, **columns}
    return json.dumps({k: v for k, v in row.items() if v is not ...}).encode()


def message(role, content):
    return [{"role": role, "content": content}]


ROWS = {  # name: (second line of the file, words of the answer)
    "broken JSON": (b'{"prompt": ', ["not valid JSON", "column"]),
    "a list": (b"[1, 2]", ["expected a JSON object, found list"]),
    "NaN": (changed(strength=math.nan), ["NaN is not JSON; use null"]),
    "nested": (b"[" * 10**5, ["nested too deeply"]),
    "latin-1": (b'{"prompt": "caf\xe9"}', ["'utf-8'", "0xe9", "position 15"]),
    "surrogate": (changed(prompt=message("user", "\ud800")), ["surrogates not allowed"]),
    "other columns": (b'{"question": "a", "answer": "b"}', ["expected", "prompt", "'question'"]),
    "no rejected": (changed(rejected=...), ['"rejected" is missing', "expected text or", FIX]),
    "rejected null": (changed(rejected=None), ['"rejected" is missing', FIX]),
    "rejected empty": (changed(rejected=message("assistant", " \n")), ['"rejected" is empty', FIX]),
    "chosen a number": (changed(chosen=3), ['"chosen" is int', "expected text or a list of"]),
    "no content": (changed(prompt=[{"role": "user"}]), ['"prompt": each message', '"content"']),
    "unknown role": (
        changed(prompt=message("human", "x")),
        ['"prompt": each message needs a "role"', "user, assistant"],
    ),
    "empty prompt": (changed(prompt=[]), ["must end with a message"]),
    "nothing to answer": (changed(prompt=message("assistant", "x")), ["must end with a message"]),
    "two answers": (changed(chosen=2 * message("assistant", "x")), ['"chosen" must be one']),
    "mixed kinds": (changed(prompt="text"), ["must both be text or both be message lists"]),
    "no prompt": (changed(prompt=...), ['no "prompt"', "share no beginning"]),
    "tie and strength": (changed(tie=True, strength=2), ["a tie has strength 0"]),
    "tie a number": (changed(tie=1), ['"tie" is 1', "true or false"]),
    "strength a text": (changed(strength="2"), ["\"strength\" is '2'", "expected a number"]),
}


@pytest.mark.parametrize("name", ROWS)
@each_stage
def test_malformed_row(stage, name, world, capsys):
    """A row that cannot be meant is refused with flag, file and line. Skipping it in silence would train on less than the
    user thinks; a KeyError would leave him to search 740 lines for the one."""
    second, words = ROWS[name]
    Path("mine.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n" + second + b"\n")
    flag = "--data" if stage is sft else "--pairs"
    line = refused(stage, world, capsys, flag, "mine.jsonl")
    says(line, f"error: {flag} mine.jsonl:2: ", *words)


SFT_ROWS = {
    "completion empty": ({"prompt": "a", "completion": ""}, ['"completion" is empty', FIX]),
    "completion a list": ({"prompt": "a", "completion": message("assistant", "b")}, ["both"]),
    "prompt missing": ({"completion": "b"}, ['"prompt" is missing', "expected text or a list"]),
    "messages text": ({"messages": "hello"}, ['"messages" holds no assistant turn']),
    "messages empty": ({"messages": []}, ['"messages" holds no assistant turn']),
    "no answer": ({"messages": message("user", "x")}, ["no assistant turn", "nothing to train"]),
    "text empty": ({"text": " "}, ['expected "prompt" and "completion"', "found ['text']"]),
    "text a number": ({"text": 7}, ['expected "prompt" and "completion"']),
}


@pytest.mark.parametrize("name", SFT_ROWS)
def test_malformed_row_of_sft(name, world, capsys):
    """The forms that sft.py reads beside preferences."""
    row, words = SFT_ROWS[name]
    data = write_rows("mine.jsonl", [{"text": "fine"}, row])
    says(refused(sft, world, capsys, "--data", data), "--data mine.jsonl:2: ", *words)


@each_stage
def test_missing_and_empty_files(stage, world, capsys):
    """A missing file, a folder, an empty file, and a second file that is empty behind a good one."""
    flag = "--data" if stage is sft else "--pairs"
    Path("empty.jsonl").write_text("\n \n")
    Path("folder").mkdir()
    for name in ("nope.jsonl", "folder"):
        line = refused(stage, world, capsys, flag, name)
        says(line, f"{flag} {name}: no such file", "expected JSONL")
    line = refused(stage, world, capsys, flag, "empty.jsonl")
    says(line, f"{flag} empty.jsonl: no usable row (the file is empty)")
    line = refused(stage, world, capsys, flag, world["pairs"], "empty.jsonl")
    says(line, f"{flag} empty.jsonl: no usable row (the file is empty)")
    if stage is not sft:
        says(refused(stage, world, capsys, "--eval-pairs", "no.jsonl"), "--eval-pairs no.jsonl: no")


@pytest.mark.parametrize("stage", [reward_train, dpo], ids=lambda s: s.__name__)
def test_unusable_rows_are_counted(stage, world, capsys, tmp_path):
    """Rows that are well-formed but hold nothing to learn are dropped aloud: kept and dropped by reason are the rows of the
    file. Where nothing is left, the reasons stand in the refusal."""
    answer = GOOD["chosen"][0]["content"]
    equal = {**GOOD, "rejected": GOOD["chosen"]}
    tie = {**GOOD, "tie": True}
    same_start = [message("assistant", answer * 9 + end) for end in (" yes", " no")]
    long = {**GOOD, "chosen": same_start[0], "rejected": same_start[1]}
    rows = pair_rows(6) + [equal, equal, tie, long]
    data = write_rows("mine.jsonl", rows)
    flags = ("--pairs", data, "--max-length", 90, "--ties", "drop", "--eval-fraction", 0)
    assert not stage.main(argv_of(stage, world, tmp_path / "new", *flags))
    printed = re.search(r"^data +(rows .*)", capsys.readouterr().out, re.MULTILINE)[1]
    counts = {k: int(n) for k, n in (part.rsplit(" ", 1) for part in re.split("[,;] ", printed))}
    assert counts["rows"] == 10
    assert counts["dropped: chosen = rejected"] == 2
    assert counts["dropped: tie"] == 1
    assert counts["dropped: equal after cutting"] == 1
    assert counts["training"] == 6 and counts["held out"] == 0
    assert counts["responses cut"] >= 2
    line = refused(stage, world, capsys, "--pairs", write_rows("equal.jsonl", [equal, equal]))
    says(line, "--pairs equal.jsonl: no usable row (rows 2, dropped: chosen = rejected 2)")


@each_stage
def test_prompt_longer_than_the_limit(stage, world, capsys, tmp_path):
    """A prompt beyond --max-length loses its beginning and is counted; the answer stays, so there is something to train.
    It must not be dropped, and must not eat the answer."""
    long = {**GOOD, "prompt": message("user", "sql " * 60 + "Which one?")}
    data = write_rows("mine.jsonl", [GOOD, long])
    flags = ("--data" if stage is sft else "--pairs", data, "--max-length", 80)
    assert not stage.main(argv_of(stage, world, tmp_path / "new", *flags, "--eval-fraction", 0))
    printed = capsys.readouterr().out
    says(printed, "rows 2", "prompts cut 1", "training 2")
    row = json.loads((tmp_path / "new" / "metrics.jsonl").read_text().splitlines()[0])
    assert row["step"] == 1 or all(v is None or math.isfinite(v) for v in row.values())


@every_stage
def test_longer_than_the_model(stage, world, capsys, tmp_path):
    """GPT-2 has a table of positions: one token too many is an IndexError of torch, on a GPU an assert of CUDA. Rows are cut
    to it as to --max-length, and prompts so that an answer still fits, both aloud; with no room for any prompt the line
    names both numbers."""
    policy = tiny_model("gpt2", ".", max_position_embeddings=40)
    assert not stage.main(argv_of(stage, world, tmp_path / "new", "--model", policy))
    printed = capsys.readouterr().out
    if stage is not ppo:
        says(printed, "rows 12, ", "cut 12" if stage is sft else "prompts cut 12")
    if stage is not reward_train:
        flags = ("--prompts", world["pairs"], "--model", policy, "--max-new-tokens")
        assert not stage.main(argv_of(stage, world, tmp_path / "cut", *flags, 8))
        says(capsys.readouterr().out, " prompts cut to 32 tokens")
        line = refused(stage, world, capsys, *flags, 40)
        says(line, "--max-new-tokens 40: leaves no room for a prompt in the model's 40 positions")


@each_stage
def test_text_bytes_are_kept_as_they_are(stage, world, capsys, tmp_path):
    """What is odd but right must pass: a byte-order mark, blank lines, U+2028 inside a text, an empty system turn, an empty
    prompt, an unknown column."""
    odd = {**GOOD, "chosen": message("assistant", "one\u2028two"), "annotator": {"id": 3}}
    odd["prompt"] = message("system", "") + GOOD["prompt"]
    lines = [json.dumps(r, ensure_ascii=False) for r in (odd, {**GOOD, "tie": False})]
    lines.append(json.dumps({"prompt": "", "chosen": "yes", "rejected": "no"}))
    Path("mine.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n\n".join(lines).encode() + b"\n")
    flag = "--data" if stage is sft else "--pairs"
    assert not stage.main(argv_of(stage, world, tmp_path / "new", flag, "mine.jsonl"))
    assert "rows 3" in capsys.readouterr().out


# ---- model folders and tokenizers ----


def copy_of(folder, name, *without):
    """A copy of a model folder, some files left out."""
    shutil.copytree(folder, name)
    for pattern in without:
        for file in Path(name).glob(pattern):
            file.unlink()
    return name


@every_stage
def test_model_folder_that_is_none(stage, world, capsys):
    """Each broken folder is named with what is wrong in it; none leads to a search on the hub or a page of traceback."""
    Path("empty").mkdir()
    Path("file").write_text("x")

    def line(name):
        return refused(stage, world, capsys, "--model", name)

    hub = "expected a model folder or a hub id such as org/name"
    says(line("runs/nope"), "--model runs/nope: no such folder", hub)
    says(line("file"), "--model file: no such folder", hub)
    says(line("empty"), "--model empty: not a model folder (config.json is missing)")
    policy = world["policy"]
    copy_of(policy, "bare", "*.safetensors")
    copy_of(policy, "mute", "token*")
    torn = Path(copy_of(policy, "torn")) / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:1000])
    (Path(copy_of(policy, "odd")) / "config.json").write_text('{"model_type": "odd"}')
    (Path(copy_of(policy, "cut")) / "config.json").write_text("{")
    for name in ("org/name", "bare", "mute", "torn", "odd", "cut"):
        says(line(name), f"--model {name}: ", "cannot be loaded (")


DAMAGED = {  # name: (file, key, value)
    "architectures": ("config.json", "architectures", 3),
    "end id a text": ("config.json", "eos_token_id", "1"),
    "end id of generation": ("generation_config.json", "eos_token_id", {"a": 1}),
    "width a text": ("config.json", "hidden_size", "32"),
    "type a number": ("config.json", "model_type", 7),
    "longest a text": ("tokenizer_config.json", "model_max_length", "512"),
    "class a number": ("tokenizer_config.json", "tokenizer_class", 3),
    "deviation 0": ("config.json", "reward_std", 0),
    "deviation -1": ("config.json", "reward_std", -1),
    "mean a text": ("config.json", "reward_mean", "high"),
    "record without args": ("args.json", "args", 3),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_json_in_a_model_folder(name, world, capsys, tmp_path):
    """Well-formed JSON with a wrong value, in a policy's folder and in a reward model's: nine kinds of traceback once. One
    line names the flag and the folder, wherever the value is read: a reward model does not generate, and only of a reward
    model the record is read, for its --max-length."""
    file, key, value = DAMAGED[name]
    cases = [("policy", sft, ("--model",)), ("reward", reward_train, ("--model",))]
    cases += [("reward", dpo, ("--prompts", world["pairs"], "--reward-model"))]
    codes = []
    for i, (kind, stage, flags) in enumerate(cases):
        folder = copy_of(world[kind], f"damaged{i}")
        path = Path(folder) / file
        held = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**held, key: value}))
        argv = argv_of(stage, world, f"new{i}", *flags, folder)
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            files.command(partial(stage.main, argv))
        said = capsys.readouterr().err
        codes.append(stop.value.code)
        if stop.value.code != 0:
            assert said.count("\n") == 1
            says(said, f"error: {flags[-1]} {folder}: ")
    unread = {"generation_config.json": [2, 0, 0], "args.json": [0, 0, 2]}
    assert codes == unread.get(file, [2, 2, 2])


def test_the_wrong_kind_of_model(world, capsys, tmp_path):
    """A reward model where a policy belongs, and the other way round: what it is, and the flag that it belongs to."""
    wrong = "this is a reward model; pass it as --reward-model"
    for stage in (sft, dpo):
        says(refused(stage, world, capsys, "--model", world["reward"]), "--model ", wrong)
    flags = ("--prompts", world["pairs"], "--reward-model", world["policy"])
    line = refused(dpo, world, capsys, *flags)
    says(line, "--reward-model ", "not a reward model; train one with reward_train.py")
    assert not reward_train.main(argv_of(reward_train, world, tmp_path / "lora", "--lora-rank", 2))
    says(refused(dpo, world, capsys, "--model", "lora"), "--model lora: this is a reward model")
    with pytest.raises(files.UserError, match="lora/adapter: this is a reward model"):
        common.load_policy("lora/adapter")


def test_adapter_without_its_base(world, capsys, tmp_path):
    """An adapter folder is half a model: where its base has gone, both names are in the line."""
    base = copy_of(world["policy"], "base")
    argv = argv_of(sft, world, tmp_path / "lora", "--model", base, "--lora-rank", 2)
    assert not sft.main(argv)
    shutil.rmtree(base)
    for stage in STAGES:
        line = refused(stage, world, capsys, "--model", "lora/adapter")
        says(line, "--model lora/adapter: cannot be loaded (its base model base: no such folder")


@each_stage
def test_token_without_embedding(stage, world, capsys):
    """Tokens added to a tokenizer, the embedding not resized: the first row that uses one would be an IndexError. The row is
    named; a tokenizer whose surplus is never used (Qwen2's class adds one of its own) must pass."""
    copy_of(world["policy"], "more", "token*", "*.jinja")
    tokenizer = common.load_tokenizer(world["policy"])
    tokenizer.add_tokens(["<|new|>"])
    tokenizer.save_pretrained("more")
    with_it = {**GOOD, "chosen": message("assistant", "The <|new|> one.")}
    data = write_rows("mine.jsonl", [GOOD, with_it])
    flag = "--data" if stage is sft else "--pairs"
    line = refused(stage, world, capsys, "--model", "more", flag, data)
    says(line, f"{flag} mine.jsonl:2: the token '<|new|>' (id 300)", "300 rows", "resize")
    flags = ("--model", "more")
    assert not stage.main(argv_of(stage, world, Path("new").resolve(), *flags))


@every_stage
def test_tokenizer_without_an_end(stage, world, capsys):
    """Without any end token no answer ever ends; guessing one would train a model that talks on."""
    copy_of(world["policy"], "endless", "token*", "*.jinja", "generation*")
    path = Path("endless/config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": None}))
    tokenizer = tiny_tokenizer(template=None)
    tokenizer.eos_token = None
    tokenizer.save_pretrained("endless")
    line = refused(stage, world, capsys, "--model", "endless")
    says(
        line,
        "--model endless: cannot be loaded (no tokenizer, or one without end token",
        "set eos_token",
    )


@each_stage
def test_template_that_refuses_the_row(stage, world, capsys):
    """Some templates allow no system turn. Their jinja error becomes a line with file and row."""
    copy_of(world["policy"], "strict", "token*", "*.jinja")
    refuse = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    )
    template = common.load_tokenizer(world["policy"]).chat_template
    tiny_tokenizer(template=refuse + template).save_pretrained("strict")
    row = {**GOOD, "prompt": message("system", "Be kind.") + GOOD["prompt"]}
    data = write_rows("mine.jsonl", [GOOD, row])
    flag = "--data" if stage is sft else "--pairs"
    line = refused(stage, world, capsys, "--model", "strict", flag, data)
    says(
        line, f"{flag} mine.jsonl:2: the chat template refuses ['system', 'user'", "no system turn"
    )


# ---- numbers that are not finite ----


def with_nan(folder, name, part="down_proj"):
    copy_of(folder, name)
    file = Path(name) / "model.safetensors"
    weights = load_file(file)
    weights[next(k for k in weights if part in k)][0, 0] = math.nan
    save_file(weights, file, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize("lora", [0, 2])
@every_stage
def test_nan_in_the_weights(stage, lora, world, capsys, tmp_path):
    """A folder with one NaN weight is refused before the first step, by an identity of the preflight, and the run that lay in
    --out still has its own weights. Trained on, it would be a folder full of NaN after hours."""
    broken = with_nan(world["policy"], "broken")
    line = refused(stage, world, capsys, "--model", broken, "--lora-rank", lora)
    says(line, "--model broken: ", "nan")
    says(line, " is nan, expected ", "broken weights")


@each_stage
def test_nan_while_training(stage, world, capsys, tmp_path):
    """A rate of 1e30 breaks the weights in the first step. The second stops before its update: rows named, status 2, nothing
    not finite in the folder, and no checkpoint of the broken weights."""
    flags = ("--lr", 1e30, "--schedule", "constant", "--warmup", 0, "--steps", 9, "--eval-every", 0)
    with pytest.raises(SystemExit) as stop:
        files.command(lambda: stage.main(argv_of(stage, world, tmp_path / "new", *flags)))
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    says(said, "error: loss ", "not finite; rows ", "pairs.jsonl:", "Lower --lr")
    weights = load_file(tmp_path / "new" / "model.safetensors")
    assert all(torch.isfinite(w).all() for w in weights.values())
    assert list((tmp_path / "new" / "checkpoint").glob("step-*")) == []


# ---- arguments ----

COUNT, RATE, SHARE = (
    "a whole number at least 1",
    "a number above 0",
    "a number at least 0 and below 1",
)
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
    (
        "--seed",
        "-1 0.5 9223372036854775808",
        "a whole number at least 0 and below 9223372036854775808",
    ),
    ("--lr", "0 -1 nan inf fast", RATE),
    ("--warmup", "1 -0.1 nan", SHARE),
    ("--eval-fraction", "1 1.5 -0.1", SHARE),
]
OWN_NUMBERS = [
    (sft, "--max-new-tokens", "0", COUNT),
    (dpo, "--max-new-tokens", "0 nan", COUNT),
    (dpo, "--beta", "0 nan inf", RATE),
    (dpo, "--label-smoothing", "0.5 -0.1", "a number at least 0 and below 0.5"),
    (dpo, "--nll-coef", "-1 nan", "a number at least 0"),
    (dpo, "--simpo-gamma", "nan", "a number at least 0"),
    (reward_train, "--label-smoothing", "0.5 -0.1", "a number at least 0 and below 0.5"),
    (reward_train, "--margin-scale", "-1", "a number at least 0"),
    (reward_train, "--center-coef", "nan", "a number at least 0"),
    (ppo, "--rollouts", "1", "a whole number at least 2"),
    (ppo, "--ppo-epochs", "0", COUNT),
    (ppo, "--max-new-tokens", "0", COUNT),
    *((ppo, flag, "0 nan", RATE) for flag in ("--temperature", "--kl-target", "--clip-high")),
    *(
        (ppo, f, "-0.1 nan inf", "a number at least 0")
        for f in ("--beta", "--entropy-coef", "--no-end-penalty")
    ),
]


@pytest.mark.parametrize(
    "stage, flag, values, range_",
    [(stage, *case) for stage in ALL for case in SHARED_NUMBERS] + OWN_NUMBERS,
)
def test_number_outside_its_range(stage, flag, values, range_, world, capsys):
    """Flag, value and range in one line; NaN compares with nothing and must not slip through."""
    for value in values.split():
        line = refused(stage, world, capsys, flag, value)
        says(line, f"error: argument {flag}: '{value}' given, expected {range_}; --help")


CHOICES = [(stage, "--schedule", "cosine") for stage in ALL]
CHOICES += [(ppo, "--critic", "shared"), (ppo, "--restore", "best")]
CHOICES += [(stage, flag, "bf16") for stage in ALL for flag in ("--dtype", "--save-dtype")]
CHOICES += [(dpo, "--loss-type", "sigmoid_norm"), (dpo, "--ties", "soft")]
CHOICES += [(reward_train, "--margin", "strength"), (reward_train, "--ties", "drop")]


@pytest.mark.parametrize("stage, flag, one", CHOICES)
def test_unknown_choice(stage, flag, one, world, capsys):
    """The choices are listed; argparse's forty lines of usage would push them off the screen."""
    says(refused(stage, world, capsys, flag, "fancy"), f"argument {flag}", "'fancy'", one)


@every_stage
def test_flags_that_do_not_parse(stage, world, capsys):
    """A misspelt flag, a word for a number, a flag without its value: one line each."""
    says(refused(stage, world, capsys, "--pears", "x"), "--pears", "--help lists the flags")
    says(refused(stage, world, capsys, "--lr", "fast"), "--lr", "'fast'", "--help")
    says(refused(stage, world, capsys, "--lr"), "--lr", "expected one argument")


@every_stage
def test_devices(stage, world, capsys, monkeypatch):
    """A device that is not there, or no device at all."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "tpu9", "meta"):
        line = refused(stage, world, capsys, "--device", name)
        says(line, f"--device {name}: expected auto, cpu, cuda, cuda:1 or mps (")


@every_stage
def test_wandb_that_is_not_installed(stage, world, capsys, monkeypatch):
    """Asked for at the start, not after the old run was removed."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    line = refused(stage, world, capsys, "--wandb-project", "mine")
    says(line, "--wandb-project: the package ", "; pip install wandb")


COMBINATIONS = [
    (dpo, ["--label-smoothing", 0.1, "--loss-type", "ipo"], ["--loss-type ipo has none"]),
    (dpo, ["--ties", "soft", "--loss-type", "hinge"], ["--loss-type hinge cannot learn from ties"]),
    (dpo, ["--gold", VOWELS], ["--gold and ", "add --prompts FILE"]),
    (dpo, ["--reward-model", "x"], ["--reward-model", "add --prompts FILE"]),
    (ppo, ["--reward-model", "x", "--reward-fn", "g.py:f"], ["a reward is needed, and only one"]),
    (ppo, ["--critic", "rm"], ["--critic rm: there is no --reward-model to copy", "shared"]),
    (
        ppo,
        ["--max-length", 4],
        ["--max-length 4: leaves no room", "--max-new-tokens 4", "raise it"],
    ),
    (sft, ["--gold", VOWELS], ["--gold and ", "add --prompts FILE"]),
    (sft, ["--init-config", "c.json", "--lora-rank", 2], ["leave --lora-rank out"]),
]


@pytest.mark.parametrize("stage, flags, words", COMBINATIONS)
def test_flags_that_do_not_fit_together(stage, flags, words, world, capsys):
    """A flag that would be ignored is refused: its user believes that it acts."""
    write_rows("mine.jsonl", [GOOD])
    says(refused(stage, world, capsys, *flags), *words)


def test_margin_column_that_is_missing(world, capsys):
    """--margin strength on a file without that column: the first row without it."""
    line = refused(reward_train, world, capsys, "--margin", "strength")
    says(line, "--margin strength: ", 'pairs.jsonl:1 has no "strength"')


CONFIGS = {  # name: (content of config.json, words of the line)
    "no such folder": (None, "no such folder"),
    "no JSON": ("{", "cannot be loaded ("),
    "a list": ("[1]", "cannot be loaded ("),
    "no type": ("{}", "cannot be loaded ("),
    "unknown type": ('{"model_type": "odd"}', "cannot be loaded ("),
    "heads": (
        '{"model_type": "llama", "vocab_size": 300, "hidden_size": 30, "num_attention_heads": 4}',
        "not a multiple of the number of attention heads",
    ),
    "no language model": ('{"model_type": "vit"}', "cannot be loaded ("),
    "small vocabulary": (
        '{"model_type": "gpt2", "vocab_size": 99, "n_embd": 8, "n_layer": 1, "n_head": 1}',
        "has no place in the embedding of 99 rows",
    ),
    "no tokenizer": ('{"model_type": "gpt2", "vocab_size": 300}', "cannot be loaded ("),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_init_config(name, world, capsys):
    """From scratch: what is wrong with the folder, in one line; a vocabulary that is too small is told with the row."""
    text, words = CONFIGS[name]
    if text is not None:
        copy_of(world["policy"], "c", "*.safetensors", *["token*"] * (name == "no tokenizer"))
        Path("c/config.json").write_text(text)
    line = refused(sft, world, capsys, "--init-config", "c")
    says(line, "--data " if name == "small vocabulary" else "--init-config c: ", words)


def test_init_config_takes_folder_and_file(world, tmp_path, monkeypatch):
    """`--init-config c`, `c/config.json` and, inside c, `config.json` are the same start: the same losses, of random weights."""
    home = Path(copy_of(world["policy"], "c", "*.safetensors")).resolve()
    logs = []
    for i, name in enumerate(("c", "c/config.json", "config.json")):
        monkeypatch.chdir(home if i == 2 else tmp_path)
        out = tmp_path / f"new{i}"
        assert not sft.main(argv_of(sft, world, out, "--init-config", name))
        rows = [json.loads(r) for r in (out / "metrics.jsonl").read_text().splitlines()]
        logs.append([row["loss"] for row in rows if "loss" in row])
    assert logs[0] == logs[1] == logs[2] and len(logs[0]) == 2


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
FUNCTIONS = {
    "g.py": ["expected FILE:FUNCTION"],
    "no.py:f": ["expected FILE:FUNCTION with an existing Python file"],
    "g.py:other": ["g.py has no function 'other'"],
    "g.py:value": ["g.py has no function 'value'"],
    "g.jsonl:f": ["expected FILE:FUNCTION with an existing Python file"],
    "leaves.py:f": ["SystemExit", "leaves.py, line 1"],
    "broken.py:f": ["broken.py:f: SyntaxError", "line 1"],
    "needs.py:f": ["ModuleNotFoundError", "no_such_package", "line 1"],
    "g.py:short": ["expected 12 finite numbers or None, found [1.0]"],
    "g.py:none": ["found None"],
    "g.py:infinite": ["expected 12 finite numbers or None, found [0.5", "inf]"],
    "g.py:text": ["'good'"],
    "g.py:raises": ["KeyError: 'missing'", "g.py, line 6"],
}


def write_functions():
    """The files that FUNCTIONS names."""
    Path("g.py").write_text(GOLD)
    Path("g.jsonl").write_text("{}")
    Path("leaves.py").write_text("raise SystemExit\n")
    Path("broken.py").write_text("def f(:\n")
    Path("needs.py").write_text("import no_such_package\n")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("stage", [sft, dpo], ids=lambda s: s.__name__)
def test_gold_functions(stage, function, world, capsys):
    """A user's own scoring function: where it is wrong, index and value, or the line of his file; before anything of the
    old run is touched."""
    write_functions()
    flags = ("--prompts", world["pairs"], "--gold", function)
    says(refused(stage, world, capsys, *flags), "--gold", *FUNCTIONS[function])


@pytest.mark.parametrize("stage", [sft, dpo], ids=lambda s: s.__name__)
def test_a_good_gold_function_and_an_empty_prompt(stage, world, tmp_path):
    """A dataclass in the user's file looks its module up by name; and "" is a prompt like another (p[0] of it is none)."""
    Path("g.py").write_text(GOLD)
    flags = ("--prompts", write_rows("empty.jsonl", [{"prompt": ""}]), "--gold", "g.py:good")
    assert not stage.main(argv_of(stage, world, tmp_path / "run", *flags))
    assert '"val/gold": 1.0' in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_prompts(world, capsys):
    """A prompt file that is missing, empty, or has a row that is no prompt."""
    Path("empty.jsonl").write_text("\n \n")
    data = write_rows("mine.jsonl", [{"prompt": "fine"}, {"text": "no"}])
    for stage in (sft, dpo):
        for path, words in (("no.jsonl", "no such file"), ("empty.jsonl", "no prompt")):
            line = refused(stage, world, capsys, "--gold", VOWELS, "--prompts", path)
            says(line, f"--prompts {path}: {words}")
        line = refused(stage, world, capsys, "--gold", VOWELS, "--prompts", data)
        says(line, "--prompts mine.jsonl:2: ", '"prompt"')


@pytest.mark.parametrize("function", FUNCTIONS)
def test_reward_functions(function, world, capsys):
    """The same for the reward itself: it is called on the eight answers of the preflight, before the old run is touched."""
    write_functions()
    words = [w.replace("expected 12", "expected 8") for w in FUNCTIONS[function]]
    says(refused(ppo, world, capsys, "--reward-fn", function), "--reward-fn", *words)


def test_no_reward(world, capsys, tmp_path):
    """Neither a model nor a function: both ways out are named."""
    argv = ["--model", world["policy"], "--prompts", world["pairs"], "--out", str(tmp_path / "new")]
    with pytest.raises(SystemExit) as stop:
        files.command(lambda: ppo.main(argv))
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    says(
        said,
        "a reward is needed, and only one",
        "--reward-model FOLDER",
        "--reward-fn FILE:FUNCTION",
    )


def test_reward_folder_that_is_none(world, capsys):
    """No folder, an empty one, one without weights, a policy, a classifier: what it is, with its flag. A random head scored
    by mistake would be climbed for hours."""
    Path("empty").mkdir()

    def line(name, *flags):
        return refused(ppo, world, capsys, "--reward-model", name, *flags)

    says(line("runs/nope"), "--reward-model runs/nope: no such folder")
    says(line("empty"), "--reward-model empty: not a model folder (config.json is missing)")
    bare = copy_of(world["reward"], "bare", "*.safetensors")
    says(line(bare), "--reward-model bare: cannot be loaded (")
    for critic in ("rm", "shared"):
        policy = line(world["policy"], "--critic", critic)
        says(policy, "--reward-model ", "not a reward model; train one with reward_train.py")
    three = tiny_reward_model("gpt2", ".", seed=1)
    path = Path(three) / "config.json"
    labels = {
        "id2label": {str(i): f"L{i}" for i in range(3)},
        "label2id": {f"L{i}": i for i in range(3)},
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), **labels}))
    says(line(three), "--reward-model gpt2-0: a classifier with 3 labels, not one")
    says(
        refused(ppo, world, capsys, "--model", world["reward"]),
        "--model ",
        "pass it as --reward-model",
    )


def test_prompts_of_ppo(world, capsys):
    """A file that is missing, empty, malformed, without the split, or held out whole."""
    Path("empty.jsonl").write_text("\n \n")

    def line(path, *flags):
        return refused(ppo, world, capsys, "--prompts", path, *flags)

    says(line("nope.jsonl"), "--prompts nope.jsonl: no such file", "expected JSONL")
    says(line("empty.jsonl"), "--prompts empty.jsonl: no prompt")
    data = write_rows("mine.jsonl", [{"prompt": "fine"}, {"text": "no"}])
    says(line(data), "--prompts mine.jsonl:2: ", '"prompt"')
    data = write_rows("split.jsonl", [{"prompt": "a", "split": "moon"}, {"prompt": "b"}])
    says(line(data), '--prompts split.jsonl: no row has "split": "train"')
    data = write_rows("two.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    says(
        line(data, "--eval-fraction", 0.999),
        "--prompts two.jsonl: all 2 prompts are held out",
        "lower",
    )


def test_nan_while_ppo_trains(world, capsys, tmp_path):
    """A rate of 1e30 breaks the weights in the first update; the run stops at the next, names answers and step, and neither
    folder nor checkpoint holds a number that is not finite."""
    flags = ("--lr", 1e30, "--schedule", "constant", "--warmup", 0, "--eval-every", 0, "--steps", 9)
    with pytest.raises(SystemExit) as stop:
        files.command(lambda: ppo.main(argv_of(ppo, world, tmp_path / "new", *flags)))
    said = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2
    says(said, "error: loss ", "not finite; rows [", "] of step ", "Lower --lr")
    weights = load_file(tmp_path / "new" / "model.safetensors")
    assert all(torch.isfinite(w).all() for w in weights.values())
    assert list((tmp_path / "new" / "checkpoint").glob("step-*")) == []


# ---- run folders ----


@every_stage
def test_folder_in_use(stage, world, capsys, tmp_path):
    """A folder that holds a run is refused without --resume or --overwrite; a file in the way, the folder of an input, and
    a resume where there is no run are named too. Nothing is touched."""
    run = world["runs"] / stage.__name__

    def line(out, *flags):
        before = files_of(run)
        with pytest.raises(SystemExit) as stop:
            files.command(lambda: stage.main(argv_of(stage, world, out, *flags)))
        said = capsys.readouterr().err
        assert stop.value.code == 2 and said.count("\n") == 1 and files_of(run) == before
        return said

    capsys.readouterr()
    says(line(run), "holds a run; pass --resume to ", "--overwrite to replace it, or another")
    says(line(run, "--resume", "--overwrite"), "--resume ", "--overwrite ", "pass one of them")
    Path("file").write_text("x")
    for out in ("file", "file/below"):
        says(line(out), "--out ", out, "expected the name of a folder")
    says(line("new", "--resume"), "new", "holds no run")
    model, inside = copy_of(world["policy"], "model"), "lies in it"
    for flags in ((), ("--overwrite",)):
        says(line(model, "--model", model, *flags), "--out model: ", inside)
    flags = ("--lora-rank", 2)
    assert not stage.main(argv_of(stage, world, tmp_path / "lora", *flags))
    capsys.readouterr()
    says(line("lora", "--model", "lora/adapter", "--overwrite"), "--out lora: ", inside)
    if stage in (dpo, ppo):
        reward = copy_of(world["reward"], "rm")
        flags = ("--prompts", world["pairs"], "--reward-model", reward, "--overwrite")
        says(line(reward, *flags), "--out rm: ", inside)


@every_stage
def test_overwrite_replaces_the_whole_run(stage, world, tmp_path, capsys):
    """With --overwrite nothing of the old run may be mistaken for the new one's: no rows of its log, no checkpoint, no
    adapter, and while a LoRA trains no weights but its own. What the user put there stays."""
    out = tmp_path / "new"
    assert not stage.main(argv_of(stage, world, out, "--steps", 4, "--lora-rank", 2))
    assert (out / "adapter").is_dir()
    (out / "notes.txt").write_text("mine")
    assert not stage.main(argv_of(stage, world, out, "--overwrite"))
    assert not (out / "adapter").exists() and (out / "model.safetensors").exists()
    rows = [json.loads(r) for r in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if "lr" in r] == [1, 2]
    assert [p.name for p in (out / "checkpoint").glob("step-*")] == ["step-0000002"]
    assert (out / "notes.txt").read_text() == "mine"
    flags = ("--overwrite", "--lora-rank", 2, "--stop-after", 1)
    assert not stage.main(argv_of(stage, world, out, *flags))
    assert (out / "adapter").is_dir() and not (out / "model.safetensors").exists()


@every_stage
def test_resume_of_another_run(stage, world, capsys, tmp_path):
    """--resume goes on with the same run or not at all: each difference is named with both values. A changed data file,
    other weights under the same name, another seed or rate would end in weights that belong to no run."""

    def line(*flags):
        return refused(stage, world, capsys, *flags, resume=True)

    says(line("--seed", 7), "--resume: ", "not the run in ", "--seed was 0, is 7")
    says(line("--batch-size", 3, "--lr", 0.5), "--batch-size was 4, is 3", "--lr was ", "is 0.5")
    says(line("--schedule", "linear"), "--schedule was 'cosine', is 'linear'")
    says(line("--steps", 1), "--steps 1: this run is at step 2 already")
    says(line("--lora-rank", 2, "--warmup", 0.5), "--lora-rank was 0", "--warmup was 0.05, is 0.5")
    says(line("--max-length", 9), "--max-length was 512, is 9")
    flag = data_flag(stage)
    says(line(flag, write_pairs("mine.jsonl", 12)), f"{flag} was ", "'mine.jsonl'")
    if stage is dpo:
        says(
            line("--loss-type", "ipo"), "--loss-type was 'sigmoid', is 'ipo'", "--nll-coef was 1.0"
        )
    elif stage is ppo:
        says(
            line("--beta", 0.2, "--critic", "shared"),
            "--beta was 0.05, is 0.2",
            "--critic was 'policy', is 'shared'",
        )
    elif stage is reward_train:
        says(line("--label-smoothing", 0.1), "--label-smoothing was 0.0, is 0.1")
    # the same names, other contents
    data, model = shutil.copy(world["pairs"], "own.jsonl"), copy_of(world["policy"], "own")
    argv = argv_of(stage, world, tmp_path / "run", flag, data, "--model", model)
    assert not stage.main(argv)
    shutil.copytree("run", "before")
    with open(data, "a") as file:
        file.write(json.dumps(GOOD) + "\n")
    weights = load_file("own/model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, "own/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(files.UserError) as error:
        stage.main([*argv, "--resume"])
    says(str(error.value), "own.jsonl has changed", "own has changed")
    assert files_of("run") == files_of("before")
    # another stage's run, and a record that is none
    other = ALL[ALL.index(stage) - 1]
    with pytest.raises(
        files.UserError, match=f"made by {stage.__name__}.py|of a run of {other.__name__}.py"
    ):
        other.main(argv_of(other, world, tmp_path / "before", "--resume"))
    for text in ("{", "[]", '{"args": {}}'):
        Path("before/args.json").write_text(text)
        with pytest.raises(files.UserError, match="is not the args.json of a run"):
            stage.main(argv_of(stage, world, tmp_path / "before", "--resume"))


# ---- the command itself ----


@every_stage
def test_the_command_line(stage, world, tmp_path):
    """Once as a process: status 2, one line on stderr, nothing on stdout, no folder made."""
    argv = argv_of(stage, world, tmp_path / "new", data_flag(stage), "no.jsonl")
    script = REPO / f"{stage.__name__}.py"
    run = subprocess.run(
        [sys.executable, str(script), *argv], capture_output=True, text=True, env=dict(os.environ)
    )
    assert (run.returncode, run.stdout) == (2, "")
    flag = data_flag(stage)
    assert run.stderr.startswith(f"error: {flag} no.jsonl: no such file")
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / "new").exists()
