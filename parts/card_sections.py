"""parts/card_sections.py: what evaluate.py and fairness.py measured, in the model card of a run.

Each adds a section, and replaces it when it runs again.
"""

import datetime
import re

from parts.card import own_card
from parts.files import replacing


def add_section(folder, name, title, lines):
    """Put a section into the card of a run folder, in the place of the one of this name.

    False if the folder holds no card that a run wrote.

    >>> add_section("no such folder", "fairness", "Fairness", ["No gap was found."])
    False
    """
    cards = own_card(folder)
    if not cards:
        return False
    [path] = cards
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    section = "\n".join([start, f"## {title}", "", *lines, end])
    old = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    if old.search(text):
        text = old.sub(lambda match: section, text)
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    with replacing(path) as file:
        file.write(text.encode(errors="surrogateescape"))
    return True


def add_result(sentences, title, command, report):
    """Add what `command` measured to the cards that runs wrote, and say so.

    sentences  {folder: what was measured of it, [] for nothing};  report: its path
    """
    written = []
    for folder, lines in sentences.items():
        source = f"`{command}`, {datetime.date.today()}; all of it is in `{report}`."
        try:
            if lines and add_section(folder, title, title, [*lines, "", source]):
                written.append(f"{folder}/README.md")
        except OSError as error:  # the report is written, and stands
            print(f"{folder}/README.md could not be written, so it lacks the result: {error}")
    if written:
        print(f"added to {', '.join(written)}: {title}")
