"""Log-probs, rewards, precision, LoRA and saving, for every family that the project names.

`token_logps` is the one place where all stages meet, so it is compared with the slowest true thing
there is: the model itself, fed one row at a time, without padding. Saved folders are opened by
plain transformers and by PEFT.
"""

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import common
from common import UserError
from parts import lora, parallel
from parts.runs import check_head, prepare
from tiny import _ROPE, EXTRA_FAMILIES, FAMILIES, tiny_model, tiny_reward_model, tiny_tokenizer

ALL = [*FAMILIES, *EXTRA_FAMILIES]
every_family = pytest.mark.parametrize("family", ALL)
PROMPTS = [[20], [30, 31, 32, 33, 34, 35, 36], [40, 41, 42]]
ANSWERS = [[50, 51, 52, 6], [60, 6], [70, 71, 72, 73, 74, 6]]


@pytest.fixture(scope="module")
def reward_folders(tmp_path_factory):
    """family → folder of a reward model with a random head."""
    home = tmp_path_factory.mktemp("rewards")
    return {family: tiny_reward_model(family, home) for family in ALL}


def batch(pad=7):
    return common.pad_rows(PROMPTS, ANSWERS, pad)


def left(ids, attention_mask, mask, extra=0, pad=7):
    """The same rows, padded on the left and by `extra` more columns."""
    n, width = ids.shape[0], ids.shape[1] + extra
    out = torch.full((n, width), pad), torch.zeros(n, width).bool(), torch.zeros(n, width).bool()
    for row in range(n):
        length = int(attention_mask[row].sum())
        for wide, narrow in zip(out, (ids, attention_mask, mask)):
            wide[row, width - length :] = narrow[row, :length]
    return out


def paddings():
    """The batch, with another pad id, padded on the left, and with ten more columns of the end."""
    return batch(), batch(pad=6), left(*batch()), left(*batch(6), extra=10, pad=6)


def plain_logps(model, ids, temperature=1.0):
    """log p of tokens 1 … of one row (a list), from the model's own logits in float64."""
    logits = model(torch.tensor([ids])).logits[0, :-1].double() / temperature
    return F.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)


def gradients(model):
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def same_gradients(a, b, tolerance=1e-5):
    assert a.keys() == b.keys() and a
    for name in a:
        scale = max(1.0, b[name].abs().max().item())
        assert (a[name] - b[name]).abs().max() <= tolerance * scale, name


# ---- log-probs ----


@every_family
@torch.no_grad()
def test_log_probs_are_those_of_each_row_alone(family, folders):
    """Every slip of shift, mask, padding and temperature at once. GPT-2 counts its positions from
    the first column and OPT from the mask: without explicit positions left padding moves GPT-2's
    sums by whole nats, while a test with Llama alone cannot fail. `check_head`, which compares with
    the model's own head, must not cry wolf."""
    model = common.load_policy(folders[family])
    for temperature in (1.0, 0.7):
        expected = torch.cat(
            [plain_logps(model, p + a, temperature)[len(p) - 1 :] for p, a in zip(PROMPTS, ANSWERS)]
        )
        for rows in paddings():
            logps = common.token_logps(model, *rows, temperature)
            assert logps[rows[2]].tolist() == pytest.approx(expected.tolist(), abs=2e-5)
            assert (logps[~rows[2]] == 0).all() and logps.dtype == torch.float32
    check_head(model, *batch(), "--model")


def test_rows_with_nothing_to_train(folders):
    """A batch, or one of its rows, without a counted token: zeros and finite gradients, not a crash
    and not a NaN. Column 0 is predicted from nothing; the row's last column must not score it."""
    model = common.load_policy(folders["llama"])
    ids, attention_mask, mask = batch()
    whole = common.token_logps(model, ids, attention_mask, mask).detach()
    for rows in ([1], [0, 1, 2]):
        some = mask.clone()
        some[rows] = False
        logps = common.token_logps(model, ids, attention_mask, some)
        assert (logps[~some] == 0).all()
        torch.testing.assert_close(logps[some], whole[some], atol=1e-5, rtol=0)
        logps.sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    mask[1, 0] = True
    with pytest.raises(ValueError, match=r"response_mask\[:, 0\]"):
        common.token_logps(model, ids, attention_mask, mask)


