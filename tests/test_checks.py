"""The checks in checks/: what passes, what only looks as if it did, what is refused."""

import json
import os
import random
import re
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
from checks.answers import math_answer
from checks.instructions import decide, passes
from checks.maths import verdict
from checks.programs import run_tests

import judge
from checks import instructions, risky
from conftest import REPO
from judge import read_criterion
from tiny import error_of

sys.path.insert(0, str(REPO / "data"))


def holds(check, answer, mode="strict", /, **arguments):
    criterion = read_criterion({"check": check, **arguments}, allow_code=True)
    return passes(criterion, answer, mode)


VERDICTS = {"+": True, "-": False, "?": None}
# id and arguments; + answers that pass, - answers that do not, ? answers that are not decided
TABLE = r"""
keywords:existence {"keywords": ["art", "C++"]}
+ ["Art and c++.", "(art), C++!"] - ["start, C++", "art and C", "artful c++"]
keywords:existence {"keywords": ["审计", "SQL"]}
+ ["她领导过审计，会SQL。"] - ["她领导过审核，会SQL。", "审计MySQL"]
keywords:existence {"keywords": ["감사"]}
+ ["그녀는 감사를 이끌었다."] - ["그녀는 갔다."]
keywords:existence {"keywords": ["東京", "กาแฟ"]}
+ ["私は東京に住む。ฉันชอบกาแฟมาก"] - ["京都とกา"]
keywords:existence {"keywords": ["कर"]}
+ ["कर दो", "(कर)"] - ["करती", "मकर"]
keywords:forbidden_words {"forbidden_words": ["年龄"]}
+ ["您好"] - ["请问您的年龄是多少？"]
keywords:frequency {"keyword": "茶", "frequency": 2, "relation": "exactly"}
+ ["茶と茶"] - ["茶"]
keywords:forbidden_words {"forbidden_words": ["art", "a b"]}
+ ["start", "a  c b"] - ["Start: ART.", "x, A B."]
keywords:frequency {"keyword": "to do", "frequency": 2, "relation": "at least"}
+ ["To do, to do", "to do. To do. to do"] - ["to do todo", "to do"]
keywords:forbidden_words {"forbidden_words": ["don't", "caf\u00e9", "salary", "New York", "follow-up"]}
+ ["Do not know.", "cafe", "salaryman", "NewYork"] - ["you don\u2019t know", "cafe\u0301", "sal\u00adary", "sal\u200bary", "\uff53alary"]
- ["New\u00a0York", "New\nYork", "a follow\u2011up"]
keywords:existence {"keywords": ["don\u2019t", "cafe\u0301", "Java", "2 %"]}
+ ["Don't go to a caf\u00e9 for Java\u2122 at 2\u00a0%."] - ["Don't go to a cafe for Java at 2 %."]
keywords:frequency {"keyword": "12", "frequency": 2, "relation": "exactly"}
+ ["12, 12", "10-12 and 12-15", "No.12 of 12.", "共12人, 12%", "12/31, 3/12"] - ["12, 12.5"]
keywords:letter_frequency {"letter": "E", "let_frequency": 2, "let_relation": "exactly"}
+ ["eE", "see"] - ["e", "eee", "a"]
length_constraints:number_words {"num_words": 3, "relation": "less than"}
+ ["one two", "don't"] - ["one two three", "I don't"]
length_constraints:number_words {"num_words": 3, "relation": "more than"}
+ ["a b c d"] - ["a b c"]
length_constraints:number_words {"num_words": 3, "relation": "at most"}
+ ["a b c"] - ["a b c d"]
length_constraints:number_words {"num_words": 3, "relation": "exactly"}
+ ["वह ऑडिट करती", "می\u200cخواهم تو را", "cafe\u0301 au lait"] ? ["她会SQL", "ฉันชอบกาแฟ"] - ["她会审计工作。她走。她来。她", "是"]
length_constraints:number_words {"num_words": 9, "relation": "at most"}
+ ["她会SQL和审计", "a b"] ? ["她会SQL和审计工作以及更多"] - ["她 会 她 会 她 会 她 会 她 会"]
length_constraints:number_sentences {"num_sentences": 2, "relation": "exactly"}
+ ["A b. C?", "v1.2 works. Fine", "She said \"I led it.\" Then she left.", "She led (two of them.) She knows SQL."]
+ ["**She led audits.** She knows SQL.", "1. She led audits.\n2. She knows SQL.", "She waited… Then she led."]
+ ["Dr. Ode led it. She left.", "J. R. Ode led, e.g. audits, at Acme Inc. She left? No", "She led... and left. Bye", "Go! 🎉 Now!", "Has a Ph.D. in law. Left.", "Has a B.Sc. He left."]
+ ["她领导过审计。她会SQL。", "वह ऑडिट करती है। वह SQL जानती है।", "هل تعرفين؟ نعم.", "彼女は「はい。」と言った！", "`a.` _B._", "What?! Now."]
+ ["『行く。』彼女は去った。", "She led it.[1] She left.[2]", "»Ja.« Sie ging.", "2) She led it.\n10) She left."]
- ["A b.", "A. B. C.", "She led v1.2.3 at example.com.", "One. Two. Three.", "好。好。好。"] ? ["เธอไป เธอมา"]
length_constraints:number_paragraphs {"num_paragraphs": 2}
+ ["a\n***\nb", "***\na *** b\n***"] - ["a", "a *** *** b", "a***", "***", "a***b***c"]
length_constraints:number_paragraphs {"num_paragraphs": 3}
- ["a *** *** b"]
length_constraints:nth_paragraph_first_word {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "don't"}
+ ["a\n\nDon't go", "a b\n \n\n'don't'", "a\n\nDon\u2019t go"]
+ ["a\n\n\n\ndon't", "a\n\nDON'T, go"]
- ["a\n\n**don't**", "a\n \ndon't"]
- ["a\n\ndon go", "don't\n\na", "a\nDon't", "a\n\nb\n\ndon't", "a\n\ndon'ts"]
detectable_format:number_bullet_lists {"num_bullets": 2}
+ ["* a\n- b", "x\n  - a\n- **b** c"]
- ["- a", "---\n- a\n**b**", "- a\n- b\n- c", "a - b\nc * d", "- - -\n- a"]
detectable_format:json_format {}
+ ["{\"a\": 1}", "```json\n[1]\n```", " [] ", "```json{\"a\": 1}```", "```\n{}```"] - ["1", "\"a\"", "so: {}", "{\"a\": NaN}x", "{"]
json:keys {"keys": ["a", "b"]}
+ ["{\"a\": 1, \"b\": null, \"c\": 2}"]
- ["{\"a\": 1}", "[\"a\", \"b\"]", "{\"x\": {\"a\": 1, \"b\": 2}}"]
detectable_format:title {}
+ ["<<A title>>\ntext", "<<a>b>>"] - ["<< >>", "<<>>", "<a>", "<<a\nb>>"]
detectable_format:constrained_response {}
+ ["Well. My answer is no."] - ["My answer is no", "My answer is sure.", "my answer is no."]
detectable_format:number_highlighted_sections {"num_highlights": 2}
+ ["*a* and **b c**", "*a*\n*b*"]
- ["*a*", "**a**", "**** and ** **", "* a\n* b", "*a\nb*", "*a* and * *"]
detectable_format:multiple_sections {"section_spliter": "Part", "num_sections": 2}
+ ["Part 1 a\nPart 2 b"]
- ["Part 1 a", "Part 1\nPart 2", "Apart 1 x, apart 2 y", "Part one, Part two"]
detectable_content:number_placeholders {"num_placeholders": 2}
+ ["[name], [date]"] - ["[name]", "[] []", "[a\nb] [c]"]
detectable_content:postscript {"postscript_marker": "P.S."}
+ ["**P.S.** Bring your ID.", "a\n*P.S.* b", "a\n> _P.S. b_"]
+ ["a\nP.S. b", "a\n  p. s. b"] - ["a P.S. b", "a\nPS b", "a\nP.P.S. b"]
detectable_content:postscript {"postscript_marker": "P.P.S"}
+ ["a\n_P.P.S_ b", "a\nP.P.S b", "a\nP. P. S. b"] - ["a\nP.S. b", "a\nP.P.Sample"]
startend:end_checker {"end_phrase": "Over to you."}
+ ["So: over to you.", "I say \"Over to you.\"\n"]
- ["Over to you.", "\"Over to you.\"", "Over to you. So", "... over to you."]
startend:end_checker {"end_phrase": "Don't wait."}
+ ["So don\u2019t wait.", "So: \u201cDon't\u00a0wait.\u201d"] - ["So wait."]
startend:quotation {}
+ ["\"a b\"", " \"a \"b\" c\"\n", "“Hire her.”", "„Ja.“", "« Oui »", "「はい」"] - ["“a” b", "“”", "«a”"] - ["\"a\" b", "\"", "\"\"", "\" \"", "'a'"]
change_case:english_lowercase {}
+ ["a b 1."] - ["A b", "1 2.", "İ"]
change_case:english_capital {}
+ ["A B 1."] - ["A b", "1 2."]
change_case:capital_word_frequency {"capital_frequency": 2, "capital_relation": "at least"}
+ ["SQL and HR", "I am A.", "A/B, C-D"] - ["Sql and HR", "12 HR", "SQL-HR", "U.S. law"]
punctuation:no_comma {}
+ ["a b", "<think>a, b</think>c, d</think>e", "好。"] - ["a, b", "她会SQL，很好。", "苹果、梨", "نعم، لا"]
keywords:existence {"keywords": ["sql"]}
- ["<think>sql</think>no", "sql</think>no"]
keywords:existence {"keywords": ["sorry"], "negate": true}
+ ["hello"] - ["sorry"]
text:max_chars {"max_chars": 3.0}
+ ["abc"] - ["abcd"]
combination:repeat_prompt {"prompt_to_repeat": "Say hi."}
+ ["say hi. Hi!"] - ["Say hi.", "Hi! Say hi.", "Say hi. \n"]
combination:two_responses {}
+ ["a\n******\nb", "******\na ****** b\n******"] - ["a ****** a", "a ******", "a", "a ****** b ****** c"]
regex:match {"pattern": "\\bhire\\b"}
+ ["we hire"] - ["we hired", "Hire"]
regex:absent {"pattern": "\\bhire\\b"}
+ ["we hired"] - ["we hire"]
text:contains {"answer": "New York"}
+ ["In new york."] - ["New Yorker", "York"]
text:contains {"answer": "北京"}
+ ["他住在北京市。"] - ["他住在南京市。"]
text:contains {"answer": 12}
+ ["It is 12."] - ["It is 112."]
+ ["12", "It is 12, so.", "$12.00", "(12)", "- 12", "COVID-12", "12.\n5"]
- ["12.5", "12,000", "0.12", "-12", "\u221212", ".12", "12,5", "12 000", "12'000", "12/5", "1,012", "twelve"]
text:contains {"answer": -1200}
+ ["-1200", "It is \u22121,200.0"] - ["1200", "5-1200", "-1200.5", "-12,001,200"]
interview:question_count {"num_questions": 2, "relation": "exactly"}
+ ["How? Why?", "Tell me about it, and what came of it."] - ["How?", "How? And why? Who?", "Well."]
interview:no_risky_question {}
+ ["How did you sell it?", "I can't ask about your age."]
- ["How old are you?", "Fine. Are you married?", "How old are you? Wie alt sind Sie?"]
? ["Sind Sie schwanger?", "¿Está usted casada?", "Avez-vous des enfants ?", "您多大年纪？", "كم عمرك؟"]
? ["Thanks for coming. Sind Sie schwanger?", "Bitte nennen Sie Ihr Alter."]
""".strip()
ROWS = []  # (id, arguments, {answer: verdict})
for line in re.sub(r"\] ([-?]) \[", r"]\n\1 [", TABLE).split("\n"):
    word, _, value = line.partition(" ")
    if word in VERDICTS:
        ROWS[-1][2].update(dict.fromkeys(json.loads(value), VERDICTS[word]))
    else:
        ROWS.append((word, json.loads(value), {}))
