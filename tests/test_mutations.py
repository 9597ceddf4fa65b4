"""The "break it" gallery: one line of a stage is broken, and a named check must turn red.

A test that passes proves little until it has been seen to fail. Each entry of docs/gallery.md is a
patch of one or two lines, applied to a copy of the source that is executed as a module; the check
it names is a test of this folder or one of the few below. The page is the only list: where a line
of the code moved or changed, edit the entry's patch there.
"""

import contextlib
import doctest
import functools
import importlib
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
from parts import files, lora, runs
from tiny import pair_rows, tiny_model, write_rows

REPO = Path(__file__).resolve().parent.parent
MODULES = """parts/files parts/stats parts/parallel parts/lora parts/shared_prompt common parts/runs
parts/rollouts checks/answers checks/risky checks/instructions watch judge sft reward_train dpo ppo
grpo_rubric grpo_agent evaluate fairness""".split()  # in import order
TEXTS = ["Assess this candidate.", "Role: data engineer, python and sql.", "hold", "Ask: kafka?"]

PAGE = (REPO / "docs" / "gallery.md").read_text(encoding="utf-8")
ENTRY = re.compile(  # number, title, module, patch, check, why
    r"^### (\d+)\. (.+)\n[^#]*?```diff\n--- (\S+)\.py\n.*\n((?:[-+].*\n)+)```\n\n"
    r"<details><summary>.*?</summary>\n\n`([\w.]+)`\n\n(.+?)\n\n</details>",
    re.M,
)
SLIPS = ENTRY.findall(PAGE)
CASES = [(f"{n}-{stage}", stage, patch, check) for n, _, stage, patch, check, _ in SLIPS]


# ---- the checks that no other file here has in this form ----


def batch(tokenizer, extra=0):
    """Four prompts with answers of 3, 2, 4 and 1 tokens, padded by `extra` more columns than
    needed."""
    prompts = [common.encode_prompt(tokenizer, text) for text in TEXTS]
    answers = [tokenizer.encode(text)[:n] for text, n in zip(TEXTS[::-1], (3, 2, 4, 1))]
    ids, attention_mask, mask = common.pad_rows(prompts, answers, tokenizer.pad_token_id)
    pad = torch.nn.functional.pad
    return (
        pad(ids, (0, extra), value=tokenizer.pad_token_id),
        pad(attention_mask, (0, extra), value=False),
        pad(mask, (0, extra), value=False),
    )


def check_one_token_at_a_time(tokenizer, llama_folder):
    """Column t of token_logps is log p(token t | tokens before t), by a loop that feeds one more
    token at a time."""
    model = common.load_policy(llama_folder, trainable=False)
    ids, attention_mask, mask = batch(tokenizer)
    with torch.no_grad():
        ours = common.token_logps(model, ids, attention_mask, mask)
        for row in range(len(ids)):
            for t in mask[row].nonzero()[:, 0].tolist():
                logits = model(input_ids=ids[row : row + 1, :t]).logits[0, -1]
                assert abs(ours[row, t] - logits.log_softmax(-1)[ids[row, t]]) < 1e-4
    assert not ours[~mask].any()


def check_shared_prompt(tokenizer, tmp_path):
    """Both answers after one prompt have the log-probs that they have in rows of their own; a
    Mistral with window 8."""
    model = common.load_policy(tiny_model("mistral", tmp_path, sliding_window=8), trainable=False)
    file = write_rows(tmp_path / "rows.jsonl", pair_rows(4))
    rows = dpo.batch_rows(common.load_pairs([file], tokenizer, 99, False), range(4), 0)
    one, two = (common.token_logps(model, *rows, shared=shared) for shared in (True, False))
    assert (one - two).abs().max() < 1e-4


def check_padding(tokenizer, llama_folder, reward_folder):
    """Ten more pad tokens change neither a log-prob nor a score."""
    policy = common.load_policy(llama_folder, trainable=False)
    reward_model = common.load_reward_model(reward_folder, tokenizer, trainable=False)
    found = []
    with torch.no_grad():
        for extra in (0, 10):
            ids, attention_mask, mask = batch(tokenizer, extra)
            sums = common.token_logps(policy, ids, attention_mask, mask).sum(1)
            found.append(
                torch.stack([sums, common.reward_scores(reward_model, ids, attention_mask)])
            )
    assert (found[0] - found[1]).abs().max() < 1e-4


