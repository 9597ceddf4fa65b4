"""The same batch through TRL and through ours: loss and gradients, number by number, and eight
steps of training; and adapters through PEFT.

TRL and PEFT are what our users come from. Where the two disagree one of us has a bug, or a
convention that a user must be told of. Compared from the same file of messages on, so that
template, masks and end token are compared as well. Development dependencies: without them
everything here is skipped.

How TRL (1.16) must be set to compute the same: bf16 off (its default), no gradient checkpointing,
no max_length. Its `ipo` and `sigmoid_norm` divide by the answer's tokens, as ours. Its DPOTrainer
no longer smooths labels in `sigmoid`; cDPO and SimPO are compared with its CPOTrainer, cDPO with a
reference of 0. Its `sft` term is our --nll-coef.
"""

import contextlib

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import common
import dpo
import grpo_rubric
import reward_train
import sft
from parts import files, runs
from tiny import pair_rows, table, tiny_model, tiny_reward_model, write_rows

needs = pytest.importorskip  # name, reason: the test, or the file, is skipped with its reason
REASON = "needs the development dependency {} (requirements-dev.txt)"
TOLERANCE = 1e-5
N = 5  # odd, so that halves cut in the wrong place do not go unseen


@pytest.fixture(scope="module")
def world(tmp_path_factory, tokenizer):
    """Two tiny Llamas (policy, reference), a reward model, and a file of pairs of uneven length
    with margins."""
    place = tmp_path_factory.mktemp("parity")
    rows = pair_rows(N, seed=3)
    for i, row in enumerate(rows):
        row["margin"] = 0.25 * i
    return {
        "rows": rows,
        "file": write_rows(place / "pairs.jsonl", rows),
        "policy": tiny_model("llama", place, seed=1),
        "ref": tiny_model("llama", place, seed=2),
        "reward": tiny_reward_model("llama", place, seed=3),
        "place": place,
    }


def gradients(model):
    return {k: p.grad.detach().clone() for k, p in model.named_parameters() if p.grad is not None}


def assert_same(ours, theirs):
    """(loss, gradients) twice: within 1e-5 each, the same parameters, and gradients that are not
    all 0."""
    assert abs(ours[0] - theirs[0]) < TOLERANCE, f"loss {ours[0]} and {theirs[0]}"
    assert ours[1].keys() == theirs[1].keys()
    gap = {k: (g - theirs[1][k]).abs().max().item() for k, g in ours[1].items()}
    worst = max(gap, key=gap.get)
    assert gap[worst] < TOLERANCE, f"{worst}: {gap[worst]}"
    assert max(g.abs().max() for g in ours[1].values()) > 100 * TOLERANCE


def trl_options(place, **options):
    return dict(
        output_dir=str(place / "trl"), use_cpu=True, bf16=False,
        gradient_checkpointing=False, report_to=[],
        **{"max_length": None, "per_device_train_batch_size": N, **options},
    )  # fmt: skip


def trl_result(trainer, check=None):
    """(loss, gradients) of the trainer's own loss on its own batch of all rows, in the file's
    order."""
    rows = [trainer.train_dataset[i] for i in range(N)]
    inputs = trainer.data_collator(rows)
    if check is not None:
        check(inputs)
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), gradients(trainer.model)


class Stopped(Exception):
    """Thrown where the first update would happen."""


def run_stage(stage, monkeypatch, world, *flags):
    """A stage's own main() on the file, whose rows are all trained on; returns its --out."""
    monkeypatch.setattr(runs, "stop_signals", lambda: contextlib.nullcontext([0]))  # no handlers
    out = world["place"] / f"ours{len(list(world['place'].iterdir()))}"
    data = "--data" if stage is sft else "--pairs"
    stage.main([data, world["file"], "--eval-fraction", "0", "--out", str(out), *map(str, flags)])
    return out


def stage_result(stage, monkeypatch, world, *flags):
    """(loss, gradients) at its first update: file, reference, forward, micro-batches and all."""
    found = []

    def catch(run, where):
        found.extend([run.loss, gradients(run.model)])
        raise Stopped

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(runs.Run, "update", catch)
        run_stage(stage, patch, world, "--batch-size", N, *flags)
    return tuple(found)


# ---- DPO ----


