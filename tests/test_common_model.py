"""Log-probs, rewards, precision, LoRA and saving, for every family that the project names.

`token_logps` is the one place where all stages meet, so it is compared with the slowest true thing there is: the model
itself, fed one more token at a time, without padding. A saved folder is opened by plain transformers in another process.
"""

import copy
import json
import math
import shutil
import subprocess
import sys
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
from tiny import (
    EXTRA_FAMILIES,
    FAMILIES,
    tiny_config,
    tiny_model,
    tiny_reward_model,
    tiny_tokenizer,
)

ALL = [*FAMILIES, *EXTRA_FAMILIES]
PROMPTS = [[20], [30, 31, 32, 33, 34, 35, 36], [40, 41, 42]]
ANSWERS = [[50, 51, 52, 6], [60, 6], [70, 71, 72, 73, 74, 6]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """family → folder of a random policy; to be read and never written."""
    home = tmp_path_factory.mktemp("policies")
    return {family: tiny_model(family, home) for family in ALL}


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


# ---- the shift by one ----


@pytest.mark.parametrize("prompt_length", [1, 7])
def test_a_look_up_model_knows_its_next_token(tmp_path, prompt_length):
    """Shifted by one, every loss still falls, on the wrong tokens. A Llama whose layers add nothing and whose head names
    the successor 7·i + 3 of each token i: log p ≈ 0 for the true row, below −5 for each token of the answer read backwards.
    """
    folder = tiny_model("llama", tmp_path, hidden_size=64, tie_word_embeddings=False)
    model = common.load_policy(folder)
    table = F.normalize(torch.randn(300, 64, generator=torch.Generator().manual_seed(0)), dim=1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        model.model.embed_tokens.weight.copy_(table)
        model.lm_head.weight[(7 * torch.arange(300) + 3) % 300] = 4 * table
    row = [5]
    while len(row) < prompt_length + 6:
        row.append((7 * row[-1] + 3) % 300)
    prompt, answer = row[:prompt_length], row[prompt_length:]
    logps = common.token_logps(model, *common.pad_rows([prompt], [answer], 0))
    assert logps.shape == (1, len(row)) and logps.dtype == torch.float32
    assert (logps[0, :prompt_length] == 0).all() and logps.abs().max() < 0.01
    logps = common.token_logps(model, *common.pad_rows([prompt], [answer[::-1]], 0))
    assert (logps[0, prompt_length:] < -5).all()


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_one_more_token_at_a_time(family, temperature, folders):
    """Every slip of shift, mask, padding and temperature at once: the last column of ever longer prompts knows no shift."""
    model = common.load_policy(folders[family])
    ids, attention_mask, mask = batch()
    with torch.no_grad():
        logps = common.token_logps(model, ids, attention_mask, mask, temperature)
        for row, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS)):
            whole = prompt + answer
            for t in range(len(prompt), len(whole)):
                logits = model(torch.tensor([whole[:t]])).logits[0, -1].double() / temperature
                expected = logits[whole[t]] - logits.logsumexp(-1)
                assert logps[row, t].item() == pytest.approx(expected.item(), abs=2e-5)
    assert (logps[~mask] == 0).all()


def test_the_first_token_has_no_log_prob(folders):
    """Column 0 is predicted from nothing; scored anyway, it would be scored by the row's last column."""
    model = common.load_policy(folders["llama"])
    ids, attention_mask, mask = batch()
    mask[1, 0] = True
    with pytest.raises(ValueError, match=r"response_mask\[:, 0\]"):
        common.token_logps(model, ids, attention_mask, mask)


def test_rows_with_nothing_to_train(folders):
    """A batch, or one of its rows, without a counted token: zeros and finite gradients, not a crash and not a NaN.
    The other rows keep their log-probs."""
    model = common.load_policy(folders["llama"])
    ids, attention_mask, mask = batch()
    whole = common.token_logps(model, ids, attention_mask, mask).detach()
    for rows in ([1], [0, 1, 2]):
        some = mask.clone()
        some[rows] = False
        logps = common.token_logps(model, ids, attention_mask, some)
        assert (logps[~some] == 0).all()
        # the head runs over the counted rows alone: another number of rows, another rounding on some processors
        torch.testing.assert_close(logps[some], whole[some], atol=1e-5, rtol=0)
        logps.sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("family", ALL)
