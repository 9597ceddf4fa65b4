"""Log-probs, rewards, precision, LoRA and saving, for every family that the project names: against
the model itself, fed one row at a time without padding, plain transformers and PEFT."""

import copy
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import common
from parts import lora, parallel, reward_models
from parts.identities import check_head
from parts.runs import prepare
from tiny import (
    EXTRA_FAMILIES,
    FAMILIES,
    error_of,
    read_json,
    table,
    tiny_model,
    tiny_reward_model,
    tiny_tokenizer,
)

ALL = [*FAMILIES, *EXTRA_FAMILIES]
every_family = pytest.mark.parametrize("family", ALL)
in_half_precision = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
PROMPTS = [[20], [30, 31, 32, 33, 34, 35, 36], [40, 41, 42]]
ANSWERS = [[50, 51, 52, 6], [60, 6], [70, 71, 72, 73, 74, 6]]


def batch(pad=7):
    return common.pad_rows(PROMPTS, ANSWERS, pad)


def left(ids, attention_mask, mask, extra=0, pad=7):
    """The same rows, padded on the left, and by `extra` columns more."""
    wide = [F.pad(ids, (0, extra), value=pad)]
    wide += [F.pad(x, (0, extra)) for x in (attention_mask, mask)]
    n_pads = (~wide[1]).sum(1).tolist()
    return [torch.stack([row.roll(n) for row, n in zip(x, n_pads)]) for x in wide]


def paddings():
    return batch(), batch(pad=6), left(*batch()), left(*batch(6), extra=10, pad=6)


def plain_logps(model, ids, temperature=1.0):
    logits = model(torch.tensor([ids])).logits[0, :-1].double() / temperature
    return F.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)


@pytest.fixture
def heads(monkeypatch):
    """(rows, weight) of each product with the head: how many rows passed, and by which weights."""
    seen, head_logits = [], common.head_logits
    spy = lambda *args: seen.append((len(args[1]), args[2])) or head_logits(*args)  # noqa: E731
    monkeypatch.setattr(common, "head_logits", spy)
    return seen


def head_chunks(monkeypatch, model, n_rows):
    """So many rows pass the head at once."""
    size = 4 * model.config.vocab_size * n_rows
    monkeypatch.setitem(common.HEAD_CHUNK_BYTES, "cpu", size)


def gradients(model):
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def same_gradients(a, b, tolerance=1e-5):
    assert a.keys() == b.keys() and a
    for name in a:
        near = dict(rtol=0, atol=tolerance * max(1.0, b[name].abs().max().item()))
        torch.testing.assert_close(a[name], b[name], **near)


@every_family
@torch.no_grad()
def test_log_probs_are_those_of_each_row_alone(family, folders):
    """GPT-2 counts positions from the first column, OPT from the mask; Llama alone sees no slip."""
    model = common.load_policy(folders[family])
    for temperature in (1.0, 0.7):
        expected = torch.cat(
            [plain_logps(model, p + a, temperature)[len(p) - 1 :] for p, a in zip(PROMPTS, ANSWERS)]
        )
        for rows in paddings():
            logps = common.token_logps(model, *rows, temperature)
            assert logps[rows[2]].tolist() == pytest.approx(expected.tolist(), abs=2e-5)
            assert (logps[~rows[2]] == 0).all() and logps.dtype == torch.float32
    check_head(model, *batch()[:2], "--model")


def test_rows_with_nothing_to_train(folders):
    model = common.load_policy(folders["llama"])
    ids, attention_mask, mask = batch()
    whole = common.token_logps(model, ids, attention_mask, mask).detach()
    for rows in ([1], [0, 1, 2]):
        some = mask.clone()
        some[rows] = False
        logps = common.token_logps(model, ids, attention_mask, some)
        torch.testing.assert_close(logps, whole * some, atol=1e-5, rtol=0)
        assert (logps[~some] == 0).all()
        logps.sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    mask[1, 0] = True
    with pytest.raises(ValueError, match=r"response_mask\[:, 0\]"):
        common.token_logps(model, ids, attention_mask, mask)


def test_a_factor_behind_the_head_is_named(folders):
    """One that the config does not name."""
    model = common.load_policy(folders["cohere"])
    model.logit_scale = 0.5
    assert "are they scaled" in error_of(check_head, model, *batch()[:2], "--model")


