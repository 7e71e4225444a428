"""Print what is installed and what would fail: ``python tools/doctor.py``."""

import sys
from pathlib import Path

MODULE = "mrla_doctor.py"  # beside the package, in a checkout and in an installation

if __name__ == "__main__":
    folders = Path(__file__).resolve().parents
    sys.path.insert(0, str(next(folder for folder in folders if (folder / MODULE).exists())))
    import mrla_doctor

    sys.exit(mrla_doctor.main(sys.argv[1:]))
