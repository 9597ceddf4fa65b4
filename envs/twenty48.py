"""envs/twenty48.py: the game 2048 as an environment of grpo_agent.py.

    --env envs/twenty48.py:TwentyFortyEight --env-args '{"size": 4, "target": 256}'

size        rows and columns of the board, 2 to 5
target      the tile that wins, a power of 2
show_legal  list the legal moves below the board, for tiny models
max_turns   the game ends after so many moves

A move that changes nothing ends the game: if it were ignored, a fixed cycle of moves would win as
often as a good player does (compare with `blind`).

Reference    Gabriele Cirulli, 2014
"""

import math
import random
import re

MOVES = ("left", "right", "up", "down")
MOVE = re.compile(r"<move>\s*(left|right|up|down)\s*</move>", re.I)
FINE = 0.1  # of a move that changes nothing, which ends the game
CYCLE = ("left", "down", "right", "up")  # the blind baseline's moves, in turn


def slide(row):
    """A row after a move to its start; 0 is an empty cell.

    Each tile merges once; those at the start merge first.
    >>> slide([2, 2, 2, 0]), slide([4, 4, 2, 2]), slide([8, 4, 4, 8])
    ([4, 2, 0, 0], [8, 4, 0, 0], [8, 8, 8, 0])
    """
    tiles, out = [tile for tile in row if tile], []
    while tiles:
        pair = tiles[1:2] == tiles[:1]
        out.append(tiles[0] * (1 + pair))
        tiles = tiles[1 + pair :]
    return out + [0] * (len(row) - len(out))


def after(board, move):
    """The board after a move; nothing is spawned yet."""
    turned, back = move in ("up", "down"), -1 if move in ("right", "down") else 1
    rows = [slide(row[::back])[::back] for row in (zip(*board) if turned else board)]
    return [list(row) for row in (zip(*rows) if turned else rows)]


def legal_moves(board):
    return [move for move in MOVES if after(board, move) != board]


class TwentyFortyEight:
    """Reward at the end: 1 for the target, else up to 0.9 for how near the largest tile came."""

    name, val_key, reward_range, history, prose = "2048", "win", (-1, 1), 0, False

    def __init__(self, size=3, target=32, show_legal=False, max_turns=40):
        if target not in [2**n for n in range(3, 20)]:
            raise ValueError(f"target {target}: expected a power of 2 from 8 on")
        self.size, self.target, self.show_legal = size, target, show_legal
        self.max_turns = max_turns

    def reset(self, seed):
        self.rng, self.moves, self.invalid = random.Random(seed), [], 0
        self.board = [[0] * self.size for _ in range(self.size)]
        self.spawn(), self.spawn()
        rules = (
            f"2048 on {self.size} x {self.size}, reach {self.target}. "
            "Reply <move>left</move>, right, up or down."
        )
        return [{"role": "system", "content": rules}, self.shown()]

    def spawn(self):
        """A free cell becomes 2 (90 %) or 4."""
        free = [(r, c) for r in range(self.size) for c in range(self.size) if not self.board[r][c]]
        r, c = self.rng.choice(free)
        self.board[r][c] = 2 if self.rng.random() < 0.9 else 4

    def shown(self):
        text = "\n".join(" ".join(str(tile or "_") for tile in row) for row in self.board)
        if self.show_legal:
            text += f"\nlegal: {' '.join(legal_moves(self.board))}"
        return {"role": "user", "content": text}

    def step(self, text):
        moves = MOVE.findall(text)
        if not moves:  # no guess: what is not a move costs the game
            self.invalid += 1
            return None, -1.0, True, self.info()
        self.moves.append(moves[-1].lower())
        if self.moves[-1] in legal_moves(self.board):
            self.board = after(self.board, self.moves[-1])
            self.spawn()
        else:
            self.invalid += 1
        if self.invalid or not legal_moves(self.board) or self.largest() >= self.target:
            return None, self.run_out()[0], True, self.info()
        return self.shown(), 0.0, False, self.info()

    def largest(self):
        return max(map(max, self.board))

    def run_out(self):
        """p = (log₂ largest − 1) / (log₂ target − 1): 0 with nothing but 2s, 1 at the target"""
        p = min(1.0, (math.log2(self.largest()) - 1) / (math.log2(self.target) - 1))
        return (1.0 if p == 1 else 0.9 * p) - FINE * self.invalid, self.info()

    def info(self):
        return {
            "win": float(self.largest() >= self.target),
            "max_tile": self.largest(),
            "invalid": self.invalid,
            "moves": len(self.moves),
        }


# baselines: (env, rng) → text


def at_random(env, rng):
    return f"<move>{rng.choice(legal_moves(env.board))}</move>"


def corner(env, rng):
    """Into one corner as long as that is possible."""
    legal = legal_moves(env.board)
    return f"<move>{next(m for m in ('down', 'left', 'right', 'up') if m in legal)}</move>"


def blind(env, rng):
    """A cycle, played without a look at the board."""
    return f"<move>{CYCLE[len(env.moves) % len(CYCLE)]}</move>"


TwentyFortyEight.baselines = {
    "random": at_random,
    "corner": corner,
    "blind": blind,
}
