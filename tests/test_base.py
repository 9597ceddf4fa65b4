"""D8: the bundled base writes fluent, on-format, varied answers of mixed quality, on roles it never saw.

The gates are the design's: a base that names what the prompt does not hold cannot be mended by any alignment, and one
whose answers are all alike leaves alignment nothing to choose. data/base_card.py measures, this file holds the numbers.
"""

import json
import sys
from pathlib import Path

import pytest

import common
import sft
from parts import files

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "data"))

import base_card  # noqa: E402
import train_tokenizer  # noqa: E402

BASE = ROOT / "data" / "tiny-base"


@pytest.fixture(scope="module")
def base():
    return common.load_policy(BASE, trainable=False), common.load_tokenizer(BASE)


@pytest.fixture(scope="module")
def found(base):
    rows, drawn = base_card.draw(*base)  # 90 prompts × 16 answers at temperature 1
    return base_card.measure(rows, drawn, 16)


def test_every_id_of_every_bundled_text_is_known(base):
    """A byte-level vocabulary has no unknown token: decode(encode(text)) is the text, on bundled prompts and profiles."""
    model, tokenizer = base
    assert tokenizer.unk_token_id is None and len(tokenizer) <= model.config.vocab_size
    assert common.pad_id(tokenizer) not in common.end_ids(tokenizer, model)
    for name in ("prompts", "prefs_train", "rank_test"):
        for row in list(files.read_jsonl(ROOT / "data" / f"{name}.jsonl"))[::40]:
            text = row["prompt"][0]["content"]
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_size_and_shape(base):
    """2 to 4 M weights, tied, context 512, a folder below 10 MB."""
    model, _ = base
    weights = sum(p.numel() for p in model.parameters())
    assert 2e6 <= weights <= 4e6 and model.config.tie_word_embeddings
    assert model.config.max_position_embeddings == 512
    assert sum(f.stat().st_size for f in BASE.iterdir()) < 10e6


def test_a_model_from_scratch(base, tmp_path, quiet_process):
    """A corpus and a config.json become a tokenizer with the bundled template in which each byte has a token, and sft.py
    starts from its folder. A vocabulary without room for the bytes and a folder that holds a model are refused."""
    corpus, config, out = ROOT / "data/prefs.jsonl", tmp_path / "config.json", tmp_path / "start"
    shape = json.loads((BASE / "config.json").read_text()) | {"vocab_size": 400, "eos_token_id": 7}
    argv = ["--corpus", str(corpus), "--config", str(config), "--out", str(out)]
    small = json.dumps(shape | {"vocab_size": 100})
    for written, words in (
        (small, "vocab_size 100 is too small"),
        ("{", "not a model's config.json"),
    ):
        config.write_text(written)
        with pytest.raises(files.UserError, match=words):
            train_tokenizer.main(argv)
    config.write_text(json.dumps(shape))
    train_tokenizer.main(argv)
    tokenizer = common.load_tokenizer(str(out))
    assert tokenizer.chat_template == base[1].chat_template and len(tokenizer) == 400
    text = "größer 1987 \U0001f600 \x00"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text and len(tokenizer.encode("1987")) == 4
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id
    flags = [
        "--data",
        str(corpus),
        "--out",
        str(tmp_path / "run"),
        "--steps",
        "1",
        "--batch-size",
        "2",
    ]
    sft.main([*flags, "--init-config", str(out), "--eval-fraction", "0", "--max-new-tokens", "2"])
    assert common.load_tokenizer(str(tmp_path / "run")).get_vocab() == tokenizer.get_vocab()
    with pytest.raises(files.UserError, match="holds a model"):
        train_tokenizer.main([*argv[:-1], str(tmp_path / "run")])


@pytest.mark.slow
def test_answers_end_keep_their_form_and_vary(found):
    """Ended by itself ≥ .98, right form ≥ .85, ≥ .9 of 16 answers to a prompt distinct."""
    assert found["ended"] >= 0.98 and found["form"] >= 0.85 and found["distinct"] >= 0.9


@pytest.mark.slow
def test_answers_copy_from_their_prompt(found):
    """Of the skills named and facts quoted at temperature 1, ≥ .85 stand in the prompt."""
    assert found["copied"] >= 0.85


@pytest.mark.slow
def test_quality_is_mixed(found):
    """Mean utility .35 to .55, ≥ .25 in each task, and the best of 16 at least .2 above the mean."""
    assert 0.35 <= found["utility"] <= 0.55 and found["best"] >= found["utility"] + 0.2
    for task in ("assess", "interview", "summary"):
        assert found[f"utility, {task}"] >= 0.25, task


@pytest.mark.slow
def test_heard_facts_are_repeated_rightly(base):
    """After 60 ideal interviews: of the lines that claim evidence ≥ .8 are right word for word, of all lines ≥ .6."""
    summaries = base_card.measure_summaries(*base)
    assert summaries["claims"] >= 60 and summaries["heard"] >= 0.8 and summaries["lines"] >= 0.6


@pytest.mark.slow
def test_facts_are_looked_up(base):
    """Asked for each must-have, the base quotes a skill's own fact in ≥ .5 of the cases; any fact of the prompt would be right in about .35.

    The bases before the fourth run were at chance here; then no alignment can make a fact right and no reward model see a wrong one.
    """
    lookup = base_card.measure_lookup(*base)
    assert lookup["chance"] < 0.4 and lookup["facts"] >= 0.5


@pytest.mark.slow
def test_an_unseen_title_is_copied_to_the_letter(base):
    """Asked for the role of 120 cases, the base names ≥ .8 of those titles that no row of its corpus held.

    The bases before the sixth run made "priving tutorge" of "private tutor", and what cannot be copied no reward can teach.
    """
    found = base_card.measure_roles(*base)
    assert found["roles"] >= 0.8 and found["titles"] == 15