def our_dpo(world, loss_type, beta, smoothing=0.0, reference=True):
    """(loss, gradients) of dpo.forward on the file, by the stage's own functions."""
    flags = ["--pairs", world["file"], "--eval-fraction", "0", "--model", world["policy"]]
    flags += ["--loss-type", loss_type, "--beta", str(beta), "--label-smoothing", str(smoothing)]
    args = dpo.parse_args([*flags, "--out", str(world["place"] / "none")])
    run = runs.Run("dpo", args, [], (), ())
    policy, tokenizer = dpo.load_models(args, run)
    pairs, _, _ = dpo.load_data(args, policy, tokenizer)
    pad, ref_logps = common.pad_id(tokenizer), None
    if reference:
        frozen = common.load_policy(world["ref"], trainable=False)
        ref_logps = dpo.reference_logps(run, frozen, pairs, pad)
    losses, *_ = dpo.forward(args, policy, pairs, range(N), pad, ref_logps)
    loss = losses.mean()
    loss.backward()
    return (loss.item(), gradients(policy)), dpo.batch_rows(pairs, range(N), pad)


def trl_trainer(kind, world, tokenizer, rows=None, ref=None, **options):
    """TRL's SFT, Reward or DPO trainer on these rows, in the file's order."""
    trl = needs("trl", reason=REASON.format("trl"))
    datasets = needs("datasets", reason=REASON.format("datasets"))
    head = AutoModelForSequenceClassification if kind == "Reward" else AutoModelForCausalLM
    names = {"model": "reward" if kind == "Reward" else "policy", "ref_model": ref}
    models = {
        key: head.from_pretrained(world[name], dtype=torch.float32)
        for key, name in names.items()
        if name
    }
    return getattr(trl, f"{kind}Trainer")(
        **models,
        args=getattr(trl, f"{kind}Config")(**trl_options(world["place"], **options)),
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(world["rows"] if rows is None else rows),
    )


FORMS = table("""
sigmoid | 0.1 | 0.0
hinge | 0.1 | 0.0
ipo | 0.5 | 0.0
robust | 0.1 | 0.1
sigmoid_norm | 1.0 | 0.0
""")


@pytest.mark.parametrize("loss_type, beta, smoothing", FORMS)
def test_dpo_loss_and_gradients(world, tokenizer, loss_type, beta, smoothing):
    """A user who moves a run from TRL must get the same curve: each loss that both have, from the
    same messages, within 1e-5 in the loss and in every gradient; the ids and the trained positions
    are equal to begin with."""
    ours, (ids, attention_mask, response_mask) = our_dpo(world, loss_type, beta, smoothing)

    def same_batch(inputs):
        assert torch.equal(inputs["attention_mask"].bool(), attention_mask)
        assert torch.equal(inputs["input_ids"][attention_mask], ids[attention_mask])
        assert torch.equal(inputs["completion_mask"].bool(), response_mask)

    options = {"loss_type": [loss_type], "beta": beta, "label_smoothing": smoothing}
    theirs = trl_trainer("DPO", world, tokenizer, ref="ref", **options)
    assert_same(ours, trl_result(theirs, same_batch))


@pytest.mark.parametrize(
    "loss_type, beta, options",
    [("simpo", 2.0, {"simpo_gamma": 1.0}), ("sigmoid", 0.1, {"label_smoothing": 0.2})],
)
def test_losses_of_cpo(world, tokenizer, loss_type, beta, options):
    """TRL's CPOTrainer, which has no reference, holds SimPO (mean log-probs, γ itself and not γ/β:
    TRL divides by β and multiplies again) and cDPO: ours with a reference of 0 is the same sum."""
    datasets = needs("datasets", reason=REASON.format("datasets"))
    cpo = needs("trl.experimental.cpo", reason="this TRL has no CPOTrainer")
    options |= {"max_length": 512, "cpo_alpha": 0.0, "loss_type": loss_type, "beta": beta}
    trainer = cpo.CPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(world["policy"], dtype=torch.float32),
        args=cpo.CPOConfig(**trl_options(world["place"], **options)),
        train_dataset=datasets.Dataset.from_list(world["rows"]),
        processing_class=tokenizer,
    )
    smoothing = options.get("label_smoothing", 0.0)
    ours, _ = our_dpo(world, loss_type, beta, smoothing, reference=False)
    assert_same(ours, trl_result(trainer))


# ---- the reward model ----


