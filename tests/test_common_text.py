"""From a file to token ids: what every stage trusts `common.py` with before a model is loaded."""

import itertools
import json
import math
import random
import re
from collections import Counter

import numpy as np
import pytest
import torch

import common
from common import UserError
from parts import files, identities, prompting, reward_models
from parts.pairs import TokenRows, held_out, read_pairs
from parts.rows import split_prompt
from tiny import (
    BOS_TEMPLATE,
    CHATML,
    TEMPLATE,
    cases,
    error_of,
    pair_rows,
    table,
    tiny_model,
    tiny_tokenizer,
    write_rows,
)


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return [{"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def plain():
    """A tokenizer without chat template, for which text is continued as it stands."""
    return tiny_tokenizer(template=None)


USER, ANSWER = [user("Which candidate fits this role?")], said("The first one.")


def write_bytes(folder, data, name="rows.jsonl"):
    (folder / name).write_bytes(data)
    return folder / name


BROKEN = {
    b'{"a": 1': "not valid JSON",
    b"{'a': 1}": "not valid JSON",
    b'{"a": 1} {"a": 2}': "not valid JSON",
    b"[1, 2]": "found list",
    b"null": "found NoneType",
    b'{"a": NaN}': "NaN",
    b'{"a": -Infinity}': "Infinity",
    b'{"a": "\xff\xfe"}': "utf-8",
    b'{"n": ' + b"9" * 6000 + b"}": "digit",
}


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_line_is_named(tmp_path, line):
    path = write_bytes(tmp_path, b'{"a": 1}\n\n\n{"a": 2}\n' + line + b"\n")
    with pytest.raises(UserError) as caught:
        list(files.read_jsonl(path))
    said = str(caught.value)
    assert said.startswith(f"{path}:5: ") and BROKEN[line] in said and "\n" not in said


def test_lines_of_a_file(tmp_path):
    """`str.splitlines` would also split at U+2028 and U+0085. Rows come one at a time."""
    odd = '{"text": "one\u2028two\u2029three\x85four"}'
    data = f'\ufeff{odd}\r\n\n  \t\n{{"a": 2}}\n\n{{"a": 3}}'.encode()
    rows = list(files.read_jsonl(write_bytes(tmp_path, data), numbered=True))
    assert rows == [(1, {"text": "one\u2028two\u2029three\x85four"}), (4, {"a": 2}), (6, {"a": 3})]
    rows = files.read_jsonl(write_bytes(tmp_path, b'{"a": 1}\n{oh\n'))
    assert next(rows) == {"a": 1}
    with pytest.raises(UserError, match=":2:"):
        next(rows)
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UserError, match="--pairs"):
            next(files.read_jsonl(path, flag="--pairs"))


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


def test_prompt_and_answer_are_encoded_apart(plain):
    """A BPE that merges "Recommend" + "ation" gives ids that no sampler would ever produce."""
    tokenizer = plain
    prompt, answer = "Assess: Recommend", "ation: hold."
    apart = tokenizer.encode(prompt), tokenizer.encode(answer)
    assert tokenizer.encode(prompt + answer) != sum(apart, []), "pick a prompt whose end merges"
    ids, chosen, rejected = common.encode_pair(tokenizer, prompt, answer, "ation: reject.")
    assert (ids, chosen[:-1]) == apart and ids == common.encode_prompt(tokenizer, prompt)
    assert tokenizer.decode(rejected, skip_special_tokens=True) == "ation: reject."


@pytest.mark.parametrize("template", [BOS_TEMPLATE, None])
@pytest.mark.parametrize("max_length", [math.inf, 12])
def test_exactly_one_bos(template, max_length):
    """Template and post-processor each write one; Qwen's knows one and writes none."""
    tokenizer = tiny_tokenizer(bos="<s>", template=template and TEMPLATE)
    for prompt in ("Assess", USER):
        assert tokenizer.bos_token_id not in common.encode_prompt(tokenizer, prompt)
    tokenizer = tiny_tokenizer(bos="<s>", add_bos=True, template=template)
    text, bos = numbers_as_text(40), tokenizer.bos_token_id
    for prompt, answer in ((text, "hold."), ([user(text)], said("hold."))):
        pair = common.encode_pair(tokenizer, prompt, answer, max_length=max_length)
        for ids in (common.encode_prompt(tokenizer, prompt, max_length), sum(pair, [])):
            assert ids.count(bos) == 1 and ids[0] == bos and len(ids) <= max_length


def test_an_eos_that_is_appended_goes():
    """T5's would end the dialogue before the answer. A text's own BOS is the one."""
    tokenizer = tiny_tokenizer(bos="<s>", add_bos=True, add_eos=True, template=None)
    words = tokenizer.encode("Assess", add_special_tokens=False)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert tokenizer("Assess")["input_ids"] == [bos, *words, eos]
    for text in ("Assess", "<s>Assess"):
        assert common.encode_prompt(tokenizer, text) == [bos, *words]
    assert common.encode_pair(tokenizer, "Assess", "Assess")[1] == [*words, eos]


def test_text_is_a_turn_where_there_is_a_chat_template(capsys):
    """One rule for every stage, said once: dpo.py and ppo.py continued a text that grpo_rubric.py
    sent as a turn. A text that is opened for an answer is continued, as TRL continues it."""
    common.say_once.cache_clear()
    tokenizer, text = tiny_tokenizer(template=CHATML), "Which candidate fits this role?"
    turns = common.encode_pair(tokenizer, USER, ANSWER)
    for prompt in (text, USER):  # text after messages is an assistant's turn
        assert common.encode_pair(tokenizer, prompt, "The first one.") == turns
        assert common.encode_prompt(tokenizer, prompt) == turns[0]
    for opened in (
        f"\n\nHuman: {text}\n\nAssistant:",
        f"{text}\n### Response:\n",
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n",
    ):
        ids = tokenizer.encode(opened)
        assert common.encode_pair(tokenizer, opened, "Yes.")[0] == ids
        assert common.encode_prompt(tokenizer, opened) == ids
    bare = tiny_tokenizer(template=None)
    ids = bare.encode(text)
    assert common.encode_prompt(bare, text) == ids != common.encode_prompt(bare, USER)
    assert common.encode_prompt(bare, text) == ids, "the plain template is no chat"
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("given as text ")[2] for line in lines] == [
        "is a user's turn of the chat template",
        "is continued as it stands: it is opened for an answer",
        "is continued as it stands: the model has no chat template",
    ]


