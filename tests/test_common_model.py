"""Log-probs, LoRA and saving: against the model itself, fed one row at a time without padding, plain
transformers and PEFT."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import common
import tiny
from common import load_model
from parts import parallel
from parts.shared_prompt import can_share
from tiny import CHATML, FAMILIES, cases, error_of, filled, read_json, tiny_model, tiny_tokenizer

# of 8 tokens; of Qwen in one layer
WINDOWS = {"mistral window": "mistral", "qwen2 window": "qwen2"}
of_families = pytest.mark.parametrize("family", FAMILIES)
of_linear_layers = pytest.mark.parametrize("family", [*FAMILIES][:-1])  # GPT-2 has none
policy_of = partial(tiny.policy_of, trainable=True)
PROMPTS = [[20], [30, 31, 32, 33, 34, 35, 36], [40, 41, 42]]
ANSWERS = [[50, 51, 52, 6], [60, 6], [70, 71, 72, 73, 74, 6]]
FP32 = torch.float32


@pytest.fixture(scope="module")
def made(folders, tmp_path_factory):
    """family → folder; those of WINDOWS look back 8 tokens."""
    window = dict(sliding_window=8, use_sliding_window=True, max_window_layers=1)
    home = tmp_path_factory.mktemp("windows")
    windows = {name: tiny_model(family, home, **window) for name, family in WINDOWS.items()}
    return lambda family: windows.get(family) or folders[family]


def batch(pad=7, side="right"):
    ids, attention_mask, mask = common.pad_rows(PROMPTS, ANSWERS, side=side)
    return [ids.masked_fill(~attention_mask, pad), attention_mask, mask]


def gradients(model):
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def same_gradients(a, b, tolerance=1e-5):
    assert a.keys() == b.keys() and a
    for name in a:
        near = dict(rtol=0, atol=tolerance * max(1.0, b[name].abs().max().item()))
        torch.testing.assert_close(a[name], b[name], **near)


# ---- log-probs ----


@of_families
@torch.no_grad()
def test_log_probs_and_entropies_are_those_of_each_row_alone(family, made):
    """Whatever the padding: its id, its side, its width."""
    policy = policy_of(made(family), trainable=False)
    for temperature in (1.0, 0.7):
        expected = []
        for p, a in zip(PROMPTS, ANSWERS):
            logits = policy.model(torch.tensor([p + a])).logits[0].double() / temperature
            logps = F.log_softmax(logits[len(p) - 1 : -1], -1)
            expected.append((logps[range(len(a)), a], -(logps.exp() * logps).sum(-1)))
        for rows in (batch(), batch(6), [F.pad(x, (10, 0)) for x in batch(side="left")]):
            for ours, theirs in zip(policy(*rows, temperature), zip(*expected)):
                assert ours[rows[2]].tolist() == pytest.approx(torch.cat(theirs).tolist(), abs=2e-5)
                assert (ours[~rows[2]] == 0).all() and ours.dtype == FP32
    ids, attention_mask, mask = batch()
    assert not policy(ids, attention_mask, mask & False)[0].any(), "nothing to train"


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])  # tied, capped, a head of its own
def test_chunks_of_the_head_change_nothing(family, made, monkeypatch):
    """A border in the wrong place, Gemma 2's cap or a tied head's gradient forgotten: all show. Only
    answer tokens enter the head; the backward computes each chunk again, and adds its gradient of the
    head before the next one has its own."""
    n, generator = 200, torch.Generator().manual_seed(0)
    policy, heads, head_logits = policy_of(made(family)), [], common.head_logits
    spy = lambda model, hidden: heads.append(len(hidden)) or head_logits(model, hidden)  # noqa: E731
    monkeypatch.setattr(common, "head_logits", spy)
    answers = torch.randint(9, 300, (2, n // 2), generator=generator).tolist()
    ids, attention_mask, mask = common.pad_rows([[20, 21], [22]], answers)
    weight = torch.randn(ids.shape, generator=generator)
    logits = policy.model(ids, attention_mask=attention_mask.long()).logits[:, :-1].float() / 0.8
    plain = F.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    plain = F.pad(plain, (1, 0)) * mask
    (plain * weight).sum().backward()
    expected, added = gradients(policy), []
    head = policy.model.get_output_embeddings().weight
    head.register_post_accumulate_grad_hook(lambda _: added.append(len(heads)))
    for most, chunks in ((1, [64, 64, 64, 8]), (300 * 100, [100, 100]), (2**21, [200])):
        monkeypatch.setitem(common.CHUNK, "cpu", most)
        ours, entropies = policy(ids, attention_mask, mask, 0.8)
        assert heads == chunks and not entropies.requires_grad
        torch.testing.assert_close(ours, plain, atol=2e-5, rtol=0)
        (ours * weight).sum().backward()
        assert sum(heads) == 2 * n
        assert added[: len(chunks)] == [*range(len(chunks) + 1, 2 * len(chunks) + 1)]
        same_gradients(gradients(policy), expected)
        heads.clear()
        added.clear()


@torch.no_grad()
def test_log_softmax_is_fp32_for_bf16_models(tmp_path):
    """In bf16 it is off by .01 a token: the sum of 1000 must be float64's of its hidden states."""
    folder = tiny_model("llama", tmp_path, vocab_size=32000, max_position_embeddings=1100)
    row = [(7919 * i) % 32000 for i in range(1001)]
    rows = common.pad_rows([row[:1]], [row[1:]])
    policy = policy_of(folder, trainable=False, dtype=torch.bfloat16)
    hidden = common.hidden_states(policy.model, *rows[:2], torch.bfloat16)[0, :-1]
    logits = hidden.double() @ policy.model.lm_head.weight.double().T
    double = F.log_softmax(logits, -1).gather(-1, torch.tensor(row[1:])[:, None]).sum().item()
    assert policy(*rows)[0].sum().item() == pytest.approx(double, abs=0.1)