ROWS.append(("detectable_format:json_format", {}, {"[" * 100_000: False}))


# spellings, one answer after each |; the habits are those of GSM8K, MATH, MMLU, ARC, Minerva,
# lm-evaluation-harness, lighteval, R1, chat models and SmolLM2-135M
SPELLINGS = r"""
12
+ \boxed{12} | #### 12 | Il totale è 12. | Die Antwort lautet 12. | 答えは12です。 | 答案为12元 | A: 12 | n=12 | = 12 | The answer is 13. Oh wait, I made a mistake. The answer is 12. | The answer is 24/2. | There are 3 answers: 12. | \boxed{12 \mbox{ inches}^2} | \boxed{\approx 12} | She makes 4*3 = $<<4*3=12>>12.\n#### 12 | The answer is $ 12 . | I am sure that the answer is 12. Any other answer is wrong. | The answer is 12. | **12** | x = 12 | 12 | Answer: 12 | **Answer:** 12 | **Answer: 12** | The answer is **12**. | The final answer is: $\boxed{12}$. I hope it is correct. | <answer>12</answer> | <think>x</think><answer> 12 </answer> | The answer is $12. | Answer: $12$ | The answer is 12, which is right. | The answer is 12 because 3*4 = 12. | Final Answer: 12 | ### Answer\n12 | ### Final Answer:\n\n**12** | The answer is:\n\[ x = 12 \] | #### 12 dollars | So, the solution to x + 7 = 19 is x = 12. | So, the answer is x = 12. | Simplify 24/2: 12. | 100 divided by 8 equals 12. | Done.\nThe result is 12 | \boxed{\text{12 apples}} | \boxed{\boxed{12}} | \fbox{12} | \boxed 12 | $\boxed{x=12}$ | So 5 + 7 = 12. | Therefore, x = 12. | So the total is **12**. | Thus the answer is 12 apples (a dozen). | The answer is twelve. | 12.0 | 12. | 12!\n | Sum: 12 | answer = 12 | The answer to the question is 12. | The correct answer is 12. | La respuesta es 12. | Die Antwort ist 12. | La réponse est 12. | 答案是12 | 答案：12 | Answer: There are 12 apples left. | Answer: She pays $12 in total. | ANSWER: 12 | So the number of clips is 12. | 7\n#### 12\n | The final result is 12. | {"answer": 12} | {"answer": "12"} | The answer is \(12\). | The answer is about 12. | 12 apples | So, 60/5 is equal to 3 * 4 = 12 candidates. | \boxed{12\%} | 5 = 5, so \boxed{3} no, \boxed{12} | The answer is 12 - as shown. | Answer: 12 (twelve) | \[\boxed{12}\] | The answer is 12.00 dollars. | <answer>\boxed{12}</answer> | <answer>$\boxed{12}$</answer> | <answer>The answer is 12.</answer> | <answer>The answer is 12, so it is.</answer> | I put it into \boxed{}. The answer is 12. | \boxed{12} (in \boxed{} as asked) | The answer is 12 and not 13. | The answer is 12, not 13. | The answer is 12 rather than 13. | \boxed{12 \pmod{13}}
- 15 - 28 is 15 - 28 = 1. | The answer is between 10 and 12. | \boxed{1,2} | The answer is x = 12 or y = 3 | \boxed{} | Answer: | No answer. | \boxed{12\text{ or }13} | The answer is: 2 | 7 times 8 equals 54. | So, the new offer is $160,000. | \boxed{13} | #### 13 | The answer is 13. | The answer is 13, not 12. | 13 | x = 13 | I do not know. | \boxed{12} so \boxed{13} | The answer is 12 or 13. | The answer is 1 2/3. | #### 112 | \boxed{12, 13} | The answer is -12. | \boxed{12^2} | It is 13. | \boxed{0.12} | The answer is 120. | The answer is 1.2. | \boxed{12 000} | \boxed{12 million} | #### 12/5 | \boxed{-12} | \boxed{12e2} | (12, 13) | 12 or 13 | <answer>\boxed{13}</answer> | <answer>The answer is 13.</answer> | \boxed{} \boxed{} | \boxed{13} (in \boxed{}) | The answer is 13 and not 12. | <answer>\boxed{12</answer>
? #### answer\n#### answer | Answer:\nStep 1: we multiply.\nTotal = 12 | The answer is: Let x = 5. Then y = 12. | Answer: To get 13, add 1 to 12. | The answer is 12 or more. | \boxed{1 2} | Answer: 720 minutes | The answer is 12. Wait, no, it is 13. | The answer is 12.\nActually, it is 13. | She has 12 left. | Answer - 12 | \boxed{12x} | \boxed{12!} | \boxed{3*4} | \boxed{zwölf} | The answer is less than 12. | The answer is 12 times 5. | She gets twelve of them. | \boxed{12 \cdot k} | The answer is not 12. | There were 12 at first and 3 later left. | 2 dozen of them | \boxed{12}. Wait, it must be 13. | The answer is 12 and a half. | \boxed{12:1} | The answer is 12x. | The answer is 12k. | The answer is $12k. | The answer is 12 тысяч рублей. | Die Antwort ist 12 Millionen Euro, glaube ich. | <answer>12. Wait, it is 13</answer> or so | \boxed{12 \text{ and not } 13} | \boxed{12, \text{ but not } 13}
1/2
+ \boxed{0.5} | 1/2 | \boxed{1} no, \boxed{\frac12} | #### 0.50 | $\boxed{\dfrac{1}{2}}$. | The answer is ½. | The answer is .5 | The probability is \frac{1}{2}. | p = 1/2 | The answer is $\frac{1}{2}$. | Answer: $$\frac{1}{2}$$ | The answer is 1/2 hour.
- \boxed{0.5 | \boxed{0.5} or \boxed{2} | #### 2 | \boxed{1 1/2} | \boxed{1\frac12} | 5 | The answer is 2.
? \boxed{50%} | It is one half. | Then 1/2 of them left. | Then \frac12 of them left. | \boxed{2-1/2}
-3
+ \boxed{-3} | The answer is -3. | The answer is negative 3. | The answer is minus three. | #### -3 | The answer is −3. | x = -3 | $x=-3$ | \boxed{x = -3}
- \boxed{3} | The answer is 3. | #### 3 | 5-3
1,2
+ \boxed{1, 2} | \boxed{2,1} | \boxed{1} and \boxed{2} | The answer is 1 and 2. | x = 1 or x = 2 | The solutions are x = 1 and x = 2. | \boxed{x=1, x=2} | \boxed{\{1,2\}} | The answer is x = 1, x = 2.
- \boxed{1} | \boxed{1,3} | \boxed{1,2,3}
? \boxed{(1,2)} | \boxed{1.2}
(2,3)
+ \boxed{(2,3)} | The answer is (2, 3). | \boxed{\left(2,3\right)} | the midpoint is (2, 3). | (2,3) | The answer is $(2, 3)$.
- \boxed{(3,2)} | \boxed{[2,3]} | \boxed{2}
80000
+ \boxed{\$80,000} | The answer is $80,000. | #### 80000 | \boxed{80{,}000} | \boxed{80.000,00} | The answer is 80 000 €. | The answer is 80 thousand dollars. | The answer is USD 80,000 per year. | So, the new offer is $80,000. | \boxed{8 \times 10^4} | 8e4 | The answer is 80'000.
- \boxed{80} | \boxed{8,000} | #### 80
? \boxed{80.000} | She got $80k of it. | \boxed{SGD 80,000} | \boxed{\text{Total } 80,000} | \boxed{80 k}
1000 last
+ It is 1000 | 5 then 1,000.0 | So she gets $1,000.00. | 1 000 in all | It makes 10^3 = 1e3
- 1000 and 5 | no idea | It is -1000 | 1000 of 2000 | It is 1 1000/2000
? It is 10^{1000} | none | x_1000 | It is 1000x | It is 1000 тысяч
5 last
+ It is 5cm
- It is 5 million
? It is 5k | 5 Milliarden
5000000 last
+ So 5 million people
0.5 last
- It is 1 1/2.
+ It is 1/2. | It is \frac{1}{2}.
7 strict
+ \boxed 7 | \boxed{7}, \boxed{7.0}
- \boxed{6} \boxed{7}
So the sum is $\boxed{12}$. No other value, such as 3, works.
+ 12
- 3
#### 1,000
+ \boxed{1000}
2\frac{1}{2}
+ \boxed{2.5}
- \boxed{21/2}
5.5
- \boxed{1\frac{1}{2}}
12000000000
+ The answer is $12 bn. | So $12bn. | It is $12 bn all told.
? It cost her $12 bn to go.
500000
+ 5 lakh rupees
- 5 crore
? He gave 5 lakh to her.
B
+ B | (B) | B. | [[B]] | answer(B) | A, C and D are wrong. The answer is B. | I think B | My choice: B | The correct letter is B | Thus (B). | Among A and B, I choose B. | The answer isn't A. The answer is B. | B) Paris is the capital, and A) London is not. | **b** | b | B) | B) Paris | (B) Paris | B. Paris | B: Paris | B - Paris | Option B | option b | Option B: Paris | The answer is B | The answer is (B). | The answer is (B) Paris. | The answer is B) Paris. | The correct answer is **B) Paris**. | The correct answer is B. Paris | First A. The answer is (B). | Answer: B, not C | The answer is A. No, the answer is B. | The answer is B because of C | Answer: B | ANSWER: B | **Answer:** B | **Answer: B** | Final Answer: B | ### Answer\nB | \boxed{B} | $\boxed{\text{B}}$ | \boxed{\textbf{(B)}} | \boxed{(B)} | \boxed{\text{(B) Paris}} | <answer>B</answer> | {"answer": "B"} | #### B | Final Answer: The final answer is $\boxed{B}$. I hope it is correct. | B\n\nParis is the capital of France. | B. Paris is the capital of France. | Option B is correct. | B is the correct answer. | (B) is correct because A is wrong. | Therefore, B) Paris is the correct answer. | I would choose B. | I'd go with option B. | The best answer is B. | The right option is (B). | Let me think.\n\nB | It's B. | It must be (B). | The answer is clearly B. | My answer: B | The correct option is: B | Correct answer: B | Respuesta: B | Die Antwort ist B. | 答案：B | 答案是B | Ｂ | [B] | B because A is wrong. | the answer is b. | The answer is option B. | The answer is letter B. | So the answer is B, Paris. | Answer: (b), not C | The answer is: **(B)** Paris | "B" | `B` | Of the options, the correct choice is B | B, since it is the capital | A is wrong. The answer is B. | B\nB | <answer>The answer is B.</answer> | <answer>\boxed{B}</answer> | It goes into \boxed{}. The answer is B. | The best answer: the best option : B
- A | B and C | (A) | A) Paris | The answer is A. | Answer: A, not B | \boxed{A} | A or B | The answer is A and B. | Both A and B are right, so the answer is A, B. | Answer: C | c) Rome | I choose C. | \boxed{A, B} | The answer is D because B is wrong. | \boxed{B, C} | ... | . | ? | 👍 | ** | <answer>The answer is A.</answer>
? A) Paris C) Rome | A, C and D are wrong, so Paris. | 2 | A is not the answer. B is. | The correct choice is (B) Paris (C) Rome. | The answer is A. Or B? | The answer is not B | The capital is Paris. | A) Paris\nB) London\nC) Rome | A trap | Be careful. | AB | I think so. | B is wrong. A is also wrong. | I am not sure, maybe B or so | \boxed{Paris}
(A)
+ The answer is A: Green is a blend. | The answer is A) green.\n\nThis is it. | A | the answer is A. | a) | A is correct. | A) a kilogram
- The answer is B. | B | A) a kilogram\n\nThe answer is B. A gram is a unit. | A: The correct answer is C) blue. | So, the answer is: C) Cooking | The correct answer is (X).
? The answer is a trap. | A gram is the right answer. | It is a fact that this is correct. | The letter "A" is a symbol. | A fruit is a vegetable. | A. recieve\nB. receive | A trap | A lot of people think so. | a good question
3
+ 3 | (3) | 3) seven | 3. seven | Option 3 | The answer is 3. | The answer is 3) seven | \boxed{3}
- 4 | 4) eight | The answer is 2.
? 3.5 | seven
B) Paris
+ B | Paris | The answer is Paris. | B) Paris | (B) | The answer is B.
- A | C) Rome
yes
+ Yes | Yes, 17 is prime. | **Yes** | yes. | The answer is yes. | Answer: Yes | Yes 17 is prime
- No | No, it is not. | The answer is no.
? It is prime. | Yes and no | Yes, but no
Paris
+ Paris | The answer is Paris. | **Paris** | paris. | Answer: Paris | \boxed{\text{Paris}} | Paris, France
- London | The answer is Rome. | \boxed{Rome}
? The capital is Paris. | It is not Paris.
The United Kingdom
+ United Kingdom | The United Kingdom. | the united kingdom, of course
- France | ...
? In the United Kingdom.
United Kingdom
+ The United Kingdom.
""".strip()
kind = "math:equal"
for line in SPELLINGS.split("\n"):
    if line[:2] in ("+ ", "- ", "? "):
        texts = line[2:].replace("\\n", "\n").split(" | ")
        ROWS[-1][2].update(dict.fromkeys(texts, VERDICTS[line[0]]))
    else:
        kind = "choice:equal" if line == "B" else kind
        flag = {"last_number": True} if line.endswith(" last") else {}
        flag = {"strict_boxed": True} if line.endswith(" strict") else flag
        ROWS.append((kind, {"answer": re.sub(" (?:last|strict)$", "", line), **flag}, {}))


