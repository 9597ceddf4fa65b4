"""Families of models, each tried small: what works stands in the table of docs/adapt.md.

WRITE_FAMILIES=1 python -m pytest tests/test_families.py    # writes the table anew
"""

import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import common
from common import UserError
from parts import lora, shared_prompt
from parts.identities import check_head
from parts.runs import prepare
from test_common_model import ANSWERS, PROMPTS, batch, filled
from test_common_sample import PROMPTS as MORE_PROMPTS
from test_common_sample import slow_row
from tiny import EXTRA_FAMILIES, FAMILIES, MORE_FAMILIES, tiny_reward_model

REPO = Path(__file__).resolve().parent.parent
PAGE = REPO / "docs" / "adapt.md"
COLUMNS = "family", "trains", "samples", "LoRA", "reward model", "reopened by transformers"
ALL = [*FAMILIES, *EXTRA_FAMILIES, *MORE_FAMILIES]
MARKS = re.compile(r"(?<=<!-- families -->\n).*?(?=<!-- /families -->)", re.S)
SETTINGS = SimpleNamespace(grad_checkpoint=False, fsdp=False)


def outcome(function, *args):
    """What a function returns; "no: …" for a refusal, which must be one line."""
    try:
        return function(*args)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 500
        reason = re.sub("^--model.*?: ", "", str(error))
        return "no class in transformers" if "has no class" in reason else f"no: {reason}"


def trains(model):
    """In train mode the log-probs of right-padded rows are those of each row alone in eval mode,
    and a gradient reaches every weight that a token used."""
    rows = batch()
    prepare(model.eval(), SETTINGS)
    check_head(model, *rows[:2], "--model")
    logps = common.token_logps(model, *rows)
    logps.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        for i, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS)):
            ids = torch.tensor([prompt + answer])
            own = F.log_softmax(model.eval()(ids).logits[0, :-1].double(), -1)
            own = own.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
            assert (logps[i][rows[2][i]] - own).abs().max() < 1e-4
    pairs = SimpleNamespace(
        prompts=[[20, 21, 22]], chosen=[[*range(30, 50)]], rejected=[[*range(60, 70)]]
    )
    pairs.lengths = lambda: [23]
    once = shared_prompt.can_share(model, pairs, common.pad_rows)
    return "yes, prompts once" if once else "yes"


def samples(model, tokenizer, monkeypatch):
    """Draws after prompts of different lengths are those of a loop without cache; rows move, and
    memory that nobody has written holds NaN."""
    common.check_sampling(model, "--model")
    model.generation_config.eos_token_id = [*range(9, 300, 9)]
    with monkeypatch.context() as patch:
        patch.setattr(common, "micro_tokens", lambda model: 10)
        real = torch.Tensor.new_empty

        def poison(x, *size, **options):
            new = real(x, *size, **options)
            return new.fill_(math.nan) if new.is_floating_point() else new

        patch.setattr(torch.Tensor, "new_empty", poison)
        how = {"max_new_tokens": 10, "temperature": 2.0, "seed": 3}
        rollout = common.sample(model, tokenizer, MORE_PROMPTS, n=2, **how)
    assert len({len(ids) for ids in rollout.response_ids}) > 1, "rows must leave and move"
    for i, prompt in enumerate(rollout.prompt_ids):
        ids, logps, _ = slow_row(model, tokenizer, prompt, i, 3, 10, 2.0)
        assert rollout.response_ids[i] == ids
        assert rollout.logps[i] == pytest.approx(logps, abs=1e-4)
    return "exact"


def adapts(folder, capsys):
    """Every adapter gets a gradient; what has none is printed; the merge is the hooked model."""
    lora.say_once.cache_clear()
    capsys.readouterr()
    model = common.load_policy(folder, lora_rank=2)
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "lora" in x] or [""]
    common.token_logps(model, *batch()).sum().backward()
    layers = lora.lora_layers(model)
    assert layers and all(m.lora_B.weight.grad.abs().max() > 0 for _, m in layers), family_of(model)
    filled(model)
    state = lora.merged_state(model, torch.float32)
    plain = common.load_policy(folder)
    before = common.token_logps(plain, *batch())
    plain.load_state_dict(state)
    with torch.no_grad():
        gap = common.token_logps(plain, *batch()) - common.token_logps(model, *batch())
    assert gap.abs().max() < 1e-3 < (common.token_logps(plain, *batch()) - before).abs().max()
    left = line.partition("not adapted: ")[2].partition(" (")[0]
    return f"not on {left}" if left else "all linear layers"


def family_of(model):
    return model.config.model_type


def scores(family, folder, tmp_path, tokenizer):
    """Scores of padded rows are transformers' of each row alone."""
    fresh = common.load_reward_model(folder, tokenizer)  # of a causal folder
    assert common.reward_scores(fresh, *batch()[:2]).abs().max() == 0
    folder = tiny_reward_model(family, tmp_path)
    model = common.load_reward_model(folder, tokenizer, trainable=False)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        alone = [theirs(torch.tensor([p + a])).logits.item() for p, a in zip(PROMPTS, ANSWERS)]
        found = common.reward_scores(model, *batch()[:2]).tolist()
    assert found == pytest.approx(alone, abs=1e-4)
    return "yes"


def reopens(model, tokenizer, out):
    common.save_model(model, tokenizer, out)
    opened, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        for ids in (torch.tensor([p + a]) for p, a in zip(PROMPTS, ANSWERS)):
            torch.testing.assert_close(opened(ids).logits, model.eval()(ids).logits)
    assert opened.config.to_dict()["model_type"] == family_of(model)
    return "equal logits"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ALL)
def test_what_works_with_each_family(family, folders, tmp_path, tokenizer, capsys, monkeypatch):
    folder = folders[family]
    model = common.load_policy(folder)
    row = [
        family,
        outcome(trains, model),
        outcome(samples, common.load_policy(folder), common.load_tokenizer(folder), monkeypatch),
        outcome(adapts, folder, capsys),
        outcome(scores, family, folder, tmp_path, tokenizer),
        outcome(reopens, model, tokenizer, tmp_path / "out"),
    ]
    line = f"| {' | '.join(row)} |"
    text = PAGE.read_text(encoding="utf-8")
    if os.environ.get("WRITE_FAMILIES"):
        lines = {x.split(" | ")[0]: x for x in MARKS.search(text)[0].splitlines()[2:]}
        lines[f"| {family}"] = line
        head = [f"| {' | '.join(COLUMNS)} |", "| --- " * len(COLUMNS) + "|"]
        lines = head + [lines[f"| {name}"] for name in ALL if f"| {name}" in lines]
        PAGE.write_text(MARKS.sub(lambda _: "\n".join(lines) + "\n", text), encoding="utf-8")
    assert line in PAGE.read_text(encoding="utf-8"), "WRITE_FAMILIES=1 writes the table anew"