def test_plain_template_is_saved_with_the_tokenizer(tmp_path):
    """GPT-2 has no template; after a save and a load it has one, and the ids are the same: those
    of a text too, which the next stage continues as this one did."""
    folder = tiny_model("gpt2", tmp_path, tokenizer=tiny_tokenizer(pad=None, template=None))
    tokenizer = common.load_tokenizer(folder)
    ids = common.encode_prompt(tokenizer, USER)
    assert tokenizer.decode(ids) == "user: Which candidate fits this role?\nassistant:"
    common.save_model(common.load_policy(folder), tokenizer, tmp_path / "out")
    again = common.load_tokenizer(str(tmp_path / "out"))
    assert common.encode_prompt(again, USER) == ids
    for stage in (again, common.load_tokenizer(str(tmp_path / "out"))):  # asked first, or last
        assert common.encode_prompt(stage, "Which fits?") == again.encode("Which fits?")
    text = again.apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    assert again.encode(text, add_special_tokens=False) == ids, "as transformers alone encodes it"


def test_a_template_that_refuses_is_one_line(tmp_path):
    tokenizer = tiny_tokenizer(template="{{ raise_exception('System role not supported') }}")
    refused = error_of(common.encode_prompt, tokenizer, USER)
    assert "refuses ['user']: System role not supported" in refused
    refused = error_of(common.load_tokenizer, tiny_model("llama", tmp_path, tokenizer))
    assert "System role not supported" in refused


def test_end_ids(tmp_path):
    """Of tokenizer and template, a list in the config, an int in the generation config."""
    tokenizer = tiny_tokenizer(template=CHATML)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|end|>"])
    assert common.end_ids(tokenizer) == sorted(ends)
    model = common.load_policy(tiny_model("llama", tmp_path, tokenizer))
    for of_config, of_generation, more in (([ends[1], 77], 42, [77, 42]), (None, None, [])):
        model.config.eos_token_id = of_config
        model.generation_config.eos_token_id = of_generation
        assert common.end_ids(tokenizer, model) == sorted(ends + more)


