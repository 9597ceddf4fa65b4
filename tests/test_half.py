"""Half precision, on the bundled base: trainers run in bf16 and fp16, and slips that the
preflight exists for stop a run: in fp32 all, in half precision those of .1 nat a token and more.

On a GPU: TEST_DEVICE=cuda python -m pytest tests/test_half.py

On the base rounding moves the log-prob of a token by .006 to .015 in bf16 and .001 to .002 in fp16, in
the mean; the preflight's bound in half precision is .1, and what is planted here moves it by more.
"""

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import common
import dpo
from conftest import REPO
from parts.files import UserError, read_jsonl
from tiny import words, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet_process", "fast_half_products")]
BASE = str(REPO / common.BASE)
DEVICE = os.environ.get("TEST_DEVICE", "cpu")
TRAINERS = ["dpo", "reward_train"]
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def command(stage, pairs, out, *flags):
    """argv of two steps of four rows."""
    argv = f"--model {BASE} --device {DEVICE} --steps 2 --batch-size 4 --eval-fraction 0 --pairs"
    argv += f" {pairs} --out {out}" + " --max-new-tokens 12" * (stage != "reward_train")
    return words(argv, *flags)


def train(stage, *arguments):
    return importlib.import_module(stage).main(command(stage, *arguments)) or 0


def logged(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    rows = [row for _, row in zip(range(8), read_jsonl(REPO / "data/prefs_train.jsonl"))]
    return write_rows(tmp_path_factory.mktemp("rows") / "pairs.jsonl", rows)


@pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
def test_fast_products_are_those_of_torch(dtype):
    """A sum of 576 products in another order moves one rounding in 350 (fp16), by one step. With
    `out` torch's own kernel is called."""
    sizes = (56, 576), (576, 300), (4, 28, 64), (4, 64, 30), (300,), (4, 28, 30)
    generator = torch.Generator().manual_seed(0)
    a, b, c, d, e, f = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    products = (torch.mm, a, b), (torch.addmm, e, a, b), (torch.bmm, c, d), (torch.baddbmm, f, c, d)
    for product, *matrices in products:
        ours, theirs = product(*matrices), product(*matrices, out=torch.empty(0, dtype=dtype))
        assert ours.dtype == dtype and (ours != theirs).float().mean() < 0.01
        torch.testing.assert_close(ours, theirs, rtol=torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("stage", TRAINERS)
def test_two_steps(stage, dtype, lora_rank, pairs, tmp_path, capsys):
    """Every weight learns, none is stored in half precision, and fp16 loses no step to an overflow:
    at a loss multiplied by 65536 the first two steps of each run were lost."""
    out, flags = tmp_path / "run", f"--dtype {dtype} --lora-rank {lora_rank}"
    assert train(stage, pairs, out, flags) == 0
    assert f"in {HALVES[dtype]}" in capsys.readouterr().out
    steps = [row for row in logged(out) if "lr" in row]
    assert len(steps) == 2 and all(abs(row["loss"]) < 20 for row in steps)
    before, after = (load_file(f"{x}/model.safetensors") for x in (BASE, out))
    assert {weight.dtype for weight in after.values()} == {torch.float32}
    adapted = {key for key in before if "layers" in key and before[key].ndim > 1}
    still = {key for key in before.keys() & after.keys() if torch.equal(before[key], after[key])}
    assert not still & adapted and (lora_rank or not still - {"lm_head.weight"})


@pytest.mark.parametrize("dtype", HALVES)
def test_with_kernels_of_torch(dtype, pairs, tmp_path):
    """A process of its own multiplies as a user's does, without `fast_half_products`."""
    argv = command("dpo", pairs, tmp_path / "run", f"--dtype {dtype}")
    subprocess.run([sys.executable, f"{REPO}/dpo.py", *argv], cwd=REPO, check=True)
    steps = [row for row in logged(tmp_path / "run") if "lr" in row]
    assert len(steps) == 2 and all(abs(row["loss"]) < 20 for row in steps)


# ---- planted slips: each is red in every precision ----


def shift(patch):
    """Each token is scored by the logits of its own column, one too late."""
    real = common.hidden_states

    def late(*arguments, **cache):
        return real(*arguments, **cache).roll(-1, 1)

    patch.setattr(common, "hidden_states", late)


def scaled(factor):
    """A family that multiplies its logits behind the head, as Granite does by 1/8."""

    def plant(patch):
        real = common.head_logits
        patch.setattr(common, "head_logits", lambda model, hidden: real(model, hidden) / factor)

    return plant


def masked(patch):
    """Attention that does not see the prompt's first half."""
    real = common.hidden_states

    def blind(model, ids, attention_mask, *rest, **cache):
        mask = attention_mask.clone()
        mask[:, : ids.shape[1] // 2] = False
        return real(model, ids, mask, *rest, **cache)

    patch.setattr(common, "hidden_states", blind)


def reference(patch):
    """The reference has other weights: each matrix with noise of a tenth of its deviation."""
    real = dpo.reference_logps

    @torch.no_grad()
    def other_logps(run, policy, pairs):
        before = {name: weight.clone() for name, weight in policy.named_parameters()}
        generator = torch.Generator(policy.model.device).manual_seed(0)
        for weight in policy.parameters():
            if weight.ndim > 1:
                draw = torch.randn(weight.shape, generator=generator, device=weight.device)
                weight += draw * 0.1 * weight.std()
        logps = real(run, policy, pairs)
        for name, weight in policy.named_parameters():
            weight.copy_(before[name])
        return logps

    patch.setattr(dpo, "reference_logps", other_logps)


OURS = "gap between our log-probs and the model's"
ALL = ["fp32", *HALVES]
SLIPS = {  # what to plant, what the message says, in which precisions it is seen
    "shift": (shift, OURS, ALL),
    "logits x 8": (scaled(1 / 8), OURS, ALL),
    "half the prompt": (masked, OURS, ALL),
    # by less than the bound of half precision, .1 in the mean
    "logits x 0.8": (scaled(1.25), OURS, ["fp32"]),
    "reference + 10 %": (reference, "h before step one", ["fp32"]),
}
PLANTED = [(slip, dtype) for slip, (_, _, dtypes) in SLIPS.items() for dtype in dtypes]


@pytest.mark.parametrize("slip, dtype", PLANTED)
def test_a_planted_slip_stops_the_run(slip, dtype, pairs, tmp_path, monkeypatch):
    plant, message, _ = SLIPS[slip]
    plant(monkeypatch)
    with pytest.raises(UserError, match=f"--model .*: {message}"):
        train("dpo", pairs, tmp_path / "run", f"--dtype {dtype}")
    assert not (tmp_path / "run" / "config.json").exists()
