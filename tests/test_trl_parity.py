"""The same batch through TRL and through ours, from the same file of messages on: loss and gradients,
eight steps of training. Skipped without it.

TRL (1.16) computes the same with bf16 off (its default), no gradient checkpointing, no max_length.
Its `ipo` and `sigmoid_norm` divide by the answer's tokens, as ours. Its DPOTrainer no longer smooths
labels in `sigmoid`: cDPO is compared with CPOTrainer and a reference of 0. Its `sft` is --nll-coef.
"""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import common
import dpo
import reward_train
import sft
from common import Policy
from parts import files, runs
from parts.grpo import grpo_loss
from parts.pairs import Pairs
from tiny import cases, pair_rows, policy_of, tiny_model, tiny_reward_model, write_rows

needs = pytest.importorskip  # name, reason: the test, or the file, is skipped with its reason
REASON = "needs the development dependency {} (requirements-dev.txt)"
TOLERANCE = 1e-5
N = 5  # odd, so that halves cut in the wrong place do not go unseen


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    place = tmp_path_factory.mktemp("parity")
    rows, sixteen = pair_rows(N, seed=3), pair_rows(16, seed=5)
    for i, row in enumerate(sixteen):
        row["margin"] = i
    return {
        "rows": rows,
        "file": write_rows(place / "pairs.jsonl", rows),
        "sixteen": sixteen,
        "sixteen file": write_rows(place / "sixteen.jsonl", sixteen),
        "policy": tiny_model("llama", place, seed=1),
        "ref": tiny_model("llama", place, seed=2),
        "reward": tiny_reward_model("llama", place, seed=3),
        "place": place,
    }


load_policy = partial(policy_of, trainable=True)


def result(loss, model):
    loss.backward()
    return loss.detach(), {k: p.grad for k, p in model.named_parameters() if p.grad is not None}


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
    assert max(g.abs().max() for g in ours[1].values()) > 100 * TOLERANCE


def trl_trainer(kind, world, tokenizer, rows, ref=None, **options):
    trl, datasets = (needs(name, reason=REASON.format(name)) for name in ("trl", "datasets"))
    home = needs("trl.experimental.cpo", reason="no CPOTrainer") if kind == "CPO" else trl
    head = AutoModelForSequenceClassification if kind == "Reward" else AutoModelForCausalLM
    models = {"model": "reward" if kind == "Reward" else "policy"}
    models |= {"ref_model": ref} if ref else {}
    models = {key: head.from_pretrained(world[x], dtype=torch.float32) for key, x in models.items()}
    if kind == "GRPO":
        models["reward_funcs"] = lambda completions, **_: [0.0] * len(completions)
    else:
        options = {"max_length": None, **options}
    args = getattr(home, f"{kind}Config")(
        output_dir=str(world["place"] / "trl"), use_cpu=True, bf16=False,
        gradient_checkpointing=False, report_to=[], **options,
    )  # fmt: skip
    how = dict(models, args=args, processing_class=tokenizer)
    return getattr(home, f"{kind}Trainer")(train_dataset=datasets.Dataset.from_list(rows), **how)


@cases("""
kind | loss_type | beta | smoothing
DPO | sigmoid | 0.1 | 0.0
DPO | hinge | 0.1 | 0.0
DPO | ipo | 0.5 | 0.0
DPO | robust | 0.1 | 0.1
DPO | sigmoid_norm | 1.0 | 0.0
CPO | simpo | 2.0 | 0.0
CPO | sigmoid | 0.1 | 0.2
""")
def test_dpo_loss_and_gradients(kind, loss_type, beta, smoothing, world, tokenizer):
    """Ids and trained positions are equal. CPOTrainer has no reference: ours of 0 is the same. Its
    SimPO has mean log-probs, and γ itself: TRL divides by β and multiplies again."""
    flags = f"--pairs {world['file']} --eval-fraction 0 --model {world['policy']} --loss-type"
    flags += f" {loss_type} --beta {beta} --label-smoothing {smoothing} --out {world['place']}/none"
    args = dpo.parse_args(flags.split())
    run = runs.Run("dpo", args, ())
    policy, frozen = load_policy(world["policy"]), policy_of(world["ref"])
    pairs = Pairs(args, common.load_tokenizer(world["policy"]), common.load_config(world["policy"]))
    run.state["reference"] = torch.zeros(2, N)
    if kind == "DPO":
        run.state["reference"] = dpo.reference_logps(run, frozen, pairs)
    losses, *_ = dpo.pair_loss(run, pairs, range(N), dpo.pair_logps(policy, pairs, range(N)))
    options = {"beta": beta, "label_smoothing": smoothing, "per_device_train_batch_size": N}
    if kind == "DPO":
        options["loss_type"] = [loss_type]
    else:
        options |= {"loss_type": loss_type, "max_length": 512, "cpo_alpha": 0.0, "simpo_gamma": 1.0}
    ref = "ref" if kind == "DPO" else None
    trainer = trl_trainer(kind, world, tokenizer, world["rows"], ref, **options)
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(N)])
    if kind == "DPO":
        ids, attention_mask, response_mask = pairs.batch(range(N), torch.device("cpu"))
        assert torch.equal(inputs["attention_mask"].bool(), attention_mask)
        assert torch.equal(inputs["input_ids"][attention_mask], ids[attention_mask])
        assert torch.equal(inputs["completion_mask"].bool(), response_mask)
    trainer.model.train()
    theirs = trainer.compute_loss(trainer.model, inputs)
    assert_same(result(losses.mean(), policy.model), result(theirs, trainer.model))