@every_family
def test_chunks_of_the_head_change_nothing(family, folders, monkeypatch):
    """The head runs in chunks that the backward computes again; a chunk border in the wrong place,
    a cap forgotten (Gemma 2), or a tied head without its gradient shows in values or gradients.
    Chunks of 1, 7 and all of the 12 tokens, against full logits."""
    model = common.load_policy(folders[family])
    ids, attention_mask, mask = batch()
    weight = torch.randn(ids.shape, generator=torch.Generator().manual_seed(0))
    logits = model(ids, attention_mask=attention_mask.long()).logits[:, :-1].float() / 0.8
    all_logps = F.log_softmax(logits, -1)
    plain = all_logps.gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropy = -(all_logps.exp() * all_logps).sum(-1)
    on = mask[:, 1:]
    (((plain + 0.3 * entropy) * weight[:, 1:])[on]).sum().backward()
    expected = gradients(model)
    heads = []
    model.get_output_embeddings().register_forward_hook(lambda m, i, o: heads.append(len(o)))
    for rows, chunks in ((1, 12), (7, 2), (10**6, 1)):
        size = 4 * model.config.vocab_size * rows
        monkeypatch.setitem(common.HEAD_CHUNK_BYTES, "cpu", size)
        heads.clear()
        logps, entropies, top = common.token_logps(
            model, ids, attention_mask, mask, 0.8, with_entropy=True, with_top=True
        )
        assert len(heads) == chunks and sum(heads) == mask.sum() == 12, "only answer tokens pass"
        assert (logps[:, 1:][on] - plain[on]).abs().max() < 1e-5
        assert (entropies[:, 1:][on] - entropy[on]).abs().max() < 1e-5
        assert torch.equal(top[:, 1:][on], (logits.argmax(-1) == ids[:, 1:])[on].float())
        assert (logps[~mask] == 0).all() and (entropies[~mask] == 0).all()
        ((logps + 0.3 * entropies) * weight).sum().backward()
        assert sum(heads) == 12 * (1 + (chunks > 1)), "chunks are computed again, not kept"
        same_gradients(gradients(model), expected)


def test_check_head_finds_scaled_logits():
    """Granite divides its logits by 8 behind the head; log-probs without that are another
    model's."""
    fields = dict(_ROPE, vocab_size=300, initializer_range=0.3, logits_scaling=8.0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("granite", **fields)).eval()
    model.compute_dtype = torch.float32
    with pytest.raises(UserError, match="logits are scaled"):
        check_head(model, *batch(), "--model")


# ---- precision ----


@torch.no_grad()
def test_log_softmax_is_fp32_for_bf16_models(tmp_path):
    """bf16 has 3 digits: log-softmax in it is off by some 0.01 a token, a sum over 1000 tokens
    by whole nats. V = 32 000: the sum is within 0.1 of the fp32 log-softmax of the same bf16
    logits."""
    folder = tiny_model("llama", tmp_path, vocab_size=32000, max_position_embeddings=1100)
    model = common.load_policy(folder).bfloat16()
    row = [(7919 * i) % 32000 for i in range(1001)]
    logps = common.token_logps(model, *common.pad_rows([row[:1]], [row[1:]], 0))
    logits = model.lm_head(model.model(torch.tensor([row])).last_hidden_state[0, :-1])
    assert logits.dtype == torch.bfloat16 and logps.dtype == torch.float32
    at = torch.tensor(row[1:])[:, None]
    expected = F.log_softmax(logits.double(), -1).gather(-1, at).sum().item()
    assert logps.sum().item() == pytest.approx(expected, abs=0.1)
    assert abs(F.log_softmax(logits, -1).gather(-1, at).double().sum().item() - expected) > 0.1


def test_precision_is_picked_by_capability(monkeypatch):
    """A T4 (7, 5) says that bf16 is supported because torch counts emulation, which is slower than
    fp32: fp16 + scaler."""
    pick, fp16, bf16 = parallel.pick_precision, (torch.float16, True), (torch.bfloat16, False)
    for capability, expected in {(7, 5): fp16, (6, 1): fp16, (8, 0): bf16, (9, 0): bf16}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a, c=capability: c)
        assert pick("cuda") == pick(torch.device("cuda:0")) == expected
    assert pick("cuda", "fp32") == pick("cpu") == pick("mps") == (torch.float32, False)
    assert pick("cpu", "fp16") == fp16 and pick("cpu", "bf16") == bf16


