"""Gives the Python that runs this file the packages of another environment: ``python asv_environment.py VENV``.

asv makes an environment for the commit that it measures. One line in a ``.pth`` file there lets it see the packages of
``.venv`` (torch, DeepSpeed, …), but not tiebench itself: path files inside a path that came from a path file are not
read, and that is how ``.venv`` knows its own, editable tiebench.

Standard library only: nothing is installed when it runs.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def share(venv: Path) -> Path:
    """Write the ``.pth`` file and return it.

    Raises:
        SystemExit: `venv` has no packages for this version of Python.
    """
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = venv.resolve() / "lib" / version / "site-packages"
    if not packages.is_dir():
        raise SystemExit(f"asv: {packages} is missing: run ci/test or ci/nightly once, with {version}")
    path = Path(sysconfig.get_paths()["purelib"]) / "tiebench_shared.pth"
    path.write_text(f"{packages}\n")
    return path


if __name__ == "__main__":
    share(Path(sys.argv[1]))