@every_family
def test_chunks_of_the_head_change_nothing(family, folders, monkeypatch, heads):
    """A border in the wrong place, Gemma 2's cap or a tied head's gradient forgotten: all show. Only
    the 12 answer tokens pass the head, and once more where chunks are computed again, not kept."""
    model, (ids, attention_mask, mask) = common.load_policy(folders[family]), batch()
    weight = torch.randn(ids.shape, generator=torch.Generator().manual_seed(0))
    logits = model(ids, attention_mask=attention_mask.long()).logits[:, :-1].float() / 0.8
    full, top = F.log_softmax(logits, -1), (logits.argmax(-1) == ids[:, 1:]).float()
    plain = full.gather(-1, ids[:, 1:, None]).squeeze(-1), -(full.exp() * full).sum(-1), top
    plain = [F.pad(x, (1, 0)) * mask for x in plain]
    (plain[0] * weight).sum().backward()
    expected = gradients(model)
    for n_rows, chunks, again in ((1, 12, 12), (7, 2, 12), (10**6, 1, 0)):
        head_chunks(monkeypatch, model, n_rows)
        heads.clear()
        ours = common.token_logps(
            model, ids, attention_mask, mask, 0.8, with_entropy=True, with_top=True
        )
        assert (len(heads), sum(n for n, _ in heads)) == (chunks, 12)
        for numbers, theirs in zip(ours, plain):
            torch.testing.assert_close(numbers * mask, theirs, atol=1e-5, rtol=0)
        assert (ours[0][~mask] == 0).all() and (ours[1][~mask] == 0).all()
        (ours[0] * weight).sum().backward()
        assert sum(n for n, _ in heads) == 12 + again
        same_gradients(gradients(model), expected)


@in_half_precision
def test_products_of_half_precision_are_summed_in_fp32(dtype):
    """Against float64."""
    generator = torch.Generator().manual_seed(0)
    hidden, master, grad = (
        torch.randn(n, generator=generator) for n in ((40, 64), (90, 64), (40, 90))
    )
    half = hidden.to(dtype).requires_grad_(), master.to(dtype)
    exact = [x.detach().double().requires_grad_() for x in half]
    logits = common.HalfMatmul.apply(*half, master.requires_grad_())
    expected = exact[0] @ exact[1].T
    expected.backward(grad.to(dtype).double())
    logits.backward(grad)
    assert logits.dtype == master.grad.dtype == torch.float32 and half[0].grad.dtype == dtype
    for ours, theirs in ((logits, expected), (master.grad, exact[1].grad)):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-4, rtol=0)
    near = dict(atol=0.05, rtol=2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(half[0].grad.double(), exact[0].grad, **near)


@in_half_precision
def test_the_head_in_half_precision(dtype, folders, monkeypatch, heads):
    """The gradient of many chunks adds up in fp32. A frozen head is cast once per pass, not once
    per chunk."""
    model = common.load_policy(folders["llama"], dtype=dtype)
    head = model.get_output_embeddings().weight
    copied, grads = head.detach().to(dtype), []
    with monkeypatch.context() as patch:
        patch.setattr(common, "head_weight", lambda model: copied)  # what a GPU multiplies
        for n_rows in (1, 10**6):
            head_chunks(monkeypatch, model, n_rows)
            model.zero_grad()
            common.token_logps(model, *batch()).sum().backward()
            grads.append(head.grad)
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-5)
    frozen = common.load_policy(folders["llama"], dtype=dtype, trainable=False)
    head_chunks(monkeypatch, frozen, n_rows=1)
    heads.clear()
    common.token_logps(frozen, *batch())
    assert len(heads) == 12 and len({id(weight) for _, weight in heads}) == 1
    assert heads[0][1].dtype == torch.float32


@torch.no_grad()
def test_log_softmax_is_fp32_for_bf16_models(tmp_path):
    """In bf16 it is off by .01 a token: the sum of 1000 must be float64's, to 0.1."""
    folder = tiny_model("llama", tmp_path, vocab_size=32000, max_position_embeddings=1100)
    model, row = common.load_policy(folder).bfloat16(), [(7919 * i) % 32000 for i in range(1001)]
    logps = common.token_logps(model, *common.pad_rows([row[:1]], [row[1:]], 0))
    logits, at = model(torch.tensor([row])).logits[0, :-1], torch.tensor(row[1:])[:, None]
    assert logits.dtype == torch.bfloat16 and logps.dtype == torch.float32
    half, double = (F.log_softmax(x, -1).gather(-1, at).double() for x in (logits, logits.double()))
    assert logps.sum().item() == pytest.approx(double.sum().item(), abs=0.1)
    assert abs(half.sum() - double.sum()) > 0.1


