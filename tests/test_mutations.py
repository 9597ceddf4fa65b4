"""The "break it" gallery: one line of a stage is broken, and a named check must turn red.

A test that passes proves little until it has been seen to fail. Each row below is a mutation of one line, applied to a
copy of the source that is executed as a module; the check it names is a test of this folder or one of the few below. As
an exercise, cover the last column. A mutation that no longer finds its line fails too: correct the row.
"""

import contextlib
import doctest
import functools
import importlib
import itertools
import sys
import types
from pathlib import Path

import pytest
import torch

import common
import dpo
import parts
import test_grpo
import test_ppo
from parts import files, lora, runs
from tiny import pair_rows, tiny_model, write_rows

REPO = Path(__file__).resolve().parent.parent
MODULES = (  # in import order
    "parts/files", "parts/stats", "parts/parallel", "parts/lora", "parts/shared_prompt", "common", "parts/runs",
    "parts/rollouts", "checks/answers", "checks/risky", "checks/instructions", "watch", "judge", "sft", "reward_train", "dpo", "ppo", "grpo_rubric", "grpo_agent",
    "evaluate", "fairness",
)  # fmt: skip
TEXTS = ["Assess this candidate.", "Role: data engineer, python and sql.", "hold", "Ask: kafka?"]

GALLERY = [
    # module, its line, the line broken, what turns red
    # -- DPO: what goes into the formula
    (
        "dpo",
        "logps = token_logps(policy, ids, attention_mask, mask, shared=pairs.shared).sum(1)",
        "logps = token_logps(policy, ids, attention_mask, mask, shared=pairs.shared).mean(1)",
        "test_toy_world.test_the_stage_lands_on_the_optimum",
    ),
    (
        "common",
        "answers = [pairs.chosen[i] for i in indices] + [pairs.rejected[i] for i in indices]",
        "answers = [pairs.rejected[i] for i in indices] + [pairs.chosen[i] for i in indices]",
        "test_toy_world.test_the_stage_lands_on_the_optimum",
    ),
    (
        "dpo",
        "*logps, *ref, args.beta",
        "*logps.flip(0), *ref.flip(0), args.beta",
        "test_toy_world.test_the_stage_lands_on_the_optimum",
    ),
    (
        "dpo",
        "ref_logps[:, part].to(logps.device)",
        "ref_logps[:, part].flip(0).to(logps.device)",
        "check_preflight",
    ),
    (
        "dpo",
        "lengths = mask.sum(1).view(2, -1)",
        "lengths = attention_mask.sum(1).view(2, -1)",
        "test_toy_world.test_the_stage_normalises_ipo_by_the_answer_tokens",
    ),
    # -- DPO: the formula
    (
        "dpo",
        "z = chosen_rewards - rejected_rewards",
        "z = beta * (policy_chosen_logps - policy_rejected_logps)",
        "check_preflight",
    ),
    (
        "dpo",
        "z = chosen_rewards - rejected_rewards",
        "z = beta * (policy_chosen_logps - policy_rejected_logps)",
        "test_toy_world.test_dpo_lands_on_the_optimum",
    ),
    (
        "dpo",
        "z = chosen_rewards - rejected_rewards",
        "z = rejected_rewards - chosen_rewards",
        "test_toy_world.test_dpo_lands_on_the_optimum",
    ),
    (
        "dpo",
        "z = chosen_rewards - rejected_rewards",
        "z = (chosen_rewards - rejected_rewards) / 2",
        "test_losses.test_dpo_rewards_golden",
    ),
    (
        "dpo",
        "losses = -(1 - epsilon) * F.logsigmoid(z) - epsilon * F.logsigmoid(-z)",
        "losses = -(1 - epsilon) * F.logsigmoid(z)",
        "test_losses.test_dpo_golden",
    ),
    (
        "dpo",
        "losses = (-(1 - epsilon) * F.logsigmoid(z) + epsilon * F.logsigmoid(-z)) / (1 - 2 * epsilon)",
        "losses = (-(1 - epsilon) * F.logsigmoid(z) - epsilon * F.logsigmoid(-z)) / (1 - 2 * epsilon)",
        "test_toy_world.test_other_objectives",
    ),
    (
        "dpo",
        "losses = (1 - z).clamp(min=0)",
        "losses = (1 + z).clamp(min=0)",
        "test_losses.test_dpo_golden",
    ),
    (
        "dpo",
        "losses = (per_token - 1 / (2 * beta)) ** 2",
        "losses = (per_token - beta / 2) ** 2",
        "test_losses.test_dpo_golden",
    ),
    (
        "dpo",
        "losses = -F.logsigmoid(beta * per_token - simpo_gamma)",
        "losses = -F.logsigmoid(beta * (per_token - simpo_gamma))",
        "test_losses.test_dpo_golden",
    ),
    (
        "dpo",
        "return losses, chosen_rewards.detach(), rejected_rewards.detach()",
        "return losses, chosen_rewards, rejected_rewards.detach()",
        "test_losses.test_losses_are_per_example_and_differentiable",
    ),
    (
        "parts/files",
        "if above < value < below and value >= at_least:",
        "if not (value <= above or value >= below or value < at_least):",  # NaN passes, as a β
        "test_losses.test_wrong_settings",
    ),
    # -- DPO: the loop and its log
    ("dpo", "loss = losses.sum() / len(batch)", "loss = losses.mean()", "check_micro_batches"),
    (
        "dpo",
        "args.nll_coef * chosen_logps.sum() / chosen_tokens",
        "args.nll_coef * chosen_logps.sum() / numbers[5].sum()",
        "check_micro_batches",
    ),
    (
        "dpo",
        "right = ((margins > 0) & ~equal).double() + 0.5 * equal",
        "right = (margins >= 0).double()",
        "test_losses.test_metrics_of_a_step_are_sums_divided_once",
    ),
    # -- PPO: the reward
    (
        "ppo",
        "return torch.where(mask, ends - kl_coef * kl, 0.0), kl",
        "return torch.where(mask, ends + kl_coef * kl, 0.0), kl",
        "test_toy_world.test_ppo_lands_on_the_optimum",
    ),
    (
        "ppo",
        "kl = kl_estimates(logps, ref_logps, mask)[0]",
        "kl = kl_estimates(logps, ref_logps, mask)[2]",  # k3 moved into the reward
        "test_toy_world.test_ppo_lands_on_the_optimum",
    ),
    (
        "ppo",
        "kl = kl_estimates(logps, ref_logps, mask)[0]",
        "kl = kl_estimates(logps, ref_logps, mask)[1]",
        "test_toy_world.test_ppo_lands_on_the_optimum",
    ),
    (
        "ppo",
        "last = mask.long().cumsum(1).argmax(1, keepdim=True)",
        "last = torch.full_like(mask[:, :1].long(), mask.shape[1] - 1)",
        "test_ppo.test_shape_rewards_golden",
    ),
    (
        "ppo",
        "at_end = at_end - no_end_penalty * (~finished).to(at_end.dtype)",
        "at_end = at_end - no_end_penalty * finished.to(at_end.dtype)",
        "test_ppo.test_shape_rewards_golden",
    ),
    # -- PPO: advantages
    (
        "ppo",
        "torch.where(mask[:, t], delta + gamma * lam * after, 0.0)",
        "torch.where(mask[:, t], delta + gamma * after, 0.0)",  # λ forgotten
        "test_ppo.test_gae_golden",
    ),
    (
        "ppo",
        "next_value = after if bootstrap is None else",
        "next_value = values[:, -1] if bootstrap is None else",  # bootstrap after the end
        "test_ppo.test_gae_golden",
    ),
    (
        "ppo",
        "after = torch.where(mask[:, t], advantages[:, t], after)",
        "after = advantages[:, t]",
        "test_ppo.test_a_gap_hands_on_what_is_behind_it",
    ),
    (
        "ppo",
        "next_value = torch.where(mask[:, t], values[:, t], next_value)",
        "next_value = values[:, t]",
        "test_ppo.test_a_gap_hands_on_what_is_behind_it",
    ),
    (
        "ppo",
        "values = torch.where(mask, at_least_fp32(values), 0.0)",
        "values = at_least_fp32(values) * mask",
        "test_losses.test_masked_places_count_for_nothing",
    ),
    (
        "ppo",
        "var = (squares - n * mean**2).clamp(min=0) / (n - 1)",
        "var = (squares - n * mean**2).clamp(min=0) / n",
        "test_ppo.test_whiten_golden",
    ),
    (
        "ppo",
        "totals or (int(mask.sum()), x.double().sum(), x.double().square().sum())",
        "totals or (mask.numel(), x.double().sum(), x.double().square().sum())",
        "test_ppo.test_whiten_golden",
    ),
    (
        "ppo",
        "n, total, squares = totals or (",
        "n, total, squares = (",  # each rank by its own
        "test_ppo.test_whiten_golden",
    ),
    ("ppo", "    if n < 2:\n", "    if n < 1:\n", "test_ppo.test_whiten_golden"),
    # -- PPO: the losses
    (
        "ppo",
        "log_ratio = torch.where(mask, at_least_fp32(logps) - at_least_fp32(old_logps), 0.0)",
        "log_ratio = (at_least_fp32(logps) - at_least_fp32(old_logps)) * mask",
        "test_losses.test_masked_places_count_for_nothing",
    ),
    (
        "ppo",
        "bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)",
        "bounded = -advantages * ratio.clamp(1 + clip_low, 1 - clip_high)",
        "test_ppo.test_policy_loss_case_by_case",
    ),
    (
        "ppo",
        "bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)",
        "bounded = -advantages * ratio.clamp(1 - clip_high, 1 + clip_low)",
        "test_ppo.test_policy_loss_case_by_case",
    ),
    (
        "ppo",
        "return torch.maximum(plain, bounded), bounded > plain",
        "return torch.minimum(plain, bounded), bounded < plain",
        "test_ppo.test_policy_loss_case_by_case",
    ),
    (
        "ppo",
        "    ratio = log_ratio.clamp(-20, 20).exp()",
        "    ratio = log_ratio.exp()",
        "test_losses.test_far_log_ratios_stay_finite",
    ),
    (
        "ppo",
        "bounded = (old_values + (values - old_values).clamp(-clip, clip) - returns) ** 2",
        "bounded = (values + (old_values - values).clamp(-clip, clip) - returns) ** 2",
        "test_ppo.test_value_loss_golden",
    ),
    (
        "ppo",
        "return 0.5 * torch.maximum(plain, bounded), bounded > plain",
        "return torch.maximum(plain, bounded), bounded > plain",
        "test_ppo.test_value_loss_golden",
    ),
    (
        "ppo",
        "return (1 - (returns - values).var() / returns.var()).item()",
        "return (1 - (returns - values).square().mean() / returns.var()).item()",
        "test_ppo.test_explained_variance_golden",
    ),
    (
        "ppo",
        "max(kl / self.target - 1, -0.2)",
        "max(1 - kl / self.target, -0.2)",
        "test_ppo.test_adaptive_kl_golden",
    ),
    # -- PPO: critic and rollout
    (
        "ppo",
        "head.weight.data.copy_(critic.score.weight / deviation)",
        "head.weight.data.copy_(critic.score.weight)",
        "test_ppo.test_critic_from_the_reward_model_starts_as_the_score",
    ),
    (
        "ppo",
        "head.bias.data.fill_(-mean_score / deviation)",
        "head.bias.data.fill_(0.0)",
        "test_ppo.test_critic_from_the_reward_model_starts_as_the_score",
    ),
    (
        "ppo",
        'trunk = policy if args.critic == "shared" else critic',
        "trunk = policy",
        "test_ppo.test_first_minibatch_has_ratio_one_and_kl_zero",
    ),
    (
        "ppo",
        "policy, ids, attention_mask, mask, args.temperature, with_entropy=True",
        "policy, ids, attention_mask, mask, 1.0, with_entropy=True",
        "test_ppo.test_first_minibatch_has_ratio_one_and_kl_zero",
    ),
    (
        "ppo",
        "ref_logps[part, :t] = token_logps(reference, *ids_and_masks, args.temperature)",
        "ref_logps[part, :t] = token_logps(reference, *ids_and_masks)",
        "test_ppo.test_first_minibatch_has_ratio_one_and_kl_zero",
    ),
    (
        "ppo",
        "keep = [i for i, score in enumerate(scores) if score is not None]",
        "scores = [score or 0.0 for score in scores]; keep = list(range(len(scores)))",
        "test_ppo.test_none_drops_the_answer",
    ),
    (
        "ppo",
        "with adapter_off(reference):",
        "if True:",  # the reference wears the adapter
        "test_ppo.test_three_models_or_one",
    ),
    # -- PPO: the update
    (
        "ppo",
        "logps, old_logps, advantages, mask, CLIP_LOW, args.clip_high",
        "logps, logps.detach(), advantages, mask, CLIP_LOW, args.clip_high",
        "test_ppo.test_the_rollout_is_fixed_before_the_update",
    ),
    (
        "ppo",
        "logps, old_logps, advantages, mask, CLIP_LOW, args.clip_high",
        "logps, logps, advantages, mask, CLIP_LOW, args.clip_high",
        "test_toy_world.test_sampled_ppo",
    ),
    (
        "ppo",
        "loss = (policy_losses - args.entropy_coef * entropies).sum() / actions",
        "loss = masked_mean(policy_losses - args.entropy_coef * entropies, mask)",
        "test_ppo.test_gradient_for_every_cut",
    ),
    (
        "ppo",
        'actions = int(b["mask"][batch].sum())',
        'actions = int(b["mask"].sum())',  # those of the rollout
        "test_ppo.test_ragged_tail",
    ),
    (
        "ppo",
        "order = np.random.default_rng([args.seed, run.step, epoch]).permutation(n)",
        "order = np.random.default_rng([args.seed, run.step]).permutation(n)",
        "test_ppo.test_ragged_tail",
    ),
    (
        "ppo",
        "sums.update(of_part)",
        "sums = of_part",  # the last micro-batch logged as the mean
        "test_ppo.test_the_log_of_an_update_is_its_mean",
    ),
    (
        "ppo",
        "run.backward(loss + VALUE_COEF * value_losses.sum() / actions)",
        "(loss + VALUE_COEF * value_losses.sum() / actions).backward()",
        "test_ppo.test_one_scale_for_policy_and_critic",
    ),
    # -- PPO: the loop
    (
        "ppo",
        'b["finished"], args.no_end_penalty',
        "None, args.no_end_penalty",
        "test_ppo.test_the_loop_hands_on",
    ),
    (
        "ppo",
        'b["advantages"] = masked_whiten(advantages, b["mask"])',
        'b["advantages"] = advantages',
        "test_ppo.test_the_loop_hands_on",
    ),
    (
        "ppo",
        "models, asked, args.seed * 10**6 + step",
        "models, asked, args.seed",
        "test_ppo.test_the_loop_hands_on",
    ),
    (
        "ppo",
        'kl_control.update(row["kl/ref"])',
        'kl_control.update(row["kl/token"])',
        "test_ppo.test_the_loop_hands_on",
    ),
    # -- GRPO: groups
    (
        "grpo_rubric",
        "means = rewards.sum(dim=1, keepdim=True) / n.clamp(min=1)",
        "means = rewards.sum(dim=0, keepdim=True) / len(rewards)",
        "test_grpo.test_group_advantages_golden",
    ),
    (
        "grpo_rubric",
        "(centred**2).sum(dim=1, keepdim=True) / (n - 1).clamp(min=1)",
        "(centred**2).sum(dim=1, keepdim=True) / n.clamp(min=1)",
        "test_grpo.test_group_advantages_golden",
    ),
    (
        "grpo_rubric",
        "rewards = torch.where(valid, rewards, 0.0)",
        "rewards, valid = torch.where(valid, rewards, 0.0), torch.ones_like(valid)",  # a lost call scored 0
        "test_grpo.test_group_advantages_golden",
    ),
    (
        "grpo_rubric",
        "signal = (n > 1) & (highest - lowest > 1e-6)",
        "signal = (n > 1) & (highest - lowest > 0)",
        "test_grpo.test_groups_without_signal",
    ),
    (
        "grpo_rubric",
        "centred = centred * n / (n - 1).clamp(min=1)",
        "centred = centred * rewards.shape[1] / (rewards.shape[1] - 1)",  # G also where some have no score
        "test_grpo.test_group_advantages_golden",
    ),
    (
        "grpo_rubric",
        'if scale == "std":',
        'if scale in ("std", "center"):',  # std switched on with KL in the loss
        "test_toy_world.test_grpo_default_with_kl_in_the_loss",
    ),
    # -- GRPO: the loss
    (
        "grpo_rubric",
        "losses = losses + beta * token_ratio * k3",
        "losses = losses - beta * token_ratio * k3",
        "test_toy_world.test_grpo_default_with_kl_in_the_loss",
    ),
    (
        "grpo_rubric",
        "losses = losses + beta * token_ratio * k3",
        "losses = losses + beta * k3",
        "test_toy_world.test_grpo_default_with_kl_in_the_loss",
    ),
    (
        "grpo_rubric",
        "losses = losses + beta * token_ratio * k3",
        "losses = losses + beta * ratio * k3",
        "test_grpo.test_grpo_loss_golden",
    ),
    (
        "grpo_rubric",
        "-advantages * ratio.clamp(1 - clip_low, 1 + clip_high)",
        "-advantages * ratio.clamp(1 - clip_high, 1 + clip_low)",
        "test_grpo.test_grpo_loss_golden",
    ),
    (
        "grpo_rubric",
        "losses = torch.maximum(plain, bounded)",
        "losses = torch.minimum(plain, bounded)",
        "test_grpo.test_clip_case_by_case",
    ),
    (
        "grpo_rubric",
        "means = log_ratio.sum(dim=1, keepdim=True) / lengths.clamp(min=1)",
        "means = log_ratio.mean(dim=1, keepdim=True)",  # over the padding too
        "test_grpo.test_grpo_loss_golden",
    ),
    (
        "grpo_rubric",
        "log_ratio = torch.where(mask, at_least_fp32(logps) - at_least_fp32(old_logps), 0.0)",
        "log_ratio = (at_least_fp32(logps) - at_least_fp32(old_logps)) * mask",
        "test_losses.test_masked_places_count_for_nothing",
    ),
    (
        "grpo_rubric",
        "ratio = token_ratio = log_ratio.clamp(-20, 20).exp()",
        "ratio = token_ratio = log_ratio.exp()",
        "test_losses.test_far_log_ratios_stay_finite",
    ),
    (
        "grpo_rubric",
        "count = normalizer or lengths.sum().clamp(min=1)",
        "count = lengths.sum().clamp(min=1)",
        "test_grpo.test_parts_with_the_normalizer_of_the_whole",
    ),
    (
        "grpo_rubric",
        "count = normalizer or len(losses) * max_tokens",
        "count = normalizer or losses.numel()",  # the batch's longest
        "test_grpo.test_grpo_loss_golden",
    ),
    (
        "grpo_rubric",
        "count = normalizer or (lengths > 0).sum().clamp(min=1)",
        "count = normalizer or len(losses)",
        "test_grpo.test_parts_with_the_normalizer_of_the_whole",
    ),
    (
        "grpo_rubric",
        "return ((max_tokens - buffer - lengths) / buffer).clamp(-1, 0)",
        "return ((max_tokens - buffer - lengths) / max_tokens).clamp(-1, 0)",
        "check_docstring_examples",
    ),
    # -- GRPO: the update
    (
        "grpo_rubric",
        '{"token": counted,',
        '{"token": None,',  # tokens counted per micro-batch
        "test_grpo.test_gradient_for_every_cut",
    ),
    (
        "grpo_rubric",
        'counted = b["mask"][rows].sum().item()',
        'counted = b["mask"][rows[(advantages[rows] != 0).numpy()]].sum().item()',
        "test_grpo.test_answers_without_advantage_cost_no_forward",
    ),
    (
        "grpo_rubric",
        "rows = rows[in_loss[rows].numpy()]",
        "pass",
        "test_grpo.test_answers_without_advantage_cost_no_forward",
    ),
    (
        "parts/rollouts",
        'rows = b["ids"], b["attention_mask"], b["mask"], args.temperature',
        'rows = b["ids"], b["attention_mask"], b["mask"], 1.0',
        "test_grpo.test_answers_without_advantage_cost_no_forward",
    ),
    (
        "parts/rollouts",
        "old_logps = logps.detach() if",
        "old_logps = logps if",  # the graph is kept
        "test_grpo.test_gradient_for_every_cut",
    ),
    (
        "parts/rollouts",
        "if args.num_substeps == 1 else",
        "if True else",  # every substep takes the policy of the moment for the one that drew
        "test_grpo.test_substeps_are_of_whole_groups",
    ),
    (
        "grpo_rubric",
        "rows = (groups[:, None] * size + np.arange(size)).ravel()",
        "rows = (groups[:, None] + len(order) * np.arange(size)).ravel()",
        "test_grpo.test_substeps_are_of_whole_groups",
    ),
    (
        "parts/rollouts",
        "with torch.no_grad(), adapter_off(reference):",
        "with torch.no_grad():",  # the reference wears the adapter
        "test_grpo.test_lora_reference_is_the_start",
    ),
    # -- GRPO: the loop and its data
    (
        "grpo_rubric",
        "None if None in found else sum(w * x for w, x in",
        "sum(w * (x or 0.0) for w, x in",
        "test_grpo.test_a_lost_grade_is_no_zero",
    ),
    (
        "grpo_rubric",
        'in_loss &= torch.tensor(b["finished"])',
        "pass",
        "test_grpo.test_overlong",
    ),
    (
        "grpo_rubric",
        "advantages_PG = group_advantages(shaped_PG, args.scale)",
        "advantages_PG = group_advantages(rewards_PG, args.scale)",
        "test_grpo.test_overlong",
    ),
    (
        "grpo_rubric",
        "[train[i] for i in batch], args.seed * 10**6 + step)",
        "[train[i] for i in batch], args.seed)",
        "test_grpo.test_each_step_has_its_own_prompts_and_draws",
    ),
    (
        "grpo_rubric",
        "random.Random(args.data_seed).shuffle(rows)",
        "random.Random(args.seed).shuffle(rows)",
        "test_grpo.test_split_is_the_recipes",
    ),
    # -- the reward model
    (
        "reward_train",
        "z = chosen_rewards - rejected_rewards",
        "z = rejected_rewards - chosen_rewards",
        "test_toy_world.test_reward_model_recovers_the_reward",
    ),
    (
        "reward_train",
        "z = z - torch.where(tie, 0.0, margin)",
        "z = z + torch.where(tie, 0.0, margin)",
        "test_losses.test_bradley_terry_golden",
    ),
    (
        "reward_train",
        "epsilon = torch.where(tie, 0.5, label_smoothing)",
        "epsilon = torch.where(tie, 0.0, label_smoothing)",
        "test_losses.test_bradley_terry_ties_pull_together",
    ),
    (
        "reward_train",
        "z = z - torch.where(tie, 0.0, margin)",
        "z = z - margin",
        "test_losses.test_bradley_terry_ties_pull_together",
    ),
    (
        "reward_train",
        "return losses + center_coef * (chosen_rewards + rejected_rewards) ** 2",
        "return losses + center_coef * (chosen_rewards - rejected_rewards) ** 2",
        "test_losses.test_bradley_terry_golden",
    ),
    (
        "reward_train",
        "right = (decided > 0).double() + 0.5 * (decided == 0).double()",
        "right = (decided >= 0).double()",
        "test_losses.test_pair_metrics_golden",
    ),
    (
        "reward_train",
        "decided = delta if tie is None else delta[~tie.bool()]",
        "decided = delta",
        "test_losses.test_pair_metrics_golden",
    ),
    (
        "reward_train",
        "run.backward(losses.sum() / len(batch))",
        "run.backward(losses.mean())",
        "check_micro_batches",
    ),
    (
        "common",
        "last = attention_mask.long().cumsum(1).argmax(1)  # the first column that counts all",
        "last = torch.full_like(attention_mask.sum(1), attention_mask.shape[1] - 1)",
        "check_padding",
    ),
    # -- log-probs and masks
    (
        "common",
        "hidden_states(model, input_ids, attention_mask)[:, :-1][response_mask[:, 1:]]",
        "hidden_states(model, input_ids, attention_mask)[:, 1:][response_mask[:, 1:]]",
        "check_one_token_at_a_time",
    ),
    (
        "common",
        "hidden_states(model, input_ids, attention_mask)[:, :-1][response_mask[:, 1:]]",
        "hidden_states(model, input_ids, attention_mask)[:, 1:][response_mask[:, 1:]]",
        "test_ppo.test_first_minibatch_has_ratio_one_and_kl_zero",
    ),
    (
        "common",
        "tokens = input_ids[response_mask]",
        "tokens = input_ids[:, :-1][response_mask[:, 1:]]",
        "check_one_token_at_a_time",
    ),
    (
        "common",
        "logits = head_logits(model, hidden) / temperature",
        "logits = head_logits(model, hidden)",
        "check_ratio_is_one",
    ),
    (
        "common",
        "logits = head_logits(model, hidden) / (temperature or 1.0)",
        "logits = head_logits(model, hidden)",
        "check_ratio_is_one",
    ),
    (
        "common",
        "position_ids=positions(attention_mask) if position_ids is None",
        "position_ids=torch.arange(input_ids.shape[1]).expand_as(input_ids) if position_ids is None",
        "check_ratio_is_one",
    ),
    (
        "common",
        "attention_mask & (columns >= prompt_lengths)",
        "columns >= prompt_lengths",  # padding is trained
        "test_losses.test_batch_rows_keeps_pairs_together",
    ),
    (
        "common",
        "attention_mask & (columns >= prompt_lengths)",
        "attention_mask & (columns > prompt_lengths)",  # the mask slid by one
        "test_losses.test_batch_rows_keeps_pairs_together",
    ),
    # -- a pair in one row
    (
        "parts/shared_prompt",
        "after = (row >= b) & (column >= prompt[pair, 0])",
        "after = row >= b",  # the first rejected token is read after the chosen answer
        "check_shared_prompt",
    ),
    (
        "parts/shared_prompt",
        "sees = (part[:, None] == 0) | (part[:, None] == part[..., None])",
        "sees = part[:, None] <= part[..., None]",  # the rejected answer sees the chosen one
        "check_shared_prompt",
    ),
    (
        "parts/shared_prompt",
        "position_ids=position, use_cache=False",
        "position_ids=s.expand_as(position), use_cache=False",  # positions go on after the chosen one
        "check_shared_prompt",
    ),
    (
        "parts/shared_prompt",
        "sees & (position[..., None] - position[:, None] < window)",
        "sees",  # the window is forgotten
        "check_shared_prompt",
    ),
    (
        "parts/lora",
        "module.lora_on = False",
        "module.lora_on = True",
        "check_adapter_off_is_the_base",
    ),
    (
        "common",
        "tuple(t.shape) for name, t in",
        "t.numel() for name, t in",
        "test_losses.test_shapes_that_differ_are_refused",
    ),
    # -- KL
    (
        "common",
        "d = torch.where(mask, at_least_fp32(logps) - at_least_fp32(ref_logps), 0.0)",
        "d = torch.where(mask, at_least_fp32(ref_logps) - at_least_fp32(logps), 0.0)",
        "test_losses.test_kl_card_values",
    ),
    (
        "common",
        "d = torch.where(mask, at_least_fp32(logps) - at_least_fp32(ref_logps), 0.0)",
        "d = (at_least_fp32(logps) - at_least_fp32(ref_logps)) * mask",
        "test_losses.test_masked_places_count_for_nothing",
    ),
    (
        "common",
        "return d, d**2 / 2, torch.expm1(-bounded) + bounded",
        "return d, d**2 / 2, torch.expm1(bounded) - bounded",
        "test_losses.test_kl_card_gradients",
    ),
    (
        "common",
        "return d, d**2 / 2, torch.expm1(-bounded) + bounded",
        "return d, d**2, torch.expm1(-bounded) + bounded",
        "check_docstring_examples",
    ),
    (
        "common",
        "return d, d**2 / 2, torch.expm1(-bounded) + bounded",
        "return bounded.detach() + 0 * d, d**2 / 2, torch.expm1(-bounded) + bounded",
        "test_losses.test_kl_far_from_the_reference",
    ),
    # -- what is added up
    (
        "ppo",
        "return torch.where(mask, at_least_fp32(x), 0.0).sum() / mask.sum().clamp(min=1)",
        "return torch.where(mask, at_least_fp32(x), 0.0).sum() / mask.sum()",
        "test_losses.test_masked_mean_by_hand",
    ),
    (
        "ppo",
        "return torch.where(mask, at_least_fp32(x), 0.0).sum() / mask.sum().clamp(min=1)",
        "return (at_least_fp32(x) * mask).sum() / mask.sum().clamp(min=1)",
        "test_losses.test_masked_places_count_for_nothing",
    ),
    (
        "sft",
        "return torch.where(mask, -common.at_least_fp32(logps), 0.0)",
        "return -common.at_least_fp32(logps)",
        "test_losses.test_sft_loss_by_hand",
    ),
    (
        "sft",
        "return torch.where(mask, -common.at_least_fp32(logps), 0.0)",
        "return torch.where(mask, -logps, 0.0)",
        "test_losses.test_precision_is_kept_or_raised",
    ),
    (
        "sft",
        "loss = sft_loss(logps, mask).sum() / trained",
        "loss = sft_loss(logps, mask).sum() / mask.sum()",  # tokens counted per micro-batch
        "check_micro_batches",
    ),
    # -- agents
    (
        "grpo_agent",
        '"mask": weights > 0}',
        '"mask": attention_mask}',  # the environment's words too
        "test_agent.test_only_sampled_tokens_are_trained",
    ),
    (
        "grpo_agent",
        "[1 / (tokens * len(turns) * n) for tokens in turns]",
        "[1 / (tokens * len(turns)) for tokens in turns]",
        "test_agent.test_weights_of_a_step_sum_to_one",
    ),
    # -- the grader, the alarms
    (
        "judge",
        "rated = [(w, p) for w, p in zip(weights, passed, strict=True) if p is not None]",
        "rated = [(w, p) for w, p in zip(weights, passed, strict=True)]",  # no verdict is a no
        "check_docstring_examples",
    ),
    (
        "watch",
        'if not point.dropped or point.rose != (rule.name == "R2 reward_hacking"):',
        "if not point.dropped:",  # hacking without a rising reward
        "check_docstring_examples",
    ),
    (
        "watch",
        "if new.s > best.s + delta or",
        "if new.s > best.s or",  # noise counts as progress
        "check_docstring_examples",
    ),
    # -- the measures
    (
        "evaluate",
        "return (np.sign(a[:, :, None] - b[:, None, :]) + 1) / 2",
        "return (a[:, :, None] >= b[:, None, :]) * 1.0",  # a tie is a win
        "check_docstring_examples",
    ),
    (
        "parts/stats",
        "half = z / (n + z * z) * math.sqrt(k * (n - k) / n + z * z / 4)",
        "half = z / (n + z * z) * math.sqrt(k * (n - k) / n)",
        "check_docstring_examples",
    ),
    (
        "fairness",
        "top = max(rates.values(), default=0)",
        "top = min(rates.values(), default=0)",
        "check_docstring_examples",
    ),
    (
        "fairness",
        "r is not None and r < Fraction(4, 5)}",
        "r is not None and r <= Fraction(4, 5)}",
        "check_docstring_examples",
    ),
    (
        "fairness",
        "sd = scores.mean(1).std(ddof=1) if len(scores) > 1 else 0.0",
        "sd = scores.mean(1).std() if len(scores) > 1 else 0.0",
        "check_docstring_examples",
    ),
]


