"""Half precision has few numbers, and a model stored in bf16 stands on them: what is trained in bf16
keeps what was learned.

The kind: an fp32 weight that a forward rounds to the nearest half-precision number.
"""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import common
from common import Policy
from conftest import REPO
from parts.files import read_jsonl
from tiny import tiny_model

pytestmark = pytest.mark.usefixtures("fast_half_products")
FAMILIES = "llama qwen2 qwen3 mistral gemma gemma2 gemma3_text phi3 gpt2".split()
BASE = str(REPO / common.BASE)


def policy_of(folder, dtype, **options):
    return Policy(common.load_model(folder, "cpu", dtype, **{"trainable": True, **options}), dtype)


def stored_in_bf16(source, folder):
    policy = policy_of(source, torch.float32)
    for weight in policy.parameters():
        weight.data = weight.data.bfloat16().float()
    common.save_model(policy.model, common.load_tokenizer(source), folder, source)
    return str(folder)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Folder of the bundled base with all weights on numbers of bf16, as most models are stored."""
    return stored_in_bf16(BASE, tmp_path_factory.mktemp("stored") / "model")


@pytest.fixture(scope="module")
def batch():
    """(ids, attention mask, mask of the answers) of eight chosen answers."""
    tokenizer = common.load_tokenizer(BASE)
    rows = [row for _, row in zip(range(8), read_jsonl(REPO / "data/prefs.jsonl"))]
    pairs = [common.encode_pair(tokenizer, row["prompt"], row["chosen"]) for row in rows]
    return common.pad_rows(*zip(*pairs), 0)


def mean_logp(policy, batch):
    with torch.no_grad():
        return policy(*batch)[0][batch[2]].mean().item()


def learn(policy, batch, lr=3e-5, steps=4):
    """What four small steps towards these answers add to the mean log-prob of their tokens."""
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    optimizer, before = (
        torch.optim.AdamW(weights, lr=lr, weight_decay=0.0),
        mean_logp(policy, batch),
    )
    for _ in range(steps):
        (-policy(*batch)[0][batch[2]].mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return mean_logp(policy, batch) - before


def test_bf16_learns_what_fp32_learns(stored, batch, monkeypatch):
    """SmolLM2 in bf16 gained a fifth of what it gained in fp32 in six steps at 1e-5, and DPO's
    held-out loss fell to .62 in place of .46."""
    exact = learn(policy_of(stored, torch.float32), batch)
    half = learn(policy_of(stored, torch.bfloat16), batch)
    assert exact > 0.02 and half == pytest.approx(exact, rel=0.2)
    monkeypatch.setattr(common, "spread_weights", lambda model, seed: None)
    assert learn(policy_of(stored, torch.bfloat16), batch) < 0.6 * exact


def test_the_start_is_the_model(stored):
    """Spread weights round to what they were; nearly all of the linear layers' moved, and others,
    which forwards read in fp32, did not."""
    policy = policy_of(stored, torch.bfloat16)
    weights, moved = load_file(f"{stored}/model.safetensors"), 0
    for name, weight in policy.model.named_parameters():
        assert torch.equal(weight.bfloat16(), weights[name].bfloat16()), name
        moved += (weight != weights[name]).sum().item()
    linear = sum(w.numel() for n, w in weights.items() if "layers" in n and w.ndim > 1)
    assert 0.95 * linear < moved <= linear
    embedding = policy.model.get_input_embeddings().weight
    assert torch.equal(embedding, weights["model.embed_tokens.weight"])
    again = policy_of(stored, torch.bfloat16).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in policy.state_dict().items())
    other = policy_of(stored, torch.bfloat16, seed=1).state_dict()
    assert any(not torch.equal(value, other[name]) for name, value in policy.state_dict().items())


def test_only_what_is_trained_in_bf16_is_spread(stored):
    """Not fp32, not fp16, which has four times as many numbers, not a frozen base."""
    weights = load_file(f"{stored}/model.safetensors")
    for dtype, options in (
        (torch.float32, {}), (torch.float16, {}), (torch.bfloat16, {"lora_rank": 2}),
        (torch.bfloat16, {"trainable": False}),
    ):  # fmt: skip
        policy = policy_of(stored, dtype, **options)
        own = [(n, w) for n, w in policy.model.named_parameters() if n in weights]
        assert own and all(torch.equal(w.float(), weights[n]) for n, w in own)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_forward_is_the_models(family, tmp_path, monkeypatch):
    folder = stored_in_bf16(tiny_model(family, tmp_path), tmp_path / "stored")
    rows, logps = common.pad_rows([[*range(5, 11)]], [[*range(11, 25)]], 0), []
    for spread in (common.spread_weights, lambda model, seed: None):
        monkeypatch.setattr(common, "spread_weights", spread)
        with torch.no_grad():
            logps.append(policy_of(folder, torch.bfloat16)(*rows)[0])
    assert torch.equal(*logps)


def model_of(weight):
    """What `spread_weights` asks a model for, with one linear layer."""
    layer = torch.nn.Linear(*weight.shape[::-1], bias=False)
    layer.weight.data = weight.clone()
    return SimpleNamespace(base_model=torch.nn.ModuleList([layer]), device="cpu"), layer.weight


@torch.no_grad()
def test_the_spread_is_even_between_the_middles():
    """In shares of the distance to the next number, from large weights to the smallest."""
    generator = torch.Generator().manual_seed(1)
    for scale in (1.0, 1e-3, 1e-30):
        start = (torch.randn(400, 400, generator=generator) * scale).bfloat16()
        model, weight = model_of(start.float())
        for seed in range(3):  # a second stage spreads again, and piles nothing up at the middles
            common.spread_weights(model, seed)
            assert torch.equal(weight.bfloat16(), start)
        above = torch.nextafter(start.abs(), torch.tensor(torch.inf, dtype=torch.bfloat16))
        offset = (weight - start.float()) / (above.float() - start.float().abs())
        shares = torch.histc(offset.abs().clamp(max=0.4999), 5, 0, 0.5) / offset.numel()
        assert (shares - 0.2).abs().max() < 0.02
        assert abs(offset.mean()) < 0.005, "as many up as down"