def test_precision_is_picked_by_capability(monkeypatch):
    """A T4 (7, 5) emulates bf16, slower than fp32, and says that it is supported."""
    pick, fp16, bf16 = parallel.pick_precision, (torch.float16, True), (torch.bfloat16, False)
    for capability, expected in {(7, 5): fp16, (6, 1): fp16, (8, 0): bf16, (9, 0): bf16}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a, c=capability: c)
        assert pick("cuda") == pick(torch.device("cuda:0")) == expected
    assert pick("cuda", "fp32") == pick("cpu") == pick("mps") == (torch.float32, False)
    assert pick("cpu", "fp16") == fp16 and pick("cpu", "bf16") == bf16


def test_autocast_does_not_outlive_an_optimiser_step(folders):
    """One context around the loop would cache the weights of step 0."""
    model = common.load_policy(folders["llama"], dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = common.token_logps(model, *batch())
    first.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    optimizer.step()
    second, fresh = outputs(model), outputs(copy.deepcopy(model))
    assert torch.equal(second, fresh) and (second - first).abs().max() > 0.1
    gap = (outputs(common.load_policy(folders["llama"])) - first).abs().max().item()
    assert 1e-5 < gap < 0.5, "bf16 was really used, and is close"


DROPOUT = {
    "gpt2": dict(attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1),
    "opt": dict(dropout=0.1, attention_dropout=0.1, layerdrop=0.5),
    "gpt_neox": dict(hidden_dropout=0.1, attention_dropout=0.1),
}


@pytest.mark.parametrize("family", DROPOUT)
def test_dropout_is_off_and_kept_in_the_saved_config(family, tmp_path):
    """Dropout in the policy alone: no loss starts at log 2. OPT also drops whole layers."""
    folder = tiny_model(family, tmp_path, **DROPOUT[family])
    model, tokenizer = common.load_policy(folder), common.load_tokenizer(folder)
    prepare(model, SimpleNamespace(grad_checkpoint=False, fsdp=False))
    assert model.training
    forwards = [outputs(model) for _ in range(4)]
    assert all(torch.equal(f, outputs(model.eval())) for f in forwards)
    common.save_model(model, tokenizer, tmp_path / "out")
    config = read_json(tmp_path / "out" / "config.json")
    assert {k: config[k] for k in DROPOUT[family]} == DROPOUT[family]
    assert config.get("use_cache", True) and model.config.use_cache is False


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_gradient_checkpointing_acts_and_is_exact(family, lora_rank, folders):
    """It sleeps in eval mode, and under LoRA loses all gradients without a hook."""
    grads, calls = [], []
    for on in (False, True):
        model = filled(common.load_policy(folders[family], lora_rank=lora_rank))
        prepare(model, SimpleNamespace(grad_checkpoint=on, fsdp=False))
        blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 2)
        for block in blocks:  # their first part: the recomputation stops once it has what it needs
            part = next(block.children())
            part.register_forward_pre_hook(lambda *_, on=on: calls.append(on))
        common.token_logps(model, *batch()).sum().backward()
        grads.append(gradients(model))
        assert grads[-1].keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    same_gradients(grads[1], grads[0], 1e-6)
    assert calls == [False] * 2 + [True] * 4


@every_family
@torch.no_grad()
def test_reward_scores_are_transformers_own(family, reward_folders):
    """Also padded with the end id, where pooling by "last id that is not pad" errs."""
    folder = reward_folders[family]
    model = reward_models.load_reward_model(folder, tiny_tokenizer(), trainable=False)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    alone = [theirs(torch.tensor([p + a])).logits.item() for p, a in zip(PROMPTS, ANSWERS)]
    for rows in paddings():
        scores = reward_models.reward_scores(model, *rows[:2])
        assert scores.tolist() == pytest.approx(alone, abs=1e-4) and scores.dtype == torch.float32
    assert scores.std() > 0.01 and not model.fresh_head
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    "gone", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "score.weight"]
)
def test_weights_that_are_missing_are_not_drawn(gone, tmp_path, tokenizer):
    make, load = tiny_model, common.load_policy
    if gone == "score.weight":
        make, load = tiny_reward_model, lambda f: reward_models.load_reward_model(f, tokenizer)
    file = Path(make("qwen3", tmp_path)) / "model.safetensors"
    weights = load_file(file)
    del weights[gone]
    save_file(weights, file, metadata={"format": "pt"})
    refused = error_of(load, str(file.parent))
    assert f"its weight files lack {gone} (1 missing)" in refused


