"""`make site`: builds the site into build/site; fails where a link is broken or a page fetches from elsewhere."""

import os
import subprocess
import sys
import time

from tools.site import checks, pages
from tools.site.public_names import PARTS, ROOT, public_names

SITE = ROOT / "build" / "site"


def main() -> int:
    start = time.monotonic()
    count = pages.stage()
    # The hooks are imported by the name of their package; the theme's note on its successor is nothing to readers here.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--clean"]
    if (status := subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode) != 0:
        return status
    modules = {part.module for part in PARTS}
    names = {name.defined for part in PARTS for name in public_names(part)} - modules
    problems = [f"fetched from elsewhere: {one}" for one in checks.fetched_from_elsewhere(SITE)]
    problems += [f"not in the reference: {name}" for name in checks.missing_names(SITE, sorted(names))]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{count} pages, {len(names)} public names, {time.monotonic() - start:.0f} s; see {SITE / 'index.html'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