def test_chunks_of_the_head_change_nothing(family, folders, monkeypatch):
    """The head runs in chunks that the backward computes again; a chunk border in the wrong place, or a cap forgotten
    (Gemma 2), shows in values or gradients. Chunks of 1, 7 and all of the 12 tokens, against full logits.
    """
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
    vocabulary = model.config.vocab_size
    for rows, chunks in ((1, 12), (7, 2), (10**6, 1)):
        monkeypatch.setitem(common.HEAD_CHUNK_BYTES, "cpu", 4 * vocabulary * rows)
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
        same_gradients(gradients(model), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads_have_their_gradient(tied, tmp_path):
    """A head that is computed apart from the forward must still reach the embedding it is tied to."""
    model = common.load_policy(tiny_model("llama", tmp_path, tie_word_embeddings=tied))
    ids, attention_mask, mask = batch()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    common.token_logps(model, ids, attention_mask, mask).sum().backward()
    found = gradients(model)
    logits = model(ids, attention_mask=attention_mask.long()).logits
    logps = F.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    logps[mask[:, 1:]].sum().backward()
    same_gradients(found, gradients(model))


@pytest.mark.parametrize("family", ALL)
def test_padding_and_batch_mates_change_no_log_prob(family, folders):
    """Ten more pad tokens, left or right, other pad ids, other mates: the same numbers to 1e-4 of sums near 20.

    GPT-2 counts its positions from the first column and OPT from the mask: without explicit positions left padding
    moves GPT-2's sums by whole nats, while a test with Llama alone cannot fail.
    """
    model = common.load_policy(folders[family])
    with torch.no_grad():
        alone = [common.token_logps(model, *common.pad_rows([p], [a], 0)).sum().item() for p, a in zip(PROMPTS, ANSWERS)]  # fmt: skip
        for rows in (batch(), batch(pad=6), left(*batch()), left(*batch(6), extra=10, pad=6)):
            sums = common.token_logps(model, *rows).sum(1)
            assert sums.tolist() == pytest.approx(alone, abs=1e-4)


def test_a_sliding_window_is_the_models_own(tmp_path):
    """A window of 8 tokens that some path forgets is right on short rows and wrong on long ones: a row of 40 tokens."""
    model = common.load_policy(tiny_model("mistral", tmp_path, sliding_window=8))
    row = [(17 * i) % 290 + 8 for i in range(40)]
    with torch.no_grad():
        expected = plain_logps(model, row)[19:]
        logps = common.token_logps(
            model, *left(*common.pad_rows([row[:20], [9]], [row[20:], [6]], 7))
        )
        assert logps[0, 20:].tolist() == pytest.approx(expected.tolist(), abs=2e-5)
    far = common.load_policy(tiny_model("mistral", tmp_path, sliding_window=None))
    assert (plain_logps(far, row)[19:] - expected).abs().max() > 0.1, "the window matters here"


@pytest.mark.parametrize("family", ALL)
def test_check_head_is_quiet_for_the_families(family, folders):
    """The comparison that guards the chunked head must not cry wolf: below 1e-4 in fp32 on every family."""
    check_head(common.load_policy(folders[family]), *batch(), "--model")


def test_check_head_finds_scaled_logits(tmp_path):
    """Granite divides its logits by 8 behind the head; log-probs without that are another model's: a gap far above 1e-4."""
    model = common.load_policy(tiny_model_of("granite", tmp_path, logits_scaling=8.0))
    with pytest.raises(UserError, match="logits are scaled"):
        check_head(model, *batch(), "--model")


def tiny_model_of(family, tmp_path, **fields):
    """A family that the project does not support, to see it refused."""
    from transformers import AutoConfig

    from tiny import _ROPE

    tokenizer = tiny_tokenizer()
    config = AutoConfig.for_model(family, **_ROPE, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None, initializer_range=0.3, **fields)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / family)
    tokenizer.save_pretrained(tmp_path / family)
    return str(tmp_path / family)


# ---- precision ----


def test_log_softmax_is_fp32_for_bf16_models(tmp_path):
    """bf16 has 3 digits: log-softmax in it is off by some 0.01 a token, and a sum over 1000 tokens by whole nats.

    V = 32 000 and 1000 tokens: the sum is within 0.1 of the fp32 log-softmax of the same bf16 logits.
    """
    folder = tiny_model("llama", tmp_path, vocab_size=32000, max_position_embeddings=1100)
    model = common.load_policy(folder).bfloat16()
    row = [(7919 * i) % 32000 for i in range(1001)]
    with torch.no_grad():
        logps = common.token_logps(model, *common.pad_rows([row[:1]], [row[1:]], 0))
        hidden = model.model(torch.tensor([row])).last_hidden_state[0, :-1]
        logits = model.lm_head(hidden)
    assert logits.dtype == torch.bfloat16 and logps.dtype == torch.float32
    at = torch.tensor(row[1:])[:, None]
    expected = F.log_softmax(logits.double(), -1).gather(-1, at).sum().item()
    assert logps.sum().item() == pytest.approx(expected, abs=0.1)
    assert abs(F.log_softmax(logits, -1).gather(-1, at).double().sum().item() - expected) > 0.1


