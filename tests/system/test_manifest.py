"""Files that a manifest names are what was written, or they are not read."""

import json
import os
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.system.errors import DamagedError, ExitCode
from runner.system.manifest import NAME, FileDigest, Manifest, read_checked
from runner.system.stored_json import sealed

FILES = {"recipe.lock.yaml": "lock: 1\n", "inference/net.onnx": "weights" * 20, "verification.json": "{}"}
MOST = 10_000


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "inference").mkdir()
    manifest = Manifest(folder)
    for name, text in FILES.items():
        manifest.store_text(folder / name, text)
    return folder


@pytest.fixture
def run(original, tmp_path):
    return shutil.copytree(original, tmp_path / "run")


def is_read(folder, name):
    """Whether a file is read, with what was written in it."""
    try:
        content = read_checked(folder / name, MOST) if "/" not in name else None
        Manifest(folder).check(folder / name)
    except DamagedError as error:
        assert error.exit_code is ExitCode.NO_CHECKPOINT  # noqa: PT017 (one of two ends)
        assert str(folder) in str(error)  # noqa: PT017
        return False
    assert content in (None, FILES[name].encode())
    assert (folder / name).read_text() == FILES[name]
    return True


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_is_noticed_wherever_it_is(original, tmp_path, data):
    shutil.rmtree(tmp_path)
    run = shutil.copytree(original, tmp_path / "run")
    flipped = data.draw(st.sampled_from([NAME, *FILES]))
    content = bytearray((run / flipped).read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (run / flipped).write_bytes(content)
    assert {name for name in FILES if is_read(run, name)} == (set() if flipped == NAME else {*FILES} - {flipped})


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=400) | st.sampled_from([b"[" * 100_000, b"{}", b"null", b"0" * 5000, b"\xff\xfe", b""]))
def test_any_content_of_a_manifest_is_refused_in_one_line(original, tmp_path, content):
    shutil.rmtree(tmp_path)
    run = shutil.copytree(original, tmp_path / "run")
    (run / NAME).write_bytes(content)
    with pytest.raises(DamagedError, match=NAME) as error:
        Manifest(run).entries()
    assert "\n" not in str(error.value)


DIGEST = {"sha256": "0" * 64, "size": 1}
ENTRIES = [
    {"../x": [DIGEST]}, {"/etc/passwd": [DIGEST]}, {"a/../b": [DIGEST]}, {"": [DIGEST]}, {".": [DIGEST]},
    {"a//b": [DIGEST]},
    {"a/": [DIGEST]}, {".hidden": [DIGEST]}, {"a\nb": [DIGEST]}, {"a\0b": [DIGEST]}, {"x" * 300: [DIGEST]}, {"a": []},
    {"a/b/c/d/e/f": [DIGEST]}, {"a": [DIGEST] * 3}, {"a": DIGEST}, {"a": None}, {"a": "0" * 64}, {"a": [{}]}, [], None,
    "a",
    {"a": [{**DIGEST, "size": -1}]}, {"a": [{**DIGEST, "size": True}]}, {"a": [{**DIGEST, "size": 2**64}]},
    {"a": [{**DIGEST, "sha256": "0" * 63}]}, {"a": [{**DIGEST, "sha256": "G" * 64}]}, {"a": [{**DIGEST, "more": 1}]},
    {"a": [{**DIGEST, "sha256": None}]}, {str(number): [DIGEST] for number in range(10_001)},
]  # fmt: skip


@pytest.mark.parametrize("files", ENTRIES, ids=lambda files: repr(files)[:40])
def test_entries_of_another_form_are_refused(files, run):
    (run / NAME).write_text(sealed({"format": 1, "files": files}))
    with pytest.raises(DamagedError, match=NAME):
        Manifest(run).entries()


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
@pytest.mark.parametrize("name", [NAME, *FILES])
def test_what_is_no_regular_file_is_not_read(kind, name, run):
    path = run / name
    path.rename(run / "elsewhere")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(run / "elsewhere")
    else:
        path.mkdir()
    with pytest.raises(DamagedError):
        Manifest(run).check(run / "recipe.lock.yaml" if name == NAME else path)


def test_what_a_manifest_does_not_name_is_not_read(run):
    (run / "other.lock.yaml").write_text("lock: 1\n")
    with pytest.raises(DamagedError, match=r"is not in runner-manifest\.json"):
        read_checked(run / "other.lock.yaml", MOST)
    assert not Manifest(run).is_whole(run / "other.lock.yaml")


def test_without_a_manifest_there_is_nothing_to_compare_with(tmp_path):
    (tmp_path / "recipe.lock.yaml").write_text("lock: 1\n")
    assert read_checked(tmp_path / "recipe.lock.yaml", MOST) == b"lock: 1\n"


@pytest.mark.parametrize("written", ["old", "new"])
def test_a_process_that_dies_while_a_file_is_replaced_leaves_a_whole_one(written, run, monkeypatch):
    def die(point, *_):
        raise KeyboardInterrupt(point)

    path, manifest = run / "recipe.lock.yaml", Manifest(run)
    old = path.read_text()
    monkeypatch.setattr("runner.system.manifest.reach", die)
    for text in ("lock: 2\n", "lock: 3\n"):
        with pytest.raises(KeyboardInterrupt):
            manifest.store_text(path, text)
        if written == "old":
            path.write_text(old)
        manifest.check(path)
    monkeypatch.undo()
    manifest.store_text(path, "lock: 4\n")
    assert manifest.entries()["recipe.lock.yaml"] == [FileDigest.of(path)]


def test_a_manifest_is_json_and_its_digest(run):
    text, digest = (run / NAME).read_text().splitlines()
    assert FileDigest.of_content(text.encode()).sha256 == digest
    assert json.loads(text)["files"].keys() == FILES.keys()
