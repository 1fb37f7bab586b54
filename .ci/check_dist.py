"""Check what `python -m build` made: `python .ci/check_dist.py FOLDER`.

The wheel and the sdist each hold every module and asset of every room, once, under kvpolicies/,
and the wheel installs nothing else.
"""

import os
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".safetensors", ".json", ".md", ".yaml", ".html", ".j2", ".csv"}


def expected() -> set[str]:
    """Files of the package as seen through its links, which is how they are installed."""
    found = set()
    for folder, _, names in os.walk(ROOT / "kvpolicies", followlinks=True):
        paths = (Path(folder, name) for name in names)
        found |= {p.relative_to(ROOT).as_posix() for p in paths if p.suffix in SUFFIXES}
    assert any(path.endswith(".safetensors") for path in found), "no weights in the source tree"
    return found


def main(folder: Path) -> None:
    want = expected()
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == want, f"wheel: missing {want - names}, unexpected {names - want}"
    with tarfile.open(next(folder.glob("*.tar.gz"))) as sdist:
        names = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    assert names >= want, f"sdist: missing {want - names}"
    print(f"{len(want)} files, all in the wheel and in the sdist")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
