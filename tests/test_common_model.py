"""Log-probs, LoRA and saving: against the model itself, fed one row at a time without padding, plain
transformers and PEFT."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import common
from common import Policy, load_model
from parts import lora, parallel, sampling
from parts.shared_prompt import can_share
from tiny import CHATML, cases, error_of, read_json, tiny_model, tiny_tokenizer

# of those that are promised, and GPT-2, which counts positions from the first column
FAMILIES = "llama qwen2 qwen3 mistral gemma gemma2 gemma3_text phi3 gpt2".split()
every_family = pytest.mark.parametrize("family", FAMILIES)
WINDOWS = ["mistral window", "gemma3_text"]  # of 8 tokens
PROMPTS = [[20], [30, 31, 32, 33, 34, 35, 36], [40, 41, 42]]
ANSWERS = [[50, 51, 52, 6], [60, 6], [70, 71, 72, 73, 74, 6]]
FP32 = torch.float32


@pytest.fixture(scope="module")
def made(folders, tmp_path_factory):
    """family → folder; "mistral window" has one of 8 tokens."""
    window = tiny_model("mistral", tmp_path_factory.mktemp("window"), sliding_window=8)
    return lambda family: window if family == "mistral window" else folders[family]


def policy_of(folder, trainable=True, dtype=FP32, **options):
    return Policy(load_model(folder, "cpu", dtype, trainable=trainable, **options), dtype)


def batch(pad=7):
    return common.pad_rows(PROMPTS, ANSWERS, pad)


def left(ids, attention_mask, mask, extra=0, pad=7):
    """The same rows, padded on the left, and by `extra` columns more."""
    wide = [F.pad(ids, (0, extra), value=pad)]
    wide += [F.pad(x, (0, extra)) for x in (attention_mask, mask)]
    n_pads = (~wide[1]).sum(1).tolist()
    return [torch.stack([row.roll(n) for row, n in zip(x, n_pads)]) for x in wide]


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


@every_family
@torch.no_grad()
def test_log_probs_and_entropies_are_those_of_each_row_alone(family, made):
    """Whatever the padding: its id, its side, its width."""
    policy = policy_of(made(family), trainable=False)
    for temperature in (1.0, 0.7):
        expected, entropies = [], []
        for p, a in zip(PROMPTS, ANSWERS):
            logits = policy.model(torch.tensor([p + a])).logits[0].double() / temperature
            logps = F.log_softmax(logits[len(p) - 1 : -1], -1)
            expected += logps.gather(-1, torch.tensor(a)[:, None]).squeeze(-1).tolist()
            entropies += (-(logps.exp() * logps).sum(-1)).tolist()
        for rows in (batch(), batch(6), left(*batch()), left(*batch(6), extra=10, pad=6)):
            numbers = policy(*rows, temperature)
            for ours, theirs in zip(numbers, (expected, entropies)):
                assert ours[rows[2]].tolist() == pytest.approx(theirs, abs=2e-5)
                assert (ours[~rows[2]] == 0).all() and ours.dtype == FP32


def test_rows_with_nothing_to_train(folders):
    policy, (ids, attention_mask, mask) = policy_of(folders["llama"]), batch()
    whole = policy(ids, attention_mask, mask)[0].detach()
    for rows in ([1], [0, 1, 2]):
        some = mask.clone()
        some[rows] = False
        logps, _ = policy(ids, attention_mask, some)
        torch.testing.assert_close(logps, whole * some, atol=1e-5, rtol=0)
        logps.sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in policy.parameters() if p.grad is not None)


def test_the_cut_into_micro_batches_changes_nothing(folders):
    """Losses of the whole batch's count: the sum over forwards has the gradient of one forward."""
    policy, rows = policy_of(folders["llama"]), batch()
    policy(*rows)[0].sum().backward()
    whole = gradients(policy)
    for part in ([1], [2, 0]):
        policy(*common.pad_rows([PROMPTS[i] for i in part], [ANSWERS[i] for i in part], 9))[
            0
        ].sum().backward()
    same_gradients(gradients(policy), whole)