def test_weights_are_fp32_masters(tmp_path, tokenizer):
    """AdamW at 1e-6 adds less than half a bf16 step to most weights: trained in bf16 they never
    move. A folder in bf16 is loaded in fp32."""
    policy = tiny_model("llama", tmp_path, dtype=torch.bfloat16)
    reward = tiny_reward_model("llama", tmp_path / "r", dtype=torch.bfloat16)
    for model in (common.load_policy(policy), common.load_reward_model(reward, tokenizer)):
        assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_autocast_does_not_outlive_an_optimiser_step(folders):
    """Autocast caches the low-precision copy of a weight for the length of its context: one around
    the whole loop would go on with the weights of step 0. After a step the output is that of a
    fresh copy, bit for bit."""
    model = common.load_policy(folders["llama"], dtype=torch.bfloat16)
    rows, optimizer = batch(), torch.optim.SGD(model.parameters(), lr=0.1)
    first = common.token_logps(model, *rows)
    first.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    optimizer.step()
    second, fresh = outputs(model), outputs(copy.deepcopy(model))
    assert torch.equal(second, fresh) and (second - first).abs().max() > 0.1
    gap = (outputs(common.load_policy(folders["llama"])) - first).abs().max().item()
    assert 1e-5 < gap < 0.5, "bf16 was really used, and is close"


# ---- dropout and gradient checkpointing ----

DROPOUT = {
    "gpt2": dict(attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1),
    "opt": dict(dropout=0.1, attention_dropout=0.1, layerdrop=0.5),
    "gpt_neox": dict(hidden_dropout=0.1, attention_dropout=0.1),
}


@pytest.mark.parametrize("family", DROPOUT)
def test_dropout_is_off_and_kept_in_the_saved_config(family, tmp_path):
    """Dropout in the policy and not in the reference: the loss at step 0 is not log 2, and no ratio
    is 1. Forwards in train mode are equal (OPT also drops whole layers), and the saved config still
    says .1, and that the cache, which training turns off, is on."""
    folder = tiny_model(family, tmp_path, **DROPOUT[family])
    model, tokenizer = common.load_policy(folder), common.load_tokenizer(folder)
    prepare(model, SimpleNamespace(grad_checkpoint=False, fsdp=False))
    assert model.training
    forwards = [outputs(model) for _ in range(4)]
    assert all(torch.equal(f, outputs(model.eval())) for f in forwards)
    common.save_model(model, tokenizer, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {k: config[k] for k in DROPOUT[family]} == DROPOUT[family]
    assert config.get("use_cache", True) and model.config.use_cache is False


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_gradient_checkpointing_acts_and_is_exact(family, lora_rank, folders):
    """`from_pretrained` returns eval mode, in which checkpointing sleeps and saves nothing; with
    LoRA its inputs need no gradient, and without a hook every adapter gradient is missing. Each of
    2 blocks runs twice, gradients are equal."""
    found, runs = [], []
    for on in (False, True):
        model = filled(common.load_policy(folders[family], lora_rank=lora_rank))
        prepare(model, SimpleNamespace(grad_checkpoint=on, fsdp=False))
        blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 2)
        calls = []
        for block in blocks:  # their first part: the recomputation stops once it has what it needs
            part = next(block.children())
            part.register_forward_pre_hook(lambda *_, c=calls: c.append(1))
        common.token_logps(model, *batch()).sum().backward()
        found.append(gradients(model))
        runs.append(len(calls))
        assert found[-1].keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    same_gradients(found[1], found[0], 1e-6)
    assert runs == [2, 4]


# ---- reward scores ----


@every_family
@torch.no_grad()
def test_reward_scores_are_transformers_own(family, reward_folders):
    """A score that only our code can compute is of no use in TRL: transformers' own of each row
    alone, whatever the mates and the padding, the end id itself as padding (where pooling by "last
    id that is not pad" reads the token before the end), left or right."""
    folder = reward_folders[family]
    model = common.load_reward_model(folder, tiny_tokenizer(), trainable=False)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    alone = [theirs(torch.tensor([p + a])).logits.item() for p, a in zip(PROMPTS, ANSWERS)]
    for rows in paddings():
        scores = common.reward_scores(model, *rows[:2])
        assert scores.tolist() == pytest.approx(alone, abs=1e-4) and scores.dtype == torch.float32
    assert scores.std() > 0.01 and not model.fresh_head
    assert not any(p.requires_grad for p in model.parameters())


