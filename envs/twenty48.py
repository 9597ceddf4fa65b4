"""envs/twenty48.py: the game 2048 as an environment of grpo_agent.py.

    --env envs/twenty48.py:TwentyFortyEight --env-args '{"size": 4, "target": 256}'

size        rows and columns of the board, 2 to 5
target      the tile that wins, a power of 2 from 8 on
show_legal  list the legal moves below the board, for tiny models
max_turns   the game ends after so many moves

R = 1           the target is reached
    0.9·p       else, p = log₂(largest / 2) / log₂(target / 2): 0 with nothing but 2s
    0.9·p − 0.1 the last move changed nothing
    −1          the reply holds no move; nothing else is taken for one
A move that changes nothing ends the game: if it were ignored, a fixed cycle of moves would win as
often as a good player does (compare with `blind`).

Reference    Gabriele Cirulli, 2014
"""

import itertools
import math
import random
import re

TURNED = {"up": "left", "down": "right"}
MOVE = re.compile(r"(?s).*<move>\s*(left|right|up|down)\s*</move>")  # of several the last


def slide(row):
    """A row after a move to its start; 0 is an empty cell.

    Each tile merges once; those at the start merge first.
    >>> slide([2, 2, 2, 0]), slide([4, 4, 2, 2]), slide([8, 4, 4, 8])
    ([4, 2, 0, 0], [8, 4, 0, 0], [8, 8, 8, 0])
    """
    merged = []
    for tile, run in itertools.groupby(filter(None, row)):
        pairs, single = divmod(len(list(run)), 2)
        merged += [2 * tile] * pairs + [tile] * single
    return merged + [0] * (len(row) - len(merged))


def after(board, move):
    """The board after a move, before a tile is added. Rows are lists, from top to bottom."""
    if move in TURNED:  # a move of the columns is one of the rows of the turned board
        return [*map(list, zip(*after(zip(*board), TURNED[move])))]
    back = -1 if move == "right" else 1
    return [slide(row[::back])[::back] for row in board]


def legal_moves(board):
    """The moves that change the board."""
    return [move for move in ("left", "right", "up", "down") if after(board, move) != board]


class TwentyFortyEight:
    """board: rows of tiles, 0 is empty; moves: how many were read; invalid: 1 if the last was not
    legal or could not be read."""

    name, val_key, history, prose = "2048", "win", 0, False

    def __init__(self, size=3, target=32, show_legal=False, max_turns=40):
        self.size, self.target = size, target
        self.show_legal, self.max_turns = show_legal, max_turns

    def reset(self, seed):
        self.rng, self.moves, self.invalid = random.Random(seed), 0, 0
        self.board = [[0] * self.size for _ in range(self.size)]
        self.spawn()
        self.spawn()
        rules = (
            f"2048 on {self.size} x {self.size}, reach {self.target}. "
            "Reply <move>left</move>, right, up or down."
        )
        return [{"role": "system", "content": rules}, self.shown()]

    def spawn(self):
        """A free cell becomes 2 (90 %) or 4."""
        row, i = self.rng.choice(
            [(row, i) for row in self.board for i, tile in enumerate(row) if not tile]
        )
        row[i] = 2 if self.rng.random() < 0.9 else 4

    def shown(self):
        text = "\n".join(" ".join(str(tile or "_") for tile in row) for row in self.board)
        if self.show_legal:
            text += f"\nlegal: {' '.join(legal_moves(self.board))}"
        return {"role": "user", "content": text}

    def step(self, text):
        match = MOVE.match(text.lower())
        self.moves += bool(match)
        if match and match[1] in legal_moves(self.board):
            self.board = after(self.board, match[1])
            self.spawn()
            if legal_moves(self.board) and self.largest() < self.target:
                return self.shown(), 0.0, False, self.info()
        else:
            self.invalid = 1
        reward, info = self.run_out()
        return None, reward if match else -1.0, True, info

    def largest(self):
        return max(map(max, self.board))

    def run_out(self):
        """(reward, info) at the end."""
        p = math.log2(self.largest() / 2) / math.log2(self.target / 2)
        return (1.0 if p >= 1 else 0.9 * p) - 0.1 * self.invalid, self.info()

    def info(self):
        largest = self.largest()
        return {
            "win": float(largest >= self.target),
            "max_tile": largest,
            "invalid": self.invalid,
            "moves": self.moves,
        }


# ---- baselines: (env, rng) → text ----


def at_random(env, rng):
    return f"<move>{rng.choice(legal_moves(env.board))}</move>"


def corner(env, rng):
    """Into one corner as long as that is possible."""
    return f"<move>{min(legal_moves(env.board), key=('down', 'left', 'right', 'up').index)}</move>"


def blind(env, rng):
    """A cycle, played without a look at the board."""
    return f"<move>{('left', 'down', 'right', 'up')[env.moves % 4]}</move>"


TwentyFortyEight.baselines = {"random": at_random, "corner": corner, "blind": blind}
