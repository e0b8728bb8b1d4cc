"""Children of a module that does what it is told, good or bad."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from runner.child.spawn import Cause, Child, ChildError, Limits
from runner.system.processor import THREAD_VARIABLES

TALKER = """
    import os, signal, subprocess, sys, time
    from runner.system.errors import CheckpointError, DivergedError, UsageError

    def main(parent):
        print("what a library prints")
        if "raises" in parent.options:
            raise {"usage": UsageError, "diverged": DivergedError, "checkpoint": CheckpointError, "value": ValueError,
                   "memory": MemoryError}[parent.options["raises"]]("in its own words")
        if "asks" in parent.options:
            parent.tell(heard=parent.ask(question=1))
            return
        for command in parent.commands():
            if command == "family":
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
                parent.tell(pids=[os.getpid(), child.pid])
            elif command == "sleep":
                time.sleep(600)
            elif command == "hoard":
                hoard = [os.urandom(2**26) for _ in range(16)]
                time.sleep(600)
            elif command == "die":
                os.kill(os.getpid(), signal.SIGSEGV)
            elif command == "leave":
                return
            elif command == "where":
                parent.tell(path=sys.path, safe=sys.flags.safe_path, threads=os.environ.get("OMP_NUM_THREADS"))
            else:
                parent.tell(said=command)
"""


@pytest.fixture(autouse=True)
def talker(tmp_path, monkeypatch):
    (tmp_path / "talker.py").write_text(textwrap.dedent(TALKER))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def gone(pid):
    """Whether a process has ended, when it has had time to."""
    deadline = time.monotonic() + 120
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_child_answers_and_what_it_prints_is_no_answer():
    with Child("talker") as child:
        assert child.ask("hello") == {"said": "hello"}
        assert child.ask("again") == {"said": "again"}


def test_a_child_may_ask_back_and_end_well():
    with Child("talker", options={"asks": True}) as child:
        assert child.receive() == {"question": 1}
        child.send([2])
        assert child.receive() == {"heard": [2]}
        assert child.receive() is None


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("usage", Cause.INVALID),
        ("diverged", Cause.DIVERGED),
        ("checkpoint", Cause.FAILED),
        ("value", Cause.FAILED),
        ("memory", Cause.OUT_OF_MEMORY),
    ],
)
def test_how_a_child_ended_is_said_in_its_own_words(error, cause):
    with Child("talker", options={"raises": error}) as child, pytest.raises(ChildError, match="own words") as caught:
        child.answer()
    assert caught.value.cause is cause
    assert ("ValueError:" in str(caught.value)) == (error == "value")


def test_a_signal_is_named_and_leaving_without_a_word_is_no_answer():
    with Child("talker") as child:
        with pytest.raises(ChildError, match="SIGSEGV") as caught:
            child.ask("die")
        assert caught.value.cause is Cause.CRASHED
        with pytest.raises(ChildError, match="SIGSEGV"):
            child.ask("hello")
    with Child("talker") as child, pytest.raises(ChildError) as caught:
        child.ask("leave")
    assert caught.value.cause is Cause.CRASHED


@pytest.mark.parametrize(
    ("limits", "command", "cause", "reason"),
    [
        (Limits(silence=0.2), "sleep", Cause.HUNG, "no answer to 'sleep' for 0.2 s"),
        (Limits(seconds=0.2), "sleep", Cause.TIMEOUT, "more than 0.2 s"),
        (Limits(memory=2**29), "hoard", Cause.OUT_OF_MEMORY, "GiB of host memory, of 0.5"),
    ],
)
def test_a_child_that_keeps_to_no_limit_is_ended(limits, command, cause, reason):
    with Child("talker", limits=limits) as child, pytest.raises(ChildError, match=reason) as caught:
        child.ask(command)
    assert caught.value.cause is cause


def test_nobody_is_left_of_a_child_that_was_stopped():
    with Child("talker") as child:
        pids = child.ask("family")["pids"]
        child.send("sleep")
        with pytest.raises(ChildError) as caught:
            child.receive(lambda: True)
        assert caught.value.cause is Cause.STOPPED
        assert all(map(gone, pids))


def test_nobody_is_left_of_a_child_that_is_not_needed_any_more():
    with Child("talker") as child:
        pids = child.ask("family")["pids"]
    assert all(map(gone, pids))


PARENT = """
import sys
from runner.child.spawn import Child
child = Child("talker")
print(*child.ask("family")["pids"], flush=True)
child.ask(sys.argv[1])
sys.stdin.read()
"""


@pytest.mark.parametrize("command", ["hello", "sleep"])
def test_children_do_not_outlive_a_parent_that_is_killed(command):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child, other = map(int, parent.stdout.readline().split())
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    assert gone(child)
    assert gone(other)


COMPILER = pytest.param(True, {}, "1", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("compiles", "environment", "known"), [(False, {}, "0"), COMPILER, (True, {"CXX": "."}, "0")])
def test_copies_that_compile_know_for_which_instructions(tmp_path, compiles, environment, known):
    (tmp_path / "looks.py").write_text(
        textwrap.dedent("""
        from torch._inductor.cpu_vec_isa import valid_vec_isa_list

        def main(parent):
            parent.tell(known=valid_vec_isa_list.cache_info().currsize)
    """)
    )
    code = f"""
        from runner.child.spawn import Child

        with Child("looks", forked=True, compiles={compiles}) as child:
            print(child.answer()["known"])
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    given = os.environ | {"PYTHONPATH": str(tmp_path)} | environment
    child = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    assert child.stdout.split() == [known]


def test_a_child_imports_nothing_from_the_current_directory(tmp_path, monkeypatch):
    somewhere = tmp_path / "somewhere"
    somewhere.mkdir()
    for name in ("random", "talker", "torch", "queue", "socket"):
        (somewhere / f"{name}.py").write_text("raise SystemExit('imported from the current directory')")
    monkeypatch.chdir(somewhere)
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name)
    with Child("talker", threads=3) as child:
        where = child.ask("where")
    assert where["safe"]
    assert not {"", ".", str(somewhere)} & set(where["path"])
    assert where["threads"] == "3"


def test_secrets_of_a_recipe_are_in_no_file_and_on_no_command_line():
    with Child("talker", {"model": {"password": "swordfish"}}) as child:
        child.ask("hello")
        process = psutil.Process(child.ask("family")["pids"][0])
        assert "swordfish" not in json.dumps([process.cmdline(), process.environ()])
        texts = [path.read_text() for path in Path(child._folder.name).iterdir()]
        assert texts in (["what a library prints\n"], [""])
