"""Half precision, on the bundled base: slips that the preflight exists for stop a run, in fp32 all, in
half precision those of .1 nat a token and more (another reference: test_trainers.py); and what is trained in bf16 keeps what was learned.

On a GPU: TEST_DEVICE=cuda python -m pytest tests/test_half.py

On the base rounding moves the log-prob of a token by .006 to .015 in bf16 and .001 to .002 in fp16, in
the mean; the preflight's bound in half precision is .1, and what is planted here moves it by more.
The second kind: an fp32 weight that a forward rounds to the nearest half-precision number, for a model
stored in bf16 stands on these numbers.
"""

import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import common
import dpo
import tiny
from conftest import REPO
from parts.files import UserError, read_jsonl
from tiny import FAMILIES, tiny_model, words, write_rows

pytestmark = pytest.mark.usefixtures("quiet_process", "fast_half_products")
BASE = str(REPO / common.BASE)
HALVES = ["bf16", "fp16"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    rows = [row for _, row in zip(range(8), read_jsonl(REPO / "data/prefs_train.jsonl"))]
    return write_rows(tmp_path_factory.mktemp("rows") / "pairs.jsonl", rows)


def command(pairs, out, dtype):
    """argv of dpo.py: two steps of four rows."""
    argv = (
        f"--device {os.environ.get('TEST_DEVICE', 'cpu')} --steps 2 --batch-size 4 --dtype {dtype}"
    )
    flags = "--max-new-tokens 12 --eval-fraction 0 --model", BASE, "--pairs", pairs, "--out", out
    return words(argv, *flags)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
def test_with_kernels_of_torch(dtype, pairs, tmp_path):
    """A process of its own multiplies as a user's does, without `fast_half_products`."""
    argv = command(pairs, tmp_path / "run", dtype)
    subprocess.run([sys.executable, f"{REPO}/dpo.py", *argv], cwd=REPO, check=True)
    steps = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "lr" in row]
    assert len(steps) == 2 and all(abs(row["loss"]) < 20 for row in steps)


# ---- planted slips: each is red in every precision ----


def replaced(home, name, change):
    """A slip: `change` gets the function that stood there, and its arguments."""

    def plant(patch):
        real = getattr(home, name)
        patch.setattr(home, name, lambda *given, **more: change(real, *given, **more))

    return plant