# ---- one prompt for both answers ----


@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWS])
def test_a_shared_prompt_is_two_rows(family, made):
    """Log-probs, entropies and gradients; `can_share` says so. Prompts of 9 and 1 tokens, answers of
    other lengths: windows of 8 end within the prompt, and within the answers."""
    policy, prompts = policy_of(made(family)), [[*range(30, 39)], [20]] * 2
    answers = [[*range(50, 61), 6], [60, 6], [70, 6], [*range(80, 95), 6]]
    rows, found = common.pad_rows(prompts, answers), []
    if not can_share(policy, *rows):
        assert family == "gpt2", "promised families share"
        return
    for shared in (False, True):
        logps, entropies = policy(*rows, 0.8, shared)
        (logps * torch.linspace(-1, 1, rows[0].shape[1])).sum().backward()
        found.append((logps.detach(), entropies, gradients(policy)))
    (*numbers, grads), (*theirs, their_grads) = found
    torch.testing.assert_close(numbers, theirs, atol=2e-5, rtol=0)
    same_gradients(grads, their_grads, 2e-5)


@pytest.mark.parametrize("family", ["mistral window", "gemma3_text"])
def test_a_window_that_is_forgotten_is_seen(family, made, monkeypatch, capsys):
    policy = policy_of(made(family), trainable=False)
    kinds = {*policy.model.config.layer_types} if family == "gemma3_text" else ()

    def forgotten(model, sees, position):
        return {kind: sees[:, None] for kind in kinds} or sees[:, None]

    monkeypatch.setattr("parts.shared_prompt.layer_masks", forgotten)
    pairs = common.pad_rows([[*range(30, 39)]] * 2, [[50, 6], [70, 71, 6]])
    assert not can_share(policy, *pairs)
    assert "computed twice" in capsys.readouterr().out


# ---- models ----


def damage(path, content):
    """None removes the file, keys join the JSON that it holds, else this is its text."""
    if content is None:
        path.unlink()
    elif isinstance(content, dict):
        path.write_text(json.dumps((read_json(path) if path.is_file() else {}) | content))
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))


# who loads which folder ("own": a policy), the reason, what one of its files holds
@cases("""
who | folder | reason | file | content
config | reward | a reward model | |
config policy tokenizer | none | no such folder | |
config policy | org/name | no such folder, and as a hub id it cannot be loaded ( | |
config policy | own | cannot be loaded ( | config.json | None
policy | own | cannot be loaded ( | model.safetensors | torn
policy | own | cannot be loaded ( | model.safetensors | None
config policy | own | cannot be loaded ( | config.json | {"model_type": "lla
config policy | own | cannot be loaded ( | config.json | {"vocab_size": "many"}
config policy | own | cannot be loaded ( | config.json | {"hidden_size": [3]}
config policy | own | cannot be loaded ( | config.json | {"max_position_embeddings": "far"}
config policy | own | cannot be loaded ( | config.json | {"model_type": 7}
config policy | own | cannot be loaded ( | config.json | [1, 2]
policy | own | (9 missing) | config.json | {"num_hidden_layers": 3}
policy | own | lack lm_head.weight (1 missing) | config.json | {"tie_word_embeddings": False}
tokenizer | own | cannot be loaded ( | tokenizer_config.json | {"a":
tokenizer | own | | chat_template.jinja | {% for
tokenizer policy | own | fine | args.json | {"output_dir": "output"}
tokenizer policy | own | fine | args.json | {"lr": NaN}
policy | own | fine | tokenizer_config.json | {"a":
policy | own | fine | generation_config.json | {"temperature": -3}
""")
def test_a_wrong_or_damaged_folder_is_one_line(who, folder, reason, file, content, folders, reward_folders, tmp_path):  # fmt: skip
    """Weights that are missing are not drawn at random."""
    homes = {"own": folders, "reward": reward_folders}
    loaders = dict(config=common.load_config, tokenizer=common.load_tokenizer)
    loaders["policy"] = lambda path, flag: load_model(path, "cpu", FP32, flag=flag)
    for name in who.split():
        path = folder
        if folder in homes:
            path = tmp_path / name
            shutil.copytree(homes[folder]["llama"], path)
        if file:
            damage(path / file, content)
        if reason == "fine":
            loaders[name](path, "--x")
            continue
        refused = error_of(loaders[name], path, "--x")
        assert refused.startswith(f"--x {path}: ") and reason in refused and len(refused) < 1200


