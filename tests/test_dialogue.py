"""From a dialogue to tokens, in the behaviour of the families that people train: what is trained is
what the model would have written, and prompt and answer are the template's rendering of the whole.

The templates are small ones that behave as the published ones do where dialogues differ: thoughts,
dates, system messages, blanks, ends, earlier turns.
"""

import json
import re
from dataclasses import dataclass

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import common
import sft
from common import UserError
from parts import dialogue, pairs, tokens
from parts.turns import continued_ids, encode_conversation
from tiny import SENTENCES, tiny_model, tiny_tokenizer

# special tokens
IM = "<|im_start|> <|im_end|> <|endoftext|>"
OSS = "<|start|> <|end|> <|message|> <|channel|> <|return|>"
# pieces of templates: the content of m without its thought, the thought, the last user's turn
BARE = "{% set c = m.content.split('</think>')[-1].lstrip('\n') %}"
THOUGHT = (
    "{% set t = '' %}{% if '</think>' in m.content %}"
    "{% set t = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}{% endif %}"
)
LAST = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
)


def template(turn, opening, head="", each="", tail=""):
    """A template: each message by its role (assistant's turn; the others as `each` says)."""
    others = each or "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    return (
        f"{head}{{% for m in messages %}}{{% if m.role == 'assistant' %}}{turn}{{% else %}}{others}"
        f"{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{opening}"
        f"{{% else %}}{tail}{{% endif %}}"
    )


ANSWER = "<|im_start|>assistant\n{{ m.content }}<|im_end|>\n"
OPEN = "<|im_start|>assistant\n"
PLAIN = template(ANSWER, OPEN)
LATEST = (  # a thought in the last answer, empty where there is none; earlier ones are dropped
    f"{THOUGHT}{BARE}<|im_start|>assistant\n{{% if loop.index0 > ns.last %}}<think>\n{{{{ t }}}}\n"
    "</think>\n\n{% endif %}{{ c }}<|im_end|>\n"
)
HEADER = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
DATED = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nToday: "
    "{{ strftime_now('%d %b %Y') }}\n\n<|eot_id|>"
)
HARMONY = "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
FINAL = (
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
)


@dataclass
class Family:
    """How a family writes. `pieces`: its tokenizer is sentencepiece, with ▁ in front of a text
    ("first") or behind each special token, too ("always")."""

    chat: str
    specials: str = IM
    eos: str = "<|im_end|>"
    bos: str | None = None
    pieces: str | None = None

    def tokenizer(self):
        make = sentencepiece if self.pieces else byte_level
        made = make(self, self.specials.split())
        made.date = "2026-03-09"
        return made


