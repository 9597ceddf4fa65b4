"""From a dialogue to tokens: what is trained is what the model would have written, the template's own
rendering behind the prompt. Templates of the promised families are the published ones, as TRL's
package brings them, or small ones that behave alike.
"""

import json
from functools import partial
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import common
from tiny import CHATML, SENTENCES, said, tiny_model, tiny_tokenizer, user

# ---- families: end of turn, BOS, special tokens, template ----

MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% else %}{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
SMOLLM2 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful AI assistant named "
    "SmolLM, trained by Hugging Face<|im_end|>\n{% endif %}" + CHATML
)
IM, LLAMA = "<|im_start|> <|im_end|> <|endoftext|>", "<|start_header_id|> <|end_header_id|>"
LLAMA3, QWEN = ("<|eot_id|>", "<|begin_of_text|>", LLAMA), ("<|im_end|>", None, IM)
GEMMA = "<end_of_turn>", "<bos>", "<start_of_turn> <eos>"
PHI3 = "<|end|>", "<s>", "<|user|> <|assistant|> <|system|> <|endoftext|>"
FAMILIES = dict.fromkeys(("llama3", "llama3_1", "llama3_2"), LLAMA3)
FAMILIES |= dict.fromkeys(("qwen2_5", "qwen3", "qwen3_instruct_2507", "smollm2"), QWEN)
FAMILIES |= dict(gemma=GEMMA, gemma3=GEMMA, phi3=PHI3, phi3_5=PHI3, mistral=("</s>", "<s>", ""))
OWN = {"mistral": MISTRAL, "smollm2": SMOLLM2}
PIECES = ("gemma", "gemma3", "mistral")  # ▁ before a text's first word


def sentencepiece(eos, bos, specials, chat):
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", *specials, *bytes_], show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)])  # fmt: skip
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


def tokenizer_of(family):
    chat, (eos, bos, more) = OWN.get(family), FAMILIES[family]
    if chat is None:
        trl = pytest.importorskip("trl", reason="needs TRL's chat templates")
        file = Path(trl.__file__).parent / "chat_templates" / f"{family}.jinja"
        if not file.is_file():
            pytest.skip(f"this version of TRL brings no {file.name}")
        chat = file.read_text(encoding="utf-8")
    specials = [*dict.fromkeys([*more.split(), eos, *filter(None, [bos])])]
    if family in PIECES:
        return sentencepiece(eos, bos, specials, chat)
    return tiny_tokenizer(
        pad=None, eos=eos, bos=bos, add_bos=bool(bos), more=specials, template=chat
    )


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def own(family):
    return tokenizer_of(family)