@pytest.mark.parametrize(
    "capability, expected", [((7, 5), (torch.float16, True)), ((8, 0), (torch.bfloat16, False)), ((9, 0), (torch.bfloat16, False)), ((6, 1), (torch.float16, True))]
)  # fmt: skip
def test_precision_is_picked_by_capability(capability, expected, monkeypatch):
    """A T4 (7, 5) says that bf16 is supported because torch counts emulation, which is slower than fp32: fp16 + scaler."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *a, **k: True)
    assert (
        parallel.pick_precision("cuda")
        == parallel.pick_precision(torch.device("cuda:0"))
        == expected
    )
    assert parallel.pick_precision("cuda", "fp32") == (torch.float32, False)
    for device in ("cpu", "mps"):
        assert parallel.pick_precision(device) == (torch.float32, False)
    assert parallel.pick_precision("cpu", "fp16") == (torch.float16, True), "fp16 always scales"
    assert parallel.pick_precision("cpu", "bf16") == (torch.bfloat16, False)


def test_weights_are_fp32_masters(tmp_path):
    """AdamW at 1e-6 adds less than half a bf16 step to most weights: trained in bf16 they never move.

    A bf16 folder trains in fp32; after one step at 1e-6 at least 99 % of the entries with a gradient have moved, and
    rounded to bf16 fewer than 10 % of them would have.
    """
    model = common.load_policy(tiny_model("llama", tmp_path, dtype=torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6, weight_decay=0)
    (-common.token_logps(model, *batch()).sum()).backward()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    has = {n: p.grad != 0 for n, p in model.named_parameters()}
    optimizer.step()
    moved = torch.cat([(p != before[n])[has[n]] for n, p in model.named_parameters()])
    rounded = torch.cat([(p.bfloat16() != before[n].bfloat16())[has[n]] for n, p in model.named_parameters()])  # fmt: skip
    assert moved.double().mean() >= 0.99 and rounded.double().mean() < 0.1
    assert all(s.dtype == torch.float32 for s in optimizer.state[next(model.parameters())].values())
    reward = common.load_reward_model(tiny_reward_model("llama", tmp_path, dtype=torch.bfloat16), tiny_tokenizer())  # fmt: skip
    assert {p.dtype for p in reward.parameters()} == {torch.float32}


def test_autocast_does_not_outlive_an_optimiser_step(folders):
    """Autocast caches the low-precision copy of a weight for the length of its context: one context around the whole loop
    would go on computing with the weights of step 0. After a step the output is that of a fresh copy, bit for bit.
    """
    model = common.load_policy(folders["llama"], dtype=torch.bfloat16)
    assert model.compute_dtype == torch.bfloat16
    rows = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = common.token_logps(model, *rows)
    first.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    optimizer.step()
    with torch.no_grad():
        second = common.token_logps(model, *rows)
        fresh = common.token_logps(copy.deepcopy(model), *rows)
    assert torch.equal(second, fresh) and (second - first).abs().max() > 0.1
    exact = common.load_policy(folders["llama"])
    gap = (common.token_logps(exact, *rows) - first).abs().max().item()
    assert 1e-5 < gap < 0.5, "bf16 was really used, and is close"


# ---- dropout and gradient checkpointing ----

DROPOUT = {
    "gpt2": dict(attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1),
    "opt": dict(dropout=0.1, attention_dropout=0.1, layerdrop=0.5),
    "gpt_neox": dict(hidden_dropout=0.1, attention_dropout=0.1),
    "llama": dict(attention_dropout=0.1),
}


@pytest.mark.parametrize("family", DROPOUT)
def test_dropout_is_off_and_kept_in_the_saved_config(family, tmp_path):
    """Dropout in the policy and not in the reference: the loss at step 0 is not log 2, and no ratio is 1.

    Two forwards in train mode are equal (OPT also drops whole layers), and the saved config still says .1.
    """
    folder = tiny_model(family, tmp_path, **DROPOUT[family])
    model, tokenizer = common.load_policy(folder), common.load_tokenizer(folder)
    prepare(model, SimpleNamespace(grad_checkpoint=False, fsdp=False))
    assert model.training
    rows = batch()
    forwards = [common.token_logps(model, *rows) for _ in range(4)]
    with torch.no_grad():
        reference = common.token_logps(model.eval(), *rows)
    assert all(torch.equal(f, reference) for f in forwards)
    noisy = AutoModelForCausalLM.from_pretrained(folder).train()
    assert not torch.equal(noisy(rows[0]).logits, noisy(rows[0]).logits), "the config means it"
    common.save_model(model, tokenizer, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {k: config[k] for k in DROPOUT[family]} == DROPOUT[family]
    assert config.get("use_cache", True), "training turns the cache off; the folder is for serving"
    assert model.config.use_cache is False, "and training goes on without it"


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_gradient_checkpointing_acts_and_is_exact(family, lora_rank, folders):
    """`from_pretrained` returns eval mode, in which checkpointing sleeps and saves nothing; with LoRA its inputs need no
    gradient, and without a hook every adapter gradient is missing. Each of 2 blocks runs twice, gradients are equal.
    """
    found, runs = [], []
    for on in (False, True):
        model = common.load_policy(folders[family], lora_rank=lora_rank)
        for name, weight in model.named_parameters():
            if "lora_B" in name:  # at 0 the gradient of A would be 0 as well
                weight.data.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
        prepare(model, SimpleNamespace(grad_checkpoint=on, fsdp=False))
        blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 2)
        calls = []
        for block in blocks:  # their first part: the recomputation stops once it has what it needs
            part = next(block.children())
            part.register_forward_pre_hook(lambda *_, c=calls: c.append(1))
        common.token_logps(model, *batch()).sum().backward()
        found.append(gradients(model))
        runs.append(len(calls))
        wanted = {n for n, p in model.named_parameters() if p.requires_grad}
        assert found[-1].keys() == wanted
    same_gradients(found[1], found[0], 1e-6)
    assert runs == [2, 4]


# ---- reward scores ----


@pytest.mark.parametrize("family", ALL)
def test_reward_scores_are_transformers_own(family, reward_folders):
    """A score that only our code can compute is of no use in TRL: with a pad id that no answer holds, transformers pools
    the same number from the same right-padded rows.
    """
    model = common.load_reward_model(reward_folders[family], tiny_tokenizer(), trainable=False)
    theirs = AutoModelForSequenceClassification.from_pretrained(reward_folders[family])
    ids, attention_mask, _ = batch(pad=theirs.config.pad_token_id)
    with torch.no_grad():
        expected = theirs(ids, attention_mask=attention_mask.long()).logits
        scores = common.reward_scores(model, ids, attention_mask)
    assert expected.shape == (3, 1) and scores.shape == (3,) and scores.dtype == torch.float32
    assert scores.tolist() == pytest.approx(expected[:, 0].tolist(), abs=1e-5)
    assert scores.std() > 0.01


@pytest.mark.parametrize("family", ALL)
def test_reward_does_not_know_its_padding_or_mates(family, reward_folders):
    """The score is read at the last real token. Alone, with mates, more padding on either side, and with the end id itself
    as padding (where pooling by "last id that is not pad" reads the token before the end).
    """
    model = common.load_reward_model(reward_folders[family], tiny_tokenizer())
    with torch.no_grad():
        alone = [common.reward_scores(model, *common.pad_rows([p], [a], 7)[:2]).item() for p, a in zip(PROMPTS, ANSWERS)]  # fmt: skip
        for rows in (batch(), batch(pad=6), left(*batch()), left(*batch(6), extra=10, pad=6)):
            assert common.reward_scores(model, *rows[:2]).tolist() == pytest.approx(alone, abs=1e-4)


def test_a_fresh_head_scores_zero(folders, tmp_path):
    """A random head starts above log 2 and with a preference nobody trained: 0 for every row, exactly.

    Its pad id is one that no answer ends in, and the class is one that transformers knows by name.
    """
    for family in ALL:
        tokenizer = tiny_tokenizer()
        model = common.load_reward_model(folders[family], tokenizer)
        assert model.fresh_head and model.config.num_labels == 1
        assert common.reward_scores(model, *batch()[:2]).tolist() == [0, 0, 0]
        assert model.config.pad_token_id == common.pad_id(tokenizer)
        assert model.score.weight.requires_grad and model.score.weight.dtype == torch.float32


def test_a_trained_head_is_kept(reward_folders):
    """Loading must not zero a head that was trained."""
    model = common.load_reward_model(reward_folders["llama"], tiny_tokenizer())
    assert not model.fresh_head and model.score.weight.abs().max() > 0.01


@pytest.mark.parametrize(
    "gone", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "score.weight"]
)
def test_weights_that_are_missing_are_not_drawn(gone, tmp_path):
    """A folder saved without its head loads with a random one, and the only word about it is a warning that is off here.

    A reward head alone may be missing, from a language model: that one is meant to be new.
    """
    build, load = tiny_model, common.load_policy
    if gone == "score.weight":
        build, load = (
            tiny_reward_model,
            lambda name: common.load_reward_model(name, tiny_tokenizer()),
        )
    folder = Path(build("qwen3", tmp_path))
    assert load(str(folder)) is not None
    weights = load_file(folder / "model.safetensors")
    del weights[gone]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"its files hold no {gone}, 1 missing"):
        load(str(folder))


def test_a_family_without_a_score_head_is_refused(tmp_path):
    """BERT's classifier reads the first token through layers of its own: no reward model, and no AttributeError."""
    tokenizer, sizes = tiny_tokenizer(), {"hidden_size": 32, "num_hidden_layers": 1}
    config = AutoConfig.for_model("bert", vocab_size=len(tokenizer), num_attention_heads=4, intermediate_size=64, **sizes)  # fmt: skip
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(
        UserError, match=r"--model .*bert: cannot be loaded \(.* no attribute 'score'"
    ):
        common.load_reward_model(str(tmp_path / "bert"), tokenizer)