def test_a_model_without_end_token(tmp_path):
    """The template's end takes the place of an EOS; without a template either, it is refused."""
    tokenizer = common.load_tokenizer(tiny_model("llama", tmp_path, tiny_tokenizer(eos=None)))
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert tokenizer.eos_token_id is None and common.end_ids(tokenizer) == [end]
    assert common.encode_pair(tokenizer, "Assistant:", "hold")[1][-1] == end
    bare = tiny_model("llama", tmp_path, tiny_tokenizer(eos=None, template=None))
    assert "without end token" in error_of(common.load_tokenizer, bare)


@pytest.mark.parametrize("bos, first", [(None, "<|end|>"), ("<s>", "<s>")])
def test_an_empty_text_is_one_token(bos, first):
    tokenizer = tiny_tokenizer(bos=bos, template=None)
    assert common.encode_prompt(tokenizer, "") == [tokenizer.convert_tokens_to_ids(first)]


@pytest.mark.parametrize(
    "template, end", [(TEMPLATE, "<|end|>"), (CHATML, "<|im_end|>"), (None, "<|end|>")]
)
def test_an_answer_that_is_empty_or_absent(template, end):
    """An end alone, in text and in turns; no ids for an answer that a row does not have."""
    tokenizer = tiny_tokenizer(template=template)
    for prompt, empty in (("Assess", ""), (USER, ""), (USER, said(""))):
        answer, absent = common.encode_pair(tokenizer, prompt, empty, None)[1:]
        assert (answer, absent) == ([tokenizer.convert_tokens_to_ids(end)], [])


def test_pad_id_never_ends_an_answer_and_adds_no_row():
    """An own pad is kept; else the reserved token; else any id but an end."""
    own = tiny_tokenizer()
    assert common.pad_id(own) == own.pad_token_id
    for pad in (None, "<|end|>"):
        tokenizer = tiny_tokenizer(pad=pad)
        assert common.pad_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|reserved|>")
        bare = tiny_tokenizer(pad=pad, reserved=False, bos="<s>", template=CHATML)
        assert common.pad_id(bare) not in (*common.end_ids(bare), bare.bos_token_id)
        assert 0 <= common.pad_id(bare) < len(bare)
    chatml = tiny_tokenizer(pad="<|im_end|>", template=CHATML)
    assert common.pad_id(chatml) not in common.end_ids(chatml)


def test_masks_are_made_from_lengths():
    """A mask by `ids != pad` loses the EOS where pad = EOS; here pad stands everywhere."""
    ids, attention_mask, mask = common.pad_rows([[7], [7, 7, 7]], [[7, 7, 7, 7], [7]], 7)
    assert ids.dtype == torch.int64 and ids.tolist() == [[7] * 5, [7] * 5]
    assert attention_mask.dtype == mask.dtype == torch.bool
    assert attention_mask.int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert mask.int().tolist() == [[0, 1, 1, 1, 1], [0, 0, 0, 1, 0]]
    ids, _, _ = common.pad_rows([[1], [2, 3]], [[4, 5, 6], [8]], 0)
    assert ids.tolist() == [[1, 4, 5, 6], [2, 3, 8, 0]]


def numbers_as_text(n):
    """A text of exactly n tokens of the tiny tokenizer, each position recognisable."""
    return "".join(chr(ord("0") + i % 10) for i in range(n))


# tokens of prompt and answers without their end; the limit; what is left; what is counted. First:
# room for the prompt is max(20 − 9, 10) = 11; both answers stay whole and keep their end. Second:
# max(20 − 31, 10) = 10 for the prompt and 10 for each answer: the long one loses its end. An empty
# prompt is its first token
@cases("""
n | answers | limit | lengths | counted
40 | [4, 8] | 20 | [11, 5, 9] | {"prompts cut": 1}
40 | [4, 30] | 20 | [10, 5, 10] | {"prompts cut": 1, "responses cut": 1}
10 | [9] | 20 | [10, 10] | {}
10 | [9] | 19 | [9, 10] | {"prompts cut": 1}
3 | [30] | 20 | [3, 17] | {"responses cut": 1}
0 | [30, 2] | 2 | [1, 1, 1] | {"responses cut": 2}
""")
def test_cutting(n, answers, limit, lengths, counted, plain):
    """First the prompt from its left, then answers from their right, without their end id."""
    counts, tokenizer = Counter(), plain
    prompt, *texts = map(numbers_as_text, (n, *answers))
    ids = common.encode_pair(tokenizer, prompt, *texts, max_length=limit, counts=counts)
    assert [*map(len, ids)] == lengths and counts == Counter(counted)
    assert ids[0] == (tokenizer.encode(prompt)[-lengths[0] :] or [tokenizer.eos_token_id])
    for row, text in zip(ids[1:], texts):
        whole = [*tokenizer.encode(text), tokenizer.eos_token_id]
        assert row == whole[: len(row)]