@pytest.fixture
def heads(monkeypatch):
    """How many rows enter the head, each time."""
    seen, head_logits = [], common.head_logits
    spy = lambda model, hidden: seen.append(len(hidden)) or head_logits(model, hidden)  # noqa: E731
    monkeypatch.setattr(common, "head_logits", spy)
    return seen


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])  # tied, capped, a head of its own
def test_chunks_of_the_head_change_nothing(family, made, heads, monkeypatch):
    """A border in the wrong place, Gemma 2's cap or a tied head's gradient forgotten: all show. Only
    answer tokens enter the head; the backward computes each chunk again."""
    n, generator = 200, torch.Generator().manual_seed(0)
    policy = policy_of(made(family))
    answers = torch.randint(9, 300, (2, n // 2), generator=generator).tolist()
    ids, attention_mask, mask = common.pad_rows([[20, 21], [22]], answers, 7)
    weight = torch.randn(ids.shape, generator=generator)
    logits = policy.model(ids, attention_mask=attention_mask.long()).logits[:, :-1].float() / 0.8
    plain = F.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    plain = F.pad(plain, (1, 0)) * mask
    (plain * weight).sum().backward()
    expected = gradients(policy)
    for most, chunks in ((1, [64, 64, 64, 8]), (300 * 100, [100, 100]), (2**21, [200])):
        monkeypatch.setitem(common.CHUNK, "cpu", most)
        heads.clear()
        ours, _ = policy(ids, attention_mask, mask, 0.8)
        assert heads == chunks
        torch.testing.assert_close(ours, plain, atol=2e-5, rtol=0)
        (ours * weight).sum().backward()
        assert sum(heads) == 2 * n
        same_gradients(gradients(policy), expected)


def test_a_large_vocabulary_passes_64_tokens_at_a_time(tmp_path, heads):
    """Gemma's 262,144: chunks of 8 tokens took most of a step's time."""
    folder = tiny_model("llama", tmp_path, vocab_size=262_144, hidden_size=8, num_attention_heads=1,
                        num_key_value_heads=1, num_hidden_layers=1)  # fmt: skip
    policy = policy_of(folder, trainable=False)
    with torch.no_grad():
        policy(*common.pad_rows([[1, 2]], [[*range(10, 140)]], 0))
    assert heads == [64, 64, 2]


@torch.no_grad()
def test_log_softmax_is_fp32_for_bf16_models(tmp_path):
    """In bf16 it is off by .01 a token: the sum of 1000 must be float64's of its hidden states."""
    folder = tiny_model("llama", tmp_path, vocab_size=32000, max_position_embeddings=1100)
    row = [(7919 * i) % 32000 for i in range(1001)]
    rows = common.pad_rows([row[:1]], [row[1:]], 0)
    policy = policy_of(folder, trainable=False, dtype=torch.bfloat16)
    logps = policy(*rows)[0]
    hidden = common.hidden_states(policy.model, *rows[:2], torch.bfloat16)[0, :-1]
    logits = hidden.double() @ policy.model.lm_head.weight.double().T
    double, half = (
        F.log_softmax(x, -1).gather(-1, torch.tensor(row[1:])[:, None]).double().sum()
        for x in (logits, logits.bfloat16())
    )
    assert logps.sum().item() == pytest.approx(double.item(), abs=0.1)
    assert abs(half - double) > 0.1


def test_kl_estimates():
    """By hand, and in the mean over all tokens: KL(π‖π_ref) itself."""
    generator = torch.Generator().manual_seed(0)
    logps, ref = torch.randn(2, 300, generator=generator).log_softmax(-1)
    k1, k3 = sampling.kl_estimates(logps, ref, torch.ones(300, dtype=bool))
    kl = (logps.exp() * (logps - ref)).sum()
    for k in (k1, k3):
        torch.testing.assert_close((logps.exp() * k).sum(), kl)
    assert (k3 >= 0).all() and (k1 < 0).any()
    k1, k3 = sampling.kl_estimates(torch.tensor([-1.0, 5.0]), torch.tensor([-2.0, 0.0]), torch.tensor([True, False]))  # fmt: skip
    assert k1.tolist() == [1, 0] and k3.tolist() == pytest.approx([0.36788, 0], abs=1e-5)
    k3 = sampling.kl_estimates(torch.tensor([-200.0]), torch.tensor([-1.0]), torch.tensor([True]))[
        1
    ]
    assert k3.isfinite().all()


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="shapes differ"):
        common.same_shape(a=torch.zeros(3), b=torch.zeros(3, 1), c=None)


# ---- one prompt for both answers ----


def pair_batch():
    """Chosen rows, then rejected; prompts of 9 and 1 tokens, answers of other lengths: windows of 8
    end within the prompt, and within the answers."""
    prompts = [[*range(30, 39)], [20]]
    chosen, rejected = [[*range(50, 61), 6], [60, 6]], [[70, 6], [*range(80, 95), 6]]
    return common.pad_rows(prompts + prompts, chosen + rejected, 7)


@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWS[:1]])
def test_a_shared_prompt_is_two_rows(family, made):
    """Log-probs, entropies and gradients; `can_share` says so."""
    policy, rows = policy_of(made(family)), pair_batch()
    if not can_share(policy.model, FP32, *rows):
        assert family == "gpt2", "promised families share"
        return
    found = []
    for shared in (False, True):
        logps, entropies = policy(*rows, 0.8, shared)
        (logps * torch.linspace(-1, 1, rows[0].shape[1])).sum().backward()
        found.append((logps.detach(), entropies, gradients(policy)))
    (logps, entropies, grads), (theirs, their_entropies, their_grads) = found
    torch.testing.assert_close(logps, theirs, atol=2e-5, rtol=0)
    torch.testing.assert_close(entropies, their_entropies, atol=2e-5, rtol=0)
    same_gradients(grads, their_grads, 2e-5)