def damage(path, content):
    """None removes the file, keys join the JSON that it holds, else this is its text."""
    if content is None:
        path.unlink()
    elif isinstance(content, dict):
        path.write_text(json.dumps((read_json(path) if path.is_file() else {}) | content))
    else:
        path.write_text(content)


LOADERS = {
    "tokenizer": lambda f: common.load_tokenizer(f, "--x"),
    "policy": lambda f: common.load_policy(f, flag="--x"),
    "reward": lambda f: reward_models.load_reward_model(
        f, tiny_tokenizer(), trainable=False, flag="--x"
    ),
    "scorer": lambda f: reward_models.reward_function(f, flag="--x")(["a"], ["b"]),
}
# who loads which folder ("own": the kind that it should be), the reason, what one of its files holds
WRONG = table("""
policy | reward | this is a reward model | |
reward scorer | policy | not a reward model; train one with reward_train.py | |
reward | own | 3 labels | config.json | {"id2label": {"0": "a", "1": "b", "2": "c"}}
policy | own | config.json | config.json | None
tokenizer policy reward scorer | own | holds an adapter | adapter_config.json | {"peft_type": "LORA"}
policy | none | no such folder | |
policy | org/name | no such folder, and as a hub id it cannot be loaded ( | |
policy | own | cannot be loaded (Error while deserializing | model.safetensors | torn
policy | own | cannot be loaded (Error no file named model.safetensors | model.safetensors | None
tokenizer policy reward scorer | own | | config.json | {"model_type": "lla
tokenizer scorer | own | | tokenizer_config.json | {"a":
tokenizer scorer | own | | chat_template.jinja | {% for
tokenizer scorer | own | not the args.json of a run | args.json | {"args":
tokenizer policy scorer | own | fine | args.json | {"output_dir": "output"}
tokenizer policy scorer | own | fine | args.json | {"lr": NaN}
policy reward | own | fine | tokenizer_config.json | {"a":
policy reward | own | fine | chat_template.jinja | {% for
tokenizer policy reward scorer | own | fine | generation_config.json | {"a":
policy reward | own | fine | args.json | {"args":
""")
WRONG = [(who, *row) for several, *row in WRONG for who in several.split()]


@pytest.mark.parametrize("who, folder, reason, file, content", WRONG)
def test_a_wrong_or_damaged_folder_is_one_line(
    who, folder, reason, file, content, folders, reward_folders, tmp_path
):
    homes = {"policy": folders, "reward": reward_folders}
    homes["own"] = folders if who in ("tokenizer", "policy") else reward_folders
    if folder in homes:
        folder = str(shutil.copytree(homes[folder]["llama"], tmp_path / "x"))
    if file:
        damage(Path(folder) / file, content)
    if reason == "fine":
        LOADERS[who](folder)
        return
    refused = error_of(LOADERS[who], folder)
    assert refused.startswith(f"--x {folder}: ") and reason in refused and len(refused) < 600


def test_a_reward_model_keeps_its_scale(tmp_path, reward_folders, tokenizer):
    model = reward_models.load_reward_model(reward_folders["gpt2"], tokenizer)
    model.config.reward_mean, model.config.reward_std = 0.25, 2.0
    before, out = outputs(model), str(tmp_path / "out")
    common.save_model(model, tokenizer, out)
    again = reward_models.load_reward_model(out, tokenizer)
    assert (again.config.reward_mean, again.config.reward_std) == (0.25, 2.0)
    assert torch.equal(outputs(again), before)
    (tmp_path / "out" / "args.json").write_text('{"args": {"max_length": 6}}')
    prompt, answer = common.encode_pair(tokenizer, "Assess this candidate.", "hold", max_length=6)
    score = reward_models.reward_scores(model, *common.pad_rows([prompt], [answer], 7)[:2]).item()
    for raw, expected in ((True, score), (False, (score - 0.25) / 2)):
        rewards = reward_models.reward_function(out, raw=raw)(["Assess this candidate."], ["hold"])
        assert rewards == pytest.approx([expected], abs=1e-5)


def filled(model, std=0.1):
    """B at 0 passes every test: give it numbers."""
    for name, weight in model.named_parameters():
        if "lora_B" in name or name == "score.weight":
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            weight.data.normal_(std=std, generator=generator)
    return model