# ---- the checks that no other file here has in this form ----


def batch(tokenizer, extra=0):
    """Four prompts with answers of 3, 2, 4 and 1 tokens, padded by `extra` more columns than needed."""
    prompts = [common.encode_prompt(tokenizer, text) for text in TEXTS]
    answers = [tokenizer.encode(text)[:n] for text, n in zip(TEXTS[::-1], (3, 2, 4, 1))]
    ids, attention_mask, mask = common.pad_rows(prompts, answers, tokenizer.pad_token_id)
    pad = torch.nn.functional.pad
    return (
        pad(ids, (0, extra), value=tokenizer.pad_token_id),
        pad(attention_mask, (0, extra), value=False),
        pad(mask, (0, extra), value=False),
    )


def check_one_token_at_a_time(tokenizer, llama_folder):
    """Column t of token_logps is log p(token t | tokens before t), by a loop that feeds one more token at a time."""
    model = common.load_policy(llama_folder, trainable=False)
    ids, attention_mask, mask = batch(tokenizer)
    with torch.no_grad():
        ours = common.token_logps(model, ids, attention_mask, mask)
        for row in range(len(ids)):
            for t in mask[row].nonzero()[:, 0].tolist():
                logits = model(input_ids=ids[row : row + 1, :t]).logits[0, -1]
                assert abs(ours[row, t] - logits.log_softmax(-1)[ids[row, t]]) < 1e-4
    assert not ours[~mask].any()