FAMILIES = {
    "smollm2": Family(
        template(ANSWER, OPEN, "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help."
                 "<|im_end|>\n{% endif %}")),
    "smollm3": Family(
        template(LATEST, OPEN, LAST + "<|im_start|>system\n{{ strftime_now('%d %B %Y') }}<|im_end|>"
                 "\n")),
    "qwen2.5": Family(template(ANSWER, OPEN, TOOLS)),
    "qwen3": Family(template(LATEST, OPEN, LAST + TOOLS)),
    "qwen3.5": Family(template(LATEST, OPEN + "<think>\n", LAST + TOOLS)),
    "qwen3.5, no thoughts": Family(
        template(LATEST, OPEN + "<think>\n\n</think>\n\n", LAST), eos="<|endoftext|>"),
    "lfm2.5": Family(
        template(f"{OPEN}{{% set c = m.content %}}{{% if loop.index0 < ns.last %}}{BARE}{{% endif %}}"
                 "{{ c }}<|im_end|>\n", OPEN, LAST)),
    "nemotron3": Family(
        template(f"{THOUGHT}{BARE}{OPEN}{{% if t %}}<think>\n{{{{ t }}}}\n</think>\n\n{{% else %}}"
                 "<think></think>{% endif %}{{ c }}<|im_end|>\n", OPEN + "<think>\n")),
    "glm4": Family(
        template("<|assistant|>\n{{ m.content }}", "<|assistant|>", "[gMASK]<sop>",
                 "<|{{ m.role }}|>\n{{ m.content }}"),
        "[gMASK] <sop> <|endoftext|> <|user|> <|assistant|> <|system|>", "<|endoftext|>"),
    "gpt-oss": Family(
        template(FINAL, "<|start|>assistant", "<|start|>system<|message|>"
                 "{{ strftime_now('%Y-%m-%d') }}<|end|>", HARMONY), OSS, "<|return|>"),
    "llama3": Family(
        template(HEADER, "<|start_header_id|>assistant<|end_header_id|>\n\n", DATED, HEADER),
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>", "<|eot_id|>",
        "<|begin_of_text|>"),
    "deepseek r1": Family(
        template(f"{BARE}<|Assistant|>{{{{ c }}}}{{{{ eos_token }}}}", "<|Assistant|><think>\n",
                 "{{ bos_token }}", "{% if m.role == 'user' %}<|User|>{% endif %}{{ m.content }}"),
        "<|User|> <|Assistant|> <|eos|> <|bos|>", "<|eos|>", "<|bos|>"),
    "phi3": Family(
        template("<|assistant|>\n{{ m.content }}<|end|>\n", "<|assistant|>\n", "",
                 "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n", "{{ eos_token }}"),
        "<|system|> <|user|> <|assistant|> <|end|> <|endoftext|>", "<|endoftext|>"),
    "gemma": Family(
        template(f"{ALTERNATE}<start_of_turn>model\n{{{{ m.content | trim }}}}<end_of_turn>\n",
                 "<start_of_turn>model\n", "{{ bos_token }}" + NO_SYSTEM,
                 ALTERNATE + "<start_of_turn>user\n{{ m.content | trim }}<end_of_turn>\n"),
        "<start_of_turn> <end_of_turn> <eos> <bos>", "<eos>", "<bos>", "first"),
    "mistral": Family(
        template(f"{ALTERNATE} {{{{ m.content | trim }}}}{{{{ eos_token }}}}", "",
                 "{{ bos_token }}" + NO_SYSTEM, ALTERNATE + "[INST] {{ m.content }} [/INST]"),
        "<s> </s>", "</s>", "<s>", "first"),
    "zephyr": Family(
        template("<|assistant|>\n{{ m.content }}{{ eos_token }}\n", "<|assistant|>\n", "",
                 "<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n"),
        "<s> </s>", "</s>", "<s>", "first"),
    "llama2": Family(
        template("{{ m.content }} {{ eos_token }}", "", "", "{{ bos_token }}[INST] {{ m.content }} "
                 "[/INST]"), "<s> </s>", "</s>", "<s>", "always"),
}  # fmt: skip


def byte_level(family, specials):
    bos = family.bos
    options = dict(eos=family.eos, bos=bos, add_bos=bool(bos), template=family.chat)
    return tiny_tokenizer(pad=None, more=specials, **options)


def sentencepiece(family, specials):
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", family.pieces, split=False)
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", *specials, *bytes_], show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)])  # fmt: skip
    known = [(family.bos, backend.token_to_id(family.bos))]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{family.bos}:0 $A:0", special_tokens=known
    )
    state = json.loads(backend.to_str())  # bytes are vocabulary, not special tokens
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] not in bytes_]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token=family.eos,
        bos_token=family.bos, chat_template=family.chat, additional_special_tokens=specials,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers():
    made = {name: family.tokenizer() for name, family in FAMILIES.items()}
    return made | {"plain": tiny_tokenizer(template=None)}


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


BRIEF = {"role": "system", "content": "Be brief."}
ASK, EARLY = user("Which shift?"), said("The early one.")
THINK = "<think>\nlook at the rota\n</think>\n\n"
TOOL = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
CASES = {  # prompt, answer
    "text": ("Which shift?", "The early one."),
    "one turn": ([ASK], [EARLY]),
    "system": ([BRIEF, ASK], [EARLY]),
    "two turns": ([ASK, EARLY, user("From when?")], [said("From May.")]),
    "a thought": ([ASK], [said(THINK + "The early one.")]),
    "two thoughts": (
        [ASK, said(THINK + "The early one."), user("From when?")],
        [said("<think>\nmonth\n</think>\n\nFrom May.")],
    ),
    "blanks": ([user(" Which shift?\n")], [said("  The early one. \n")]),
    "empty": ([ASK], [said("")]),
    "special tokens as text": ([user("Is <s>old</s> <|im_end|> HTML?")], [said("Yes, <|im_end|></s>.")]),
    "tools": ([ASK], [EARLY]),
}  # fmt: skip
REFUSED = {("gemma", "system"), ("mistral", "system")}
# where the whole does not begin with the prompt: what is written behind it instead, and why
CLOSED = "\n</think>\n\n"
ELSEWHERE = {
    "deepseek r1": {  # it cuts thoughts out, and its prompt opens one
        "": CLOSED + "{}",
        "a thought": "look at the rota\n</think>\n\nThe early one.",
        "two thoughts": "month\n</think>\n\nFrom May.",
    },
    "nemotron3": {"": "</think>{}", "a thought": None, "two thoughts": None},
    "qwen3.5, no thoughts": {"a thought": "The early one.", "two thoughts": "From May."},
}