def test_the_wrong_folder_is_named(folders, reward_folders, tmp_path):
    """A folder of the wrong kind loads with random weights and a warning among many: here it is one line with the flag."""
    tokenizer, out = tiny_tokenizer(), tmp_path / "x"
    out.mkdir()
    (out / "note.txt").write_text("not a model")
    broken = Path(tiny_model("llama", tmp_path))
    (broken / "model.safetensors").write_bytes(b"\x00" * 100)
    empty = Path(tiny_model("llama", tmp_path))
    (empty / "model.safetensors").unlink()
    three = tiny_reward_model("gpt2", tmp_path)
    config = json.loads((Path(three) / "config.json").read_text())
    config["id2label"] = {"0": "a", "1": "b", "2": "c"}
    (Path(three) / "config.json").write_text(json.dumps(config))
    policy, reward = common.load_policy, common.load_reward_model
    cases = [
        (policy, (reward_folders["llama"],), {}, "this is a reward model"),
        (
            reward,
            (folders["llama"], tokenizer),
            {"trainable": False},
            "not a reward model; train one with reward_train.py",
        ),
        (reward, (three, tokenizer), {}, "3 labels"),
        (policy, (str(out),), {}, "config.json"),
        (policy, (str(tmp_path / "none"),), {}, "no such folder"),
        (policy, (str(out / "note.txt"),), {}, "no such folder"),
        (policy, (str(broken),), {}, "cannot be loaded (Error while deserializing"),
        (policy, (str(empty),), {}, "cannot be loaded (Error no file named model.safetensors"),
    ]
    for load, arguments, options, reason in cases:
        with pytest.raises(UserError) as caught:
            load(*arguments, flag="--reward-model", **options)
        message = str(caught.value)
        assert message.startswith(f"--reward-model {arguments[0]}: ") and reason in message
        assert "\n" not in message