@cases("""
capability | device | given | picked | dtype
(6, 1) | auto | auto | cuda | fp16
(7, 5) | auto | auto | cuda | fp16
(8, 0) | auto | auto | cuda | bf16
(8, 0) | cuda:0 | fp32 | cuda:0 | fp32
(8, 0) | cpu | auto | cpu | fp32
(8, 0) | cpu | fp16 | cpu | fp16
""")
def test_precision_is_picked_by_capability(capability, device, given, picked, dtype, monkeypatch):
    """A T4 (7, 5) emulates bf16, slower than fp32, and says that it is supported."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda name: None)
    monkeypatch.setattr(torch, "ones", lambda *size, device: torch.zeros(()))  # there is no GPU
    assert parallel.pick(device, given) == (torch.device(picked), parallel.DTYPES[dtype])


@cases("""
family | rank | dropout
gpt2 | 0 | {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
llama | 0 | {"attention_dropout": 0.5}
llama | 4 | {"attention_dropout": 0.5}
""")
def test_gradient_checkpointing_acts_and_is_exact(family, rank, dropout, tmp_path):
    """It sleeps in eval mode, loses all gradients under LoRA without a hook, and must not wake
    dropout."""
    policy, calls = filled(policy_of(tiny_model(family, tmp_path, **dropout), lora_rank=rank)), []
    blocks = [m for m in policy.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2]
    for block in blocks[0]:  # their first part: the recomputation stops once it has what it needs
        next(block.children()).register_forward_pre_hook(lambda *_: calls.append(1))
    policy(*batch())[0].sum().backward()
    expected = gradients(policy)
    parallel.recompute_activations(policy.model)
    policy(*batch())[0].sum().backward()
    same_gradients(gradients(policy), expected, 1e-6)
    assert len(calls) == 2 + 4
    assert expected.keys() == {n for n, p in policy.named_parameters() if p.requires_grad}


# ---- LoRA ----


def outputs(policy):
    with torch.no_grad():
        return policy(*batch())[0]


@of_linear_layers
def test_lora_starts_as_the_identity_and_switches_off(family, made):
    base = outputs(policy_of(made(family)))
    policy = policy_of(made(family), lora_rank=4)
    assert torch.equal(outputs(policy), base)
    layers = parallel.lora_layers(policy.model)
    assert len(layers) == 2 * (4 if family == "phi3" else 7), "not the embedding, not the head"
    policy(*batch())[0].sum().backward()
    steps = gradients(policy)
    assert len(steps) == 2 * len(layers)
    assert all((x != 0).any() == ("lora_B" in name) for name, x in steps.items())
    changed = outputs(filled(policy))
    assert (changed - base).abs().max() > 0.1
    with pytest.raises(KeyError), parallel.adapter_off():
        assert torch.equal(outputs(policy), base), "the adapter off is the reference"
        raise KeyError
    assert torch.equal(outputs(policy), changed)


def test_the_start_follows_the_seed(folders):
    """A has PyTorch's own start, uniform within ±1/√in."""
    a, b, c = (
        policy_of(folders["llama"], lora_rank=4, seed=seed).state_dict() for seed in (1, 1, 2)
    )
    for name in [name for name in a if "lora_A" in name]:
        assert torch.equal(a[name], b[name]) and not torch.equal(a[name], c[name])
        assert a[name].std().item() == pytest.approx((3 * a[name].shape[1]) ** -0.5, rel=0.2)
    assert error_of(lambda: policy_of(folders["gpt2"], lora_rank=2)).startswith("--lora-rank")


@torch.no_grad()
def logits_of(model):
    ids, attention_mask, _ = batch()
    return model(input_ids=ids, attention_mask=attention_mask.long()).logits[attention_mask]


# ---- saving ----


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft's own
@pytest.mark.parametrize("rank", [0, 4])
@of_families
def test_a_folder_opens_in_plain_transformers(family, rank, made, tmp_path, tokenizer):
    """With equal logits, all keys found, tied weights once, readable by other users; with LoRA merged,
    and adapter/ is the same over the base, as PEFT reads it."""
    if family == "gpt2" and rank:
        return  # has no linear layers
    policy, out = filled(policy_of(made(family), lora_rank=rank)), tmp_path / "out"
    for weight in policy.parameters():
        weight.data *= 1 + 0.01 * weight.requires_grad  # the base stays under an adapter
    base, expected = AutoModelForCausalLM.from_pretrained(made(family)), logits_of(policy.model)
    assert (expected - logits_of(base)).abs().max() > 0.01
    common.save_model(policy.model, tokenizer, out, made(family))
    assert torch.equal(logits_of(policy.model), expected)
    opened, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(logits_of(opened), expected, atol=1e-4 if rank else 3e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in out.glob("*.*"))
    tied = policy.model.config.get_text_config().tie_word_embeddings
    head = opened.get_output_embeddings().weight
    assert (head is opened.get_input_embeddings().weight) == tied and head.dtype == FP32
    assert len(load_file(out / "model.safetensors")) == len(opened.state_dict()) - tied
    if not rank:
        assert torch.equal(outputs(policy_of(out)), outputs(policy))
        return
    peft = pytest.importorskip("peft", reason="needs the development dependency peft")
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(out / "adapter").eval()  # over its base
    assert (logits_of(theirs) - expected).abs().max() < 1e-5


def test_the_authors_config_stays(tmp_path, tokenizer):
    """Keys that version 5 of transformers would leave out or spell otherwise; but weights that were
    stored in bf16 are written in fp32."""
    folder, out = tiny_model("llama", tmp_path, dtype=torch.bfloat16), tmp_path / "out"
    authors = json.loads("""{"rope_theta": 10000.0, "rope_scaling": null, "sliding_window": null,
        "my_own_key": {"a": [1]}, "attention_dropout": 0.1, "use_cache": true,
        "id2label": {"0": "a", "1": "b"}}""")
    damage(Path(folder) / "config.json", authors)
    common.save_model(policy_of(folder).model, tokenizer, out, folder)
    config, base = (read_json(Path(x) / "config.json") for x in (out, folder))
    authors |= dict(architectures=["LlamaForCausalLM"], dtype="float32", torch_dtype="float32")
    assert config.items() >= authors.items() and config.keys() >= base.keys()
    opened = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert {w.dtype for w in opened.parameters()} == {FP32}


@cases("""
labels
{}
{"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
""")
def test_a_fresh_head_opens_with_one_label(labels, tmp_path, tokenizer):
    """Whatever labels the base's config names."""
    folder, out = tiny_model("llama", tmp_path), tmp_path / "out"
    damage(Path(folder) / "config.json", labels)
    kind = AutoModelForSequenceClassification
    model = load_model(folder, "cpu", FP32, trainable=True, kind=kind, num_labels=1, pad_token_id=7)
    common.save_model(model, tokenizer, out, folder)
    opened = kind.from_pretrained(out)
    for ids in torch.tensor(PROMPTS[1:2]), torch.tensor([[7, 20]]):
        assert torch.equal(model(ids).logits, opened(ids).logits)
    assert opened(ids).logits.shape == (1, 1) and opened.config.pad_token_id == 7


@cases("""
name | given | kept
as authors write it | {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": [9]} | {"temperature": 0.6, "top_p": 0.9, "do_sample": True}
sampling off | {"temperature": 0.6, "repetition_penalty": 1.3, "do_sample": False} | {"repetition_penalty": 1.3}
refused on saving | {"early_stopping": True, "num_beams": 1} | {}
none | None | {}
broken | torn | {}
another type | {"temperature": "warm", "top_k": []} | {}
""")
def test_the_generation_config(name, given, kept, tmp_path):
    """The end ids are the tokenizer's and the template's; what authors wrote beside them stays; a
    broken one does not cost the weights, after hours of training."""
    tokenizer = tiny_tokenizer(template=CHATML)
    folder, out = tiny_model("llama", tmp_path, tokenizer), tmp_path / "out"
    damage(Path(folder) / "generation_config.json", given)
    common.save_model(policy_of(folder).model, tokenizer, out, folder)
    saved = read_json(out / "generation_config.json")
    assert saved["eos_token_id"] == common.end_ids(tokenizer) and len(saved["eos_token_id"]) == 2
    assert {key: saved[key] for key in kept} == kept
    assert load_file(out / "model.safetensors")
    AutoModelForCausalLM.from_pretrained(out)