# ---- broken folders ----

GONE = ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "score.weight"]


@pytest.mark.parametrize("gone", GONE)
def test_weights_that_are_missing_are_not_drawn(gone, tmp_path, tokenizer):
    """A folder saved without its head loads with a random one, and the only word about it is a
    warning that is off here. A reward head alone may be missing, from a language model."""
    head = gone == "score.weight"
    folder = Path((tiny_reward_model if head else tiny_model)("qwen3", tmp_path))
    load = (lambda f: common.load_reward_model(f, tokenizer)) if head else common.load_policy
    assert load(str(folder)) is not None
    weights = load_file(folder / "model.safetensors")
    del weights[gone]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"its weight files lack {gone} \(1 missing\)"):
        load(str(folder))


def test_the_wrong_folder_is_named(folders, reward_folders, tmp_path, tokenizer):
    """A folder of the wrong kind loads with random weights and a warning among many: here it is one
    line with the flag."""
    (tmp_path / "x").mkdir()
    for name, content in (("torn", b"\x00" * 100), ("empty", None)):
        file = Path(shutil.copytree(folders["llama"], tmp_path / name)) / "model.safetensors"
        file.write_bytes(content) if content else file.unlink()
    shutil.copytree(reward_folders["gpt2"], tmp_path / "three")
    damage(tmp_path / "three", "config.json", {"id2label": {"0": "a", "1": "b", "2": "c"}})
    policy, reward = common.load_policy, common.load_reward_model
    frozen = lambda folder, **how: reward(folder, tokenizer, trainable=False, **how)  # noqa: E731
    cases = [
        (policy, reward_folders["llama"], "this is a reward model"),
        (frozen, folders["llama"], "not a reward model; train one with reward_train.py"),
        (frozen, tmp_path / "three", "3 labels"),
        (policy, tmp_path / "x", "config.json"),
        (policy, tmp_path / "none", "no such folder"),
        (policy, "org/name", "no such folder, and as a hub id it cannot be loaded ("),
        (policy, tmp_path / "torn", "cannot be loaded (Error while deserializing"),
        (policy, tmp_path / "empty", "cannot be loaded (Error no file named model.safetensors"),
    ]
    for load, folder, reason in cases:
        with pytest.raises(UserError) as caught:
            load(str(folder), flag="--reward-model")
        message = str(caught.value)
        assert message.startswith(f"--reward-model {folder}: ") and reason in message
        assert "\n" not in message


# what a damaged folder holds: file, content (a dict changes the file's JSON), who trips over it
EVERYBODY = "tokenizer policy reward scorer"
DAMAGED = [
    ("config.json", '{"model_type": "lla', EVERYBODY),
    ("tokenizer_config.json", '{"a": ', "tokenizer scorer"),
    ("chat_template.jinja", "{% for", "tokenizer scorer"),
    # transformers then takes the ends from config.json, as for a folder without this file
    ("generation_config.json", '{"a": ', ""),
    ("args.json", '{"args": ', "scorer"),
]


def damage(folder, file, content):
    path = Path(folder) / file
    if not isinstance(content, str):
        held = json.loads(path.read_text()) if path.is_file() else {}
        content = json.dumps({**held, **content})
    path.write_text(content)


@pytest.mark.parametrize("file, content, wrong", DAMAGED)
def test_damaged_json_is_one_line(
    file, content, wrong, folders, reward_folders, tmp_path, tokenizer
):
    """A value of another type, half a file: nine kinds of traceback, some in the middle of a run.
    One line names flag and folder where it enters; who does not read the file does not mind."""
    use = {
        "tokenizer": lambda f: common.load_tokenizer(f, "--x"),
        "policy": lambda f: common.load_policy(f, flag="--x"),
        "reward": lambda f: common.load_reward_model(f, tokenizer, trainable=False, flag="--x"),
        "scorer": lambda f: common.reward_function(f, flag="--x")(["a"], ["b"]),
    }
    for who, load in use.items():
        whole = (reward_folders if who in ("reward", "scorer") else folders)["llama"]
        folder = shutil.copytree(whole, tmp_path / who)
        damage(folder, file, content)
        if who not in wrong.split():
            load(str(folder))
            continue
        with pytest.raises(UserError) as caught:
            load(str(folder))
        message = str(caught.value)
        assert message.startswith(f"--x {folder}: ") and "\n" not in message and len(message) < 600