def test_a_dialogue_loses_its_oldest_turns_whole(tokenizer):
    """What is left is exactly the short dialogue's own rendering, system message first; of 301 turns
    the longest end that fits."""
    system, last = {"role": "system", "content": "Be fair."}, user("Third question?")
    turns = [system, user("First question?"), *said("First answer.")]
    turns += [user("Second question?"), *said("Second."), last]
    parts = ([system, *turns[i:]] for i in (1, 3, 5))
    whole, middle, short = (common.encode_prompt(tokenizer, part) for part in parts)
    for limit, ids in (
        (len(whole), whole),
        (len(whole) - 1, middle),
        (len(middle) - 1, short),
        (len(short) - 4, short[4:]),  # then by tokens
    ):
        assert common.encode_prompt(tokenizer, turns, limit) == ids
    assert turns[0] == system and len(turns) == 6, "the user's list is not edited"
    turns = [user(f"turn {i}") if i % 2 == 0 else said(f"turn {i}")[0] for i in range(301)]
    ends = (common.encode_prompt(tokenizer, turns[i:]) for i in range(300, -1, -2))
    *_, longest = itertools.takewhile(lambda ids: len(ids) <= 128, ends)
    assert common.encode_prompt(tokenizer, turns, 128) == longest


# Anthropic's layout first: the blank before the answer belongs to the answer
SPLIT = table(r"""
"\n\nHuman: Hi\n\nAssistant:" | " Yes, do" | " Yesterday"
"\n\nHuman: Hi\n\nAssistant:" | " So:\nAnswer: 4" | " So:\nAnswer: 5"
"Do it.\n\n### Response:" | " The first" | " The last"
"[INST] hi [/INST]" | " yes" | " no"
"User: hi\nAI:" | " yes" | " no"
"POST: hi\nTL;DR:" | " yes" | " no"
"" | "same words" | "same words"
"" | "alpha" | "beta"
"" | "Answer: A tea" | "Answer: A spoon"
"" | "\n\nAssistant: A tea" | "\n\nAssistant: A spoon"
"" | "" | ""
""")
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
SPLIT += [[RENDERED, "yes", "no"]]
SPLIT += [[[user("a"), *more], said("d"), said("e")] for more in ([], [*said("b"), user("c")])]


@pytest.mark.parametrize("prompt, chosen, rejected", SPLIT)
def test_split_prompt(prompt, chosen, rejected):
    """Messages: the longest common beginning. Texts: to a line that asks for an answer; where nothing
    stands before that, the answers have a form in common, but no prompt."""
    whole = [prompt + chosen, prompt + rejected]
    before = json.dumps(whole)
    assert split_prompt(*whole) == (prompt, chosen, rejected)
    assert json.dumps(whole) == before


def test_ultrafeedback_is_read():
    """The prompt as text and whole dialogues: it becomes their common beginning."""
    question, yes, no = user("Why?"), *said("So."), *said("No.")
    row = {"prompt": "Why?", "chosen": [question, yes], "rejected": [question, no]}
    wrong = {**row, "prompt": "How?"}
    common.check_pair(row)
    assert row == {"prompt": [question], "chosen": [yes], "rejected": [no]}
    system = {"role": "system", "content": "Be brief."}
    row = {"prompt": "Why?", "question": "Why?", "chosen": [system, question, yes]}  # ORPO-mix
    row["rejected"] = [system, question, no]
    common.check_pair(row)
    assert row["prompt"] == [system, question] and row["chosen"] == [yes]
    with pytest.raises(ValueError, match='leave the column "prompt" out'):
        common.check_pair(wrong)


