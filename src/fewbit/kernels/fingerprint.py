"""A hash of an extension's sources.

`setup.py` runs this file before the package can be imported, so it needs only the standard library.
"""

import hashlib
from pathlib import Path


def fingerprint(source: Path, folder: Path) -> str:
    """The hash of one C++ file and every header that it could include.

    Args:
        source: the C++ file.
        folder: the folder of all kernels; every header in it is hashed.

    Returns:
        16 hexadecimal digits, which change with any byte or name of these files.
    """
    digest = hashlib.sha256()
    for path in (source, *sorted(folder.rglob("*.h"))):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]