def test_a_reward_model_keeps_its_scale(tmp_path, reward_folders, tokenizer):
    """PPO standardises rewards by the mean and deviation that the reward model's config keeps; the
    head itself is not rescaled, and an answer is cut as in the model's training."""
    model = common.load_reward_model(reward_folders["gpt2"], tokenizer)
    model.config.reward_mean, model.config.reward_std = 0.25, 2.0
    before, out = outputs(model), str(tmp_path / "out")
    common.save_model(model, tokenizer, out)
    again = common.load_reward_model(out, tokenizer)
    assert (again.config.reward_mean, again.config.reward_std) == (0.25, 2.0)
    assert torch.equal(outputs(again), before)
    (tmp_path / "out" / "args.json").write_text('{"args": {"max_length": 6}}')
    pair = common.encode_pair(tokenizer, "Assess this candidate.", "hold", max_length=6)
    raw = common.reward_scores(model, *common.pad_rows(*zip(pair), 7)[:2]).item()
    for flag, expected in ((True, raw), (False, (raw - 0.25) / 2)):
        score = common.reward_function(out, raw=flag)(["Assess this candidate."], ["hold"])
        assert score == pytest.approx([expected], abs=1e-5)


# ---- LoRA ----


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
        return common.reward_scores(model, ids, attention_mask)
    return common.token_logps(model, ids, attention_mask, mask)


@every_family
def test_lora_starts_as_the_identity_and_switches_off(family, folders):
    """With B = 0 the policy is its reference, to the last bit; with B filled it is not, and
    adapter_off brings it back, also when the block inside raises. Only A and B are trained, in each
    linear layer of the two blocks (GPT-2 hides its own in Conv1D), no embedding, no head. By hand:
    GPT-2 and GPT-NeoX have 4 a block, OPT 6, the Llama kin 7. After one backward B has a gradient
    everywhere and A, behind B = 0, has exactly 0."""
    base = outputs(common.load_policy(folders[family]))
    model = common.load_policy(folders[family], lora_rank=4)
    assert torch.equal(outputs(model), base)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_A." in n or ".lora_B." in n for n in trained)
    layers = lora.lora_layers(model)
    assert len(layers) == 2 * {"gpt2": 4, "gpt_neox": 4, "opt": 6}.get(family, 7)
    common.token_logps(model, *batch()).sum().backward()
    for path, module in layers:
        assert not any(word in path for word in ("embed", "lm_head", "wte"))
        assert module.lora_B.weight.grad.abs().max() > 0, path
        assert module.lora_A.weight.grad.abs().max() == 0, path
    changed = outputs(filled(model))
    assert (changed - base).abs().max() > 0.1
    with pytest.raises(KeyError), lora.adapter_off(model):
        assert torch.equal(outputs(model), base)
        raise KeyError
    assert torch.equal(outputs(model), changed)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_lora_is_w_plus_alpha_over_r_times_b_a(family, folders):
    """The scale is α/r with α = 2r, and Conv1D's weight lies the other way round. The merged weight
    is W + (α/r)·B·A entry by entry; in a plain model it computes the same."""
    model, plain = common.load_policy(folders[family]), common.load_policy(folders[family])
    filled(lora.add_lora(model, 8))
    path, layer = lora.lora_layers(model)[0]
    delta = 2 * layer.lora_B.weight @ layer.lora_A.weight
    delta = delta.T if family == "gpt2" else delta
    merged = lora.merged_state(model)
    assert torch.allclose(merged[f"{path}.weight"], layer.weight + delta, atol=1e-6)
    assert merged.keys() == plain.state_dict().keys()
    plain.load_state_dict(merged)
    assert (outputs(plain) - outputs(model)).abs().max() < 1e-4