def test_a_blank_answer_of_whole_dialogues_drops_the_pair():
    """UltraFeedback holds some: a chosen one trained the model to end at once."""
    question, yes, nothing = user("Why?"), *said("So."), *said(" ")
    for chosen, rejected in (
        ([question, yes], [question, nothing]),
        ([question, nothing], [question, yes]),
    ):
        row = {"chosen": chosen, "rejected": rejected}
        common.check_pair(row)
        assert row["drop"] == "an answer is blank"


def test_token_rows_return_what_was_appended():
    """Offsets off by one show at empty rows; a row held neither forbids an append nor changes."""
    rows, kept = TokenRows(), [[1, 2, 3], [], [4], [5, 6], []]
    for ids in kept:
        rows.append(ids)
    held = rows[0]
    assert len(rows) == 5 and [r.tolist() for r in rows] == kept
    assert held.dtype == np.int32 and rows.lengths().tolist() == [3, 0, 1, 2, 0]
    rows.append([7] * 1000)
    assert held.tolist() == rows[0].tolist() == [1, 2, 3] and rows[5].tolist() == [7] * 1000


GOOD = {"prompt": "Assess", "chosen": "hold", "rejected": "reject"}


BASES = {"good": GOOD, "chat": {"prompt": USER, "chosen": ANSWER, "rejected": said("no")}, "": {}}


@cases(r"""
base | change | reason
| {"prompt": "Assess", "completion": "hold"} | completion
| {"prompt": "Assess", "completion": "hold", "label": True} | dpo.py --loss-type kto
| {"chosen": "alpha", "rejected": "beta"} | share no beginning
| {"messages": "x", "chosen": "Answer: a", "rejected": "Answer: b"} | found columns ['chosen', 'messages', 'rejected']
| {"query": "x", "chosen": "Yes, a", "rejected": "Yes, b"} | "query"; rename it
| {"chosen": "alpha", "rejected": [{"role": "assistant", "content": "x"}]} | both be text or both be
good | {"rejected": None} | "rejected" is missing
good | {"rejected": " \n "} | "rejected" is empty
good | {"chosen": {"role": "assistant", "content": "x"}} | dict
good | {"prompt": 5} | "prompt" is int
good | {"chosen": [{"role": "assistant", "content": "x"}]} | both be text or both be message lists
good | {"chosen": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]} | leave the column "prompt" out
good | {"tie": True, "strength": 2} | strength
good | {"tie": "yes"} | "tie"
good | {"strength": "big"} | "strength"
good | {"strength": -3} | swap them
good | {"margin": 1e39} | "margin"
good | {"chosen": "half \ud800"} | surrogate
chat | {"prompt": []} | "prompt"
chat | {"chosen": [{"role": "assistant", "content": ""}]} | "chosen" is empty
chat | {"chosen": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]} | one assistant message
chat | {"prompt": [{"role": "assistant", "content": "x"}]} | assistant
chat | {"prompt": [{"role": "boss", "content": "x"}]} | "role" (system
chat | {"prompt": [{"role": "user", "content": ["x"]}]} | one text (join its parts)
chat | {"prompt": [{"role": "user", "content": "\udfff"}]} | surrogate
""")
def test_a_malformed_row_stops_with_file_and_line(tmp_path, base, change, reason, tokenizer):
    """Line 4, as one is blank. JSON reads 1e999 as infinity; 1e39 is one in fp32."""
    lines = [json.dumps(GOOD), "", json.dumps(GOOD), json.dumps({**BASES[base], **change})]
    path = write_bytes(tmp_path, "\n".join(lines).encode())
    with pytest.raises(UserError) as caught:
        read_pairs([path], tokenizer, 64, True)
    message = str(caught.value)
    assert message.startswith(f"--pairs {path}:4: ") and reason in message and "\n" not in message


WHOLE = "\n\nHuman: Who fits best?\n\nAssistant:"


def test_answers_that_repeat_their_prompt_are_counted(tmp_path, tokenizer):
    """HH-RLHF with a column of prompts added: the model was trained to repeat them, in silence."""
    twice = {"prompt": WHOLE, "chosen": WHOLE + " Ann.", "rejected": WHOLE + " No."}
    turns = [user("Who fits best?")], said("Who fits best? Ann."), said("Who fits best?\nNo.")
    rows = [twice, dict(zip(("prompt", "chosen", "rejected"), turns))]
    one = {"prompt": "Who", "chosen": "Whoever can.", "rejected": "Who?"}  # a word may come again
    file = write_rows(tmp_path / "pairs.jsonl", [*rows, one, *pair_rows(1)])
    counts = read_pairs([file], tokenizer, 64).counts
    assert counts["answers that begin with their whole prompt"] == 2