# what a damaged folder holds: file, content (a dict changes the file's JSON), who trips over it
DAMAGED = {
    "architectures is a number": ("config.json", {"architectures": 3}, "tokenizer policy reward scorer"),
    "architectures holds a number": ("config.json", {"architectures": [3]}, "tokenizer policy reward scorer"),
    "end id is text": ("config.json", {"eos_token_id": "1"}, "tokenizer policy reward scorer"),
    "positions are text": ("config.json", {"max_position_embeddings": "64"}, "tokenizer policy reward scorer"),
    "config is a list": ("config.json", "[1]", "tokenizer policy reward scorer"),
    "config is torn": ("config.json", '{"model_type": "lla', "tokenizer policy reward scorer"),
    "config is empty": ("config.json", "", "tokenizer policy reward scorer"),
    "model_max_length is text": ("tokenizer_config.json", {"model_max_length": "512"}, "tokenizer scorer"),
    "tokenizer config is torn": ("tokenizer_config.json", '{"a": ', "tokenizer scorer"),
    "tokenizer config is a list": ("tokenizer_config.json", "[1]", "tokenizer scorer"),
    "template is torn": ("chat_template.jinja", "{% for", "tokenizer scorer"),
    "tokenizer is torn": ("tokenizer.json", '{"a": ', "tokenizer scorer"),
    # transformers then takes the ends from config.json, as for a folder without this file
    "generation config is torn": ("generation_config.json", '{"a": ', ""),
    "generation config is a list": ("generation_config.json", "[1]", "policy"),
    "end ids are an object": ("generation_config.json", {"eos_token_id": {"a": 1}}, "policy"),
    "end id for sampling is text": ("generation_config.json", {"eos_token_id": "1"}, "policy"),
    "record is torn": ("args.json", '{"args": ', "scorer"),
    "record is a list": ("args.json", "[1]", "scorer"),
    "record's flags are a number": ("args.json", {"args": 3}, "scorer"),
    "record's length is text": ("args.json", {"args": {"max_length": "512"}}, "scorer"),
}  # fmt: skip


def loaders(folders, reward_folders):
    """name → (a whole folder, what loads and uses it)"""
    tokenizer = tiny_tokenizer()
    return {
        "tokenizer": (folders["llama"], lambda f: common.load_tokenizer(f, "--x")),
        "policy": (folders["llama"], lambda f: common.sample(common.load_policy(f, flag="--x"), tokenizer, ["a"], max_new_tokens=2)),
        "reward": (reward_folders["llama"], lambda f: common.load_reward_model(f, tokenizer, trainable=False, flag="--x")),
        "scorer": (reward_folders["llama"], lambda f: common.reward_function(f, flag="--x")(["a"], ["b"])),
    }  # fmt: skip


def damage(folder, file, content):
    path = Path(folder) / file
    if not isinstance(content, str):
        held = json.loads(path.read_text()) if path.is_file() else {}
        content = json.dumps({**held, **content})
    path.write_text(content)


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_json_is_one_line(name, folders, reward_folders, tmp_path):
    """A value of another type, half a file: nine kinds of traceback, some in the middle of a run. One line names flag and
    folder where the folder enters; who does not read the file does not mind."""
    file, content, wrong = DAMAGED[name]
    for who, (whole, load) in loaders(folders, reward_folders).items():
        folder = shutil.copytree(whole, tmp_path / who)
        damage(folder, file, content)
        if who not in wrong.split():
            load(str(folder))
            continue
        with pytest.raises(UserError) as caught:
            load(str(folder))
        message = str(caught.value)
        assert message.startswith(f"--x {folder}: ") and "\n" not in message and len(message) < 600


@pytest.mark.parametrize("key, value", [
    ("reward_std", 0), ("reward_std", -1), ("reward_std", "x"), ("reward_std", math.nan), ("reward_mean", math.inf),
    ("reward_mean", None),
])  # fmt: skip
def test_a_bad_reward_scale(key, value, folders, reward_folders, tmp_path):
    """Scores divided by 0 are NaN, by −1 they teach the policy what people reject: refused where the folder enters."""
    for who in ("reward", "scorer"):
        whole, load = loaders(folders, reward_folders)[who]
        folder = shutil.copytree(whole, tmp_path / who)
        damage(folder, "config.json", {"reward_mean": 0.5, "reward_std": 2.0})
        load(str(folder))
        damage(folder, "config.json", {key: value})
        with pytest.raises(UserError, match=rf"^--x .*{key} '?{value}") as caught:
            load(str(folder))
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


# ---- LoRA ----


def filled(model, std=0.1):
    """B at 0 passes every test: give it numbers."""
    for name, weight in model.named_parameters():
        if "lora_B" in name or name == "score.weight":
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            weight.data.normal_(std=std, generator=generator)
    return model


def outputs(model, rows=None):
    ids, attention_mask, mask = rows or batch()
    with torch.no_grad():
        if hasattr(model, "score"):
            return common.reward_scores(model, ids, attention_mask)
        return common.token_logps(model, ids, attention_mask, mask)


@pytest.mark.parametrize("family", ALL)
def test_lora_starts_as_the_identity_and_switches_off(family, folders):
    """With B = 0 the policy is its reference, to the last bit; with B filled it is not, and adapter_off brings it back,
    also when the block inside raises. Only A and B are trained.
    """
    base = outputs(common.load_policy(folders[family]))
    model = common.load_policy(folders[family], lora_rank=4)
    assert torch.equal(outputs(model), base)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_A." in n or ".lora_B." in n for n in trained)
    filled(model)
    changed = outputs(model)
    assert (changed - base).abs().max() > 0.1
    with pytest.raises(KeyError), lora.adapter_off(model):
        assert torch.equal(outputs(model), base)
        raise KeyError
    assert torch.equal(outputs(model), changed)


