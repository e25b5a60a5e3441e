"""Holds one thread of another process still, with ptrace, as a device call that does not return holds it."""

import ctypes
import os
import subprocess
import time

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_ALL_THREADS = 0x40000000  # __WALL of waitpid
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(what, tid):
    if _libc.ptrace(what, tid, None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")


def can_trace():
    """Whether this machine lets a process trace its children; some containers do not."""
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            thread = FrozenThread(child.pid)
            thread.freeze()
            thread.thaw()
            return True
        except OSError:
            return False
        finally:
            child.kill()


def threads(pid):
    """{thread id: (name, processor time in ticks)}"""
    found = {}
    for tid in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{tid}/stat") as file:
            head, tail = file.read().rsplit(") ", 1)
        found[int(tid)] = (head.split("(", 1)[1], sum(map(int, tail.split()[11:13])))
    return found


class FrozenThread:
    """From freeze to thaw; both are called by the same thread."""

    def __init__(self, tid):
        self.tid = tid

    def freeze(self):
        _ptrace(_SEIZE, self.tid)
        _ptrace(_INTERRUPT, self.tid)
        os.waitpid(self.tid, _ALL_THREADS)

    def thaw(self):
        _ptrace(_DETACH, self.tid)

    def bury(self):
        """Instead of thaw, when its process has ended: until then the process cannot be waited for."""
        os.waitpid(self.tid, _ALL_THREADS)

    def freeze_outside_of_locks(self, others_go_on):
        """A thread may be caught with a lock of the allocator, which then holds up everybody: not what is meant."""
        for _ in range(20):
            self.freeze()
            if others_go_on():
                return
            self.thaw()
            time.sleep(0.05)
        raise AssertionError("the thread was never outside of locks")