def test_the_table_of_spellings_is_large():
    counts = Counter()
    for check, _, answers in ROWS:
        counts[check] += len(answers)
    assert counts["math:equal"] >= 150 and counts["choice:equal"] >= 150


@pytest.mark.parametrize("check, arguments, answers", ROWS)
def test_what_passes_and_what_only_looks_so(check, arguments, answers):
    assert {a: holds(check, a, **arguments) for a in answers} == answers


@pytest.mark.parametrize("check", sorted(instructions.CHECKS))
def test_an_empty_answer_never_passes(check):
    examples = {row[0]: row[1] for row in ROWS} | {"code:compiles": {}}
    examples["code:tests"] = {"tests": "assert True"}
    empty = ["", " \n", "<think>in 3 parts", "<think>x</think>\n", "\u200b\u2060", "x</think> "]
    for negate in (False, True):
        for answer in empty:
            for mode in ("strict", "loose"):
                assert not holds(check, answer, mode, **examples[check] | {"negate": negate})


def test_loose_forgives_a_first_line_a_last_line_and_stars():
    small = "change_case:english_lowercase"
    cases = "Here it is:\nhello", "hello\nBye", "Hi\nhello\nBye"
    assert not any(holds(small, text) for text in cases)
    assert all(holds(small, text, "loose") for text in cases)
    assert holds("regex:match", "*a* b", "loose", pattern="a b")
    assert not holds(small, "Hi\nHello\nBye", "loose")
    assert not holds("punctuation:no_comma", "a, b", "loose")  # the variants less a line are empty