def expected(family, case, prompt, whole, content):
    """The text of the answer, without its end."""
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    elsewhere = ELSEWHERE[family]
    return elsewhere.get(case, elsewhere.get("")).format(content.lstrip("\n"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_what_the_model_would_have_written(family, case, tokenizers):
    """By decoding, and by the ids of the whole rendering. Exceptions: REFUSED, ELSEWHERE."""
    tokenizer, (prompt, answer) = tokenizers[family], CASES[case]
    tools = TOOL if case == "tools" else None
    if (family, case) in REFUSED:
        with pytest.raises(UserError, match="the chat template refuses"):
            common.encode_pair(tokenizer, prompt, answer)
        return
    ids, written = common.encode_pair(tokenizer, prompt, answer, tools=tools)
    prompt, answer = dialogue.as_turns(tokenizer, prompt, answer)
    opened = dialogue.render(tokenizer, prompt, tools, add_generation_prompt=True)
    whole = dialogue.render(tokenizer, [*prompt, *answer], tools)
    opened, whole = (text.replace(tokens.MARK, "") for text in (opened, whole))
    assert ("search" in opened) == (bool(tools) and "tools" in tokenizer.chat_template)
    if case != "special tokens as text":  # a text that is rendered already is continued
        bos = [tokenizer.bos_token_id] if family == "zephyr" else []  # of the tokenizer alone
        assert common.encode_prompt(tokenizer, opened) == bos + ids
    assert ids == common.encode_prompt(tokenizer, prompt, tools=tools)
    tail = expected(family, case, opened, whole, answer[0]["content"])
    if not FAMILIES[family].pieces:  # sentencepiece decodes the blank in front of a text away
        assert tokenizer.decode(ids) == opened
    text = tokenizer.decode(ids + written[:-1])[len(tokenizer.decode(ids)) :]
    ends = {*common.end_ids(tokenizer)}
    assert written[-1] in ends and not ends & {*written[:-1]}
    # an end token, or (glm4) none; what stands behind it, a line break or an EOS, is not trained
    ending = dialogue.render(tokenizer, [ASK, said("ANSWER")]).rpartition("ANSWER")[2]
    assert text == tail.removesuffix(ending) + ending.partition(tokenizer.decode(written[-1:]))[0]
    if whole.startswith(opened) and case != "special tokens as text":
        row = tokenizer.encode(whole, add_special_tokens=False)
        assert row[: len(ids + written[:-1])] == ids + written[:-1]


# families that need several rows: they hide earlier thoughts; gpt-oss ends its last turn with another
# token, glm4 with none; what opens a thought in the prompt alone does not show it later
SEVERAL_ROWS = ("qwen3", "qwen3.5", "smollm3", "lfm2.5", "qwen3.5, no thoughts")
SEVERAL_ROWS += ("gpt-oss", "glm4", "deepseek r1", "nemotron3")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_turn_of_a_dialogue_is_trained_once(family, tokenizers):
    """In the row of the whole, or, where the template shows it otherwise later, in a row of its own:
    each with the prompt and the ids of the dialogue when it was its last turn."""
    tokenizer, trained = tokenizers[family], []
    if family == "llama2":  # every turn begins with a BOS
        assert tokenizer.encode("x")[0] == tokenizer.bos_token_id
    turns = [
        ASK,
        said(THINK + "The early one."),
        user("From when?"),
        said("From May."),
        user("Sure?"),
    ]
    turns.append(said("<think>\nyes\n</think>\n\nSure."))
    rows = encode_conversation(tokenizer, turns)
    for ids, mask in rows:
        for run in re.finditer("1+", "".join(str(int(on)) for on in mask)):
            trained.append((ids[: run.start()], ids[run.start() : run.end()]))
    alone = [common.encode_pair(tokenizer, turns[:i], [turns[i]]) for i in (1, 3, 5)]
    assert sorted(trained) == sorted(alone)
    assert (len(rows) > 1) == (family in SEVERAL_ROWS)


def test_the_date_is_fixed(tokenizers, monkeypatch):
    tokenizer, rendered = tokenizers["llama3"], []
    for today in ("2026-03-09", "2027-01-01", None):
        monkeypatch.setattr(tokenizer, "date", today)
        rendered.append(dialogue.render(tokenizer, [ASK]))
    assert "Today: 09 Mar 2026\n" in rendered[0] and "Today: 01 Jan 2027\n" in rendered[1]
    assert len({*rendered}) == 3, "without a date the clock's"


THINKER = "qwen3.5"
GRADED = [  # family, what was sampled behind its prompt, the answer's text, what is graded
    (THINKER, "hm\n</think>\n\nYes.<|im_end|>", "<think>\nhm\n</think>\n\nYes.", "\n\nYes."),
    (THINKER, "hm, and", "<think>\nhm, and", ""),
    ("qwen3", "<think>\nhm\n</think>\n\nYes.<|im_end|>", "<think>\nhm\n</think>\n\nYes.", "\n\nYes."),
    ("qwen3", "<think>\nhm", "<think>\nhm", ""),
    ("qwen2.5", "Yes.<|im_end|>", "Yes.", "Yes."),
    ("gpt-oss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"
     "Yes.<|return|>", "Yes.", "Yes."),
    ("gpt-oss", "<|channel|>analysis<|message|>hm", "", ""),
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mark_changes_no_other_token(family, tokenizers):
    """Ids between special tokens, of a text with a MARK where nothing is special: the plain ones."""
    tokenizer, special = tokenizers[family], FAMILIES[family].specials.split()[0]
    for text in ("the first", f"the first{special}the second", f"{special}the first{special}"):
        marked = text.replace("first", f"fi{tokens.MARK}rst").replace("sec", f"s{tokens.MARK}ec")
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokens.rendered_ids(tokenizer, marked) == ids


@pytest.mark.parametrize("family, sampled, text, graded", GRADED)
def test_what_is_graded(family, sampled, text, graded, tokenizers):
    """What the prompt opened counts; an unfinished thought is an empty answer, in every template."""
    tokenizer = tokenizers[family]
    ids = tokenizer.encode(sampled, add_special_tokens=False)
    prompt = common.encode_prompt(tokenizer, [ASK])
    assert dialogue.answer_texts(tokenizer, [prompt], [ids]) == [text]
    assert dialogue.visible(text) == graded
    if text and graded:  # a reward model reads the same tokens that were sampled
        assert common.encode_pair(tokenizer, [ASK], text)[1] == (
            ids if family != "gpt-oss" else common.encode_pair(tokenizer, [ASK], "Yes.")[1]
        )


def test_text_pairs_are_joined_as_they_stand(tokenizers):
    """The ids of the joined text, split behind the prompt's; where a token would span the seam the
    prompt's stay, and the answer has no blank of a first word."""
    llama = tokenizers["llama2"]
    llama = type(llama)(tokenizer_object=llama.backend_tokenizer, eos_token="</s>", bos_token="<s>")
    counts = dialogue.Counter()
    for prompt, answer in (("Tea?\n", "the one."), ("Tea? ", "the one."), ("", "the one.")):
        ids, written = common.encode_pair(llama, prompt, answer, counts=counts)
        assert llama.decode([*ids, *written], skip_special_tokens=True) == prompt + answer
        assert ids[0] == llama.bos_token_id and written[-1] == llama.eos_token_id
        if prompt:
            assert not llama.convert_ids_to_tokens(written[0]).startswith("▁")
    assert [*counts.values()] == [1]
    for text, answer in (("a </s> b", "b</s>."), ("<s>a", "b")):  # text, but for a BOS in front
        ids = sum(common.encode_pair(llama, text, answer), [])
        assert ids.count(llama.eos_token_id) == ids.count(llama.bos_token_id) == 1
        assert (
            llama.decode(ids).replace("<s> ", "<s>") == f"<s>{text.removeprefix('<s>')}{answer}</s>"
        )
    qwen = tiny_tokenizer(bos="<s>", template=None)  # which writes none
    assert common.encode_prompt(qwen, "<s>a")[0] == qwen.bos_token_id
    thought = common.encode_pair(llama, "Assistant: <think>\n", "<think>\nhm</think>Yes.")
    assert "<think>" not in llama.decode(thought[1])


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "search", "arguments": {"q": "</s>"}}}
    ],
}
NAME = "{% if m.tool_calls %}[{{ m.tool_calls[0].function.name }}]{% endif %}"
SYSTEM_LAST = (  # Mistral 7B v0.3: a system message stands in the last user's turn, if it is last
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "{{ m.content }}[/INST]{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
CALLED = "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}"
TEXT = "{% if m.tool_calls %}{{ '!' + m.tool_calls[0].function.arguments }}{% endif %}"
JSON_CALL = {**CALL, "tool_calls": [{"function": {"name": "f", "arguments": '{"city": "Ulm"}'}}]}
# the template's family, prompt and answer; what of it is trained; what is counted
USUAL = dict(family=Family(PLAIN), prompt=[ASK], answer=EARLY, trained="The early one.<|im_end|>",
             counted=[])  # fmt: skip
ODD = {  # what differs from USUAL
    "a template for each use": dict(
        family=Family({"default": PLAIN, "tool_use": template(ANSWER, OPEN, "tools")})),
    "a call that ends with a token of its own": dict(
        family=Family(
            template("{% if m.tool_calls %}<|start|>assistant to={{ m.tool_calls[0].function.name }}"
                     f"<|call|>{{% else %}}{FINAL}{{% endif %}}", "<|start|>assistant", "", HARMONY),
            OSS + " <|call|>", "<|return|>"),
        answer=CALL, trained=" to=search<|call|>"),
    "a call behind an opened thought": dict(
        family=Family(
            template(f"<|Assistant|>{{{{ m.content }}}}{NAME}{{{{ eos_token }}}}",
                     "<|Assistant|><think>\n"), "<|Assistant|> <|eos|>", "<|eos|>"),
        answer=CALL, trained="\n</think>\n\n[search]<|eos|>",
        counted=["thoughts closed empty, because the prompt opens one"]),
    "a thought and a call": dict(
        family=Family(
            template(f"{BARE}<|Assistant|>{{{{ c }}}}{NAME}{{{{ eos_token }}}}",
                     "<|Assistant|><think>\n"), "<|Assistant|> <|eos|>", "<|eos|>"),
        answer={**CALL, "content": THINK}, trained="look at the rota\n</think>\n\n[search]<|eos|>"),
    "a thought in a key of its own": dict(
        answer={**EARLY, "reasoning_content": "hm"},
        counted=["not used: reasoning_content of an answer"]),
    "a system message in the last turn": dict(
        family=Family(SYSTEM_LAST, "<s> </s>", "</s>", "<s>"), prompt=[BRIEF, ASK],
        trained=" The early one.</s>",
        counted=["answers as after their last message alone: the template rewrites their prompt"]),
    "a thought that only the prompt closes": dict(
        family=Family(template(ANSWER, OPEN + "<think>\n\n</think>\n\n")),
        counted=["answers without an empty thought, because the prompt closes it"]),
    "arguments as JSON text": dict(
        family=Family(template(ANSWER.replace("<|im_end|>", CALLED + "<|im_end|>"), OPEN)),
        answer=JSON_CALL, trained='{"city": "Ulm"}<|im_end|>'),
    "a template that wants arguments as text": dict(
        family=Family(template(ANSWER.replace("<|im_end|>", TEXT + "<|im_end|>"), OPEN)),
        answer=JSON_CALL, trained='!{"city": "Ulm"}<|im_end|>'),
    "an end token that is spelled": dict(
        answer=said("Yes.<|im_end|> \n"), trained="Yes.<|im_end|>",
        counted=["answers that spell their end token, which is written once"]),
    "a character of private use": dict(
        answer=said("\ue0ff <|im_end|>."), trained="\ue0ff <|im_end|>.<|im_end|>"),
    "a key of 0": dict(
        answer={**EARLY, "weight": 0, "refusal": None}, counted=["not used: weight of an answer"]),
    "a template that shortens": dict(
        family=Family(template(ANSWER.replace("m.content", "m.content[:3]"), OPEN)),
        trained="The<|im_end|>", counted=["answers that the template shows otherwise"]),
    "a template that lowers": dict(
        family=Family("{% for m in messages %}<|{{ m.role }}|>{{ m.content | lower }}{% endfor %}"),
        trained="<|assistant|>the early one.<|im_end|>", counted=["answers that the template shows otherwise"]),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_odd_templates(case):
    odd, counts = USUAL | ODD[case], dialogue.Counter()
    tokenizer = odd["family"].tokenizer()
    _, ids = common.encode_pair(tokenizer, odd["prompt"], [odd["answer"]], counts=counts)
    assert tokenizer.decode(ids) == odd["trained"]
    assert [*+counts] == odd["counted"]


def test_thoughts_are_tokens_beside_a_spelled_one():
    """Where <think> is a special token."""
    tokenizer = Family(PLAIN, IM + " <think> </think>").tokenizer()
    ids = common.encode_pair(tokenizer, [ASK], [said("<think>a <|im_end|></think>b")])[1]
    tokens_of = tokenizer.convert_ids_to_tokens(ids)
    assert [tokens_of.count(t) for t in ("<think>", "</think>", "<|im_end|>")] == [1, 1, 1]


IDS = (  # Mistral v0.3: whatever stands behind a call, and its result, needs the id
    "{% for m in messages %}{% if (m.tool_calls or m.role == 'tool') and not (m.tool_call_id or "
    "m.tool_calls[0].id) %}{{ raise_exception('no id') }}{% endif %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{{ m.tool_calls[0].id if m.tool_calls }}{{ m.tool_call_id }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = [{"id": "abcdefghi", "function": {"name": "f", "arguments": {}}}]
HISTORY = [ASK, {**said(""), "tool_calls": CALLS},
           {"role": "tool", "content": "12", "tool_call_id": "abcdefghi"}]  # fmt: skip
HIDES = template(ANSWER, OPEN, each="{% if m.role == 'user' %}{{ m.content }}{% endif %}")
DEFAULT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
)
SHOWS_TOOLS, TOOLS_AS_TEXT = FAMILIES["qwen2.5"].chat, {"tools": json.dumps(TOOL)}
UNREAD = {  # template, prompt, a row's columns; what is counted
    "a template that wants a key": (IDS, HISTORY, {}),
    "a system message": (HIDES, [BRIEF, ASK], {}, "system message of a prompt"),
    "a developer's": (HIDES, [{**BRIEF, "role": "developer"}, ASK], {},
                      "developer message of a prompt"),
    "the default system message": (template(ANSWER, OPEN, DEFAULT), [BRIEF, ASK], {}),
    "a name": (HIDES, [ASK, EARLY, {**ASK, "name": "kim"}], {}, "name of a prompt"),
    "tools as text": (SHOWS_TOOLS, [ASK], TOOLS_AS_TEXT),
    "no tools as text": (SHOWS_TOOLS, [ASK], {"tools": "[]"}),
    "tools as text, hidden": (HIDES, [ASK], TOOLS_AS_TEXT, "column tools"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREAD)
def test_what_of_a_prompt_is_not_read(case):
    """One rule for columns, messages and their keys: the template shows it, or it is counted. Of a
    dialogue to imitate all turns are read."""
    chat, prompt, columns, *counted = UNREAD[case]
    tokenizer, counts = Family(chat).tokenizer(), dialogue.Counter()
    tools = pairs.count_unread(tokenizer, prompt, columns, counts)
    assert [*+counts] == [f"not used: {name}" for name in counted]
    assert (tools or None) == (TOOL if case == "tools as text" else None)
    row = {"messages": [*prompt, EARLY], **columns}
    (ids, _), *_ = sft.encode_row(tokenizer, row, 999, counts)[0]
    assert [*(+counts).values()] == [2] * len(counted)
    assert ids[-1] in common.end_ids(tokenizer)


def test_tools_that_are_no_json():
    with pytest.raises(dialogue.Refused, match='"tools" is a text, but not JSON'):
        pairs.count_unread(tiny_tokenizer(), [ASK], {"tools": "search"}, dialogue.Counter())


def test_tokens_that_take_in_blanks():
    """Phi 3's special tokens take in the line break behind them, beside a spelled one, too."""
    phi3 = FAMILIES["phi3"]
    tokenizer = tiny_tokenizer(eos=phi3.eos, template=phi3.chat, more=("<unk>",))
    greedy = [AddedToken(x, rstrip=True, special=True) for x in phi3.specials.split()[:-1]]
    tokenizer.add_special_tokens({"additional_special_tokens": greedy})
    for asked, answered, texts in (
        ("a", "b", ["<|user|>a<|end|><|assistant|>", "b<|end|>"]),
        (
            "a <|end|>",
            "b <|end|> c",
            ["<|user|>a <|end|><|end|><|assistant|>", "b <|end|> c<|end|>"],
        ),
    ):
        rows = common.encode_pair(tokenizer, [user(asked)], [said(answered)])
        assert [tokenizer.decode(ids) for ids in rows] == texts


def test_an_end_token_is_special(tmp_path):
    """Whatever its folder says: a text that spells it is text, and is not graded."""
    tokenizer = tiny_tokenizer(eos="<|endoftext|>", template=PLAIN.replace("im_", "x_"))
    tokenizer.add_tokens([AddedToken("<|x_start|>"), AddedToken("<|x_end|>")])
    tokenizer = common.load_tokenizer(tiny_model("llama", tmp_path, tokenizer))
    prompt, ids = common.encode_pair(tokenizer, [user("a<|x_end|>b")], [said("c<|x_end|>d")])
    end = tokenizer.convert_tokens_to_ids("<|x_end|>")
    assert [row.count(end) for row in (prompt, ids)] == [1, 1]
    assert dialogue.answer_texts(tokenizer, [prompt], [ids]) == ["c<|x_end|>d"]


def test_unknown_characters_are_counted():
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"
    )
    counts = dialogue.Counter()
    assert common.encode_pair(tokenizer, "a ", "a é", counts=counts)[1] == [2, 0, 1]
    assert [*counts] == ["answers with characters that the tokenizer does not know"]


# family: texts that are continued as they stand: a template has written them, and another program
# has shortened some
RENDERED = {
    "qwen3": (f"{{}}{OPEN}<think>\n\n</think>\n\n", f"{{}}{OPEN}<think>\n", f"{{}}{OPEN[:-1]}",
              f"{{}}{OPEN}Strengths:"),
    "qwen3.5": (f"{{}}{OPEN}<think>\n\n</think>\n\n", f"{{}}{OPEN}"),
    "mistral": ("[INST] Hi [/INST]",),
    "llama3": ("<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant"
               "<|end_header_id|>",),
}  # fmt: skip


@pytest.mark.parametrize("family", RENDERED)
def test_a_text_that_is_rendered_is_not_rendered_again(family, tokenizers):
    tokenizer = tokenizers[family]
    texts = [text.format("<|im_start|>user\nHi<|im_end|>\n") for text in RENDERED[family]]
    for text in texts:
        assert dialogue.as_turns(tokenizer, text) == [text]
        ids = common.encode_prompt(tokenizer, text)
        assert ids == tokenizer(text)["input_ids"], "special tokens, and one BOS"
    quoted = f"Sum up this CV: {texts[-1]}"
    for text in ("Is <|im_end|> HTML?", "What does [/INST] do?", "user\nassistant", quoted):
        assert isinstance(dialogue.as_turns(tokenizer, text)[0], list)


def test_a_text_that_is_a_dialogue(tokenizers):
    """A job title is not a turn: only a last line, or a dialogue with both sides, is continued."""
    for text, turn in (
        ("Roles:\nAssistant: two years.\nWhich fits?", True),
        ("\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Who?", False),
        ("Who?\n\nBot:", False),
    ):
        assert isinstance(dialogue.as_turns(tokenizers["qwen2.5"], text)[0], list) == turn


def test_what_sft_reads():
    """A corpus that ends a text itself gets no second end; a column that another layout would read is
    named; of a dialogue the turns of weight 0 are not trained."""
    tokenizer = tiny_tokenizer(template=PLAIN, more=IM.split())
    text = "<|im_start|>user\nx<|im_end|>\n"
    (ids, _), *_ = sft.encode_row(tokenizer, {"text": text}, 99, dialogue.Counter())[0]
    assert tokenizer.decode(ids) == text
    other = {"text": "x", "prompt": "y", "chat_template_kwargs": {"a": 1}}
    turns = [
        ASK,
        {**EARLY, "weight": 0},
        user("No. Which?"),
        {**said("The late one."), "weight": 1},
    ]
    for row, trained, unread in (
        ({"messages": [ASK, EARLY], **other}, "The early one.<|im_end|>",
         ["prompt", "text", "chat_template_kwargs"]),
        ({"messages": [*turns, ASK]}, "The late one.<|im_end|>", []),
    ):  # fmt: skip
        counts = dialogue.Counter()
        ((ids, mask),) = sft.encode_row(tokenizer, row, 999, counts)[0]
        assert tokenizer.decode([i for i, on in zip(ids, mask) if on]) == trained
        assert [*+counts] == [f"not used: column {name}" for name in unread]


ABSENT = {"prompt": None, "text": None}  # null is no column


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"prompt": "x", "completion": "y", "label": False}, "label false"),
        ({"messages": [ASK, EARLY], **ABSENT, "label": False}, "label false"),
        ({"messages": [ASK, {**EARLY, "weight": 0}]}, "weight 0"),
        ({"prompt": [ASK], "completion": [{**EARLY, "train": False}]}, "weight 0"),
        ({"prompt": [ASK], "chosen": [{**EARLY, "loss": False}], "rejected": [said("No.")]}, "weight 0"),
        ({"messages": [{**ASK, "train": False}, {**EARLY, "train": True}], **ABSENT, "label": True}, None),
        ({"prompt": [ASK], "completion": [CALL]}, None),  # an answer, though it has no text
        ({"messages": [ASK, CALL]}, None),
        ({"messages": [ASK, said(" \n")]}, "blank"),
    ],
)  # fmt: skip
def test_bad_answers_are_not_imitated(row, reason):
    sft.check_row(row)
    assert (reason or "") in row.get("drop", "") and ("drop" in row) == bool(reason)
    assert "text" not in row and sft.form_of(row) in row