MARGINS = "--pairs {} --margin margin --margin-scale 0.25 --center-coef 0.01"
RPO = dict(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.3], beta=0.1)
TRAINERS = {  # stage: TRL's trainer, our flags, its options
    sft: ("SFT", "--data {} --max-new-tokens 2", {}),
    reward_train: ("Reward", MARGINS, {"center_rewards_coefficient": 0.01}),
    dpo: ("DPO", "--pairs {} --nll-coef 0.3 --max-new-tokens 2", RPO),
}
SHARED = """--eval-fraction 0 --batch-size 4 --epochs 2 --lr 1e-3 --schedule linear --warmup 0
--eval-every 100 --micro-tokens 150 --overwrite"""


@pytest.mark.parametrize("stage", TRAINERS, ids=lambda stage: stage.__name__)
def test_eight_steps(stage, tokenizer, world, quiet_process):
    kind, flags, options = TRAINERS[stage]
    start, out = world["reward" if kind == "Reward" else "policy"], world["place"] / kind
    flags = f"{flags.format(world['sixteen file'])} {SHARED} --model {start} --out {out}"
    assert stage.main(flags.split()) in (None, 0)
    found = [row for row in files.read_jsonl(out / "metrics.jsonl") if "grad_norm" in row]
    order = [i for step in range(1, 9) for i in common.batch_indices(16, 4, 0, step)[0]]
    rows = [dict(world["sixteen"][i]) for i in order]
    for row in rows:
        row["margin"] *= 0.25
        if stage is not reward_train:
            del row["margin"]
        if stage is sft:
            row["completion"] = row.pop("chosen")
            del row["rejected"]
    options = options | dict(
        per_device_train_batch_size=4, learning_rate=1e-3, lr_scheduler_type="linear",
        warmup_steps=0, num_train_epochs=1, logging_steps=1, save_strategy="no",
        train_sampling_strategy="sequential", disable_tqdm=True,
    )  # fmt: skip
    ref = "policy" if stage is dpo else None
    trainer = trl_trainer(kind, world, tokenizer, rows, ref, **options)
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
    torch.testing.assert_close(after, dict(theirs), atol=10 * TOLERANCE, rtol=0)
    assert max((after[k] - before[k]).abs().max() for k in theirs) > 100 * TOLERANCE


def grpo_batch(tokenizer):
    """Ids of eight answers to two prompts, one with the end token, one of a single token."""
    generator = torch.Generator().manual_seed(4)
    texts = ["sql"] * 4 + ["Assess this candidate: kafka."] * 4
    answers = [torch.randint(7, 250, (n,), generator=generator) for n in (6, 1, 4, 2, 3, 6, 5, 2)]
    answers = [answer.tolist() for answer in answers]
    answers[2][-1] = tokenizer.eos_token_id
    advantages = torch.tensor([1.0, -0.5, 0.25, -0.75, 0.0, 1.5, -1.0, -0.5])
    return [common.encode_prompt(tokenizer, text) for text in texts], answers, advantages


def old_and_ref(logps):
    """Of both sides the same numbers, off by .4 nats at most."""
    return [logps.detach() + 0.4 * torch.sin(40 * logps.detach() + phase) for phase in (0, 1)]


def trl_grpo(world, tokenizer, batch, **options):
    """(loss, gradients) of TRL's GRPOTrainer: prompts padded on the left, answers on the right."""
    prompts, answers, advantages = batch
    options |= {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6}
    trainer = trl_trainer("GRPO", world, tokenizer, [{"prompt": "sql"}] * 8, **options)
    inputs = {"advantages": advantages, "num_items_in_batch": torch.tensor(sum(map(len, answers)))}
    for name, ids, side in (("prompt", prompts, "left"), ("completion", answers, "right")):
        padded = tokenizer.pad({"input_ids": ids}, padding_side=side, return_tensors="pt")
        inputs |= {f"{name}_ids": padded["input_ids"], f"{name}_mask": padded["attention_mask"]}
    mask = inputs["completion_mask"].bool()
    rows = common.pad_rows(prompts, answers)
    with torch.no_grad():
        logps = Policy(trainer.model, torch.float32)(*rows)[0][rows[2]]
    old, ref = old_and_ref(torch.zeros(mask.shape).masked_scatter(mask, logps))
    inputs |= {"old_per_token_logps": old} | (
        {"ref_per_token_logps": ref} if options.get("beta") else {}
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return result(trainer._compute_loss(trainer.model, inputs), trainer.model)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_grpo_loss_and_gradients(beta, world, tokenizer):
    """The mean over tokens, with a higher upper clip, is TRL's "dapo". Its KL is ours with
    use_bias_correction_kl, its default in 1.16: without it k3 stands without its ratio."""
    batch = grpo_batch(tokenizer)
    options = {"loss_type": "dapo", "epsilon_high": 0.28, "beta": beta}
    options["use_bias_correction_kl"] = bool(beta)
    prompts, answers, advantages = batch
    policy = load_policy(world["policy"])
    rows = common.pad_rows(prompts, answers)
    logps = policy(*rows)[0]
    old, ref = old_and_ref(logps)
    loss, columns = grpo_loss(logps, old, advantages, rows[2], ref, beta=beta)
    assert columns["clip_frac"].any()
    assert_same(result(loss, policy.model), trl_grpo(world, tokenizer, batch, **options))