def check_shared_prompt(tokenizer, tmp_path):
    """Both answers after one prompt have the log-probs that they have in rows of their own; a Mistral with window 8."""
    model = common.load_policy(tiny_model("mistral", tmp_path, sliding_window=8), trainable=False)
    file = write_rows(tmp_path / "rows.jsonl", pair_rows(4))
    rows = dpo.batch_rows(common.load_pairs([file], tokenizer, 99, False), range(4), 0)
    one, two = (common.token_logps(model, *rows, shared=shared) for shared in (True, False))
    assert (one - two).abs().max() < 1e-4


def check_padding(tokenizer, llama_folder, reward_folder):
    """Ten more pad tokens change neither a log-prob nor a score."""
    policy = common.load_policy(llama_folder, trainable=False)
    reward_model = common.load_reward_model(reward_folder, tokenizer, trainable=False)
    found = []
    with torch.no_grad():
        for extra in (0, 10):
            ids, attention_mask, mask = batch(tokenizer, extra)
            sums = common.token_logps(policy, ids, attention_mask, mask).sum(1)
            found.append(
                torch.stack([sums, common.reward_scores(reward_model, ids, attention_mask)])
            )
    assert (found[0] - found[1]).abs().max() < 1e-4


def check_ratio_is_one(tokenizer, gpt2_folder):
    """Log-probs of generation = log-probs of rescoring, at temperature .7, prompts of mixed length, positions learned."""
    model = common.load_policy(gpt2_folder, trainable=False)
    rollout = common.sample(model, tokenizer, TEXTS, n=2, max_new_tokens=6, temperature=0.7)
    rows = common.pad_rows(rollout.prompt_ids, rollout.response_ids, tokenizer.pad_token_id)
    with torch.no_grad():
        logps = common.token_logps(model, *rows, temperature=0.7)
    drawn = torch.tensor([x for row in rollout.logps for x in row])
    assert ((logps[rows[2]] - drawn).exp() - 1).abs().max() < 1e-4