def check_ratio_is_one(tokenizer, gpt2_folder):
    """Log-probs of generation = log-probs of rescoring, at temperature .7, prompts of mixed
    length, positions learned."""
    model = common.load_policy(gpt2_folder, trainable=False)
    rollout = common.sample(model, tokenizer, TEXTS, n=2, max_new_tokens=6, temperature=0.7)
    rows = common.pad_rows(rollout.prompt_ids, rollout.response_ids, tokenizer.pad_token_id)
    with torch.no_grad():
        logps = common.token_logps(model, *rows, temperature=0.7)
    drawn = torch.tensor([x for row in rollout.logps for x in row])
    assert ((logps[rows[2]] - drawn).exp() - 1).abs().max() < 1e-4


def check_adapter_off_is_the_base(tokenizer, llama_folder):
    """With LoRA the reference is the policy with its adapter off: the base's own log-probs, and on
    again afterwards."""
    model = common.load_policy(llama_folder, lora_rank=2)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.fill_(0.1)
    rows = batch(tokenizer)
    with torch.no_grad():
        base = common.token_logps(common.load_policy(llama_folder, trainable=False), *rows)
        on = common.token_logps(model, *rows)
        with lora.adapter_off(model):
            off = common.token_logps(model, *rows)
        assert torch.equal(off, base)
        assert torch.equal(on, common.token_logps(model, *rows)) and (on - base).abs().max() > 0.01


def check_docstring_examples(stage):
    """The examples worked by hand in the stage's docstrings say what they say."""
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


EVERYTHING = 10**6  # tokens: the whole batch in one forward


def check_micro_batches(stage, llama_folder, reward_folder, tmp_path):
    """The gradient of 6 uneven rows is the same in one forward and row by row: divided by the
    count of the whole step."""
    file = write_rows(tmp_path / "rows.jsonl", pair_rows(6))
    flags = {
        "dpo": ["--pairs", file, "--model", llama_folder, "--nll-coef", "1"],
        "reward_train": ["--pairs", file, "--model", reward_folder],
        "sft": ["--data", file, "--model", llama_folder],
    }[stage.__name__]
    flags += ["--batch-size", "6"]
    flags += ["--max-new-tokens", "2"] if stage.__name__ != "reward_train" else []
    whole, apart = (
        first_gradient(stage, tmp_path / str(n), [*flags, "--micro-tokens", str(n)])
        for n in (EVERYTHING, 1)
    )
    assert whole.abs().max() > 1e-3
    assert (whole - apart).abs().max() < 1e-5 * max(1, whole.abs().max())


def check_preflight(llama_folder, tmp_path):
    """A run from the reference itself starts at log 2; the stage insists on it before the first
    update."""
    file = write_rows(tmp_path / "rows.jsonl", pair_rows(6))
    flags = ["--pairs", file, "--model", llama_folder, "--max-new-tokens", "2"]
    try:
        first_gradient(dpo, tmp_path / "out", flags)
    except files.UserError as error:
        raise AssertionError(f"preflight: {error}") from error