def blind(real, model, ids, attention_mask, *rest, **cache):
    """Attention that does not see the prompt's first half."""
    mask = attention_mask.clone()
    mask[:, : ids.shape[1] // 2] = False
    return real(model, ids, mask, *rest, **cache)


def scaled(factor):
    """A family that multiplies its logits behind the head, as Granite does by 1/8."""
    return replaced(common, "head_logits", lambda real, *given: real(*given) * factor)


def late(real, *given, **more):
    """Each token is scored by the logits of its own column, one too late."""
    return real(*given, **more).roll(-1, 1)


OURS = "gap between our log-probs and the model's"
ALL = ["fp32", *HALVES]
SLIPS = {  # what to plant, what the message says, in which precisions it is seen
    "shift": (replaced(common, "hidden_states", late), OURS, ALL),
    "logits x 8": (scaled(8), OURS, ALL),
    "half the prompt": (replaced(common, "hidden_states", blind), OURS, ALL),
    # by less than the bound of half precision, .1 in the mean
    "logits x 0.8": (scaled(0.8), OURS, ["fp32"]),
}
PLANTED = [(slip, dtype) for slip, (_, _, dtypes) in SLIPS.items() for dtype in dtypes]


@pytest.mark.slow
@pytest.mark.parametrize("slip, dtype", PLANTED)
def test_a_planted_slip_stops_the_run(slip, dtype, pairs, tmp_path, monkeypatch):
    plant, message, _ = SLIPS[slip]
    plant(monkeypatch)
    with pytest.raises(UserError, match=f"--model .*: {message}"):
        dpo.main(command(pairs, tmp_path / "run", dtype))
    assert not (tmp_path / "run" / "config.json").exists()


# ---- rounding ----

policy_of = partial(tiny.policy_of, trainable=True)


def stored_in_bf16(source, folder):
    policy = policy_of(source)
    for weight in policy.parameters():
        weight.data = weight.data.bfloat16().float()
    common.save_model(policy.model, common.load_tokenizer(source), folder, source)
    return str(folder)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Folder of the bundled base with all weights on numbers of bf16, as most models are stored."""
    return stored_in_bf16(BASE, tmp_path_factory.mktemp("stored") / "model")


def test_bf16_learns_what_fp32_learns(stored, pairs):
    """SmolLM2 in bf16 gained a fifth of what it gained in fp32 in six steps at 1e-5, and DPO's
    held-out loss fell to .62 in place of .46. Here: what four small steps towards eight answers add
    to the mean log-prob of their tokens."""
    tokenizer = common.load_tokenizer(BASE)
    rows = [
        common.encode_pair(tokenizer, row["prompt"], row["chosen"]) for row in read_jsonl(pairs)
    ]
    batch = common.pad_rows(*zip(*rows))

    def learn(dtype):
        policy, means = policy_of(stored, dtype=dtype), []
        optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-5, weight_decay=0.0)
        for _ in range(5):
            means.append(policy(*batch)[0][batch[2]].mean())
            optimizer.zero_grad()
            (-means[-1]).backward()
            optimizer.step()
        return (means[-1] - means[0]).item()

    exact, half = learn(torch.float32), learn(torch.bfloat16)
    assert exact > 0.02 and half == pytest.approx(exact, rel=0.2)


BF16 = dict(dtype=torch.bfloat16)


@pytest.mark.parametrize("options, spread", [
    (BF16, True), ({}, False), ({"dtype": torch.float16}, False), (BF16 | {"lora_rank": 2}, False),
    (BF16 | {"trainable": False}, False),
], ids=["bf16", "fp32", "fp16", "lora", "frozen"])  # fmt: skip
def test_only_what_is_trained_in_bf16_is_spread(options, spread, stored):
    """The start is the model: spread weights round to what they were; nearly all of the linear
    layers' moved, and others, which forwards read in fp32, did not. The spread follows the seed. fp16
    has eight times as many numbers."""
    policy, same, other = (
        dict(policy_of(stored, **options, seed=seed).model.named_parameters()) for seed in (0, 0, 1)
    )
    weights, moved = load_file(f"{stored}/model.safetensors"), []
    for name in policy.keys() & weights.keys():
        weight, was = policy[name].float(), weights[name]
        assert torch.equal(weight.bfloat16(), was.bfloat16()), name
        assert torch.equal(policy[name], same[name]), name
        linear = spread and "layers" in name and was.ndim > 1
        assert torch.equal(policy[name], other[name]) != linear, name
        if linear:
            moved.append((weight != was).flatten())
        else:
            assert torch.equal(weight, was), name
    assert not spread or torch.cat(moved).float().mean() > 0.95


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_forward_is_the_models(family, tmp_path, monkeypatch):
    folder = stored_in_bf16(tiny_model(family, tmp_path), tmp_path / "stored")
    rows, logps = common.pad_rows([[*range(5, 11)]], [[*range(11, 25)]]), []
    for spread in (common.spread_weights, lambda model, seed: None):
        monkeypatch.setattr(common, "spread_weights", spread)
        with torch.no_grad():
            logps.append(policy_of(folder, **BF16)(*rows)[0])
    assert torch.equal(*logps)


@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-30])
def test_the_spread_is_even_between_the_middles(scale):
    """In shares of the distance to the next number, from large weights to the smallest."""
    generator = torch.Generator().manual_seed(1)
    start = (torch.randn(400, 400, generator=generator) * scale).bfloat16()
    layer = torch.nn.Linear(400, 400, bias=False)
    layer.weight.data = start.float()
    model = SimpleNamespace(base_model=torch.nn.ModuleList([layer]), device="cpu")
    for seed in range(3):  # a second stage spreads again, and piles nothing up at the middles
        common.spread_weights(model, seed)
        assert torch.equal(layer.weight.bfloat16(), start)
    above = torch.nextafter(start.abs(), torch.tensor(torch.inf, dtype=torch.bfloat16))
    offset = (layer.weight - start.float()) / (above.float() - start.float().abs())
    shares = torch.histc(offset.abs().clamp(max=0.4999), 5, 0, 0.5) / offset.numel()
    assert (shares - 0.2).abs().max() < 0.02
    assert abs(offset.mean()) < 0.005, "as many up as down"