def check_adapter_off_is_the_base(tokenizer, llama_folder):
    """With LoRA the reference is the policy with its adapter off: the base's own log-probs, and on again afterwards."""
    model = common.load_policy(llama_folder, lora_rank=2)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.fill_(0.1)
    rows = batch(tokenizer)
    with torch.no_grad():
        base = common.token_logps(common.load_policy(llama_folder, trainable=False), *rows)
        on = common.token_logps(model, *rows)
        with lora.adapter_off(model):
            off = common.token_logps(model, *rows)
        assert torch.equal(off, base)
        assert torch.equal(on, common.token_logps(model, *rows)) and (on - base).abs().max() > 0.01


def check_docstring_examples(stage):
    """The examples worked by hand in the stage's docstrings say what they say."""
    result = doctest.testmod(stage)
    assert result.attempted > 0 and result.failed == 0, f"{result.failed} examples differ"


class Stopped(Exception):
    """Thrown where the first update would happen."""


def first_gradient(stage, folder, flags):
    """All gradients that a stage's main() holds before its first update, as one vector."""
    found = []

    def catch(run, where):
        found.extend(p.grad.flatten() for p in run.model.parameters() if p.grad is not None)
        raise Stopped

    runs.Run.update = catch  # of this copy
    runs.stop_signals = lambda: contextlib.nullcontext([0])  # no handlers in the test process
    with pytest.raises(Stopped):
        stage.main([*flags, "--eval-fraction", "0", "--out", str(folder)])
    return torch.cat(found)


