"""What a compiled extension was built from, as a short text: two builds of the same sources have the same one.

`setup.py` runs this file by itself, before anything of the package can be imported: it needs nothing but Python.
"""

import hashlib
from pathlib import Path


def fingerprint(source: Path, folder: Path) -> str:
    """The fingerprint of one C++ file and of every header that it could include.

    Args:
        source: the C++ file.
        folder: the folder of all kernels, of which every header counts.

    Returns:
        Sixteen hexadecimal digits; others whenever a byte or a name of these files changes.
    """
    digest = hashlib.sha256()
    for path in (source, *sorted(folder.rglob("*.h"))):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]