def test_a_blank_prompt_is_none(tmp_path, tokenizer):
    """As a CSV has it beside whole dialogues, which were taken for answers to nothing."""
    row = {"prompt": " ", "chosen": WHOLE + " Ann.", "rejected": WHOLE + " No."}
    common.check_pair(row)
    assert row == {"prompt": WHOLE, "chosen": " Ann.", "rejected": " No."}
    rows = [GOOD | {"prompt": ""}, *pair_rows(1)]
    counts = read_pairs([write_rows(tmp_path / "pairs.jsonl", rows)], tokenizer, 64).counts
    assert counts["blank prompts"] == 1


def test_a_prompt_that_touches_its_answer_is_counted(tmp_path, plain):
    """Text that is continued is joined as it is; turns have a template between them."""
    rows = [GOOD | {"prompt": prompt} for prompt in ("two audits.", "two audits.\n")]
    file = write_rows(tmp_path / "pairs.jsonl", [*rows, *pair_rows(1)])
    assert read_pairs([file], plain, 64).counts["no space between prompt and answer"] == 1


def test_unusable_rows_are_counted_and_nothing_vanishes(tmp_path, tokenizer):
    """8 rows: 2 equal pairs, 1 tie, 1 pair equal in all tokens that fit; 4 kept, with ties 5."""
    long = numbers_as_text(30)
    rows = [{}, {"prompt": "B", "strength": 3, "margin": 0.5, "annotator": "kim"}]
    rows += [{"rejected": "hold"}, {"chosen": "reject"}, {"tie": True, "strength": 0}]
    rows += [{"chosen": long + "x", "rejected": long + "y"}, {"tie": False, "chosen": long}]
    rows.append({"tie": None, "strength": None})
    path = write_rows(tmp_path / "pairs.jsonl", [GOOD | row for row in rows])
    counted = {"rows": 8, "dropped: chosen = rejected": 2, "dropped: equal after cutting": 1}
    for keep_ties, ties in ((False, {"dropped: tie": 1}), (True, {})):
        pairs = read_pairs([path], tokenizer, 16, keep_ties)
        counts = {k: n for k, n in pairs.counts.items() if re.match("rows$|dropped", k)}
        assert counts == counted | ties
        assert len(pairs.prompts) == len(pairs.train) == 4 + keep_ties
        assert pairs.tie.tolist() == [False] * 2 + [True] * keep_ties + [False] * 2
    np.testing.assert_equal(pairs.strength, [math.nan, 3, 0, math.nan, math.nan])
    np.testing.assert_equal(pairs.margin, [math.nan, 0.5, math.nan, math.nan, math.nan])
    assert pairs.lengths()[3] == 16 == len(pairs.prompts[3]) + len(pairs.chosen[3])
    other = write_bytes(tmp_path, b"\n\n\n" + json.dumps(GOOD).encode(), "b.jsonl")
    pairs = read_pairs([path, other], tokenizer, 64)
    assert pairs.name([5, 0, 2]) == f"{other}:4; {path}:1; {path}:6"


NOTHING = {
    "the file is empty": [],
    "tie 2": [{**GOOD, "tie": True}] * 2,
    "chosen = rejected 1": [{**GOOD, "rejected": "hold"}],
}


@pytest.mark.parametrize("reason", NOTHING)
def test_no_usable_row_stops_and_says_why(tmp_path, tokenizer, reason):
    good = write_rows(tmp_path / "good.jsonl", [GOOD])
    bad = write_rows(tmp_path / "bad.jsonl", NOTHING[reason])
    for names, flag, held in (([bad], "", ()), ([good, bad], "", ()), ([good], "eval-", [bad])):
        said = rf"--{flag}pairs .*bad\.jsonl: no usable row .*{reason}"
        with pytest.raises(UserError, match=said):
            read_pairs(names, tokenizer, 64, False, 0, held)