@torch.no_grad()
def outputs(model):
    ids, attention_mask, mask = batch()
    if hasattr(model, "score"):
        return reward_models.reward_scores(model, ids, attention_mask)
    return common.token_logps(model, ids, attention_mask, mask)


@every_family
def test_lora_starts_as_the_identity_and_switches_off(family, folders):
    base = outputs(common.load_policy(folders[family]))
    model = common.load_policy(folders[family], lora_rank=4)
    reward = reward_models.load_reward_model(folders[family], tiny_tokenizer(), lora_rank=4)
    assert torch.equal(outputs(model), base)
    for adapted, head in ((model, set()), (reward, {"score.weight"})):
        trained = {name for name, w in adapted.named_parameters() if w.requires_grad}
        kinds = {name.rpartition(".lora_")[2] for name in trained}
        assert kinds == {"A.weight", "B.weight"} | head
    layers = lora.lora_layers(model)
    assert len(layers) == 2 * {"gpt2": 4, "gpt_neox": 4, "opt": 6}.get(family, 7)
    common.token_logps(model, *batch()).sum().backward()
    for path, module in layers:
        assert not re.search("embed|lm_head|wte", path)
        assert module.lora_B.weight.grad.abs().max() > 0, path
        assert module.lora_A.weight.grad.abs().max() == 0, path
    changed = outputs(filled(model))
    assert (changed - base).abs().max() > 0.1
    with pytest.raises(KeyError), lora.adapter_off(model):
        assert torch.equal(outputs(model), base)
        raise KeyError
    assert torch.equal(outputs(model), changed)


@pytest.mark.parametrize("rank, stored", [(0, torch.float32), (4, torch.bfloat16)])
def test_precision_of_the_base_and_of_a_merge(rank, stored, tmp_path, monkeypatch):
    """At 1e-6 most bf16 weights never move: fp32, but for a base that no step changes."""
    folder = tiny_model("llama", tmp_path, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_, **__: self)  # stays on the CPU
    model = common.load_policy(folder, torch.bfloat16, "cuda", lora_rank=rank)
    assert model.lm_head.weight.dtype == stored
    assert {w.dtype for w in model.parameters() if w.requires_grad} == {torch.float32}
    if rank:
        layer = model.model.layers[0].mlp.up_proj
        layer.weight.data.fill_(1.0)
        layer.lora_A.weight.data.fill_(1.0)
        layer.lora_B.weight.data.fill_(0.001 / (rank * lora.SCALE))  # B·A adds `rank` products
        merged = lora.merged_state(model, torch.float32)["model.layers.0.mlp.up_proj.weight"]
        assert merged.dtype == torch.float32 and torch.allclose(merged, torch.tensor(1.001))


def test_only_rank_0_copies_a_merged_model(folders, monkeypatch):
    """A copy on each of a node's 8 ranks is 8 models in main memory."""
    model = common.load_policy(folders["llama"], lora_rank=2)
    monkeypatch.setattr(lora, "rank", lambda: 1)
    monkeypatch.setattr(torch.Tensor, "to", None)
    assert lora.merged_state(model, torch.float32) == {}


@torch.no_grad()
def logits_of(model):
    """Of a language model at each token, of a reward model per row."""
    ids, attention_mask, _ = batch()
    logits = model(input_ids=ids, attention_mask=attention_mask.long()).logits
    return logits[attention_mask] if logits.ndim == 3 else logits[:, 0]


DENSE, ODD = (
    "gpt2 llama gpt_neox opt".split(),
    "deepseek_v3 qwen3_next gemma4 zamba2 falcon_h1".split(),
)
ADAPTERS = [(family, "policy") for family in DENSE + ODD] + [(family, "reward") for family in DENSE]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft's own
@pytest.mark.parametrize("family, kind", ADAPTERS)
def test_adapter_folders_are_pefts(family, kind, folders, tmp_path, tokenizer):
    """`peft` loads ours unchanged, to 1e-5, with the score head (theirs: test_trl_parity.py). Adapters
    of dense layers beside experts went to other layers in silence; bare names hit another tower, or a
    layer that is none; PEFT refused Mamba's out_proj."""
    peft = pytest.importorskip("peft")
    folder, load, auto, options = folders[family], common.load_policy, AutoModelForCausalLM, {}
    if kind == "reward":
        load = lambda name, **k: reward_models.load_reward_model(name, tokenizer, **k)  # noqa: E731
        auto, options = AutoModelForSequenceClassification, {"num_labels": 1, "pad_token_id": 7}
    model, merged = filled(load(folder, lora_rank=4)), tmp_path / "merged"
    expected = outputs(model)
    assert (expected - outputs(load(folder))).abs().max() > 0.01
    common.save_model(model, tokenizer, merged)
    assert (outputs(load(str(merged))) - expected).abs().max() < 1e-4
    refused = error_of(load, str(merged / "adapter"))
    assert re.search("holds an adapter .* merge it into its base with PEFT", refused)
    base = auto.from_pretrained(folder, **options)
    theirs = peft.PeftModel.from_pretrained(base, merged / "adapter").eval()
    assert (logits_of(theirs) - logits_of(model)).abs().max() < 1e-5
    plain = auto.from_pretrained(merged)
    assert (logits_of(theirs) - logits_of(plain)).abs().max() < 1e-4


