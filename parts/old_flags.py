"""parts/old_flags.py: --config for the stages that still have it (the RL trainers, annotate.py); leaves with them."""

import json
import sys
from pathlib import Path

from parts.files import UserError

ONE_SESSION = {"config", "resume", "overwrite", "stop_after"}  # never taken from an earlier run


def parse_with_config(parser, argv):
    """parse_args, with --config FILE as a layer of defaults under the command line."""
    parser.error = argument_error
    first, _ = parser.parse_known_args(argv)
    if getattr(first, "config", None):
        try:
            record = read_record(first.config)
            saved = record["args"]
        except OSError:
            raise UserError(f"--config {first.config}: no such file") from None
        except ValueError as error:
            raise UserError(f"--config {first.config}: {error}") from None
        if foreign := sorted(saved.keys() - vars(first).keys()):
            raise UserError(
                f"--config {first.config}: made by {record.get('stage')}.py; "
                f"--{foreign[0].replace('_', '-')} is no flag here"
            )
        line = []  # as flags in front of the others, so that argparse checks them like the others
        for action in parser._actions:
            value, flag = saved.get(action.dest), action.option_strings[-1]
            if value is None or value is False or value == [] or action.dest in ONE_SESSION:
                continue
            if isinstance(value, list):
                line += [flag, *map(str, value)]
            else:
                line.append(flag if value is True else f"{flag}={value}")
        argv = [*line, *(sys.argv[1:] if argv is None else argv)]
    return parser.parse_args(argv)


def argument_error(message):
    """argparse's error without its forty lines of usage."""
    raise UserError(f"{message}; --help lists the flags")


def read_record(path):
    """An args.json; ValueError where it is none."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(record["args"], dict) or not isinstance(record["sha256"], dict):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        raise ValueError("this is not the args.json of a run") from None
    return record