BAD = r"""
{"check": "language:response_language", "language": "de"} | unknown check.*nearest known one
{"check": "keyword:existence", "keywords": ["a"]} | nearest known one is "keywords:existence"
{"check": "keywords:existence"} | has no "keywords"
{"check": "keywords:existence", "keywords": "sql"} | expected a list of texts
{"check": "keywords:existence", "keywords": []} | expected a list of texts
{"check": "keywords:existence", "keywords": ["a", " "]} | expected text
{"check": "keywords:existence", "keywords": ["a"], "keyword": "b"} | unknown argument "keyword"
{"check": "punctuation:no_comma", "n": 1} | takes no argument
{"check": "length_constraints:number_words", "num_words": 5, "relation": "around"} | expected one of less than
{"check": "length_constraints:number_words", "num_words": 5} | has no "relation"
{"check": "length_constraints:number_words", "num_words": true, "relation": "at most"} | expected a whole number
{"check": "length_constraints:number_words", "num_words": "5", "relation": "at most"} | expected a whole number
{"check": "length_constraints:number_words", "num_words": 2.5, "relation": "at most"} | expected a whole number
{"check": "detectable_format:number_highlighted_sections", "num_highlights": 0} | at least 1
{"check": "length_constraints:nth_paragraph_first_word", "num_paragraphs": 1, "nth_paragraph": 2, "first_word": "a"} | larger
{"check": "keywords:letter_frequency", "letter": "#", "let_frequency": 1, "let_relation": "exactly"} | one letter
{"check": "regex:match", "pattern": "(a"} | regular expression
{"check": "math:equal", "answer": ""} | expected text
{"check": "math:equal", "answer": "\\boxed{1"} | can be read
{"check": "math:equal", "answer": "$ $"} | can be read
{"check": "math:equal", "answer": "#### Step 1: we go"} | "answer" is '#### Step.*can be read
{"check": "math:equal", "answer": "1", "strict_boxed": 1} | true or false
{"check": "code:tests", "tests": "assert 1"} | --allow-code-execution
{"check": "code:compiles", "tests": "assert 1"} | takes no argument
{"check": 7} | unknown check
""".strip().split("\n")


@pytest.mark.parametrize("case", BAD)
def test_a_bad_check_is_refused_at_load(case):
    criterion, message = case.split(" | ")
    with pytest.raises(ValueError, match=message):
        read_criterion(json.loads(criterion))


