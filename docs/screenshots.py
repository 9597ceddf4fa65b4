"""docs/screenshots.py: the pictures of README.md, taken in Chromium from the real page and from the committed reports.

Needs playwright (requirements-dev.txt) and a Chromium on the PATH or in CHROME_BIN. Of each page one picture of a laptop's
window and one of a phone's, of the reports also one of a dark screen, into docs/img.

Run          python docs/screenshots.py
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
WINDOWS = {"laptop": (1180, 660), "phone": (390, 780)}


def serve(folder):
    """(process, address) of `python annotate.py` on the bundled items and a free port."""
    command = [sys.executable, str(REPO / "annotate.py"), "--items", str(REPO / "data" / "items.jsonl")]  # fmt: skip
    command += ["--out", str(folder / "annotate"), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder)
    for line in process.stdout:
        if found := re.search(r"http://127\.0\.0\.1:\S+", line):
            return process, found[0]
    raise SystemExit(f"annotate.py ended with status {process.wait()} before it listened")


def pages(folder):
    """{picture: file}: the reports of the demo's seed 0 as their pages show them."""
    import fairness
    from parts.pages import write_page
    from parts.verdicts import NOTICE

    def read(kind):
        file = REPO / "reports" / "demo" / f"{kind}-seed-0.json"
        return json.loads(file.read_text(encoding="utf-8"))

    sections = fairness.sections(read("fairness"))
    write_page(folder / "fairness.html", fairness.TITLE, sections, lead=NOTICE)
    # the heading that stands at the top of the picture
    found = {"fairness": (folder / "fairness.html", "Same résumé")}
    report = REPO / "runs" / "demo" / "report" / "report.html"  # where `make demo` has run
    return found | ({"report": (report, "Which model is better?")} if report.is_file() else {})


def watched_runs(runs):
    """{stage: watch.html} of the demo's PPO and rubric GRPO, where `make demo` has run."""
    found = {}
    for name in ("ppo", "grpo"):
        if (runs / name / "metrics.jsonl").is_file():
            command = [sys.executable, str(REPO / "watch.py"), str(runs / name), "--html"]
            subprocess.run(command, stdout=subprocess.DEVNULL)  # the status tells of alarms
            found[name] = runs / name / "watch.html"
    return found


def take(browser, folder, out, watched):
    process, address = serve(folder)
    try:
        for window, (width, height) in WINDOWS.items():
            context = browser.new_context(viewport={"width": width, "height": height})
            page = context.new_page()
            page.goto(address)
            page.wait_for_selector("#start:not([hidden])")
            page.fill("#name", "ann" if window == "laptop" else "ben")
            page.press("#name", "Enter")
            page.wait_for_selector("#work:not([hidden])")
            page.wait_for_timeout(500)  # fonts and the row of keys
            page.screenshot(path=out / f"annotate-{window}.png")
            for name, (file, heading) in pages(folder).items():
                page.goto(file.as_uri())
                page.locator("h2", has_text=heading).first.evaluate("e => e.scrollIntoView()")
                page.screenshot(path=out / f"{name}-{window}.png")
                if window == "laptop":
                    page.emulate_media(color_scheme="dark")
                    page.screenshot(path=out / f"{name}-dark.png")
                    page.emulate_media(color_scheme="light")
            for name, file in watched.items():
                page.goto(file.as_uri())
                page.screenshot(path=out / f"watch-{name}-{window}.png")
            context.close()
    finally:
        process.terminate()
        process.wait()


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="The pictures of README.md, taken in Chromium.")
    parser.add_argument("--out", type=Path, default=REPO / "docs" / "img", help="folder")
    parser.add_argument("--runs", type=Path, default=REPO / "runs" / "demo", help="of make demo")
    return parser.parse_args(argv)


def main(argv=None):
    from playwright.sync_api import sync_playwright

    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    chromium = os.environ.get("CHROME_BIN") or shutil.which("chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        take(browser, Path(folder), args.out, watched_runs(args.runs))
        browser.close()
    for picture in sorted(args.out.glob("*.png")):
        print(f"{picture.name}  {picture.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