SYSTEM = {"role": "system", "content": "Be brief."}
ASK, EARLY = user("Which shift?"), said("The early one.")
THINK = "<think>\nlook at the rota\n</think>\n\n"
TOOL = {"name": "search", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}
CALL = {"type": "function", "function": {"name": "search", "arguments": {"q": "rota"}}}
CASES = {  # prompt, answer, tools
    "one turn": ([ASK], EARLY),
    "system": ([SYSTEM, ASK], EARLY),
    "two turns": ([ASK, EARLY, user("From when?")], said("From May.")),
    "a thought": ([ASK], said(THINK + "The early one.")),
    "two thoughts": ([ASK, said(THINK + "Early."), user("When?")], said("<think>\nm\n</think>\n\nMay.")),
    "blanks": ([user("  Which shift?\n")], said(" The early one. ")),
    "empty": ([ASK], said("")),
    "a tool's answer": (
        [ASK, said("", tool_calls=[CALL]), {"role": "tool", "name": "search", "content": "early"}],
        EARLY, [{"type": "function", "function": TOOL}]),
}  # fmt: skip
REFUSED = {
    ("gemma", "system"), ("gemma", "a tool's answer"), ("gemma3", "a tool's answer"),
    ("mistral", "system"), ("mistral", "a tool's answer"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_prompt_and_answer_are_the_templates_own(case, family, own):
    """The ids of the template's rendering of prompt and whole; one BOS, one end, and it is last."""
    prompt, answer, *tools = CASES[case]
    tools = tools[0] if tools else None
    if (family, case) in REFUSED:
        with pytest.raises(common.Refused, match="refuses"):
            common.encode_pair(own, prompt, [answer], tools=tools)
        return
    ids, written = common.encode_pair(own, prompt, [answer], tools=tools)
    rendered = {"tokenize": False, "tools": tools}
    opened = own.apply_chat_template(prompt, add_generation_prompt=True, **rendered)
    whole = own.apply_chat_template([*prompt, answer], **rendered)
    assert whole.startswith(opened)
    assert ids == own.encode(opened, add_special_tokens=False)
    assert ids == common.encode_prompt(own, prompt, tools=tools)
    row = own.encode(whole, add_special_tokens=False)
    assert ids + written == row[: len(ids + written)]
    ends = common.end_ids(own)
    assert ends == own.convert_tokens_to_ids([FAMILIES[family][0]])
    assert written[-1] in ends and not {*ends} & {*written[:-1]}
    assert (ids + written).count(own.bos_token_id) == (own.bos_token_id in row)
    behind = own.decode(row[len(ids + written) :]).replace(own.eos_token, "").replace("<s>", "")
    assert not behind.strip(), "only blanks and an EOS stand behind the end"


def test_keys_without_a_value_are_no_keys(family, own):
    """Loggers write {"tool_calls": [], "name": null}; `'tool_calls' in message` is true of it."""
    prompt, answer = CASES["two turns"]
    empty = {"tool_calls": [], "tool_call_id": None, "name": "", "reasoning_content": None}
    logged = [{**turn, **empty} for turn in [*prompt, answer]]
    assert common.encode_pair(own, logged[:-1], logged[-1:]) == common.encode_pair(
        own, prompt, [answer]
    )


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
    prompts = [CASES[case] for case in ("one turn", "two turns")]
    rows = [{"prompt": p, "chosen": [a], "rejected": [said("No.")]} for p, a in prompts]
    ends = common.end_ids(own)
    for row, theirs in zip(rows, ids_of_trl(own, rows, tmp_path), strict=True):
        prompt, *answers = theirs
        answers = [ids[: next(t for t, i in enumerate(ids, 1) if i in ends)] for ids in answers]
        assert common.encode_pair(own, *row.values()) == (prompt, *answers)


# ---- templates in which dialogues differ ----

OPENED = "<|im_start|>assistant\n"
DROPS = (  # R1 cuts thoughts out of the whole, and its prompt opens one
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|assistant|>"
    "{{ m.content.split('</think>')[-1] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
NO_END = (  # GLM 4
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TWICE = CHATML.replace("m['content'] }}<|im_end|>", "m['content'] }}<|im_end|><|end|>")
ODD = {  # template, answer; what of it is trained
    "rewritten prompt": (DROPS, THINK + "Early.", THINK + "Early.<|end|>"),
    "no end in the template": (NO_END, "Early.", "Early.<|end|>"),
    "a second end": (TWICE, "Early.", "Early.<|im_end|>"),
    "an end inside": (CHATML, "Is <|im_end|> HTML?", "Is <|im_end|>"),
    "trimmed": (CHATML.replace("m['content']", "m['content'] | trim"), "  Early. ", "Early.<|im_end|>"),
    "no template": (None, "Early.", " Early.<|end|>"),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_odd_templates(case):
    chat, answer, trained = ODD[case]
    tokenizer = tiny_tokenizer(template=chat)
    ids = common.encode_pair(tokenizer, [ASK], [said(answer)])[1]
    assert tokenizer.decode(ids) == trained


def test_tokens_that_take_in_blanks():
    """Phi 3's special tokens take in the line break behind them."""
    tokenizer = tiny_tokenizer(eos="<|endoftext|>", template=(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
    ))  # fmt: skip
    greedy = [
        AddedToken(f"<|{x}|>", rstrip=True, special=True) for x in ("user", "assistant", "end")
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": greedy})
    pair = common.encode_pair(tokenizer, [user("a")], [said("b")])
    assert [tokenizer.decode(ids) for ids in pair] == ["<|user|>a<|end|><|assistant|>", "b<|end|>"]


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
@pytest.mark.parametrize("prompt", ["Assess " * 9, [user("Assess " * 9)]], ids=["text", "messages"])
@pytest.mark.parametrize("in_template", [True, False])
def test_exactly_one_bos(in_template, prompt, limit):
    """The template and the post-processor each write one. Cut, the prompt loses it from its left."""
    chat = "{{ bos_token }}" * in_template + CHATML
    tokenizer = tiny_tokenizer(bos="<s>", add_bos=True, add_eos=True, template=chat)
    answer = "hold." if isinstance(prompt, str) else [said("hold.")]
    pair = common.encode_pair(tokenizer, prompt, answer, max_length=limit)
    has_one = limit is None and (in_template or isinstance(prompt, str))
    for ids in (common.encode_prompt(tokenizer, prompt, limit), sum(pair, [])):
        assert ids.count(tokenizer.bos_token_id) == has_one and len(ids) <= (limit or 999)
    assert pair[0].count(tokenizer.eos_token_id) == 0, (
        "an EOS that T5 appends would end the dialogue"
    )