MATH = r"""
0.5 = 1/2 ; \frac{1}{2} = .5 ; \frac12 = \dfrac{1}{2} ; -\frac34 = -0.75 ; 1,000 = 1000
1,00 ≠ 100 ; 50% ? 0.5 ; 0.5 ≠ 0.501 ; 50\% = 50% ; 3 = 3. ; \left(1, 2\right) = (1,2)
(1/2,3) = (0.5, 3.0) ; (1,2) ≠ (2,1) ; (1,2) ≠ [1,2] ; ((1,2),3) = ((1.0,2),3) ; (1,2) ≠ (1,2,3)
x+1 ? 1+x ; \text{even} = even ; 1/0 = 1/0 ; 1/0 ? 2/0 ; −2 = -2 ; 1e3 = 1000 ; x ? X
1\frac{1}{2} = 3/2 ; 1\frac{1}{2} ≠ 5.5 ; 2 2/3 = 8/3 ; 2 2/3 ≠ 22/3 ; 2.5 = 2\frac{1}{2} ; 21/2 ≠ 2\frac{1}{2} ; 1½ = 1.5 ; ½ = 0.5 ; -1 1/2 = -1.5 ; -1\frac{1}{2} ≠ -0.5 ; 1 and 1/2 = 1.5 ; 1 3/2 ? 2.5 ; 2-1/2 ? 2.5
\frac{-1}{2} = -0.5 ; \frac{1}{-2} = -1/2 ; -1/-2 = 1/2 ; \frac{1.5}{2} = 0.75 ; 1.5/2 = 3/4 ; \frac1{2} = 0.5 ; \tfrac{3}{4} = 0.75 ; \frac{10}{4} = 2.5
$12 = 12 ; \$12 = 12 ; 12\$ = 12 ; $12.00 = 12 ; -$12 = -12 ; $-12 = -12 ; 12 dollars = 12 ; 12 dollars = $12 ; €12 ? $12 ; 12 USD = $12 ; US$12 = 12 ; 12 € = 12 ; £1,200.50 = 1200.5 ; \$1{,}200 = 1200 ; USD 12 = 12 ; Rs. 12 = 12 ; 50 cents ? 0.5
12 apples = 12 ; 12\text{ apples} = 12 ; 12 cm = 12 ; 12\ \text{cm} = 12 ; 12\,\mathrm{cm}^2 = 12 ; 12 cm² = 12 ; 12 cm^2 = 12 cm² ; 12 km ? 12 m ; 5000 m ? 5 km ; 12 km = 12 kilometers ; 12 hours = 12 ; 12x ? 12 ; 12 x ? 12 ; 5m ? 5 ; 12kg = 12 ; 12 years old = 12 ; 60 km/h = 60 ; 60 \text{ km/h} = 60
2n ? 2 ; 3k ? 3 ; 4c ? 4 ; 4h ? 4 ; 2 n ? 2 ; 2 xy ? 2 ; \frac32n ? 3/2 ; \frac{3}{2} g ? 3/2 ; 12\text{ m} = 12 ; 20 N = 20 ; 9.8 m/s^2 = 9.8 ; 80k ? 80 ; 80 K ? 80 ; 80k ? 80000
20 mm ? 2 cm ; 3 yd ? 9 ft ; 1 week ? 168 hours ; 2 weeks ? 14 days ; €12 ? $13 ; 12 dollars each ≠ 13 dollars total ; 12 kg ≠ 13 kilograms
$80k ? 80 ; $80k = 80000 ; $1.2M ? 1.2 ; \$1.2M = 1200000 ; $12 bn ≠ 12 ; $12 bn = 12000000000 ; €3m = 3000000 ; 5 lakh ≠ 5 ; 5 lakh = 500000 ; 2 crore ≠ 2 ; 2 crores = 20000000
12 Mio. ? 12 ; 3 Milliarden ? 3 ; 2 millones ? 2 ; 5 milhões ? 5 ; 5 тысяч ? 5 ; 5 млн ? 5 ; 5 万元 ? 5 ; 5 grand ? 5 ; 5 milligrams = 5
3 sevenths ? 3 ; 3 twentieths ? 3 ; 7 \pmod{9} = 7 ; 7 \pmod{9} ? 16 ; 7 \pmod 9 ? 7 \pmod 8
CAD 1,234 ? 1234 ; AED 1,234 ? 1234 ; R\$ 1.234,50 ? 1234.5 ; \text{PLN } 1 234,50 ? 1234.5 ; \text{etwa } 3,5 ? 3.5 ; 1234 ? CAD 1,234 ; 3,5 cm = 3.5
30^\circ = 30 ; 30^{\circ} = 30° ; 30 degrees = 30 ; 30° = 30^\circ ; 180° ? \pi ; 20 °C = 20
50% = 50 ; 50 percent = 50\% ; 50 = 50% ; 0.5 ? 50% ; 5% ≠ 50%
1,234,567 = 1234567 ; 1 234 567 = 1234567 ; 1.234.567 = 1234567 ; 1'234'567 = 1234567 ; 1’234 = 1234 ; 12,34,567 = 1234567 ; 1{,}234 = 1234 ; 1\,234 = 1234 ; 1_000 = 1000 ; 1.234,56 = 1234.56 ; 1,234.56 = 1234.56 ; 3,5 = 3.5 ; 0,125 = 0.125 ; 1.234 ? 1234 ; 1.234 = 1.234 ; 1,234 ? 1.234 ; 3.5 ? 3,5 ; 3,5 = 5,3
3e8 = 300000000 ; 3 \times 10^8 = 3e8 ; 3×10⁸ = 300000000 ; 3x10^8 = 3E8 ; 3.0 × 10^{8} = 300000000 ; 1.2\times10^{-4} = 0.00012 ; 10^6 = 1000000 ; 10⁻² = 0.01 ; 3*10**8 = 3e8 ; 2 million = 2000000 ; 2 million ≠ 2 ; 1.5 thousand = 1500 ; 2^{10} ? 1024 ; 1024 = 2^{10} ; 3\times10^8 ≠ 3
x = 12 = 12 ; x=12 = 12 ; f(3) = 9 = 9 ; 12 = x = 12 ; 5+7=12 = 12 ; Total = 12 = 12 ; x \approx 3.33 ? 10/3 ; \frac{10}{3} \approx 3.33 = 10/3 ; 3.33 ? 10/3 ; 3.34 ≠ 10/3 ; 0.333 ? 1/3 ; 0.3 ≠ 1/3 ; 0.\overline{3} = 1/3 ; 0.1\overline{6} = 1/6
twelve = 12 ; twenty-one = 21 ; Twelve dollars = 12 ; two hundred = 200 ; minus 5 = -5 ; negative five = -5 ; twelve ≠ 13 ; one half ? 0.5 ; one hundred twenty ? 100 ; one hundred twenty ? 120 ; five thousand two hundred ? 500000 ; two thousand five hundred ? 2500 ; two hundred thousand = 200000 ; two three ? 5 ; twenty eleven ? 31 ; twenty dollars = 20
300 K = 300 K ; 12n = 12n ; 36\pi\text{ units} = 36\pi ; \frac13\text{ cups} = 1/3 ; \sqrt{12} = 2\sqrt{3} ; \frac{\sqrt{3}}{3} = \frac{1}{\sqrt{3}} ; \sqrt3/2 = \frac{\sqrt{3}}{2} ; √2 = \sqrt{2} ; 1.41 ? \sqrt{2} ; 3\pi = 3π ; 3pi = 3\pi ; \pi/4 = \frac{\pi}{4} ; \frac{1}{4}\pi = \frac{\pi}{4} ; 2\pi ≠ 3\pi ; \sqrt{25} ? 5 ; 12*7 ? 84 ; 12*7 ≠ 85 ; \sqrt[3]{2} = \sqrt[3]{2} ; 1+\sqrt{2} = \sqrt{2}+1 ; \pi12 ? 12 ; 2\pi3 ? 6\pi ; \sqrt{()} ? 3 ; 7//2 ? 3 ; 3 ? 7//2 ; 5! ? 120 ; 5! ? 5 ; 2+3 ? 5
1, 2 = 2, 1 ; 1 and 2 = 1,2 ; x=1 or x=2 = 1, 2 ; x = 1, x = 2 = 1,2 ; \{1,2\} = 1,2 ; \pm 2 = -2, 2 ; 3, \pm 2 = -2, 2, 3 ; 1 \pm 2 \pm 3 ? 1 ; 12 or 13 ≠ 12 ; 1,2 ? (1,2) ; [0, \infty) = [0,\infty) ; (0, \infty) ≠ [0,\infty) ; (-\infty,1)\cup(2,3) = (2,3) \cup (-\infty, 1) ; x \in [1,2] = [1,2] ; (1; 2) = (1,2) ; 3, 5 ≠ 3.5
(12) = 12 ; +12 = 12 ; 012 = 12 ; **12** = 12 ; `12` = 12 ; $12$ = 12 ; $$12$$ = 12 ; \(12\) = 12 ; \[x = 12\] = 12 ; about 12 = 12 ; 12 or so ? 12 ; 3:2 = 3:2 ; 6:4 ? 3:2 ; 5:30 = 5:30 ; 12 of the apples = 12 ; 2 dozen ? 24 ; 3 times 4 ? 3 ; 5 minutes and 30 seconds ? 5 ; 12 more than 5 ? 12
x=1, y=2 ? y=1, x=2 ; x=1, y=2 = y=2, x=1 ; x=3 ? y=3 ; Monday = monday ; Monday ≠ Tuesday ; \text{not even} ? odd ; 101_2 = 101_2 ; 101 ? 101_2 ; y=2x+1 = 2x+1 ; \begin{pmatrix}1\\2\end{pmatrix} = \begin{pmatrix} 1 \\ 2 \end{pmatrix}
""".strip().replace("\n", " ; ")