@pytest.mark.parametrize("rank, stored", [(0, torch.float32), (4, torch.bfloat16)])
def test_the_base_of_an_adapter_is_held_in_the_compute_dtype(rank, stored, folders, monkeypatch):
    """On a GPU fp32 masters of weights that no step changes are twice the memory; asked of
    transformers, as no GPU is here."""
    monkeypatch.setattr(common.nn.Module, "to", lambda self, *_, **__: self)  # stays on the CPU
    model = common.load_policy(folders["llama"], torch.bfloat16, "cuda", lora_rank=rank)
    assert model.lm_head.weight.dtype == stored
    assert {w.dtype for w in model.parameters() if w.requires_grad} == {torch.float32}


def test_a_half_precision_base_merges_in_fp32(folders):
    """bf16 has 8 bits: a step of 0.001 beside a weight of 1 is rounded away. The saved sum has
    it."""
    model = common.load_policy(folders["llama"], lora_rank=2)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight.data = torch.ones_like(layer.weight).bfloat16()
    layer.lora_A.weight.data.fill_(1.0)
    layer.lora_B.weight.data.fill_(0.001 / (2 * lora.SCALE))  # B·A adds two products
    merged = lora.merged_state(model)["model.layers.0.mlp.up_proj.weight"]
    assert merged.dtype == torch.float32 and torch.allclose(merged, torch.tensor(1.001))


def test_a_broken_adapter_is_one_line(folders, tmp_path, tokenizer):
    """Half copied, of another kind or another base: the folder and the reason."""
    good = common.load_policy(folders["llama"], lora_rank=2)
    common.save_model(good, tokenizer, tmp_path, adapter_only=True)
    loop, other = str(tmp_path / "loop"), folders["gpt2"]
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    (second, *_) = (name for name in weights if "lora_B" in name)
    for name, change in {
        "broken": "{",
        "junk": None,
        "bias": {"bias": "all"},
        "other": {"base_model_name_or_path": other},
        "loop": {"base_model_name_or_path": loop},
        "half": {second: None},
        "more": {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 2)},
    }.items():
        folder = shutil.copytree(tmp_path / "adapter", tmp_path / name)
        if name in ("half", "more"):
            kept = {k: v for k, v in {**weights, **change}.items() if v is not None}
            save_file(kept, folder / "adapter_model.safetensors")
        elif name == "junk":
            (folder / "adapter_model.safetensors").write_text("junk" * 20)
        else:
            damage(folder, "adapter_config.json", change)
        words = "not a plain LoRA adapter" if name == "bias" else "cannot be loaded"
        with pytest.raises(UserError, match=words) as caught:
            common.load_policy(str(folder))
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft's own
@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox", "opt"])
@pytest.mark.parametrize("kind", ["policy", "reward"])
def test_adapter_folders_are_pefts(family, kind, folders, tmp_path, tokenizer):
    """An adapter only we can read is lost: `peft` loads ours unchanged (theirs here: test_trl_parity
    .py), to 1e-5. Merged folder, adapter beside it, adapter alone; for a reward model the score
    head travels with the adapter (`modules_to_save`)."""
    peft = pytest.importorskip("peft")
    folder, load, auto, options = folders[family], common.load_policy, AutoModelForCausalLM, {}
    if kind == "reward":
        load = lambda name, **k: common.load_reward_model(name, tokenizer, **k)  # noqa: E731
        auto, options = AutoModelForSequenceClassification, {"num_labels": 1, "pad_token_id": 7}
    model = filled(lora.add_lora(load(folder), 4))
    expected = outputs(model)
    assert (expected - outputs(load(folder))).abs().max() > 0.01
    merged, alone = tmp_path / "merged", tmp_path / "alone"
    common.save_model(model, tokenizer, merged)
    common.save_model(model, tokenizer, alone, adapter_only=True)
    assert not (alone / "model.safetensors").exists() and not (alone / "config.json").exists()
    for name in (merged, merged / "adapter", alone / "adapter"):
        assert (outputs(load(str(name))) - expected).abs().max() < 1e-4, name

    def their_outputs(theirs):
        ids, attention_mask, mask = batch()
        with torch.no_grad():
            logits = theirs(ids, attention_mask=attention_mask.long()).logits
        if kind == "reward":
            return logits[:, 0]
        logps = F.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return F.pad(logps, (1, 0)) * mask

    theirs = peft.PeftModel.from_pretrained(
        auto.from_pretrained(folder, **options), alone / "adapter"
    )
    assert (their_outputs(theirs.eval()) - expected).abs().max() < 1e-5