def test_a_blank_turn_is_not_imitated():
    """ShareGPT and WildChat hold some: the model learned to end at once where one stood."""
    tokenizer, counts = tiny_tokenizer(template=PLAIN, more=IM.split()), dialogue.Counter()
    row = {"messages": [ASK, said(""), user("Which?"), EARLY, user("No. Which?"), said(" ")]}
    sft.check_row(row)
    ((ids, mask),) = sft.encode_row(tokenizer, row, 999, counts)[0]
    assert tokenizer.decode([i for i, on in zip(ids, mask) if on]) == "The early one.<|im_end|>"
    assert counts["answers that are blank, not trained"] == 2


def test_keys_that_no_template_shows_cost_one_rendering(monkeypatch):
    """WildChat has nine beside role and content: with one rendering for each key of each message a
    pair behind 20 of them took a quarter of a second, three times what it takes with two."""
    tokenizer, renderings = tiny_tokenizer(template=PLAIN, more=IM.split()), []
    whole = tokenizer.apply_chat_template
    monkeypatch.setattr(
        tokenizer, "apply_chat_template", lambda *a, **k: renderings.append(1) or whole(*a, **k)
    )
    more = {key: "x" for key in "language country state header".split()}
    messages = [{**turn, **more} for turn in [ASK, EARLY] * 10]
    unread = dialogue.unread_keys(tokenizer, messages, range(20))
    assert unread == sorted(more) and len(renderings) == 2
    messages[1] = CALL | more  # one key is shown
    tokenizer.chat_template = template(CALLED + ANSWER, OPEN)
    assert dialogue.unread_keys(tokenizer, messages, range(20)) == sorted(more)


