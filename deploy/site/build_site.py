"""Builds the site of docs/ into build/site, strictly: a page that is not in the navigation, or a link or an anchor that
leads nowhere, ends it with an error.

    python deploy/site/build_site.py [--serve]

What builds it, MkDocs with its theme Material, is installed at locked versions into build/site-env the first time,
apart from what Paddock needs. `--serve` shows the pages on this machine and renews them when they change.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "docs.lock"
ENVIRONMENT = ROOT / "build" / "site-env"
PYTHON = ENVIRONMENT / "bin" / "python"
STAMP = ENVIRONMENT / "installed"
CONFIG = ROOT / "deploy" / "site" / "mkdocs.yml"
SITE = ROOT / "build" / "site"
CLEAN = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "NO_MKDOCS_2_WARNING": "1"}
"""The variable keeps its theme from announcing a successor on each build."""


def main() -> int:
    if not install():
        print("site: MkDocs can't be installed from requirements/docs.lock; the reason stands above", file=sys.stderr)
        return 1
    if "--serve" in sys.argv[1:]:
        return subprocess.run(mkdocs("serve"), cwd=ROOT, env=CLEAN).returncode
    # Without `--quiet`, with which it counts no warnings either.
    done = subprocess.run(mkdocs("build", "--strict"), cwd=ROOT, env=CLEAN, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.splitlines()
        print("\n".join(line for line in lines if not line.startswith("INFO")), file=sys.stderr)
        return done.returncode
    print(f"site: {SITE.relative_to(ROOT)}/index.html")
    return 0


def install() -> bool:
    """Make the environment where it is not that of the lock; False where that fails."""
    wanted = hashlib.sha256(LOCK.read_bytes()).hexdigest() + sys.version
    if STAMP.is_file() and STAMP.read_text() == wanted:
        return True
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    venv.create(ENVIRONMENT, with_pip=True)
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile", "--no-deps"]
    if subprocess.run([*pip, "--require-hashes", "--requirement", str(LOCK)]).returncode != 0:
        return False
    STAMP.write_text(wanted)
    return True


def mkdocs(command: str, *flags: str) -> list[str]:
    return [str(PYTHON), "-m", "mkdocs", command, "--config-file", str(CONFIG), *flags]


if __name__ == "__main__":
    sys.exit(main())