@pytest.mark.parametrize("case", MATH.split(" ; "))
def test_math_equality(case):
    """Two values are equal (=), differ (≠), or it cannot be told (?)."""
    a, sign, b = re.fullmatch(r"(.*) ([=≠?]) (.*)", case).groups()
    assert verdict(a, b) is {"=": True, "≠": False, "?": None}[sign]


FORMS = [  # of a number, with numerator n, denominator d, its decimals and thousands
    "{n}/{d}", r"\frac{{{n}}}{{{d}}}", r"x = \dfrac{{{n}}}{{{d}}}", r"{whole}\frac{{{top}}}{{{d}}}",
    "{decimal}", "${decimal}", "{decimal} km", r"{grouped}\text{{ cm}}", "{grouped}^\\circ", "{comma}",
]  # fmt: skip
PLACES = [r"\boxed{%s}", "#### %s", "The answer is %s.", "So 1 + 1 = %s.", "%s", r"\[ x = %s \]"]


def test_no_spelling_of_another_number_is_right():
    rng, verdicts = random.Random(0), Counter()
    for _ in range(3000):
        value = Fraction(rng.randint(1, 4000), rng.choice([1, 2, 4, 5, 8, 10, 100]))
        other = rng.choice([value, value * 10, value / 10, value + 1, 1 / value])
        n, d = value.numerator, value.denominator
        text = rng.choice(PLACES) % rng.choice(FORMS[d == 1 and 4 or 0 :]).format(
            n=n, d=d, whole=n // d or "", top=n % d, decimal=float(value),
            grouped=f"{float(value):,}", comma=str(float(value)).replace(".", ","),
        )  # fmt: skip
        gold = f"{other.numerator}/{other.denominator}"
        verdicts[value == other, holds("math:equal", text, answer=gold)] += 1
    assert not verdicts[True, False] and not verdicts[False, True]
    assert verdicts[True, True] > 20 * verdicts[True, None]


@pytest.mark.parametrize("text", ["9" * 5000, "(" * 5000, "((9^99)^99)^99", "1 " * 5000, "{" * 99])
def test_a_formula_without_end_is_read_in_no_time(text):
    start = time.process_time()
    assert verdict(text, "1") is not True and not holds("math:equal", text, answer="1")
    assert not holds("math:equal", text, answer="1", last_number=True) or text[:1] == "1"
    assert time.process_time() - start < 2


DEGENERATE = (
    r"""
the | the best | answer | answer is | the answer is 1 | A | A, | thus A | thus I | 1 | 1, | 1,x | , | ,a | 1.5 | ½
not | or | and | no! | !no | ! | wait. | = | x= | : | ( | ) | (1, | {1, | [ | {} | \pm | 1\pm | \frac{ | \frac{1}{
\sqrt{ | \text{ | \boxed{ | \boxed{1} | \boxed{1,} | \fbox1 | <answer> | <answer>1</answer> | $1 | $ 1 | $ | \$1 | ^2
** | **a | *_ | _ | a_ | #### | ####1 | - | -1 | one | hundred | one hundred | 5 million | 1/2 | 1e9 | 9^ | .1 | . | %
\cup | \begin{ | ± | √ | ² | \n | 1\n | A) a\n | \n\n- 1 | 万 | ٣ | ﷺ | 👍 | is | = 1 | is correct | (A | \in | \approx
""".strip()
    .replace("\n", " | ")
    .split(" | ")
)  # repeated to 8,000 characters, with and without blanks