EVERYTHING = 10**6  # tokens: the whole batch in one forward


def check_micro_batches(stage, llama_folder, reward_folder, tmp_path):
    """The gradient of 6 uneven rows is the same in one forward and row by row: divided by the count of the whole step."""
    file = write_rows(tmp_path / "rows.jsonl", pair_rows(6))
    flags = {
        "dpo": ["--pairs", file, "--model", llama_folder, "--nll-coef", "1"],
        "reward_train": ["--pairs", file, "--model", reward_folder],
        "sft": ["--data", file, "--model", llama_folder],
    }[stage.__name__]
    flags += ["--batch-size", "6"]
    flags += ["--max-new-tokens", "2"] if stage.__name__ != "reward_train" else []
    whole, apart = (
        first_gradient(stage, tmp_path / str(n), [*flags, "--micro-tokens", str(n)])
        for n in (EVERYTHING, 1)
    )
    assert whole.abs().max() > 1e-3
    assert (whole - apart).abs().max() < 1e-5 * max(1, whole.abs().max())


def check_preflight(llama_folder, tmp_path):
    """A run from the reference itself starts at log 2; the stage insists on it before the first update."""
    file = write_rows(tmp_path / "rows.jsonl", pair_rows(6))
    flags = ["--pairs", file, "--model", llama_folder, "--max-new-tokens", "2"]
    try:
        first_gradient(dpo, tmp_path / "out", flags)
    except files.UserError as error:
        raise AssertionError(f"preflight: {error}") from error


