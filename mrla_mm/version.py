"""The one version string of the package, and the commit of its checkout."""

import subprocess
from pathlib import Path

__version__ = "0.1.0"


def commit() -> str | None:
    """Return the commit of the checkout that the package runs from, with a "+" if files were changed; or None."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, timeout=30).returncode
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if changed else "")