def test_prompts_never_part(tmp_path, tokenizer):
    """300 prompts, two rows each: the same ones in any order, .2 ± 3 sd (60 ± 21)."""
    rows, held, file = [], [], tmp_path / "p.jsonl"
    for i in range(600):
        row = {"prompt": f"Role {i // 2}", "chosen": f"hold {i % 2}", "rejected": "reject"}
        if i % 20 < 2:
            row = {k: [user(v)] if k == "prompt" else said(v) for k, v in row.items()}
        rows.append(row)
    for seed in (0, 1):
        random.Random(seed).shuffle(rows)
        pairs = read_pairs([write_rows(file, rows)], tokenizer, 64, False, 0.2)
        trained, evaluated = (
            {tuple(pairs.prompts[i]) for i in part} for part in (pairs.train, pairs.eval)
        )
        assert not trained & evaluated and len(trained | evaluated) == 300
        assert sorted([*pairs.train, *pairs.eval]) == list(range(600))
        held.append(evaluated)
    assert held[0] == held[1] and 39 <= len(held[0]) <= 81
    few = read_pairs([write_rows(file, [GOOD])], tokenizer, 64, False, 0.999)
    assert (len(few.train), len(few.eval)) == (1, 0), "if all were held out, none are"
    assert not held_out("x", 0.0) and held_out("x", 1.0)
    turn = user("x")
    for fraction in np.linspace(0, 1, 20):  # the order of the keys in the file is no difference
        assert held_out([turn], fraction) == held_out([dict(reversed(turn.items()))], fraction)


def test_some_prompts_are_of_all_roles():
    """The first 8 of a sorted file are of one role."""
    rows = [{"prompt": f"Role {i}"} for i in range(40)]
    some = prompting.some_prompts(rows, 8)
    assert some == prompting.some_prompts(rows[::-1], 8) and len(some) == 8 and some != rows[:8]


def test_eval_files_are_the_held_out_rows(tmp_path, tokenizer):
    """Nothing else is held out; of its rows the 3 with a known prompt are counted."""
    train, known = write_rows(tmp_path / "a.jsonl", pair_rows(4)), pair_rows(5)[2:]
    fresh = [{**row, "prompt": [user(f"new {i}")]} for i, row in enumerate(pair_rows(2))]
    known[2] = {**pair_rows(1)[0], "chosen": said("another answer")}
    for rows, leaks in (([*known, *fresh], 3), (fresh, 0)):
        held = write_rows(tmp_path / "b.jsonl", rows)
        pairs = read_pairs([train], tokenizer, 64, False, 0.9, [held])
        assert pairs.train.tolist() == [0, 1, 2, 3] and len(pairs.eval) == len(rows)
        assert pairs.counts["held out, though their prompt is trained on"] == leaks


def test_the_token_strip_is_made_from_the_tensors(tokenizer, capsys):
    """Of a long row what is far from the first trained token is left out."""

    def strip(ids, trained):
        rows = [*ids, 7], [1] * len(ids) + [0], [*map(bool, trained), False]
        identities.show_row(tokenizer, [torch.tensor([row]) for row in rows], "file:1", "legend")
        return capsys.readouterr().out.splitlines()

    ids = common.encode_pair(tiny_tokenizer(template=None), "1\n", "34")
    shown = ["file:1   legend", "·1·\\n▮3▮4◆<|end|>"]
    shown += ["3 of 5 tokens trained; the first is predicted from position 1"]
    assert strip(sum(ids, []), [0, 0, 1, 1, 1]) == shown
    assert strip(ids[0], [0, 0])[1:] == ["·1·\\n", "0 of 2 tokens trained"]
    text = numbers_as_text(200)
    long = strip(tokenizer.encode(text), [i >= 100 for i in range(200)])[1]
    assert re.sub("[·▮◆]", "", long) == f"{text[:12]} … {text[88:140]} … {text[194:]}"
    assert long.count("▮") == 45


def test_what_is_left_out_is_said(tmp_path, capsys):
    """Columns of a prompt file that no model is shown; a reward model without its scale."""
    file = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "Which?", "tools": [{"a": 1}]}])
    prompting.load_prompts(file, "--prompts")
    common.say_once.cache_clear()
    assert reward_models.reward_scale(object(), "--reward-model runs/old/adapter") == (0.0, 1.0)
    columns, scale = capsys.readouterr().out.splitlines()
    assert columns == f"--prompts {file}: not shown to the model: column tools 1"
    assert scale.startswith("--reward-model runs/old/adapter: no mean and deviation")
