"""Families of models, each tried small: what works stands in the table of docs/adapt.md.

WRITE_FAMILIES=1 python -m pytest tests/test_families.py    # writes the table anew
"""

import inspect
import json
import math
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import common
import dpo
import ppo
import reward_train
import sft
from common import UserError
from parts import lora, reward_models, runs, sampling, shared_prompt
from parts.families import cache_argument
from parts.identities import check_head
from parts.runs import prepare
from test_common_model import ANSWERS, PROMPTS, batch, filled
from test_common_sample import PROMPTS as MORE_PROMPTS
from test_common_sample import slow_row
from test_ppo import read
from test_trainers import REWARD_FN, steps, train
from tiny import (
    EXTRA_FAMILIES,
    FAMILIES,
    MORE_FAMILIES,
    table,
    tiny_model,
    tiny_reward_model,
)

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
        reason = re.sub(r"^--model.*?: | by [\d.e-]+", "", str(error))
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
    sampling.check_sampling(model, "--model")
    model.generation_config.eos_token_id = [*range(9, 300, 9)]
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "micro_tokens", lambda model: 10)
        real = torch.Tensor.new_empty

        def poison(x, *size, **options):
            new = real(x, *size, **options)
            return new.fill_(math.nan) if new.is_floating_point() else new

        patch.setattr(torch.Tensor, "new_empty", poison)
        how = {"max_new_tokens": 10, "temperature": 2.0, "seed": 3}
        rollout = sampling.sample(model, tokenizer, MORE_PROMPTS, n=2, **how)
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
    fresh = reward_models.load_reward_model(folder, tokenizer)  # of a causal folder
    assert reward_models.reward_scores(fresh, *batch()[:2]).abs().max() == 0
    folder = tiny_reward_model(family, tmp_path)
    model = reward_models.load_reward_model(folder, tokenizer, trainable=False)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        alone = [theirs(torch.tensor([p + a])).logits.item() for p, a in zip(PROMPTS, ANSWERS)]
        found = reward_models.reward_scores(model, *batch()[:2]).tolist()
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


@pytest.mark.usefixtures("quiet_process")
@pytest.mark.parametrize("stage", [sft, reward_train, dpo, ppo], ids=lambda s: s.__name__)
def test_a_family_without_samples_trains_on(
    stage, folders, tmp_path, pairs_file, capsys, monkeypatch
):
    """An IndexError after the reference pass over the whole file, and for nothing: neither loss
    needs a sample. PPO does, and is refused before its first step: its rollouts need our caches,
    which this family lacks; transformers can sample it."""
    flags = ["--prompts", pairs_file, "--gold", REWARD_FN] if stage in (sft, dpo) else []
    arguments = stage, pairs_file, folders["minimax"], tmp_path / "out"
    if stage is ppo:
        with pytest.raises(UserError, match="^--model[^\n]*: MiniMaxForCausalLM cannot be sampled"):
            train(*arguments, "--critic shared --max-length 96")
        assert not (tmp_path / "out").exists()
        return
    log = train(*arguments, *flags)
    assert len(steps(log, "loss")) == 1 and any("val/gold" in row for row in log) == bool(flags)
    monkeypatch.setattr("transformers.generation.GenerationMixin.generate", lambda *_, **__: 1 / 0)
    log, said = train(*arguments, *flags, "--overwrite"), capsys.readouterr().out
    assert len(steps(log, "loss")) == 1 and not any("val/gold" in row for row in log)
    assert said.count("samples    none, training needs none: ") == (stage is not reward_train)


@pytest.mark.usefixtures("quiet_process")
@pytest.mark.parametrize("family, flags", [("lfm2", ""), ("phimoe", "--lora-rank 2")])
def test_trainers_take_recurrent_layers_and_experts(family, flags, folders, tmp_path, pairs_file):
    """The router of PhiMoE draws experts at random in train mode, so no reference was the policy."""
    for stage in (dpo, ppo):
        more = "--critic shared --max-length 96" if stage is ppo else ""
        log = train(stage, pairs_file, folders[family], tmp_path / stage.__name__, flags, more)
        assert len(steps(log, "loss")) == 1
    assert read(tmp_path / "dpo/samples.jsonl")


def test_a_cache_is_passed_under_the_name_that_the_forward_has():
    """transformers 5.24 calls it `cache` in every family; the names before are deprecated there, and
    Mamba's forward takes no past_key_values."""
    for forward in (lambda ids, cache: 0, lambda ids, cache_params: 0, lambda past_key_values: 0):
        *_, expected = inspect.signature(forward).parameters
        assert cache_argument(SimpleNamespace(forward=forward)) == expected