@pytest.mark.parametrize("margin, center", [(False, 0.0), (True, 0.01)])
def test_reward_loss_and_gradients(world, tokenizer, monkeypatch, capsys, margin, center):
    """RewardTrainer takes the margin column when there is one and centres by its coefficient:
    `reward_train.py --margin margin --center-coef .01`, in micro-batches, has the same loss and the
    same gradients, head included."""
    flags = ("--model", world["reward"], "--margin", "margin" if margin else "none")
    flags += ("--center-coef", center)
    ours = stage_result(reward_train, monkeypatch, world, *flags, "--micro-tokens", 150)
    rows = [{k: v for k, v in row.items() if margin or k != "margin"} for row in world["rows"]]
    theirs = trl_trainer(
        "Reward", world, tokenizer, rows, center_rewards_coefficient=center or None
    )
    assert_same(ours, trl_result(theirs))
    assert "score.weight" in ours[1]


# ---- SFT, and eight steps of each ----


def completions(rows):
    return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]


RPO = dict(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.3], beta=0.1)
TRAINERS = {  # stage: TRL's trainer, our flags, its options
    sft: ("SFT", (), {}),
    reward_train: ("Reward", (), {}),
    dpo: ("DPO", ("--nll-coef", 0.3), RPO),
}


@pytest.mark.parametrize("stage", TRAINERS, ids=lambda stage: stage.__name__)
def test_eight_steps(stage, tokenizer, world, monkeypatch, capsys):
    """Optimiser, clipping, learning rate, a fixed reference: two epochs of 16 rows in batches of 4,
    in the order in which ours shuffles them. Loss and gradient norm of each step, and the weights
    at the end, are TRL's."""
    kind, flags, options = TRAINERS[stage]
    rows = pair_rows(16, seed=5)
    ours = {**world, "file": write_rows(world["place"] / "sixteen.jsonl", rows)}
    start = world["reward" if kind == "Reward" else "policy"]
    flags += ("--model", start, "--batch-size", 4, "--epochs", 2, "--lr", 1e-3)
    flags += ("--schedule", "linear", "--warmup", 0, "--eval-every", 0, "--micro-tokens", 150)
    flags += () if stage is reward_train else ("--max-new-tokens", 2)
    out = run_stage(stage, monkeypatch, ours, *flags)
    found = [row for row in files.read_jsonl(out / "metrics.jsonl") if "grad_norm" in row]
    rows = [rows[i] for step in range(1, 9) for i in common.batch_indices(16, 4, 0, step)[0]]
    rows = completions(rows) if stage is sft else rows
    options = options | dict(
        per_device_train_batch_size=4, learning_rate=1e-3, lr_scheduler_type="linear"
    )
    options |= dict(warmup_steps=0, num_train_epochs=1, logging_steps=1, save_strategy="no")
    options |= dict(train_sampling_strategy="sequential", disable_tqdm=True)
    ref = "policy" if stage is dpo else None
    trainer = trl_trainer(kind, world, tokenizer, rows, ref=ref, **options)
    losses, training_step = [], trainer.training_step
    trainer.training_step = lambda *a, **k: losses.append(training_step(*a, **k)) or losses[-1]
    trainer.train()
    history = [row for row in trainer.state.log_history if "grad_norm" in row]
    assert len(found) == len(losses) == len(history) == 8
    for row, loss, logged in zip(found, losses, history):
        assert abs(row["loss"] - loss.item()) < TOLERANCE, f"step {row['step']}"
        assert row["grad_norm"] == pytest.approx(logged["grad_norm"], rel=TOLERANCE)
        assert row["lr"] == pytest.approx(logged["learning_rate"])
    before, after = (type(trainer.model).from_pretrained(x).state_dict() for x in (start, out))
    theirs = trainer.model.state_dict()
    assert max((after[k] - theirs[k]).abs().max() for k in theirs) < 10 * TOLERANCE
    assert max((after[k] - before[k]).abs().max() for k in theirs) > 100 * TOLERANCE


# ---- GRPO ----

GRPO_N, GRPO_LENGTH = 8, 6  # two prompts × four answers, of 1 to 6 tokens