def test_texts_that_are_none():
    """Blank ones (a third of WikiText) ended the run and were called a row of another layout. Rows of
    OpenAssistant are single messages: each was a text by itself, those of the users, too."""
    row = {"text": " \n"}
    sft.check_row(row)
    assert row["drop"] == "the text is blank"
    with pytest.raises(ValueError, match='"messages"'):
        sft.check_row({"text": "Can you write?", "role": "prompter", "parent_id": None})


def end_of(tokenizer):
    return dialogue.template_end(tokenizer) or dialogue.text_end(tokenizer)


SAMPLED = [("plain", text) for text in (" Yes.", "\nYes.", "")] + [
    (family, text) for family in (THINKER, "nemotron3", "deepseek r1") for text in ("hm", "hm\n")
]


@pytest.mark.parametrize("family, sampled", SAMPLED)
def test_a_reward_model_reads_what_was_sampled(family, sampled, tokenizers):
    """Through a text, and a template or none: the same ids, with an unfinished thought, too."""
    tokenizer = tokenizers[family]
    ids = [*tokenizer.encode(sampled, add_special_tokens=False), end_of(tokenizer)]
    (text,) = dialogue.answer_texts(tokenizer, [common.encode_prompt(tokenizer, [ASK])], [ids])
    assert common.encode_pair(tokenizer, [ASK], text)[1] == ids


