"""From a dialogue to tokens: what is trained is what the model would have written, the template's own
rendering behind the prompt. Templates of the promised families are the published ones, as TRL's
package brings them, or small ones that behave alike.

dialogue.jsonl   families: end of turn, BOS, special tokens, a template where TRL brings none, and
                 whether ▁ stands before a text's first word; cases: dialogues; odd: templates in
                 which dialogues differ, and what of an answer is trained
"""

import json
from functools import partial
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import common
from case_rows import each, rows_of
from tiny import CHATML, SENTENCES, said, tiny_model, tiny_tokenizer, user

FAMILIES = {row.pop("family"): row for row in rows_of("dialogue", of="families")}
ASK = user("Which shift?")
ONE_TURN, _, TWO_TURNS, *_ = [
    (row["prompt"], row["answer"]) for row in rows_of("dialogue", of="cases")
]


def sentencepiece(eos, bos, specials, chat):
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", *specials, *bytes_], show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    known = [(bos, backend.token_to_id(bos))]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0", special_tokens=known
    )
    state = json.loads(backend.to_str())  # bytes are vocabulary, not special tokens
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] not in bytes_]
    backend = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, bos_token=bos, chat_template=chat,
        additional_special_tokens=specials, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def tokenizer_of(family, eos, bos, specials, chat, pieces):
    if chat is None:
        trl = pytest.importorskip("trl", reason="needs TRL's chat templates")
        file = Path(trl.__file__).parent / "chat_templates" / f"{family}.jinja"
        if not file.is_file():
            pytest.skip(f"this version of TRL brings no {file.name}")
        chat = file.read_text(encoding="utf-8")
    if pieces:
        return sentencepiece(eos, bos, specials, chat)
    return tiny_tokenizer(
        pad=None, eos=eos, bos=bos, template=chat, add_bos=bool(bos), more=specials
    )


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def own(family):
    return tokenizer_of(family, **FAMILIES[family])


@each("dialogue", of="cases")
def test_prompt_and_answer_are_the_templates_own(prompt, answer, tools, refused, family, own):
    """The ids of the template's rendering of prompt and whole; one BOS, one end, and it is last."""
    if family in refused:
        with pytest.raises(common.Refused, match="refuses"):
            common.encode_pair(own, prompt, [answer], tools=tools)
        return
    ids, written = common.encode_pair(own, prompt, [answer], tools=tools)
    render = partial(own.apply_chat_template, tokenize=False, tools=tools)
    opened, whole = render(prompt, add_generation_prompt=True), render([*prompt, answer])
    assert whole.startswith(opened)
    assert ids == own.encode(opened, add_special_tokens=False)
    assert ids == common.encode_prompt(own, prompt, tools=tools)
    row, n = own.encode(whole, add_special_tokens=False), len(ids + written)
    assert ids + written == row[:n]
    end = own.convert_tokens_to_ids(FAMILIES[family]["eos"])
    assert common.end_ids(own) == [end] == written[-1:] and written.count(end) == 1
    assert (ids + written).count(own.bos_token_id) == (own.bos_token_id in row)
    behind = own.decode(row[n:]).replace(own.eos_token, "").replace("<s>", "")
    assert not behind.strip(), "only blanks and an EOS stand behind the end"


def test_keys_without_a_value_are_no_keys(family, own):
    """Loggers write {"tool_calls": [], "name": null}; `'tool_calls' in message` is true of it."""
    prompt, answer = TWO_TURNS
    empty = {"tool_calls": [], "tool_call_id": None, "name": "", "reasoning_content": None}
    logged = [{**turn, **empty} for turn in [*prompt, answer]]
    found = common.encode_pair(own, logged[:-1], logged[-1:])
    assert found == common.encode_pair(own, prompt, [answer])


# ---- the same ids as TRL ----