@pytest.mark.parametrize("family", ALL)
def test_lora_reaches_every_layer_of_the_blocks_and_no_other(family, folders):
    """Each linear layer inside the two blocks (GPT-2 hides its own in Conv1D), no embedding, no head.

    By hand: GPT-2 and GPT-NeoX have 4 a block, OPT 6, the Llama kin 7. After one backward B has a gradient everywhere
    and A, behind B = 0, has exactly 0.
    """
    model = common.load_policy(folders[family], lora_rank=4)
    layers = [p for p, m in model.named_modules() if hasattr(m, "lora_A")]
    assert len(layers) == 2 * {"gpt2": 4, "gpt_neox": 4, "opt": 6}.get(family, 7)
    assert not [p for p in layers if "embed" in p or "lm_head" in p or "wte" in p]
    common.token_logps(model, *batch()).sum().backward()
    for path, module in model.named_modules():
        if hasattr(module, "lora_A"):
            assert module.lora_B.weight.grad.abs().max() > 0, path
            assert module.lora_A.weight.grad.abs().max() == 0, path


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_lora_is_w_plus_alpha_over_r_times_b_a(family, folders):
    """The scale is α/r with α = 2r by default, and Conv1D's weight lies the other way round.

    The merged weight is W + (α/r)·B·A entry by entry; loaded into a plain model it computes the same to 1e-4.
    """
    for alpha, scale in ((None, 2.0), (4, 0.5)):
        model, plain = common.load_policy(folders[family]), common.load_policy(folders[family])
        model = filled(lora.add_lora(model, 8, alpha))
        path, layer = next((p, m) for p, m in model.named_modules() if hasattr(m, "lora_A"))
        delta = scale * layer.lora_B.weight @ layer.lora_A.weight
        delta = delta.T if family == "gpt2" else delta
        merged = lora.merged_state(model)
        assert torch.allclose(merged[f"{path}.weight"], layer.weight + delta, atol=1e-6)
        assert merged.keys() == plain.state_dict().keys()
        plain.load_state_dict(merged)
        assert (outputs(plain) - outputs(model)).abs().max() < 1e-4


@pytest.mark.parametrize("rank, stored", [(0, torch.float32), (4, torch.bfloat16)])
def test_the_base_of_an_adapter_is_held_in_the_compute_dtype(rank, stored, folders, monkeypatch):
    """On a GPU fp32 masters of weights that no step changes are twice the memory; asked of transformers, as no GPU is here."""
    asked, real = [], AutoModelForCausalLM.from_pretrained

    def spy(*args, dtype, **kwargs):
        asked.append(dtype)
        return real(*args, dtype=dtype, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spy)
    monkeypatch.setattr(common.nn.Module, "to", lambda self, *_, **__: self)  # stays on the CPU
    model = common.load_policy(folders["llama"], torch.bfloat16, "cuda", lora_rank=rank)
    assert asked == [stored] and model.lm_head.weight.dtype == stored
    trained = {w.dtype for w in model.parameters() if w.requires_grad}
    assert trained == {torch.float32}


def test_a_half_precision_base_merges_in_fp32(tmp_path):
    """bf16 has 8 bits: a step of 0.001 beside a weight of 1 is rounded away. The saved sum has it, the base is as it was."""
    model = common.load_policy(tiny_model("llama", tmp_path), lora_rank=2)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight.data = torch.ones_like(layer.weight).bfloat16()
    layer.lora_A.weight.data.fill_(1.0)
    layer.lora_B.weight.data.fill_(0.001 / (2 * layer.lora_scale))  # B·A adds two products
    merged = lora.merged_state(model)["model.layers.0.mlp.up_proj.weight"]
    assert merged.dtype == torch.float32 and torch.allclose(merged, torch.tensor(1.001))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_saved_config_names_the_saved_precision(dtype, folders, tmp_path):
    """transformers and vLLM load in the dtype that config.json names: fp16 weights under "float32" are loaded twice as large."""
    model = common.load_policy(folders["llama"])
    common.save_model(model, tiny_tokenizer(), tmp_path, getattr(torch, dtype))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype
    assert {str(w.dtype) for w in load_file(tmp_path / "model.safetensors").values()} == {
        f"torch.{dtype}"
    }