# ---- saving ----


def test_folders_open_in_plain_transformers(tmp_path, folders, reward_folders, tokenizer):
    """After hours of training a folder that opens with "newly initialized" weights is nothing: no
    missing key, equal logits, still tied, template there. (test_trainers.py opens every family.)"""
    reward = lambda folder: common.load_reward_model(folder, tokenizer)  # noqa: E731
    untied = tiny_model("llama", tmp_path / "m", tie_word_embeddings=False)
    models = {
        "llama": common.load_policy(folders["llama"]),
        "half": common.load_policy(folders["llama"]),
        "untied": common.load_policy(untied),
        "half-reward": reward(reward_folders["llama"]),
        "fresh": reward(folders["llama"]),
    }
    fresh = models["fresh"]
    assert fresh.fresh_head and common.reward_scores(fresh, *batch()[:2]).tolist() == [0, 0, 0]
    ids, attention_mask, _ = batch()
    for name, model in models.items():
        out, filled_model = tmp_path / name, filled(model)
        dtype = torch.float16 if "half" in name else torch.float32
        before = copy.deepcopy(model.state_dict())
        common.save_model(filled_model, tokenizer, out, dtype)
        assert all(torch.equal(w, before[k]) for k, w in model.state_dict().items())
        head = hasattr(model, "score")
        auto = AutoModelForSequenceClassification if head else AutoModelForCausalLM
        opened, info = auto.from_pretrained(out, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert next(opened.parameters()).dtype == dtype, name
        with torch.no_grad():
            logits = [m(ids, attention_mask=attention_mask.long()).logits for m in (model, opened)]
        gap = (logits[0] - logits[1].float()).abs()
        assert (gap if head else gap[attention_mask]).max() < (0.1 if "half" in name else 3e-5)
        assert common.load_tokenizer(str(out)).chat_template == tokenizer.chat_template
        assert all(path.stat().st_mode & 0o777 == 0o644 for path in out.glob("*.*")), "readable"
        if not head:
            tied = opened.get_output_embeddings().weight is opened.get_input_embeddings().weight
            assert tied == (name != "untied") == model.config.tie_word_embeddings
            assert opened.generation_config.eos_token_id == [tokenizer.eos_token_id]
    sizes = {n: (tmp_path / n / "model.safetensors").stat().st_size for n in models}
    assert sizes["untied"] - sizes["llama"] > 0.9 * 4 * 300 * 32, "a tied matrix is written once"
    weights = load_file(tmp_path / "half-reward" / "model.safetensors")
    assert weights["score.weight"].dtype == torch.float32, "scores rank close answers"
    config = json.loads((tmp_path / "fresh" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["pad_token_id"] == common.pad_id(tokenizer) != tokenizer.eos_token_id
    assert not [p for p in tmp_path.rglob(".writing-*")]


@pytest.mark.parametrize("sampling", [False, True])
def test_a_generation_config_that_refuses_to_be_saved(sampling, tmp_path):
    """transformers raises on *saving* temperature .6 with sampling off, after hours of training:
    cleaned when loaded. With sampling on .6 is what the author meant and stays; all end ids are
    written for those who generate."""
    folder, out = tiny_model("llama", tmp_path), str(tmp_path / "out")
    tokenizer = common.load_tokenizer(folder)
    ends = sorted([tokenizer.eos_token_id, 9])
    wanted = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.3}
    wanted |= {"do_sample": sampling, "eos_token_id": ends}
    (Path(folder) / "generation_config.json").write_text(json.dumps(wanted))
    for name in (folder, out):
        common.save_model(common.load_policy(name), tokenizer, out)
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == ends
    assert saved.get("temperature", 1.0) in ((0.6,) if sampling else (None, 1.0))
    assert common.end_ids(tokenizer, common.load_policy(out)) == ends
    AutoModelForCausalLM.from_pretrained(out).save_pretrained(tmp_path / "again")
