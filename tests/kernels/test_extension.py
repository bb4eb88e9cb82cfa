"""A compiled extension is told from one that was built of other sources; `tests/test_packaging.py` builds one."""

from fewbit.kernels.fingerprint import fingerprint


def test_every_header_and_every_name_counts(tmp_path):
    source, near, far = tmp_path / "one" / "cpu.cc", tmp_path / "one" / "a.h", tmp_path / "native" / "b.h"
    found = []

    def note():
        found.append(fingerprint(source, tmp_path))

    for path in (source, near, far):
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    note()
    for path in (source, near, far):
        path.write_text("//")
        note()
    far.rename(tmp_path / "native" / "c.h")
    note()
    assert len(set(found)) == 5
    assert fingerprint(source, tmp_path) == found[-1]