def test_train_mode_draws_nothing_at_random(folders):
    """Mixtral's jitter, PhiMoE's choice of experts; after samples, too, which leave eval mode."""
    for family in ("mixtral", "phimoe"):
        model = common.load_policy(folders[family])
        prepare(model, SETTINGS)
        for _ in range(2):
            forwards = [common.token_logps(model, *batch()) for _ in range(2)]
            assert torch.equal(*forwards)
            sampling.check_sampling(model, "--model")


ENCODERS = {
    "deberta-v2": ("classifier", "DebertaV2ForSequenceClassification has no head `score`"),
    "bert": ("classifier", "BertForSequenceClassification has no head `score`"),
    "t5": ("policy", "transformers has no class for a language model of t5"),
    "lfm2": ("reward", "transformers has no class for a reward model of lfm2"),
}


@pytest.mark.parametrize("family", ENCODERS)
def test_what_is_no_decoder_is_refused_with_the_reason(family, folders, tmp_path, tokenizer):
    kind, reason = ENCODERS[family]
    folder = str(tmp_path)
    if kind == "reward":
        folder = folders[family]
    else:
        sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=1)
        config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **sizes)
        if kind == "classifier":
            AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
        config.save_pretrained(folder) if kind == "policy" else None
        tokenizer.save_pretrained(folder)
    with pytest.raises(UserError) as caught:
        if kind == "policy":
            common.load_policy(folder)
        else:
            reward_models.load_reward_model(folder, tokenizer, trainable=kind == "reward")
    assert str(caught.value).startswith(f"--model {folder}: {reason}")
    assert "\n" not in str(caught.value)


# what transformers 4 reads of the config of a family; base: whose own words are kept
OLDER = table("""
llama   | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}} | {"rope_theta": 5e5}
llama   | {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0}} | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
gpt_neox | {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5, "partial_rotary_factor": 0.5}} | {"rotary_emb_base": 7e5, "rotary_pct": 0.5}
phi3    | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}} | {"rope_theta": 5e5, "partial_rotary_factor": 1.0}
gemma3_text | {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5}, "sliding_attention": {"rope_type": "default", "rope_theta": 7e3}}} | {"rope_theta": 5e5, "rope_local_base_freq": 7e3}
qwen3_moe | {} | {"num_experts": 4}
""")


@pytest.mark.parametrize("family, config, expected", OLDER)
def test_version_4_reads_the_same_config(family, config, expected, tmp_path, tokenizer):
    """It fell back to a rope_theta of 10000 in silence: another model. Version 5's words stay."""
    folder = tiny_model(family, tmp_path, **config)
    common.save_model(common.load_policy(folder), tokenizer, tmp_path / "out", torch.float16)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert {key: written.get(key) for key in expected} == expected
    assert written["torch_dtype"] == written["dtype"] == "float16"
    before, after = (
        AutoConfig.from_pretrained(x).rope_parameters for x in (folder, tmp_path / "out")
    )
    assert before == after == written["rope_parameters"]


def test_the_words_of_the_base_stay(tmp_path, tokenizer):
    """Granite 4 names its layers "mamba"; version 5 reads and writes them as "linear_attention"."""
    folder = Path(tiny_model("granitemoehybrid", tmp_path))
    file = folder / "config.json"
    words = {"layer_types": ["mamba", "attention"], "torch_dtype": "bfloat16", "use_cache": False}
    words |= {"quantization_config": None, "transformers_version": "4.55.0"}
    file.write_text(json.dumps(json.loads(file.read_text()) | words))
    common.save_model(common.load_policy(str(folder)), tokenizer, tmp_path / "out")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["layer_types"] == ["mamba", "attention"] and not written["use_cache"]
    assert (written["torch_dtype"], written["dtype"]) == ("float32", "float32")
    assert written["transformers_version"] != "4.55.0"


@pytest.mark.parametrize("place", ["folder", "hub"])
def test_processor_files_go_with_the_folder(place, tmp_path, tokenizer, monkeypatch, folders):
    """Without preprocessor_config.json vLLM and AutoProcessor refuse a trained Gemma 3."""
    base = tmp_path / "base"
    shutil.copytree(folders["gemma3"], base)
    names = "preprocessor_config.json", "processor_config.json", "tokenizer.model"
    for name in names:
        (base / name).write_text(name)
    model = common.load_policy(str(base))
    if place == "hub":
        home = tmp_path / "hub" / "models--org--name"
        (home / "refs").mkdir(parents=True)
        (home / "refs/main").write_text("abc")
        shutil.move(base, home / "snapshots/abc")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        model.source = "org/name"
    for _ in range(2):  # a second training of what was written
        common.save_model(model, tokenizer, tmp_path / "out")
        assert [(tmp_path / "out" / name).read_text() for name in names] == list(names)
        assert {*names} <= {*runs.RUN_FILES}, "--overwrite removes them"
        model = common.load_policy(str(tmp_path / "out"))