# ---- the machine ----


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory):
    """A tiny GPT-2: its positions are learned, so a wrong position id shows."""
    return tiny_model("gpt2", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def fixtures(tokenizer, llama_folder, reward_folder, gpt2_folder, tmp_path_factory):
    long = tiny_model("llama", tmp_path_factory.mktemp("agent"), max_position_embeddings=512)
    return {
        "policy": (common.load_policy(long, trainable=False), common.load_tokenizer(long)),
        "tokenizer": tokenizer,
        "llama_folder": llama_folder,
        "reward_folder": reward_folder,
        "gpt2_folder": gpt2_folder,
        "world": test_ppo.make_world(tmp_path_factory.mktemp("ppo")),
        "graded": test_grpo.make_graded(tmp_path_factory.mktemp("grpo")),
    }


def load_modules(monkeypatch, broken_one=None, line=None, broken=None):
    """{name: fresh copy} of the modules, one of them with its line broken; they import each other's copies."""
    copies = {}
    for path in MODULES:
        name, short = path.replace("/", "."), path.rpartition("/")[2]
        module = copies[name] = types.ModuleType(name)
        module.__file__ = str(REPO / f"{path}.py")
        monkeypatch.setitem(sys.modules, name, module)
        if name != short:  # `from parts import runs` asks the package first
            monkeypatch.setattr(parts, short, module, raising=False)
        code = compiled(path, line, broken) if path == broken_one else compiled(path)
        exec(code, module.__dict__)
    return copies


@functools.cache
def compiled(path, line=None, broken=None):
    source = (REPO / f"{path}.py").read_text(encoding="utf-8")
    if line is not None:
        count = source.count(line)
        assert count == 1, f"{path}.py: {line!r} is there {count} times; correct this row"
        source = source.replace(line, broken)
    return compile(source, str(REPO / f"{path}.py"), "exec")


def run_check(check, stage, copies, fixtures, tmp_path, monkeypatch):
    """Run a check, or a test of another file with every value of its parametrize marks, on the copies."""
    file, _, name = check.rpartition(".")
    home = importlib.import_module(file or __name__)
    for alias, module in list(vars(home).items()):  # also `import grpo_agent as g`
        if isinstance(module, types.ModuleType) and module.__name__ in copies:
            monkeypatch.setattr(home, alias, copies[module.__name__])
    function = getattr(home, name)
    available = {
        **fixtures,
        "monkeypatch": monkeypatch,
        "stage": copies.get(stage.replace("/", ".")),
    }
    code = getattr(function, "__wrapped__", function).__code__
    wanted = code.co_varnames[: code.co_argcount]
    choices = []
    for mark in getattr(function, "pytestmark", []):
        assert mark.name == "parametrize", f"{check}: the gallery cannot apply the mark {mark.name}"
        names = [n.strip() for n in mark.args[0].split(",")]
        values = mark.args[1]
        choices.append([dict(zip(names, v if len(names) > 1 else (v,))) for v in values])
    for n, combination in enumerate(itertools.product(*choices)):
        values = {k: v for choice in combination for k, v in choice.items()}
        available["tmp_path"] = tmp_path / str(n)
        available["tmp_path"].mkdir()
        function(**values, **{k: available[k] for k in wanted if k not in values})


RED = (AssertionError, pytest.fail.Exception)  # a crash is no verdict: the check itself must say no


@pytest.mark.parametrize(
    "stage, line, broken, check",
    GALLERY,
    ids=[f"{i}-{row[0]}-{row[3].rpartition('.')[2]}" for i, row in enumerate(GALLERY, 1)],
)
def test_mutation_turns_its_check_red(
    stage, line, broken, check, fixtures, tmp_path, monkeypatch, capsys
):
    """The slip in the row, made on purpose: its check must see it. If this fails, a bug of that kind would go in unseen."""
    copies = load_modules(monkeypatch, stage, line, broken)
    with pytest.raises(RED):
        run_check(check, stage, copies, fixtures, tmp_path, monkeypatch)


OF_A_STAGE = ("check_micro_batches", "check_docstring_examples")  # asked of one stage
CHECKS = sorted({(row[3], row[0] if row[3] in OF_A_STAGE else "") for row in GALLERY})


@pytest.mark.parametrize("check, stage", CHECKS)
def test_check_is_green_on_the_code_as_it_is(check, stage, fixtures, tmp_path, monkeypatch, capsys):
    """A check that is always red would pass the gallery as well. On unbroken copies every one of them is green."""
    run_check(check, stage, load_modules(monkeypatch), fixtures, tmp_path, monkeypatch)


def test_preflight_cannot_see_swapped_sides(fixtures, tmp_path, monkeypatch, capsys):
    """What the gallery teaches beside the slips: the loss of swapped sides still starts at log 2, so a green preflight is
    no proof. The toy world sees it (above)."""
    line, broken = "z = chosen_rewards - rejected_rewards", "z = rejected_rewards - chosen_rewards"
    assert ("dpo", line, broken) in [row[:3] for row in GALLERY]
    copies = load_modules(monkeypatch, "dpo", line, broken)
    run_check("check_preflight", "dpo", copies, fixtures, tmp_path, monkeypatch)


def test_a_row_that_lost_its_line_fails(monkeypatch):
    """A gallery whose mutations silently no longer apply protects nothing."""
    with pytest.raises(AssertionError, match="correct this row"):
        load_modules(monkeypatch, "dpo", "a line that nobody wrote", "pass")
