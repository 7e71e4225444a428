"""Print what is installed and what would fail: ``python tools/doctor.py``."""

import importlib.util
import sys
from pathlib import Path


def load_doctor():
    """The doctor's module from its file: importing its package runs what it examines."""
    relative = Path("mrla_mm/compat/doctor.py")
    root = next(
        folder for folder in Path(__file__).resolve().parents if (folder / relative).exists()
    )
    sys.path.insert(0, str(root))
    spec = importlib.util.spec_from_file_location("mrla_mm_doctor", root / relative)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(load_doctor().main(sys.argv[1:]))