def saved_and_opened(auto, model, tokenizer, out, dtype=torch.float32):
    """The model as plain transformers opens our folder, and the folder's weights; ours stay."""
    before = copy.deepcopy(filled(model).state_dict())
    common.save_model(model, tokenizer, out, dtype)
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())
    opened, info = auto.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    gap = (logits_of(model) - logits_of(opened).float()).abs()
    assert gap.max() < (0.1 if dtype == torch.float16 else 3e-5)
    assert common.load_tokenizer(str(out)).chat_template == tokenizer.chat_template
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in out.glob("*.*"))
    assert not [*out.parent.rglob(".writing-*")]
    weights = load_file(out / "model.safetensors")
    stored = {w.dtype for name, w in weights.items() if name != "score.weight"}
    assert stored == {dtype} == {next(opened.parameters()).dtype}
    return opened, weights


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_policy_opens_in_plain_transformers(tied, dtype, tmp_path, tokenizer):
    model = common.load_policy(tiny_model("llama", tmp_path, tie_word_embeddings=tied))
    out, auto = tmp_path / "out", AutoModelForCausalLM
    opened, weights = saved_and_opened(auto, model, tokenizer, out, dtype)
    shared = opened.get_output_embeddings().weight is opened.get_input_embeddings().weight
    assert shared == tied == model.config.tie_word_embeddings
    assert ("lm_head.weight" in weights) != tied
    assert opened.generation_config.eos_token_id == [tokenizer.eos_token_id]


# "fresh": made of a language model
@pytest.mark.parametrize("name, dtype", [("fresh", torch.float32), ("reward", torch.float16)])
def test_a_reward_model_opens_in_plain_transformers(
    name, dtype, tmp_path, folders, reward_folders, tokenizer
):
    source, out = folders if name == "fresh" else reward_folders, tmp_path / "out"
    model = reward_models.load_reward_model(source["llama"], tokenizer)
    assert model.fresh_head == (outputs(model).tolist() == [0, 0, 0]) == (name == "fresh")
    auto = AutoModelForSequenceClassification
    weights = saved_and_opened(auto, model, tokenizer, out, dtype)[1]
    assert weights["score.weight"].dtype == torch.float32
    config = read_json(out / "config.json")
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["pad_token_id"] == common.pad_id(tokenizer) != tokenizer.eos_token_id


@pytest.mark.parametrize("sampling", [False, True])
def test_a_generation_config_that_refuses_to_be_saved(sampling, tmp_path):
    """transformers raises on saving temperature .6 with sampling off, after hours of training. What
    it refuses goes one by one: the ids and the penalty stay."""
    folder, out = tiny_model("llama", tmp_path), str(tmp_path / "out")
    tokenizer = common.load_tokenizer(folder)
    ends = sorted([tokenizer.eos_token_id, 9])
    wanted = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.3}
    wanted |= {"do_sample": sampling, "eos_token_id": ends, "early_stopping": True}
    (Path(folder) / "generation_config.json").write_text(json.dumps(wanted))
    for name in (folder, out):
        common.save_model(common.load_policy(name), tokenizer, out)
    saved = read_json(tmp_path / "out" / "generation_config.json")
    assert saved["eos_token_id"] == ends
    assert saved.get("temperature", 1.0) in ((0.6,) if sampling else (None, 1.0))
    assert saved["repetition_penalty"] == 1.3 and not saved.get("early_stopping")
    assert common.end_ids(tokenizer, common.load_policy(out)) == ends
    AutoModelForCausalLM.from_pretrained(out).save_pretrained(tmp_path / "again")