@pytest.mark.parametrize("family", "smollm2 qwen2.5 llama3 zephyr gemma llama2 plain".split())
def test_a_dialogue_goes_on_behind_what_was_sampled(family, tokenizers):
    """The sampled ids stay, and one end of turn stands between them and the next message."""
    tokenizer, answer = tokenizers[family], " " * (family == "plain") + "Yes."
    ids = common.encode_prompt(tokenizer, [ASK]) + tokens.behind_guard(tokenizer, answer)
    end, turns = end_of(tokenizer), [said(answer), user("From when?")]
    whole = common.encode_prompt(tokenizer, [ASK, *turns])
    for sampled in ([*ids, end], ids):  # the second one was cut
        longer = continued_ids(tokenizer, [ASK], turns, sampled)
        assert longer[: len(sampled)] == sampled and longer[-8:] == whole[-8:]
        assert longer.count(end) == whole.count(end)


def test_refused_dialogues_are_counted_together():
    """Each length of a dialogue was a reason of its own: a line of counts longer than the screen."""
    tokenizer, reasons = tiny_tokenizer(template=NO_SYSTEM + BARE), set()
    for n in range(2, 6):
        with pytest.raises(dialogue.Refused) as error:
            dialogue.render(tokenizer, [BRIEF, *[ASK, EARLY] * n])
        reasons.add(str(error.value))
    assert len(reasons) == 1 and all("'system', 'user', 'assistant'" in x for x in reasons)
