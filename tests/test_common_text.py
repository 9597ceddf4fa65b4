"""From a file to token ids: what every stage trusts before a model is loaded."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import common
from case_rows import each
from parts import answers, files
from parts.files import UserError
from parts.messages import hash_fraction, prompt_key
from parts.pairs import Pairs, share_interval
from parts.reward_models import pad_id
from tiny import (
    CHATML,
    cases,
    error_of,
    on,
    pair_rows,
    said,
    tiny_model,
    tiny_tokenizer,
    user,
    write_rows,
)  # fmt: skip

settings.register_profile(
    "tests", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


@pytest.fixture(scope="module")
def plain():
    """A tokenizer without chat template."""
    return tiny_tokenizer(template=None)


USER, ANSWER = [user("Which candidate fits this role?")], [said("The first one.")]
GOOD = {"prompt": "Assess", "chosen": "hold", "rejected": "reject"}
CHAT = {"prompt": USER, "chosen": ANSWER, "rejected": [said("no")]}


def read(tokenizer, *paths, max_length=64, eval_pairs=(), fraction=0.0, chat=False, **options):
    """`Pairs` of these files."""
    args = {"pairs": [*map(str, paths)], "eval_pairs": [*map(str, eval_pairs)]}
    args |= dict(max_length=max_length, eval_fraction=fraction, chat=chat, batch_size=4)
    boundless = SimpleNamespace(get_text_config=dict)  # a config that names no limit
    return Pairs(SimpleNamespace(**args), tokenizer, boundless, **options)


# ---- files ----


def write_bytes(folder, data, name="rows.jsonl"):
    (folder / name).write_bytes(data)
    return folder / name


@each("cases", of="broken_lines")
def test_a_broken_line_is_named(line, tail, times, reason, tmp_path):
    line = (line + times * tail).encode("latin-1")
    path = write_bytes(tmp_path, b'{"a": 1}\n\n\n{"a": 2}\n' + line + b"\n")
    refused = error_of(lambda: list(files.read_jsonl(path, flag="--pairs")))
    assert refused.startswith(f"--pairs {path}:5: ") and reason in refused


def test_lines_of_a_file(tmp_path):
    """`str.splitlines` would also split at U+2028 and U+0085. Rows come one at a time."""
    odd = '{"text": "one\u2028two\u2029three\x85four"}'
    path = write_bytes(tmp_path, f'\ufeff{odd}\r\n\n  \t\n{{"a": "\\ud83d\\ude00"}}\n{{oh'.encode())
    rows = files.read_jsonl(path, numbered=True)
    assert next(rows) == (1, {"text": "one\u2028two\u2029three\x85four"})
    assert next(rows) == (4, {"a": "😀"})
    with pytest.raises(UserError, match=":5:"):
        next(rows)
    with pytest.raises(UserError, match="--pairs"):
        next(files.read_jsonl(tmp_path / "none.jsonl", flag="--pairs"))


def test_what_is_written(tmp_path):
    """NaN and ±inf become null; after a failed write the old rows are there and nothing else."""
    path = tmp_path / "deep" / "rows.jsonl"
    numbers = {"a": math.nan, "b": [np.float32("inf"), (1.5, -math.inf)], "e": np.int64(3)}
    files.write_jsonl(path, [{**numbers, "c": {"d": np.float64(2)}}])
    files.write_jsonl(path, [{"a": "Zoë"}], append=True)
    text = '{"a": null, "b": [null, [1.5, null]], "e": 3, "c": {"d": 2.0}}\n{"a": "Zoë"}\n'
    with pytest.raises(ZeroDivisionError):
        files.write_jsonl(path, ({"a": 1 / n} for n in (1, 0)))
    with open(path, encoding="utf-8") as reader:  # the file is replaced, not written over
        files.write_jsonl(path, [{"a": 3}])
        assert reader.read() == text
    assert [*path.parent.iterdir()] == [path]


# ---- text to ids ----


@each("pair_files")
def test_what_is_read_of_pairs(rows, settings, options, kept, texts, says, hides, tmp_path, capsys):
    """One rule for every model: text is continued, messages are rendered. Rows that are left out are
    counted, and nothing vanishes."""
    tokenizer = tiny_tokenizer(**settings)
    path = write_rows(tmp_path / "pairs.jsonl", rows)
    pairs = read(tokenizer, path, **options)
    assert [[*map(tokenizer.decode, row)] for row in pairs.encoded] == texts
    assert [*pairs.lines] == [f"{path}:{i + 1}" for i in kept] and len(pairs.train) == len(kept)
    assert "chat" in options or [*pairs.rows] == [rows[i] for i in kept]
    shown = capsys.readouterr().out
    assert all(fact in shown for fact in says) and not any(fact in shown for fact in hides)


@each("cases", of="no_usable_rows")
def test_a_file_without_usable_rows(reason, rows, settings, tmp_path):
    path = write_rows(tmp_path / "pairs.jsonl", rows)
    error = error_of(read, tiny_tokenizer(**settings), path)
    assert error.startswith("--pairs") and reason in error


def test_plain_template_is_saved_with_the_tokenizer(tmp_path, capsys):
    """GPT-2 has no template; after a save and a load it has one, and the ids are the same."""
    folder = tiny_model("gpt2", tmp_path, tokenizer=tiny_tokenizer(pad=None, template=None))
    tokenizer = common.load_tokenizer(folder)
    ids = common.encode_prompt(tokenizer, USER)
    assert tokenizer.decode(ids) == "user: Which candidate fits this role?\nassistant:"
    assert "no chat template" in capsys.readouterr().out
    tokenizer.save_pretrained(tmp_path / "out")
    again = common.load_tokenizer(str(tmp_path / "out"))
    text = again.apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    assert again.encode(text, add_special_tokens=False) == ids, "as transformers alone encodes it"


@each("cases", of="end_ids")
def test_end_ids(eos, template, ends, tmp_path):
    """What the template writes behind an answer, then EOS. They follow the tokenizer: cached, a
    template or an EOS that was set later kept the old answer."""
    tokenizer = tiny_tokenizer(eos=eos, bos="<s>", add_bos=True)  # a BOS ends nothing
    common.end_ids(tokenizer)
    tokenizer.chat_template = template
    assert common.end_ids(tokenizer) == tokenizer.convert_tokens_to_ids(ends)
    bare = tiny_model("llama", tmp_path, tiny_tokenizer(eos=None, template=None))
    with pytest.raises(UserError, match="--model .*eos_token"):
        common.load_tokenizer(bare)


def test_pad_id_never_ends_an_answer():
    own = tiny_tokenizer()
    assert pad_id(own) == own.pad_token_id
    for pad, template in ((None, None), ("<|end|>", None), ("<|im_end|>", CHATML)):
        tokenizer = tiny_tokenizer(pad=pad, reserved=False, bos="<s>", template=template)
        assert pad_id(tokenizer) in {*range(len(tokenizer))} - {*common.end_ids(tokenizer)}


def test_masks_are_made_from_lengths():
    """A mask by `ids != pad` loses the EOS where pad = EOS; here pad stands everywhere."""
    rows = common.pad_rows([[0], [0, 0, 0]], [[0, 0, 0, 0], [0]])
    given, answers = on([1] * 5, [1, 1, 1, 1, 0]), on([0, 1, 1, 1, 1], [0, 0, 0, 1, 0])
    torch.testing.assert_close(rows, [torch.zeros(2, 5, dtype=torch.long), given, answers])
    ids, *_ = common.pad_rows([[1], [2, 3]], [[4, 5, 6], [8]])
    assert ids.tolist() == [[1, 4, 5, 6], [2, 3, 8, 0]]


def numbers_as_text(n):
    """A text of exactly n tokens of the tiny tokenizer, each position recognisable."""
    return "".join(chr(ord("0") + i % 10) for i in range(n))


# tokens of prompt and answers without their end; the limit; what is left. First: room for the prompt
# is max(20 − 9, 10) = 11; both answers stay whole and keep their end. Second: max(20 − 31, 10) = 10
# for the prompt and 10 for each answer: the long one loses its end
@cases("""
n | answers | limit | lengths
40 | [4, 8] | 20 | [11, 5, 9]
40 | [4, 30] | 20 | [10, 5, 10]
10 | [9] | 20 | [10, 10]
10 | [9] | 19 | [9, 10]
3 | [30] | 20 | [3, 17]
1 | [30, 2] | 2 | [1, 1, 1]
""")
def test_cutting(n, answers, limit, lengths, plain):
    """First the prompt from its left, then answers from their right, without their end id."""
    prompt, *texts = map(numbers_as_text, (n, *answers))
    ids = common.encode_pair(plain, prompt, *texts, max_length=limit)
    assert [*map(len, ids)] == lengths
    assert ids[0] == plain.encode(prompt)[-lengths[0] :]
    for row, text in zip(ids[1:], texts):
        whole = [*plain.encode(text), plain.eos_token_id]
        assert row == whole[: len(row)]


def test_batches_are_a_permutation_per_epoch_with_its_short_last_batch():
    batches = [common.batch_indices(10, 4, 0, step) for step in range(1, 7)]
    sizes = [(len(indices), epoch) for indices, epoch in batches]
    assert sizes == [(4, 0), (4, 0), (2, 0), (4, 1), (4, 1), (2, 1)]
    orders = [np.concatenate([b for b, _ in batches[i : i + 3]]).tolist() for i in (0, 3)]
    assert [sorted(order) for order in orders] == [[*range(10)]] * 2 and orders[0] != orders[1]
    assert (common.batch_indices(10, 4, 1, 1)[0] != batches[0][0]).any(), "another seed"
    assert common.batch_indices(3, 8, 0, 5)[1] == 4, "a batch larger than the data: an epoch a step"


@given(
    lengths=st.lists(st.integers(1, 99), max_size=20), most=st.integers(1, 120), ranks=st.integers(1, 4)
)  # fmt: skip
def test_micro_batches_are_the_batch(lengths, most, ranks):
    """Of each part every rank has a row: a forward of a sharded model waits for that of the others.
    Rows that fill a forward each are joined two by two where they do not divide."""
    if 0 < len(lengths) < ranks:
        wrong = f"{ranks} processes need .* --eval-fraction"
        with pytest.raises(UserError, match=wrong):
            common.micro_batches(range(len(lengths)), lengths, most, ranks)
        return
    parts = common.micro_batches(range(len(lengths)), lengths, most, ranks)
    assert sorted(i for part in parts for i in part) == [*range(len(lengths))]
    for part in parts:
        first = part[::ranks]  # of rank 0, whose rows are the longest
        assert len(part) >= ranks and lengths[part[0]] == max(lengths[i] for i in part)
        padded = len(first) * lengths[first[0]]
        assert padded <= most or len(first) <= (1 if ranks == 1 else 2)


# ---- what a row must hold ----


@cases(r"""
base | change | reason
none | {"prompt": "Assess", "completion": "hold"} | "chosen" is None
none | {"chosen": "alpha", "rejected": "beta"} | "prompt" is None
good | {"rejected": None} | "rejected"
good | {"rejected": " \n "} | not empty
good | {"prompt": " "} | not empty
good | {"chosen": {"role": "assistant", "content": "x"}} | "chosen"
good | {"prompt": 5} | "prompt"
good | {"chosen": [{"role": "assistant", "content": "x"}]} | both be text or both be
good | {"tie": "yes"} | "tie"
good | {"tie": []} | "tie"
good | {"group": ["a"]} | "group"
good | {"chosen": "half \ud800"} | surrogate
chat | {"prompt": []} | "prompt"
chat | {"chosen": [{"role": "assistant", "content": ""}]} | not empty
chat | {"chosen": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]} | one message
chat | {"prompt": [{"role": "assistant", "content": "x"}]} | assistant
chat | {"prompt": [{"role": "boss", "content": "x"}]} | "role"
chat | {"prompt": [{"role": ["user"], "content": "x"}]} | "role"
chat | {"prompt": [{"role": "user", "content": ["x"]}]} | one text
chat | {"prompt": ["x"]} | "role"
""")
def test_a_malformed_row_stops_with_file_and_line(base, change, reason, tmp_path, tokenizer):
    """Line 4, as one is blank."""
    row = {**{"good": GOOD, "chat": CHAT, "none": {}}[base], **change}
    lines = [json.dumps(GOOD), "", json.dumps(GOOD), json.dumps(row)]
    path = write_bytes(tmp_path, "\n".join(lines).encode())
    refused = error_of(read, tokenizer, path)
    assert refused.startswith(f"--pairs {path}:4: ") and reason in refused


def test_prompts_and_groups_never_part(tmp_path, tokenizer):
    """300 prompts, two rows each: the same ones in any order, .2 ± 3 sd (60 ± 21). "group" decides in
    the prompt's place: a prompt, whatever its form, or a name, or a number."""
    rows, file, held = [], tmp_path / "p.jsonl", []
    for i in range(600):
        row = GOOD | {"prompt": f"Role {i // 2}", "chosen": f"hold {i % 2}", "group": i // 8}
        rows.append(
            CHAT | {"prompt": [user(row["prompt"])], "group": i // 8} if i % 20 < 2 else row
        )
    for key, shuffled in ("prompt", rows), ("prompt", rows[::-1]), ("group", rows):
        shuffled = [row | {"group": None} if key == "prompt" else row for row in shuffled]
        pairs = read(tokenizer, write_rows(file, shuffled), fraction=0.2)
        trained, evaluated = ({pairs.keys[i] for i in part} for part in (pairs.train, pairs.held))
        assert not trained & evaluated
        assert len(trained | evaluated) == (300 if key == "prompt" else 75)
        assert sorted([*pairs.train, *pairs.held]) == list(range(600))
        held.append(evaluated)
    assert held[0] == held[1] and 39 <= len(held[0]) <= 81
    error = error_of(lambda: read(tokenizer, write_rows(file, [GOOD]), fraction=0.999))
    assert "--eval-fraction 0" in error
    assert 0 <= hash_fraction("x") < 1


# ---- the split ----


@each("cases", of="one_prompt")
def test_one_prompt_is_one_whatever_its_form(a, b, same):
    assert (prompt_key({"prompt": a}) == prompt_key({"prompt": b})) == same
    assert (prompt_key({"prompt": "x", "group": a}) == prompt_key({"prompt": b})) == same


def test_eval_files_are_the_held_out_rows(tmp_path, tokenizer, capsys):
    """Nothing else is held out, and their prompts are not trained on, in whatever form."""
    rows, fresh = pair_rows(6), GOOD | {"prompt": "new"}
    known = GOOD | {"prompt": rows[2]["prompt"][0]["content"]}
    train = write_rows(tmp_path / "a.jsonl", rows)
    held = write_rows(tmp_path / "b.jsonl", [known, fresh])
    pairs = read(tokenizer, train, eval_pairs=[held], fraction=0.9)
    assert pairs.train.tolist() == [0, 1, 3, 4, 5] and pairs.held.tolist() == [6, 7]
    assert "1 rows" in capsys.readouterr().out
    with pytest.raises(UserError, match="every prompt is held out"):
        read(tokenizer, train, eval_pairs=[train])


def test_some_prompts_are_of_all_roles():
    """The first 8 of a sorted file are of one role."""
    rows = [{"prompt": f"Role {i}"} for i in range(40)]
    some = answers.some_prompts(rows, 8)
    assert some == answers.some_prompts(rows[::-1], 8) and len(some) == 8 and some != rows[:8]


# ---- the interval of a share ----


@given(right=st.lists(st.sampled_from([0, 1]), min_size=1, max_size=40), copies=st.integers(1, 5))
def test_with_one_row_per_prompt_it_is_wilsons(right, copies):
    """As statsmodels computes it; copies of a row say nothing new."""
    from statsmodels.stats.proportion import proportion_confint

    wilson = proportion_confint(sum(right), len(right), method="wilson")
    found = share_interval(right * copies, [*range(len(right))] * copies)
    assert found == pytest.approx(wilson, abs=1e-6)


@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0, 0.5, 1]), st.integers(0, 4)), min_size=1, max_size=30
    )
)
def test_it_holds_the_share_and_stays_within_0_and_1(rows):
    right, keys = zip(*rows)
    low, high = share_interval(right, keys)
    assert -1e-9 <= low <= np.mean(right) + 1e-9 and np.mean(right) - 1e-9 <= high <= 1 + 1e-9


@cases("""
prompts | rows | mean
50 | 8 | 0.7
60 | 5 | 0.6
100 | 8 | 0.8
""")
@pytest.mark.parametrize("agree", [True, False])
def test_it_covers_in_19_of_20_samples(prompts, rows, mean, agree):
    """Where the rows of a prompt agree, all or none is right; else each prompt has a share of its own,
    Beta-distributed around `mean` with a deviation of .2, and the interval covers more. That of rows
    which stand for themselves covers less than 19 of 20 in both."""
    generator, covered, n = np.random.default_rng(0), np.zeros(2), 2000
    spread = 1e-6 if agree else mean * (1 - mean) / 0.2**2 - 1
    keys = np.repeat(np.arange(prompts), rows)
    for _ in range(n):
        shares = generator.beta(mean * spread, (1 - mean) * spread, prompts)
        right = generator.random(prompts * rows) < shares[keys]
        ends = [share_interval(right.tolist(), names) for names in (keys, range(len(right)))]
        covered += [low <= mean <= high for low, high in ends]
    assert 0.93 <= covered[0] / n <= (0.965 if agree else 1) and covered[1] / n < 0.89
