"""The bundled base writes on-format, varied answers: data/base_card.py measures."""

import json
import sys

import pytest

import common
import sft
from conftest import REPO
from parts import files

sys.path.insert(0, str(REPO / "data"))

import base_card  # noqa: E402
import train_tokenizer  # noqa: E402

BASE = REPO / "data" / "tiny-base"


@pytest.fixture(scope="module")
def base():
    return base_card.load(BASE)


def test_size_shape_and_vocabulary(base):
    model, tokenizer = base[0].model, base[1]
    assert 2e6 <= sum(p.numel() for p in model.parameters()) <= 4e6
    assert model.config.tie_word_embeddings and model.config.max_position_embeddings == 512
    assert sum(f.stat().st_size for f in BASE.iterdir()) < 10e6
    assert tokenizer.unk_token_id is None and len(tokenizer) <= model.config.vocab_size
    assert common.pad_id(tokenizer) not in common.end_ids(tokenizer)
    for name in ("prompts", "prefs_train", "rank_test"):
        for row in list(files.read_jsonl(REPO / "data" / f"{name}.jsonl"))[::40]:
            text = row["prompt"][0]["content"]
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_model_from_scratch(base, tmp_path, quiet_process):
    corpus, config, out = REPO / "data/prefs.jsonl", tmp_path / "config.json", tmp_path / "start"
    shape = json.loads((BASE / "config.json").read_text()) | {"vocab_size": 400, "eos_token_id": 7}
    argv = ["--corpus", str(corpus), "--config", str(config), "--out"]
    small = json.dumps(shape | {"vocab_size": 100})
    for written, words in ((small, "100 is too small"), ("{", "not a model's config.json")):
        config.write_text(written)
        with pytest.raises(files.UserError, match=words):
            train_tokenizer.main([*argv, str(out)])
    config.write_text(json.dumps(shape))
    train_tokenizer.main([*argv, str(out)])
    tokenizer, text = common.load_tokenizer(str(out)), "größer 1987 \U0001f600 \x00"
    assert tokenizer.chat_template == base[1].chat_template and len(tokenizer) == 400
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode("1987")) == 4
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id
    flags = f"--data {corpus} --out {tmp_path / 'run'} --model {out} --steps 1 --batch-size 2"
    sft.main(f"{flags} --eval-fraction 0 --max-new-tokens 2".split())
    assert common.load_tokenizer(str(tmp_path / "run")).get_vocab() == tokenizer.get_vocab()
    with pytest.raises(files.UserError, match="holds a model"):
        train_tokenizer.main([*argv, str(tmp_path / "run")])


@pytest.mark.slow
@pytest.mark.parametrize(
    "measures, gates",
    [
        # answers end by themselves, in form, copied from the prompt, varied, of mixed quality
        (
            lambda base: base_card.measure(*base_card.draw(*base, 10), 16),
            dict(ended=0.98, form=0.85, copied=0.85, distinct=0.9, utility=0.35, best=0.6)
            | {f"utility, {task}": 0.25 for task in ("assess", "interview", "summary")},
        ),
        # after an ideal interview: lines that claim evidence and are right, of all lines
        (base_card.measure_summaries, dict(claims=60, heard=0.8, lines=0.6)),
        # a skill's own fact is quoted where any fact would be right in about .35
        (base_card.measure_lookup, dict(facts=0.5)),
        # titles that no row of the corpus held, to the letter
        (base_card.measure_roles, dict(roles=0.8, titles=15)),
    ],
    ids=["answers", "summaries", "lookup", "roles"],
)
def test_the_base_passes_its_gates(base, measures, gates):
    found = measures(base)
    low = {key: found[key] for key, gate in gates.items() if found[key] < gate}
    assert not low and found.get("utility", 0) < 0.55 and found.get("chance", 0) < 0.4