# ---- the machine ----


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory):
    """A tiny GPT-2: its positions are learned, so a wrong position id shows."""
    return tiny_model("gpt2", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def fixtures(tokenizer, llama_folder, reward_folder, gpt2_folder, tmp_path_factory):
    long = tiny_model("llama", tmp_path_factory.mktemp("agent"), max_position_embeddings=512)
    return {
        "policy": (common.load_policy(long, trainable=False), common.load_tokenizer(long)),
        "tokenizer": tokenizer,
        "llama_folder": llama_folder,
        "reward_folder": reward_folder,
        "gpt2_folder": gpt2_folder,
        "world": test_ppo.make_world(tmp_path_factory.mktemp("ppo")),
        "graded": test_grpo.make_graded(tmp_path_factory.mktemp("grpo")),
    }


def load_modules(monkeypatch, broken_one=None, patch=None):
    """{name: fresh copy} of the modules, one of them with a slip made; they import each other's
    copies."""
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
    for alias, module in list(vars(home).items()):  # also `import grpo_agent as g`
        if isinstance(module, types.ModuleType) and module.__name__ in copies:
            monkeypatch.setattr(home, alias, copies[module.__name__])
    function = getattr(home, name)
    available = {
        **fixtures,
        "monkeypatch": monkeypatch,
        "stage": copies.get(stage.replace("/", ".")),
    }
    code = getattr(function, "__wrapped__", function).__code__
    wanted = code.co_varnames[: code.co_argcount]
    choices = []
    for mark in getattr(function, "pytestmark", []):
        assert mark.name == "parametrize", f"{check}: the gallery cannot apply the mark {mark.name}"
        names = [n.strip() for n in mark.args[0].split(",")]
        values = mark.args[1]
        choices.append([dict(zip(names, v if len(names) > 1 else (v,))) for v in values])
    for n, combination in enumerate(itertools.product(*choices)):
        values = {k: v for choice in combination for k, v in choice.items()}
        available["tmp_path"] = tmp_path / str(n)
        available["tmp_path"].mkdir()
        function(**values, **{k: available[k] for k in wanted if k not in values})


RED = (AssertionError, pytest.fail.Exception)  # a crash is no verdict: the check itself must say no


@pytest.mark.parametrize("entry, stage, patch, check", CASES, ids=[f"{c[0]}-{c[3]}" for c in CASES])
def test_slip_turns_its_check_red(
    entry, stage, patch, check, fixtures, tmp_path, monkeypatch, capsys
):
    """The slip on the page, made on purpose: its check must see it. If this fails, a bug of that
    kind would go in unseen."""
    copies = load_modules(monkeypatch, stage, patch)
    with pytest.raises(RED):
        run_check(check, stage, copies, fixtures, tmp_path, monkeypatch)


OF_A_STAGE = ("check_micro_batches", "check_docstring_examples")  # asked of one stage
CHECKS = sorted({(c[3], c[1] if c[3].endswith(OF_A_STAGE) else "") for c in CASES})


@pytest.mark.parametrize("check, stage", CHECKS)
def test_check_is_green_on_the_code_as_it_is(check, stage, fixtures, tmp_path, monkeypatch, capsys):
    """A check that is always red would pass the gallery as well. On unbroken copies every one of
    them is green."""
    run_check(check, stage, load_modules(monkeypatch), fixtures, tmp_path, monkeypatch)


def test_preflight_cannot_see_swapped_sides(fixtures, tmp_path, monkeypatch, capsys):
    """What the gallery teaches beside the slips: the loss of swapped sides still starts at log 2,
    so a green preflight is no proof. The toy world sees it (above)."""
    patch = next(patch for _, _, patch, _ in CASES if "+z = rejected_rewards - chosen" in patch)
    copies = load_modules(monkeypatch, "dpo", patch)
    run_check("test_mutations.check_preflight", "dpo", copies, fixtures, tmp_path, monkeypatch)


# ---- the page ----


def test_the_page_is_whole():
    """Each entry is read and numbered, each answer gives a reason, and each link leads
    somewhere."""
    assert [int(entry[0]) for entry in SLIPS] == list(range(1, PAGE.count("```diff") + 1))
    assert f"{len(SLIPS)} slips" in PAGE
    for number, *_, why in SLIPS:
        assert len(why.split()) >= 8, f"entry {number}: the answer gives no reason"
    anchors = re.findall(r'<a id="([\w-]+)"', PAGE)
    linked = re.findall(r"\(#([\w-]+)\)", PAGE)
    assert len(linked) >= 15 and set(linked) <= set(anchors)
    for target in re.findall(r"\]\((\.\./[\w./-]+)\)", PAGE):
        assert (REPO / "docs" / target).exists(), target


def test_an_entry_that_lost_its_line_fails(monkeypatch):
    """A gallery whose patches silently no longer apply protects nothing."""
    with pytest.raises(AssertionError, match="correct the entry: nobody wrote this"):
        load_modules(monkeypatch, "dpo", "-nobody wrote this\n+pass\n")