def grpo_batch(tokenizer):
    """Ids of eight answers to two prompts of different lengths, one with the end token and one of a
    single token; advantages of both signs, one of them 0; noise that puts old and reference
    log-probs off the policy's, far enough to clip."""
    generator = torch.Generator().manual_seed(4)
    texts = ("sql", "Assess this candidate: kafka.")
    prompts = [common.encode_prompt(tokenizer, text) for text in texts]
    lengths = (GRPO_LENGTH, 1, 4, 2, 3, 6, 5, 2)
    answers = [torch.randint(7, 250, (n,), generator=generator).tolist() for n in lengths]
    answers[2][-1] = tokenizer.eos_token_id
    noise = torch.randn(2, GRPO_N, 64, generator=generator) * 0.4
    advantages = torch.tensor([1.0, -0.5, 0.25, -0.75, 0.0, 1.5, -1.0, -0.5])
    return [prompts[i // 4] for i in range(GRPO_N)], answers, advantages, noise


def shifted(logps, mask, noise):
    """Log-probs off by noise, in the order of the answer's tokens wherever these stand."""
    flat = torch.cat([row[: int(n)] for row, n in zip(noise, mask.sum(1))])
    off = torch.zeros_like(logps).masked_scatter(mask, flat)
    return torch.where(mask, logps.detach() + off, 0.0)


def trl_grpo(world, tokenizer, batch, **options):
    """(loss, gradients) of TRL's GRPOTrainer on these ids: prompts padded on the left, answers on
    the right."""
    trl = needs("trl", reason=REASON.format("trl"))
    datasets = needs("datasets", reason=REASON.format("datasets"))
    prompts, answers, advantages, noise = batch
    args = trl_options(world["place"], **options)
    args.pop("max_length")
    args |= {"per_device_train_batch_size": GRPO_N, "num_generations": 4}
    args |= {"max_completion_length": GRPO_LENGTH}
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(world["policy"], dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(**args),
        train_dataset=datasets.Dataset.from_list([{"prompt": "sql"}] * GRPO_N),
        processing_class=tokenizer,
    )
    pad, width, length = tokenizer.pad_token_id, max(map(len, prompts)), max(map(len, answers))
    inputs = {
        "prompt_ids": torch.tensor([[pad] * (width - len(p)) + p for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": torch.tensor([a + [pad] * (length - len(a)) for a in answers]),
        "completion_mask": torch.tensor([[1] * len(a) + [0] * (length - len(a)) for a in answers]),
        "advantages": advantages,
        "num_items_in_batch": torch.tensor(sum(map(len, answers))),
    }
    mask = inputs["completion_mask"].bool()
    rows = common.pad_rows(prompts, answers, pad)
    with torch.no_grad():  # old and reference of both sides come from the same numbers
        logps = common.token_logps(trainer.model, *rows)
    packed = torch.zeros(mask.shape).masked_scatter(mask, logps[rows[2]])
    inputs["old_per_token_logps"] = shifted(packed, mask, noise[0])
    if options.get("beta"):
        inputs["ref_per_token_logps"] = shifted(packed, mask, noise[1])
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), gradients(trainer.model)


def our_grpo(world, tokenizer, batch, **options):
    """(loss, gradients) of grpo_rubric.grpo_loss on the same ids."""
    prompts, answers, advantages, noise = batch
    model = common.load_policy(world["policy"])
    rows = common.pad_rows(prompts, answers, tokenizer.pad_token_id)
    logps = common.token_logps(model, *rows)
    old, ref = (shifted(logps, rows[2], noise[i]) for i in (0, 1))
    options["max_tokens"] = GRPO_LENGTH
    loss, sums = grpo_rubric.grpo_loss(logps, old, advantages, rows[2], ref, **options)
    assert (sums["clipped"] > 0) == (options.get("loss") != "sapo")
    loss.backward()
    return loss.item(), gradients(model)


AGGREGATION = {"grpo": "sequence", "dapo": "token", "dr_grpo": "fixed"}
GRPO_FORMS = [  # TRL's options, ours
    *(({"loss_type": theirs}, {"aggregation": ours}) for theirs, ours in AGGREGATION.items()),
    ({"loss_type": "cispo", "epsilon_high": 1.2}, {"loss": "cispo"}),
    ({"loss_type": "sapo"}, {"loss": "sapo", "aggregation": "sequence"}),
    ({"loss_type": "dapo", "delta": 1.5}, {"loss": "dual"}),
]


@pytest.mark.parametrize("beta", [0.0, 0.1], ids=["no KL", "KL"])
@pytest.mark.parametrize("options, own", GRPO_FORMS, ids=lambda x: x.get("loss_type", ""))
def test_grpo_loss_and_gradients(options, own, beta, world, tokenizer, monkeypatch):
    """TRL's `grpo` is our "sequence", `dapo` "token", `dr_grpo` "fixed", its `delta` our dual clip;
    bounds of 1.2 and 1.5, which the ratios of this batch reach. Its KL is ours with
    use_bias_correction_kl, its default in 1.16: without it k3 stands without its ratio, whose
    gradient is another (the KL card in test_losses.py)."""
    monkeypatch.setattr(grpo_rubric, "CISPO_MAX", 1.2)
    monkeypatch.setattr(grpo_rubric, "DUAL_MAX", 1.5)
    batch = grpo_batch(tokenizer)
    options = {"epsilon_high": 0.28, "beta": beta, "use_bias_correction_kl": bool(beta)} | options
    theirs = trl_grpo(world, tokenizer, batch, **options)
    assert_same(our_grpo(world, tokenizer, batch, beta=beta, **own), theirs)


@pytest.mark.parametrize("loss_type", AGGREGATION)
def test_gspo_loss_and_gradients(world, tokenizer, loss_type):
    """GSPO, one ratio per answer: TRL's importance_sampling_level="sequence" is our level. Without
    a KL: TRL multiplies k3 by the answer's ratio, we by the token's, which has the KL's
    gradient."""
    batch = grpo_batch(tokenizer)
    options = dict(epsilon=0.02, epsilon_high=0.03, importance_sampling_level="sequence")
    theirs = trl_grpo(world, tokenizer, batch, loss_type=loss_type, **options)
    own = dict(clip_low=0.02, clip_high=0.03, level="sequence", aggregation=AGGREGATION[loss_type])
    assert_same(our_grpo(world, tokenizer, batch, **own), theirs)


# ---- adapters ----

TARGETS = {  # family, how PEFT's config names the layers
    "default": ("gpt2", {}),
    "all-linear": ("llama", dict(target_modules="all-linear")),
    "regex": ("gpt2", dict(target_modules=r".*\.(c_attn|q_proj|down_proj)")),
    "dotted": ("llama", dict(target_modules=["1.self_attn.q_proj", "0.mlp.up_proj"])),
    "two layers": ("llama", dict(layers_to_transform=[1], target_modules=["q_proj"])),
}


@pytest.mark.parametrize("targets", TARGETS)
def test_peft_adapter_opens_here(tmp_path, tokenizer, targets, folders):
    """An adapter that PEFT wrote is a valid --model, whatever way its config names the layers:
    logits within 1e-5, in float64 arithmetic, for these wide random models turn the rounding of one
    fp32 forward into 1e-5. Ours in PEFT is in test_common_model.py."""
    peft = needs("peft", reason=REASON.format("peft"))
    family, options = TARGETS[targets]
    ids = torch.tensor([tokenizer.encode("Role: python, sql")])

    def logits(model):
        with torch.no_grad():
            return model.double()(input_ids=ids).logits

    plain = AutoModelForCausalLM.from_pretrained(folders[family])
    options |= {"r": 4, "lora_alpha": 12, "fan_in_fan_out": family == "gpt2"}
    theirs = peft.get_peft_model(plain, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    generator = torch.Generator().manual_seed(0)
    for name, weight in theirs.named_parameters():
        if "lora_" in name:
            weight.data.normal_(std=0.1, generator=generator)
    theirs.save_pretrained(tmp_path / "peft")
    tokenizer.save_pretrained(tmp_path / "peft")
    found = logits(common.load_policy(str(tmp_path / "peft")))
    assert (found - logits(theirs)).abs().max() < TOLERANCE
    assert (found - logits(common.load_policy(folders[family]))).abs().max() > 0.1


ODD = {
    "use_rslora": dict(use_rslora=True),
    "use_dora": dict(use_dora=True),
    "rank_pattern": dict(rank_pattern={"q_proj": 2}),
    "tied head": dict(target_modules=["q_proj", "lm_head"]),
}


@pytest.mark.parametrize("odd", ODD)
def test_unusual_adapter_is_refused(tmp_path, odd, llama_folder):
    """rsLoRA scales by α/√r, DoRA has a magnitude, a pattern has other ranks: read as plain LoRA
    they would load without a word and answer nonsense. Where head and embedding are one tensor,
    merging an adapter of the head would change the embedding too."""
    peft = needs("peft", reason=REASON.format("peft"))
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, **ODD[odd])
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(llama_folder), config)
    model.save_pretrained(tmp_path / "odd", save_embedding_layers=False)
    with pytest.raises(files.UserError, match="not a plain LoRA|head tied to the embedding"):
        common.load_policy(str(tmp_path / "odd"))