def ids_of_trl(tokenizer, rows, place):
    """[(prompt ids, chosen ids, rejected ids)] as TRL's DPOTrainer makes them."""
    needs = partial(pytest.importorskip, reason="needs the development dependencies")
    trl, datasets = map(needs, ("trl", "datasets"))
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama", place, tokenizer))
    args = trl.DPOConfig(str(place), use_cpu=True, bf16=False, report_to=[], max_length=None)
    given = dict(processing_class=tokenizer, train_dataset=datasets.Dataset.from_list(rows))
    made = trl.DPOTrainer(model, args=args, **given).train_dataset
    return [*zip(made["prompt_ids"], made["chosen_ids"], made["rejected_ids"])]


def test_text_has_trls_ids(tmp_path):
    """Text is continued as it stands, by a model with a chat template, too."""
    tokenizer = tiny_tokenizer(bos="<s>", add_bos=True, template=CHATML)
    rows = [
        dict(prompt="Which candidate fits this role?", chosen=" The first", rejected=" None"),
        dict(prompt="\n\nHuman: Hi\n\nAssistant:", chosen=" Yes.", rejected=" No."),
    ]
    ours = [common.encode_pair(tokenizer, *row.values()) for row in rows]
    assert ours == ids_of_trl(tokenizer, rows, tmp_path)


def test_templates_have_trls_ids(family, own, tmp_path):
    """Except what stands behind the end token, a line break or a second end, which TRL trains."""
    rows = [
        {"prompt": p, "chosen": [a], "rejected": [said("No.")]} for p, a in (ONE_TURN, TWO_TURNS)
    ]
    ends = common.end_ids(own)
    for row, theirs in zip(rows, ids_of_trl(own, rows, tmp_path), strict=True):
        prompt, *answers = theirs
        answers = [ids[: next(t for t, i in enumerate(ids, 1) if i in ends)] for ids in answers]
        assert common.encode_pair(own, *row.values()) == (prompt, *answers)


# ---- templates in which dialogues differ ----


@each("dialogue", of="odd")
def test_odd_templates(chat, eos, greedy, answer, trained):
    """greedy: special tokens that take in the blanks behind them."""
    tokenizer = tiny_tokenizer(eos=eos, template=chat)
    greedy = [AddedToken(token, rstrip=True) for token in greedy]
    if greedy:
        tokenizer.add_special_tokens({"additional_special_tokens": greedy})
    ids, written = common.encode_pair(tokenizer, [ASK], [said(answer)])
    assert tokenizer.decode(written) == trained and (
        not greedy or "\n" not in tokenizer.decode(ids)
    )


def test_a_token_never_spans_prompt_and_answer():
    """A BPE that merges "Recommend" + "ation" gives ids that no sampler would ever produce."""
    tokenizer = tiny_tokenizer(template=None)
    prompt, answer = "Assess: Recommend", "ation: hold."
    apart = tokenizer.encode(prompt), tokenizer.encode(answer)
    assert tokenizer.encode(prompt + answer) != sum(apart, []), "pick a prompt whose end merges"
    ids, chosen, rejected = common.encode_pair(tokenizer, prompt, answer, "ation: reject.")
    assert (ids, chosen[:-1]) == apart and ids == common.encode_prompt(tokenizer, prompt)
    assert tokenizer.decode(rejected, skip_special_tokens=True) == "ation: reject."


@pytest.mark.parametrize("limit", [None, 12])
@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("in_template", [True, False])
def test_exactly_one_bos(in_template, is_text, limit):
    """The template and the post-processor each write one. Cut, the prompt loses it from its left. An
    EOS that T5 appends would end the dialogue."""
    chat, prompt, answer = "{{ bos_token }}" * in_template + CHATML, "Assess " * 9, "hold."
    tokenizer = tiny_tokenizer(bos="<s>", add_bos=True, add_eos=True, template=chat)
    if not is_text:
        prompt, answer = [user(prompt)], [said(answer)]
    pair = common.encode_pair(tokenizer, prompt, answer, max_length=limit)
    for ids in (common.encode_prompt(tokenizer, prompt, limit), sum(pair, [])):
        has_one = limit is None and (in_template or is_text)
        assert ids.count(tokenizer.bos_token_id) == has_one and len(ids) <= (limit or 999)
    assert tokenizer.eos_token_id not in pair[0]