def test_a_broken_adapter_is_one_line(folders, tmp_path):
    """Hand-edited, half copied or of another base: the folder and the reason, no traceback and no endless search."""
    good = common.load_policy(folders["llama"], lora_rank=2)
    common.save_model(good, tiny_tokenizer(), tmp_path, adapter_only=True)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())

    def adapter(name, **changes):
        folder = tmp_path / name
        shutil.copytree(tmp_path / "adapter", folder)
        text = json.dumps({k: v for k, v in {**config, **changes}.items() if v is not ...})
        (folder / "adapter_config.json").write_text(text)
        return folder

    broken, listed, junk = adapter("broken"), adapter("listed"), adapter("junk")
    (broken / "adapter_config.json").write_text("{")
    (listed / "adapter_config.json").write_text("[1]")
    (junk / "adapter_model.safetensors").write_bytes(b"junk" * 20)
    cases = [
        (broken, "cannot be loaded"),
        (listed, "cannot be loaded"),
        (junk, "cannot be loaded"),
        (adapter("no base", base_model_name_or_path=...), "not a plain LoRA adapter"),
        (adapter("no alpha", lora_alpha=...), "not a plain LoRA adapter"),
        (adapter("rank", r=8), "cannot be loaded .*size mismatch"),
        (adapter("other", base_model_name_or_path=folders["gpt2"]), "adapter and base do not fit"),
        (adapter("loop", base_model_name_or_path=str(tmp_path / "loop")), "cannot be loaded"),
    ]
    assert common.load_policy(adapter("same")) is not None
    for folder, words in cases:
        with pytest.raises(UserError, match=words) as caught:
            common.load_policy(str(folder))
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft's own
@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox", "opt"])
@pytest.mark.parametrize("kind", ["policy", "reward"])
def test_adapter_folders_are_pefts(family, kind, folders, tmp_path):
    """An adapter only we can read is lost: `peft` loads ours unchanged, and we load what `peft` wrote, to 1e-5.

    Merged folder, adapter beside it, adapter alone; for a reward model the score head travels with the adapter.
    """
    peft = pytest.importorskip("peft")
    folder, tokenizer = folders[family], tiny_tokenizer()
    if kind == "policy":
        load, auto = common.load_policy, AutoModelForCausalLM
        options = {}
    else:
        load = lambda name, **k: common.load_reward_model(name, tokenizer, **k)  # noqa: E731
        auto, options = AutoModelForSequenceClassification, {"num_labels": 1, "pad_token_id": 7}
    model = filled(lora.add_lora(load(folder), 4, 6))
    expected = outputs(model)
    assert (expected - outputs(load(folder))).abs().max() > 0.01
    merged, alone = tmp_path / "merged", tmp_path / "alone"
    common.save_model(model, tokenizer, merged)
    common.save_model(model, tokenizer, alone, adapter_only=True)
    assert not (alone / "model.safetensors").exists() and not (alone / "config.json").exists()
    for name in (merged, merged / "adapter", alone / "adapter"):
        assert (outputs(load(str(name))) - expected).abs().max() < 1e-4, name

    ids, attention_mask, mask = batch()

    def their_outputs(theirs):
        with torch.no_grad():
            logits = theirs(ids, attention_mask=attention_mask.long()).logits
        if kind == "reward":
            return logits[:, 0]
        logps = F.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return F.pad(logps, (1, 0)) * mask

    for name in (merged / "adapter", alone / "adapter"):
        theirs = peft.PeftModel.from_pretrained(auto.from_pretrained(folder, **options), name)
        assert (their_outputs(theirs.eval()) - expected).abs().max() < 1e-5
    targets = sorted({p.rpartition(".")[2] for p, m in model.named_modules() if hasattr(m, "lora_A")})  # fmt: skip
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM" if kind == "policy" else "SEQ_CLS", fan_in_fan_out=family == "gpt2")  # fmt: skip
    torch.manual_seed(0)
    theirs = peft.get_peft_model(auto.from_pretrained(folder, **options), config)
    for name, weight in theirs.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.1)
    theirs.eval().save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    ours = outputs(load(str(tmp_path / "theirs")))
    assert (ours - their_outputs(theirs)).abs().max() < 1e-4


# ---- saving ----

OPEN = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

found = []
for folder, kind, ids, mask in json.loads(sys.stdin.read()):
    auto = AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    with torch.no_grad():
        logits = model.eval()(torch.tensor(ids), attention_mask=torch.tensor(mask)).logits.float()
    head = model.get_output_embeddings() if kind == "policy" else None
    found.append({
        "keys": [sorted(map(str, info[k])) for k in ("missing_keys", "unexpected_keys", "mismatched_keys")],
        "logits": logits.tolist(),
        "dtype": str(next(model.parameters()).dtype),
        "tied": head is not None and head.weight is model.get_input_embeddings().weight,
        "temperature": getattr(getattr(model, "generation_config", None), "temperature", None),
        "eos": getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        "template": AutoTokenizer.from_pretrained(folder).chat_template,
    })
