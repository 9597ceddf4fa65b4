"""set_address.py: the address that all notebooks clone on Colab and Kaggle, set in one go.

python notebooks/set_address.py https://github.com/ME/feedbackloop.git
"""

import re
import sys
from pathlib import Path

ADDRESS = re.compile(r'(REPO_URL = \\")[^"\\]+(\\")')


def main(address, folder=Path(__file__).parent):
    """Write the address into the first cell of each notebook; their outputs stay."""
    if not re.fullmatch(r"(https?://|ssh://|git@)[^\s\"\\]+", address):
        sys.exit(f"{address}: expected what git clones, such as https://github.com/ME/NAME.git")
    for path in sorted(folder.glob("*.ipynb")):
        text = path.read_text(encoding="utf-8")
        path.write_text(ADDRESS.sub(rf"\g<1>{address}\g<2>", text), encoding="utf-8")
        print(f"notebooks/{path.name}: clones {address}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