@pytest.mark.parametrize("family", WINDOWS)
def test_a_window_that_is_forgotten_is_seen(family, made, monkeypatch, capsys):
    policy = policy_of(made(family), trainable=False)
    config = policy.model.config
    monkeypatch.setattr("parts.shared_prompt.layer_masks", lambda model, sees, position: (
        {kind: sees[:, None] for kind in {*config.layer_types}} if family == "gemma3_text" else sees[:, None]
    ))  # fmt: skip
    assert not can_share(policy.model, FP32, *pair_batch())
    assert "computed twice" in capsys.readouterr().out


# ---- models ----


def damage(path, content):
    """None removes the file, keys join the JSON that it holds, else this is its text."""
    if content is None:
        path.unlink()
    elif isinstance(content, list):
        path.write_text(json.dumps(content))
    elif isinstance(content, dict):
        path.write_text(json.dumps((read_json(path) if path.is_file() else {}) | content))
    else:
        path.write_text(content)


LOADERS = {
    "config": lambda folder: common.load_config(folder, "--x"),
    "tokenizer": lambda folder: common.load_tokenizer(folder, "--x"),
    "policy": lambda folder: load_model(folder, "cpu", FP32, flag="--x"),
}


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
tokenizer | own | cannot be loaded ( | tokenizer_config.json | {"a":
tokenizer | own | | chat_template.jinja | {% for
tokenizer policy | own | fine | args.json | {"output_dir": "output"}
tokenizer policy | own | fine | args.json | {"lr": NaN}
policy | own | fine | tokenizer_config.json | {"a":
policy | own | fine | generation_config.json | {"temperature": -3}
""")
def test_a_wrong_or_damaged_folder_is_one_line(who, folder, reason, file, content, folders, reward_folders, tmp_path):  # fmt: skip
    homes = {"own": folders, "reward": reward_folders}
    for name in who.split():
        if folder in homes:
            shutil.rmtree(tmp_path / "x", ignore_errors=True)
            path = str(shutil.copytree(homes[folder]["llama"], tmp_path / "x"))
        else:
            path = folder
        if file:
            damage(Path(path) / file, content)
        if reason == "fine":
            LOADERS[name](path)
            continue
        refused = error_of(LOADERS[name], path)
        assert refused.startswith(f"--x {path}: ") and reason in refused and len(refused) < 1200


@pytest.mark.parametrize("gone", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_that_are_missing_are_not_drawn(gone, tmp_path):
    file = Path(tiny_model("qwen3", tmp_path)) / "model.safetensors"
    weights = load_file(file)
    del weights[gone]
    save_file(weights, file, metadata={"format": "pt"})
    refused = error_of(LOADERS["policy"], str(file.parent))
    assert refused.startswith("--x ") and f"lack {gone} (1 missing)" in refused


def test_precision_is_picked_by_capability(monkeypatch):
    """A T4 (7, 5) emulates bf16, slower than fp32, and says that it is supported."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda name: None)
    monkeypatch.setattr(torch, "ones", lambda *size, device: torch.zeros(()))  # there is no GPU
    for capability, dtype in {
        (7, 5): "fp16",
        (6, 1): "fp16",
        (8, 0): "bf16",
        (9, 0): "bf16",
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a, c=capability: c)
        assert parallel.pick("auto", "auto") == (torch.device("cuda"), parallel.DTYPES[dtype])
    assert parallel.pick("cuda:0", "fp32")[1] == parallel.pick("cpu", "auto")[1] == FP32
    assert parallel.pick("cpu", "fp16")[1] == torch.float16


DROPOUT = {
    "gpt2": dict(attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5),
    "llama": dict(attention_dropout=0.5),
}


@pytest.mark.parametrize("family", DROPOUT)
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_gradient_checkpointing_acts_and_is_exact(family, lora_rank, tmp_path):
    """It sleeps in eval mode, loses all gradients under LoRA without a hook, and must not wake
    dropout."""
    folder, grads, calls = tiny_model(family, tmp_path, **DROPOUT[family]), [], []
    rank = 0 if family == "gpt2" else lora_rank  # GPT-2 has Conv1D
    for on in (False, True):
        policy = filled(policy_of(folder, lora_rank=rank))
        if on:
            parallel.recompute_activations(policy.model)
        blocks = next(
            m for m in policy.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2
        )
        for block in blocks:  # their first part: the recomputation stops once it has what it needs
            part = next(block.children())
            part.register_forward_pre_hook(lambda *_, on=on: calls.append(on))
        policy(*batch())[0].sum().backward()
        grads.append(gradients(policy))
        assert grads[-1].keys() == {n for n, p in policy.named_parameters() if p.requires_grad}
    same_gradients(grads[1], grads[0], 1e-6)
    assert calls == [False] * 2 + [True] * 4


# ---- LoRA ----


def filled(policy, std=0.1):
    """B at 0 passes every test: give it numbers."""
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            weight.data.normal_(std=std, generator=generator)
    return policy


def outputs(policy):
    with torch.no_grad():
        return policy(*batch())[0]


LINEAR = [family for family in FAMILIES if family != "gpt2"]


@pytest.mark.parametrize("family", LINEAR)
def test_lora_starts_as_the_identity_and_switches_off(family, made):
    base = outputs(policy_of(made(family)))
    policy = policy_of(made(family), lora_rank=4)
    assert torch.equal(outputs(policy), base)
    trained = {name for name, w in policy.named_parameters() if w.requires_grad}
    assert {name.rpartition(".lora_")[2] for name in trained} == {"A.weight", "B.weight"}
    layers = lora.lora_layers(policy.model)
    assert len(layers) == 2 * (4 if family == "phi3" else 7)
    policy(*batch())[0].sum().backward()
    for path, module in layers:
        assert "embed" not in path and "lm_head" not in path
        assert module.lora_B.weight.grad.abs().max() > 0, path
        assert module.lora_A.weight.grad.abs().max() == 0, path
    changed = outputs(filled(policy))
    assert (changed - base).abs().max() > 0.1
    with pytest.raises(KeyError), lora.adapter_off(policy.model):
        assert torch.equal(outputs(policy), base), "the adapter off is the reference"
        raise KeyError
    assert torch.equal(outputs(policy), changed)


def test_the_start_follows_the_seed(folders):
    a, b, c = (
        lora.lora_layers(policy_of(folders["llama"], lora_rank=4, seed=seed).model)
        for seed in (1, 1, 2)
    )
    for (_, x), (_, y), (_, z) in zip(a, b, c):
        assert torch.equal(x.lora_A.weight, y.lora_A.weight)
        assert not torch.equal(x.lora_A.weight, z.lora_A.weight)
        assert x.lora_A.weight.detach().std() == pytest.approx(
            x.lora_A.in_features**-0.5 / 3**0.5, rel=0.2
        )
    assert not torch.equal(a[0][1].lora_A.weight, a[1][1].lora_A.weight)


def test_a_model_without_linear_layers_is_refused(folders):
    assert error_of(lambda: policy_of(folders["gpt2"], lora_rank=2)).startswith("--lora-rank")


@torch.no_grad()
def logits_of(model):
    ids, attention_mask, _ = batch()
    return model(input_ids=ids, attention_mask=attention_mask.long()).logits[attention_mask]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft's own
@pytest.mark.parametrize("family", LINEAR)
def test_adapter_and_merged_folder_are_one_model(family, made, tmp_path, tokenizer):
    """As PEFT reads adapter/ over the base, and as transformers reads the folder itself."""
    peft = pytest.importorskip("peft", reason="needs the development dependency peft")
    policy, out = filled(policy_of(made(family), lora_rank=4)), tmp_path / "out"
    expected = logits_of(policy.model)
    base = AutoModelForCausalLM.from_pretrained(made(family))
    assert (expected - logits_of(base)).abs().max() > 0.01
    common.save_model(policy.model, tokenizer, out, made(family))
    theirs = peft.PeftModel.from_pretrained(base, out / "adapter").eval()
    assert (logits_of(theirs) - expected).abs().max() < 1e-5
    merged = AutoModelForCausalLM.from_pretrained(out)
    assert (logits_of(merged) - expected).abs().max() < 1e-4
    config = read_json(out / "adapter" / "adapter_config.json")
    assert (config["r"], config["lora_alpha"]) == (4, 8) and config["base_model_name_or_path"] == made(family)  # fmt: skip


# ---- saving ----


@every_family
def test_a_folder_opens_in_plain_transformers(family, made, tmp_path, tokenizer):
    """With equal logits, all keys found, tied weights once, readable by other users."""
    policy, out = policy_of(made(family)), tmp_path / "out"
    for weight in policy.parameters():
        weight.data *= 1.01
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    common.save_model(policy.model, tokenizer, out, made(family))
    assert all(torch.equal(w, before[name]) for name, w in policy.state_dict().items())
    opened, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(logits_of(opened), logits_of(policy.model), atol=3e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in out.glob("*.*"))
    assert not [*out.parent.rglob(".writing-*")]
    weights = load_file(out / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {FP32} == {next(opened.parameters()).dtype}
    tied = policy.model.config.get_text_config().tie_word_embeddings
    shared = opened.get_output_embeddings().weight is opened.get_input_embeddings().weight
    assert shared == tied and sum("lm_head" in name or "embed_tokens" in name or "wte" in name for name in weights) == 2 - tied  # fmt: skip
    again = policy_of(str(out))
    assert torch.equal(outputs(again), outputs(policy))


def test_a_bf16_base_is_written_in_fp32(tmp_path, tokenizer):
    folder = tiny_model("llama", tmp_path, dtype=torch.bfloat16)
    common.save_model(policy_of(folder).model, tokenizer, tmp_path / "out", folder)
    config = read_json(tmp_path / "out" / "config.json")
    assert {config.get(key, "float32") for key in ("dtype", "torch_dtype")} == {"float32"}
    assert {w.dtype for w in load_file(tmp_path / "out" / "model.safetensors").values()} == {FP32}


AUTHORS = {  # keys that version 5 of transformers would leave out or spell otherwise
    "rope_theta": 10000.0, "rope_scaling": None, "sliding_window": None, "my_own_key": {"a": [1]},
    "attention_dropout": 0.1, "use_cache": True, "id2label": {"0": "a", "1": "b"},
}  # fmt: skip


def test_the_authors_config_stays(tmp_path, tokenizer):
    folder, out = tiny_model("llama", tmp_path), tmp_path / "out"
    damage(Path(folder) / "config.json", AUTHORS)
    common.save_model(policy_of(folder).model, tokenizer, out, folder)
    config, base = (read_json(Path(x) / "config.json") for x in (out, folder))
    assert {key: config[key] for key in AUTHORS} == AUTHORS
    assert config.keys() >= base.keys() and config["architectures"] == ["LlamaForCausalLM"]
    AutoModelForCausalLM.from_pretrained(out)


@pytest.mark.parametrize("labels", [None, {"0": "a", "1": "b"}])
def test_a_fresh_head_opens_with_one_label(labels, tmp_path, tokenizer):
    """Whatever labels the base's config names."""
    folder, out = tiny_model("llama", tmp_path), tmp_path / "out"
    if labels:
        names = {"id2label": labels, "label2id": {name: int(i) for i, name in labels.items()}}
        damage(Path(folder) / "config.json", names)
    kind, options = AutoModelForSequenceClassification, {"num_labels": 1, "pad_token_id": 7}
    model = load_model(folder, "cpu", FP32, trainable=True, kind=kind, **options)
    common.save_model(model, tokenizer, out, folder)
    opened = kind.from_pretrained(out)
    ids, attention_mask, _ = batch()
    with torch.no_grad():
        ours, theirs = (
            m(ids, attention_mask=attention_mask.long()).logits for m in (model, opened)
        )
    assert theirs.shape == (3, 1) and torch.equal(ours, theirs) and opened.config.pad_token_id == 7


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