@pytest.mark.parametrize("piece", DEGENERATE)
def test_a_degenerate_answer_is_read_in_no_time(piece):
    """Where a model repeats itself without end: the broken ones took minutes, or crashed."""
    piece = piece.replace("\\n", "\n")
    closing = "".join({"(": ")", "[": "]", "{": "}"}.get(c, "") for c in piece)[::-1]
    for text in [(piece + blank) * (8000 // len(piece + blank)) for blank in ("", " ")]:
        count = len(text) // len(piece)
        for answer in (text, f"{text}x", f"The answer is {text}", rf"\boxed{{{text}}}",
                       f"{text[:4000]}1{closing * (count // 2)}"):  # fmt: skip
            start = time.process_time()
            holds("math:equal", answer, answer="12", last_number=True, strict_boxed=True)
            holds("choice:equal", answer, answer="B) Paris")
            assert time.process_time() - start < 2, answer[:40]


@pytest.mark.parametrize("a, b", [("1e999999 million", "1"), ("1e999999", "1e-999999")])
def test_a_number_out_of_all_bounds_is_not_told(a, b):
    assert verdict(a, b) is None


PREDICTED = r"""
\boxed{\frac{1}{2}} then \boxed{a{b}c} | a{b}c
\boxed{3 | None
no box 7 #### 8 | 8
say 7 | None
2 of 7 | None
+2 of 7 | 7
+from -1,200.5 on | -1,200.5
""".strip().split("\n")


@pytest.mark.parametrize("case", PREDICTED)
def test_math_prediction(case):
    """The last number (+) is taken only when allowed: "2 of 7" would pass as 7 by accident."""
    text, answer = case.split(" | ")
    assert str(math_answer(text.lstrip("+"), last_number=text[0] == "+")) == answer


TESTS = "assert double(2) == 4\nassert double(-1) == -2"
DOUBLE = "def double(x): return 2 * x\n"
ONE_TEST = "assert double(2) == 4"
PROGRAMS = [  # code, tests that it passes
    (DOUBLE, TESTS),
    (f"Here:\n```python\n{DOUBLE}```\nUse:\n```python\ndouble(input())\n```\n```bash\nls\n```", TESTS),
    (f"```py\nx = 1\n```\nso\n```py\n{DOUBLE}```", TESTS),
    (f"```Python3\n{DOUBLE}", TESTS),
    (f"~~~\n{DOUBLE}~~~\n```text\nnot code\n```", TESTS),
    (f"if __name__ == '__main__':\n    raise SystemExit(input())\n{DOUBLE}", TESTS),
    (f"import os\nassert not os.environ.get('SECRET')\n{DOUBLE}", TESTS),
    ("import asyncio\nasync def f(x): return 2 * x\ndef double(x): return asyncio.run(f(x))", TESTS),
    (f"import decimal, re, heapq, zlib, typing, dataclasses, functools, unittest\n{DOUBLE}", TESTS),
    (DOUBLE, f"def test_a():\n    {TESTS.splitlines()[0]}"),
    (DOUBLE, "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(double(2), 4)"),
    (f"1. So:\n\n   ```python\n   {DOUBLE}   ```\n   Done.", TESTS),
    (f"- ```python\n  {DOUBLE}  ```", TESTS),
    (f"So:\r\n```python\r\n{DOUBLE[:-1]}\r\n```\r\nDone.", TESTS),
    (f"```python title=\"a.py\"\n{DOUBLE}```", TESTS),
    (f"```{{.python}}\n{DOUBLE}```", TESTS),
    (f"````python\n{DOUBLE}S = '~~~'\n````\nDone.", TESTS),
    (DOUBLE, f"def check():\n    {ONE_TEST}\nif __name__ == '__main__':\n    check()"),
    (DOUBLE, f"import unittest\nfrom unittest import TestCase\nclass T(TestCase):\n    def test_a(self): {ONE_TEST}\nif __name__ == '__main__':\n    unittest.main()"),
    (DOUBLE, "def test_pair(x, y):\n    assert double(x) == y\nfor x in range(3): test_pair(x, 2 * x)"),
    (DOUBLE, f"import unittest\nclass T(unittest.TestCase):\n    @unittest.skip('slow')\n    def test_a(self): assert 0\n    def test_b(self): {ONE_TEST}"),
    (DOUBLE, "class TestD:\n    test_data = [2]\n    def setup_method(self, method): self.x = 2\n    def test_a(self): assert double(self.x) == 4"),
    ("x = 1", "assert x == 1"),
    ("def order(items): items.sort()", "a = [3, 1]\norder(items=a)\nassert a == [1, 3]"),
    ("def order(x): x.sort()", "a = [3, 1]\norder(a)\nassert a == [1, 3]"),
    ("def apply(f, x): return f(x)", "assert apply(lambda v: v + 1, 3) == 4 and apply(len, 'abc') == 3"),
    ("def count(n): yield from range(n)", "assert list(count(3)) == [0, 1, 2] and sum(count(4)) == 6"),
    ("def big(): return 10**6000, {(1, 2): b'x'}, {3}, 1j", "assert big() == (10**6000, {(1, 2): b'x'}, {3}, 1j)"),
    ("from datetime import date\ndef day(): return date(2020, 1, 2)", "import datetime\nassert day() == datetime.date(2020, 1, 2)"),
    ("from collections import Counter, namedtuple\nP = namedtuple('P', 'x y')\ndef f(s): return Counter(s), P(1, 2)",
     "c, p = f('aab')\nassert c == {'a': 2, 'b': 1} and p == (1, 2) and p.x == 1"),
    ("from fractions import Fraction\ndef half(): return Fraction(1, 2)\ndef top(c): return c.most_common(1)",
     "import collections, fractions\nassert half() == fractions.Fraction(1, 2) and top(collections.Counter('aab')) == [('a', 2)]"),
    ("class E(ValueError): pass\ndef f(x): raise E('no')",
     "for kind in (E, ValueError):\n    try:\n        f(1)\n        raise SystemExit\n    except kind as e:\n        assert str(e) == 'no'"),
    ("class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def __len__(self): return len(self.items)",
     "s = Stack()\ns.push([2])\ns.push(1)\nassert len(s) == 2 and s.items == [[2], 1] and isinstance(s, Stack)"),
    ("from dataclasses import dataclass\n@dataclass\nclass Q:\n    a: int\ndef q(a): return Q(a)", "assert q(1) == q(1) != q(2) and q(3).a == 3"),
    ("def depth(n): return 0 if n is None else 1 + max(depth(n.left), depth(n.right))",
     "class N:\n    def __init__(s, l=None, r=None): s.left, s.right = l, r\nassert depth(N(N(), None)) == 2"),
]  # fmt: skip
CHEATS = """
x * x
import sys; sys.exit(0)
import os; os._exit(0)
raise SystemExit(0)
while True: pass
import time; time.sleep(60)
return ' ' * (1 << 40)
return ' ' * (1 << 29)
return [x] * (1 << 22)
yield 4
import subprocess; subprocess.run(['true']); return 3
import ctypes; return 3
import socket; socket.create_connection(('127.0.0.1', 9))
import os; return int(open(f'/proc/{os.getppid()}/environ').read())
import os; return eval(os.popen('echo 4').read())
import os, signal; os.kill(os.getppid(), signal.SIGKILL)
import os; os.killpg(0, 9)
import os; os.setsid(); import time; time.sleep(60)
import sys; sys.setrecursionlimit(10**9); return double(x)
import gc; return [o for o in gc.get_objects() if isinstance(o, dict) and 'tests' in o][0]['x']
import sys; return [f for f in [sys._getframe(3)] if 'tests' in f.f_globals][0].f_locals['x']
raise AssertionError
while True: __import__('os').fork()
import _posixsubprocess; return _posixsubprocess.fork_exec()
import threading; threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start(); return 3
""".strip().split("\n")  # bodies of double; the next list is of whole answers
CHEATS = [DOUBLE.replace("return 2 * x", body) for body in CHEATS] + [
    "", "double", "I would write a function that doubles its input.", "def double(x",
    *("import os; os._exit(0)", "import sys; sys.exit(0)", "while True: pass", "x = ' ' * (1 << 40)"),
    "import atexit\natexit.register(print, 'done')\ndef double(x): return 3 * x",
    "print(open('token').read(), end='', flush=True)\nimport os; os._exit(0)",
    "import glob\ndouble = [eval(open(f).read()) for f in glob.glob('../*')]",
    "class Yes:\n    def __eq__(self, other): return True\n    __ne__ = __lt__ = __gt__ = __eq__\ndef double(x): return Yes()",
    "class Yes(int):\n    def __eq__(self, other): return True\ndef double(x): return Yes(3)",
    "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\ndef double(x): return 3",
    "import os\nfor fd in range(64):\n    try: os.write(fd, b'[true, null]\\n{\"value\": true}\\n')\n    except OSError: pass",
    "import unittest, sys\nunittest.TestCase.assertEqual = print\nsys.modules['tests'] = unittest\ndef double(x): return 3",
    "import gc\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Peer':\n        o.send('defines', {'__builtins__': {}, 'double': None}, {})",
    "import gc\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Peer':\n        o.line.send_bytes(b'cos\\n_exit\\n(I0\\ntR.')\ndef double(x): return 3",
    "x = []\nfor _ in range(100000): x = [x]\ndef double(n): return x",
    "import sys\nsys.stdout.write('[true, null]' * 100000)\ndef double(x): return 3",
]  # fmt: skip


@pytest.mark.skipif(os.name != "posix", reason="limits need POSIX")
def test_code_passes_by_returning_what_the_tests_expect(monkeypatch):
    """An answer can print, exit, patch and look for the tests: none of it is a passed test."""
    monkeypatch.setenv("SECRET", "1")
    with ThreadPoolExecutor(3) as pool:
        passed = list(pool.map(lambda case: run_tests(*case, seconds=4), PROGRAMS))
        cheats = list(pool.map(lambda code: run_tests(code, TESTS, seconds=1), CHEATS))
    assert [case for case, ok in zip(PROGRAMS, passed) if ok is not True] == []
    assert [code for code, ok in zip(CHEATS, cheats) if ok is not False] == []


WRONG = DOUBLE.replace("2", "3")
GRADED = [  # tests that run; the next lists are of tests that cannot tell, and refused at load
    f"def check():\n    {ONE_TEST}\nif __name__ == '__main__':\n    check()",
    f"async def test_a():\n    {ONE_TEST}",
    f"class TestD(object):\n    def test_a(self): {ONE_TEST}",
    f"class TestD:\n    async def test_a(self): {ONE_TEST}",
    f"import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n    async def test_a(self): {ONE_TEST}",
    f"{ONE_TEST}\ndef test_a():\n    return double(2) == 4",
    "def test_a():\n    assert double\n    return double(2) == 4",
    "import sys\nif double(2) != 4: sys.exit(1)",
]  # fmt: skip
UNGRADED = [
    f"import unittest\n@unittest.skip('x')\nclass T(unittest.TestCase):\n    def test_a(self): {ONE_TEST}",
    f"import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        import numpy\n        {ONE_TEST}",
    f"print('ok')\ndef check():\n    {ONE_TEST}",
    f"import asyncio\nasync def main():\n    {ONE_TEST}\nmain()",
    f"def test_a(tmp_path):\n    {ONE_TEST}",
    *(f"{line}\n{ONE_TEST}" for line in ("import pytest", "from solution import double", "import numpy.linalg")),
    f"import sys\nsys.exit(0)\n{ONE_TEST}",
]  # fmt: skip
REFUSED = [
    "double(2) == 4", "def test_a():\n    return double(2) == 4", "'>>> double(2)\\n4'", "double(2)",
    f"def check():\n    {ONE_TEST}", f"'Tests.'\ndef check():\n    {ONE_TEST}",
    f"async def check():\n    {ONE_TEST}",
]  # fmt: skip


@pytest.mark.skipif(os.name != "posix", reason="limits need POSIX")
def test_tests_that_run_nothing_grade_nobody():
    """They passed every answer, or gave every right one 0 for a module that is not there."""
    graded = {tests: (holds("code:tests", DOUBLE, tests=tests), holds("code:tests", WRONG, tests=tests)) for tests in GRADED}  # fmt: skip
    assert graded == dict.fromkeys(graded, (True, False))
    for tests in UNGRADED:
        assert holds("code:tests", WRONG, tests=tests) is None, tests
    for tests in REFUSED:
        with pytest.raises(ValueError, match="run and assert something"):
            holds("code:tests", DOUBLE, tests=tests)


def test_code_that_cannot_be_told_or_compiled():
    builtin = holds("code:tests", "def all(x): return True", tests="assert all([0])")
    assert builtin is None and not holds("code:tests", "print(1)", tests="assert False")
    good = DOUBLE, f"Here:\n```python\n{DOUBLE}```\nDone.", "x = 1", "print('hi')", "import os"
    good += "1 + 1", "[2 * x for x in y]", "x: int = 1", f"```\n{DOUBLE}```\nnot sure"
    prose = "not sure", "yes or no", "Strengths: SQL\nGaps: none\nRecommendation: hold", "pass"
    prose += "hire if good else reject", "well-known", "interest in SQL", "e.g", "Gaps: SQL, R"
    prose += "```\nnot sure\n```", "Yes.", "yes"
    bad = "def f(", "x = \0", "(" * 9999, "-" * 99999 + "1", "```python\nx = (\n```"
    assert all(holds("code:compiles", text) for text in good)
    assert not any(holds("code:compiles", text) for text in prose + bad)


def test_a_verdict_that_is_not_reached_has_its_reason():
    criterion = read_criterion({"check": "math:equal", "answer": "12"})
    verdict, reason = decide(criterion, "She has 12 left.")
    assert verdict is None and reason.startswith("math:equal: no answer is marked")
    row = judge.read_row(
        {"prompt": "x", "rubrics": [{"check": "math:equal", "answer": "12"}, "Is short."]}
    )
    (grade,) = judge.grade_answers([row], ["She has 12 left."], checks_only=True)
    assert (
        grade.score is None
        and grade.error == "a check cannot tell: math:equal: no answer is marked"
    )
    assert grade.criteria[0]["reason"] == reason


def test_a_fault_of_a_check_costs_one_grade_and_is_said(monkeypatch):
    monkeypatch.setitem(instructions.CHECKS, "startend:quotation", (lambda text: 1 / 0, {}))
    verdict, reason = decide(read_criterion({"check": "startend:quotation"}), "a")
    assert (verdict, reason) == (None, "startend:quotation: ZeroDivisionError: division by zero")


def test_one_definition_of_a_question():
    for text, count in (
        ("However, do you know SQL?", 1), ("Thanks. Could you tell me about SQL?", 1),
        ("How did you use SQL? Do you like it?", 2), ("Tell me about SQL.", 1), ("Good.", 0),
    ):  # fmt: skip
        assert risky.number_of_requests(text) == count, text
        asked = holds("interview:question_count", text, num_questions=count, relation="exactly")
        assert asked or not count


def test_requests_agree_with_the_interview_bank():
    import interview

    rng = random.Random(0)
    for kind, templates in interview.BANK["templates"].items():
        for template in templates:
            c, d, e = rng.sample(sorted(interview.BANK["competencies"]), 3)
            text = template.format(c=c, d=d, e=e)
            wanted = {"greeting": 0, "double": 2}.get(kind, 1)
            assert risky.number_of_requests(text) == wanted, (kind, text)
            assert risky.number_of_requests(f"Thanks. {text}") == wanted, text


def test_risky_question_offsets_are_those_of_the_text():
    text = "Gut ﬁt ½… “Well”\u200b. ＡＲＥ yo\u200bu  married？ 50% sure(s)."
    (hit,) = risky.risky_questions(text)
    assert (hit["code"], hit["severity"]) == ("sex_family", "discouraged")
    assert text[hit["start"] : hit["end"]] == hit["sentence"] == "ＡＲＥ yo\u200bu  married？"


def test_bundled_rubrics_load():
    bundled = judge.read_rubrics(REPO / "data" / "rubrics.json")
    assert [len(part) for part in bundled.splits.values()] == [300, 50, 60]
    judged = judge.read_rubrics(REPO / "data" / "rubrics_judge.json")
    for rubrics, kind in ((bundled, "check"), (judged, "judge")):
        assert {c.kind for row in rubrics.rows for c in row.criteria} == {kind}
    sizes = {row.task_id: len(row.criteria) for row in bundled.rows}
    assert all(sizes[row.task_id] == len(row.criteria) for row in judged.rows)
    assert len(judged.rows) == 40
    natural = judge.read_rubrics(REPO / "data" / "ifeval_prompts.jsonl").rows
    assert [len(natural), sum(len(row.criteria) for row in natural)] == [60, 150]


def test_a_file_of_plain_text_is_answered_with_the_form_of_a_row(tmp_path):
    """ "Expecting value: line 1 column 1" said nothing about rows of prompts and criteria."""
    file = tmp_path / "tasks.txt"
    file.write_text("Write an advert\n")
    line = error_of(judge.read_rubrics, file)
    assert line.endswith("""JSON or JSONL, rows such as {"prompt": "…", "rubrics": ["…"]}""")
    assert "no such file" in error_of(judge.read_rubrics, tmp_path / "x").lower()
    assert "rows such as" not in error_of(judge.read_rubrics, tmp_path / "x")
