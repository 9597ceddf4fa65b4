"""parts/episodes.py: a conversation with an environment, as the tokens that a policy saw and drew.

Each turn keeps the ids it was drawn after, the ids drawn and their log-probs; the rows that are
trained are put together from these, so nothing that was drawn is encoded again:

turn 1   prompt ▮drawn                            ▮ an action: trained, with its log-prob
turn 2   prompt  drawn context ▮drawn             context: the template's and the environment's words
row      prompt ▮drawn context ▮drawn             one row, as turn 2 begins with turn 1
"""

import math
import random
from dataclasses import dataclass, field

from common import encode, encode_prompt, end_ids, render
from parts.messages import check_text, visible

# ---- an episode ----


@dataclass(eq=False)
class Episode:
    """One conversation of a policy with an environment."""

    seed: int
    number: int  # among the episodes of all processes: what its draws come from
    env: object
    rng: random.Random  # a baseline's draws
    messages: list = field(default_factory=list)
    draws: list = field(default_factory=list)  # (prompt ids, drawn ids, log-probs) of each turn
    reward: float = 0.0  # the sum over its turns, or RULER's; None: the judge failed
    advantage: float = None
    metrics: dict = field(default_factory=dict)  # the environment's last info
    truncated: bool = False  # a turn was cut, or the context was full
    reason: str = None  # RULER's

    def texts(self):
        """What the policy wrote, turn by turn."""
        return [m["content"] for m in self.messages if m["role"] == "assistant"]

    def tokens(self):
        """How many the policy drew."""
        return sum(len(drawn) for _, drawn, _ in self.draws)

    def hear(self, *messages):
        """What the environment says; ValueError unless these are messages."""
        check_text({"messages": list(messages)}, "messages")
        self.messages += messages

    def note(self, reward, info):
        """Add the reward of a turn and remember its info; ValueError for what is not finite."""
        self.reward += reward
        self.metrics |= info
        if not all(map(math.isfinite, (self.reward, *self.metrics.values()))):
            raise ValueError(f"reward {reward}, info {info}: expected finite numbers")

    def take_turn(self, text):
        """One turn: the environment sees what stands behind </think>. Returns whether the episode
        goes on. text None: the context is full; the episode ends as if its turns had run out."""
        env, done, self.truncated = self.env, False, self.truncated or text is None
        if text is not None:
            self.messages.append({"role": "assistant", "content": text})
            message, reward, done, info = env.step(visible(text))
            self.note(reward, info)
            if not done:
                self.hear(message)
        ran_out = text is None or len(self.texts()) >= env.max_turns
        if ran_out and not done and hasattr(env, "run_out"):
            self.note(*env.run_out())
        return not (done or ran_out)

    def transcript(self):
        """The episode as lines to read, > before the policy's, its reward at the end."""
        lines = [f"seed {self.seed}"]
        for m in self.messages:
            mark = ">" if m["role"] == "assistant" else " "
            lines.append(f"  {mark} " + m["content"].replace("\n", "\n    "))
        numbers = (f"  {key} {x:.3g}" for key, x in self.metrics.items() if x)
        return "\n".join([*lines, f"  reward {self.reward:.2f}{''.join(numbers)}"])

    def rows_to_imitate(self, history):
        """Rows for sft.py: one dialogue of which all answers are trained; where a turn sees only
        part of the episode, each turn after what the policy saw."""
        turns = [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]
        if history == "all":
            return [{"messages": self.messages[: turns[-1] + 1]}] if turns else []
        shown = [shown_messages(self.messages[:i], history) for i in turns]
        return [{"prompt": p, "completion": [self.messages[i]]} for p, i in zip(shown, turns)]


def shown_messages(messages, history):
    """What a turn sees: all, or system messages, the last k exchanges and the newest message.

    >>> roles = "system user assistant user".split()
    >>> [m["role"] for m in shown_messages([{"role": role} for role in roles], 0)]
    ['system', 'user']
    """
    if history == "all":
        return messages
    exchanges = [m for m in messages if m["role"] != "system"]
    return [m for m in messages if m["role"] == "system"] + exchanges[-2 * history - 1 :]


# ---- its tokens ----


def continued_ids(tokenizer, messages, ids):
    """`ids` of a conversation up to a drawn answer, and those of what the template writes behind
    it, now that another message follows. Nothing that was drawn is encoded again.

    messages   the conversation; the last but one is the answer

    None if the template shows the past otherwise now (Qwen3 drops the thoughts of earlier turns).
    """
    opened = render(tokenizer, messages[:-2], add_generation_prompt=True) + messages[-2]["content"]
    whole = render(tokenizer, messages, add_generation_prompt=True)
    if not whole.startswith(opened):
        return None
    new, ends = encode(tokenizer, whole[len(opened) :], rendered=True), end_ids(tokenizer)
    is_drawn = ids[-1] in ends and new[0] in ends  # the end of turn, which the template repeats
    return ids + new[is_drawn:]


def next_prompt(tokenizer, episode):
    """Ids that the next turn answers: those so far and the new message's. If the history is cut or
    the template rewrites earlier turns, the prompt is encoded anew."""
    ids, history = None, episode.env.history
    if history == "all" and episode.draws:
        prompt, drawn, _ = episode.draws[-1]
        ids = continued_ids(tokenizer, episode.messages, prompt + drawn)
    return ids or encode_prompt(tokenizer, shown_messages(episode.messages, history))


def training_rows(draws):
    """What is trained of an episode: one row where each turn's prompt begins with the row so far,
    else a row per turn.

    draws     (prompt ids, drawn ids, log-probs) of each turn
    returns   rows {"ids", "mask", "logps"}, lists of T: mask is True for what the
              policy drew; log-probs of other tokens are 0

    >>> (row,) = training_rows([([1], [2], [-0.5]), ([1, 2, 3], [4], [-0.1])])
    >>> row["ids"], row["mask"], row["logps"]
    ([1, 2, 3, 4], [False, True, False, True], [0.0, -0.5, 0.0, -0.1])
    """
    rows = []
    for prompt, drawn, logps in draws:
        if not rows or rows[-1]["ids"] != prompt[: len(rows[-1]["ids"])]:
            rows.append({"ids": [], "mask": [], "logps": []})
        row = rows[-1]
        context = prompt[len(row["ids"]) :]  # tokens of the environment and of the template
        row["ids"] += context + drawn
        row["mask"] += [False] * len(context) + [True] * len(drawn)
        row["logps"] += [0.0] * len(context) + logps
    return rows