json.dump(found, open(sys.argv[1], "w"))
"""


def opened_elsewhere(cases, tmp_path):
    """What plain transformers sees in each (folder, kind): a fresh process that never imports this project."""
    ids, attention_mask, _ = batch()
    rows = [(str(f), kind, ids.tolist(), attention_mask.long().tolist()) for f, kind in cases]
    out = tmp_path / "seen.json"
    done = subprocess.run([sys.executable, "-c", OPEN, str(out)], input=json.dumps(rows), text=True, capture_output=True, cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "newly initialized" not in done.stderr
    return json.loads(out.read_text())


def own_logits(model):
    ids, attention_mask, _ = batch()
    with torch.no_grad():
        model = model.eval()
        return model(ids, attention_mask=attention_mask.long()).logits


def test_folders_open_in_plain_transformers(tmp_path, folders, reward_folders):
    """After hours of training a folder that opens with "newly initialized" weights is nothing.

    Every family, policy and reward model, after a change of all weights; merged LoRA; tied and untied; fp16: no missing,
    unexpected or mismatched key, equal logits, still tied, template there.
    """
    tokenizer, cases, expected = tiny_tokenizer(), [], []

    def save(name, model, kind, tolerance=3e-5, **options):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))  # fmt: skip
        before = {k: v.clone() for k, v in model.state_dict().items()}
        common.save_model(model, tokenizer, tmp_path / name, **options)
        after = model.state_dict()
        assert all(torch.equal(after[k], v) for k, v in before.items()), "saving changes nothing"
        cases.append((tmp_path / name, kind))
        expected.append((name, own_logits(model), tolerance, model))

    for family in ALL:
        save(family, common.load_policy(folders[family]), "policy")
        save(f"{family}-reward", common.load_reward_model(reward_folders[family], tokenizer), "reward")  # fmt: skip
    fresh = common.load_reward_model(folders["llama"], tokenizer)
    fresh.score.weight.data.normal_()
    save("fresh-reward", fresh, "reward")
    save("lora", common.load_policy(folders["llama"], lora_rank=4), "policy")
    save("lora-reward", common.load_reward_model(folders["gpt2"], tokenizer, lora_rank=4), "reward")
    save("untied", common.load_policy(tiny_model("llama", tmp_path / "m", tie_word_embeddings=False)), "policy")  # fmt: skip
    save("half", common.load_policy(folders["llama"]), "policy", 0.1, dtype=torch.float16)
    for seen, (name, logits, tolerance, model) in zip(opened_elsewhere(cases, tmp_path), expected):
        assert seen["keys"] == [[], [], []], name
        gap = (torch.tensor(seen["logits"]) - logits).abs()
        gap = gap[batch()[1]] if gap.shape[:2] == batch()[1].shape else gap
        assert gap.max() < tolerance, name
        assert seen["dtype"] == ("torch.float16" if name == "half" else "torch.float32"), name
        assert seen["template"] == tokenizer.chat_template
        if not hasattr(model, "score"):
            tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
            assert seen["tied"] == tied == model.config.tie_word_embeddings, name
            assert seen["eos"] == [tokenizer.eos_token_id]
    sizes = {n: (tmp_path / n / "model.safetensors").stat().st_size for n in ("llama", "untied")}
    assert sizes["untied"] - sizes["llama"] > 0.9 * 4 * 300 * 32, "a tied matrix is written once"
    config = json.loads((tmp_path / "fresh-reward" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["pad_token_id"] == common.pad_id(tokenizer) != tokenizer.eos_token_id
    assert len(config["id2label"]) == 1 if "id2label" in config else config["num_labels"] == 1
    assert not [p for p in tmp_path.rglob(".saving-*")]
    assert not (tmp_path / "llama" / "adapter").exists() and (tmp_path / "lora" / "adapter").is_dir()  # fmt: skip


@pytest.mark.parametrize("sampling", [False, True])
def test_a_generation_config_that_refuses_to_be_saved(sampling, tmp_path):
    """transformers raises on *saving* temperature .6 with sampling off, after hours of training: cleaned when loaded.

    With sampling on .6 is what the author meant and stays; all end ids are written for those who generate.
    """
    folder = tiny_model("llama", tmp_path)
    end = tiny_tokenizer().eos_token_id
    wanted = {"temperature": 0.6, "top_p": 0.9, "do_sample": sampling, "eos_token_id": [end, 9], "repetition_penalty": 1.3}  # fmt: skip
    (Path(folder) / "generation_config.json").write_text(json.dumps(wanted))
    model, tokenizer = common.load_policy(folder), common.load_tokenizer(folder)
    common.save_model(model, tokenizer, tmp_path / "out")
    common.save_model(common.load_policy(str(tmp_path / "out")), tokenizer, tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == sorted([end, 9])
    assert saved.get("temperature", 1.0) in ((0.6,) if sampling else (None, 1.0))
    assert common.end_ids(tokenizer, common.load_policy(str(tmp_path / "out"))) == sorted([end, 9])
    AutoModelForCausalLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")


def test_saving_over_a_folder_keeps_what_is_not_ours(tmp_path, folders):
    """A run folder holds logs and notes beside the weights; writing the model again touches neither."""
    out = tmp_path / "out"
    model, tokenizer = common.load_policy(folders["llama"]), tiny_tokenizer()
    common.save_model(model, tokenizer, out)
    (out / "metrics.jsonl").write_text("{}\n")
    (out / "notes").mkdir()
    (out / "notes" / "mine.txt").write_text("keep")
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    common.save_model(model, tokenizer, out)
    assert (out / "metrics.jsonl").read_text() == "{}\n"
    assert (out / "notes" / "mine.txt").read_text() == "keep"
    assert torch.equal(common.load_policy(str(out)).model.norm.weight, model.model.norm.weight)


def test_extra_numbers_of_the_config_survive(tmp_path, reward_folders):
    """PPO standardises rewards by the mean and deviation that the reward model's config keeps."""
    model, tokenizer = common.load_reward_model(reward_folders["gpt2"], tiny_tokenizer()), tiny_tokenizer()  # fmt: skip
    model.config.reward_mean, model.config.reward_std = 0.25, 2.0
    before = outputs(model)
    common.save_model(model, tokenizer, tmp_path / "out")
    again = common.load_reward_model(str(tmp_path / "out"), tokenizer, trainable=False)
    assert (again.config.reward_mean, again.config.reward_std) == (0.25, 2.0)
    assert torch.equal(outputs(again), before), "the head itself is not rescaled"
    assert not any(p.requires_grad for p in again.parameters())


def test_configs_of_the_tests_are_the_families(tmp_path):
    """The page names eight families; a family that fell out of the list would be tested by nobody."""
    wanted = {"gpt2", "llama", "qwen2", "qwen3", "mistral", "gemma", "gpt_neox", "opt"}
    assert set(FAMILIES) == wanted
    for family in FAMILIES:
        assert tiny_config(family, tiny_tokenizer()).model_type == family
