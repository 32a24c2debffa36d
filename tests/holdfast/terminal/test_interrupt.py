"""A signal that comes in a destructor is not lost."""

import signal
import subprocess
import sys

import pytest

# The callback of a weak reference gets the signal, and Python ignores what is raised there.
PROGRAM = """
import contextlib, os, signal, sys, time, weakref
from holdfast.terminal import interrupt

class Told(BaseException):
    def __init__(self, number):
        self.signal = number

class Thing:
    pass

def handle(number, frame):
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Told(number)

number, how = int(sys.argv[1]), sys.argv[2]
signal.signal(number, interrupt.end if how == "command" else handle)
if how != "never":
    interrupt.send_ignored_again()
    interrupt.send_ignored_again()
thing = Thing()
watch = weakref.ref(thing, lambda _: os.kill(os.getpid(), number))
try:
    with interrupt.raised_once(60.0) if how in ("once", "command") else contextlib.nullcontext():
        del thing
        print("goes on", flush=True)
        time.sleep(2)
except (Told, KeyboardInterrupt, SystemExit):
    sys.exit(7)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("how", "code"), [("again", 7), ("once", 7), ("command", 7), ("never", 0)])
def test_a_signal_in_a_destructor_ends_the_process(number: signal.Signals, how: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(int(number)), how], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "goes on\n"), done.stderr
    assert ("Exception ignored" in done.stderr) == (how == "never")
