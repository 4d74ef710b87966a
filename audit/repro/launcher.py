"""Closes this process's network, bounds what it may take, and becomes another program.

    python launcher.py                                         prints why the network can't be closed, if so
    python launcher.py closed|open MEMORY_BYTES FILE_BYTES SECONDS COMMAND...

It runs by its path, before anything of the command does, so it needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys

NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000
"""CLONE_NEWUSER and CLONE_NEWNET of Linux's sched.h."""


def close_network() -> str:
    """Move to a network namespace that has no interface up; returns why that is impossible."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "unshare"):
        return "this system has no network namespaces"
    user, group = os.getuid(), os.getgid()
    if not library.unshare(NEW_NETWORK):
        return ""
    # Who may not do that alone may in a user namespace, where the kernel allows those.
    if library.unshare(NEW_USER | NEW_NETWORK):
        return os.strerror(ctypes.get_errno())
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return ""


def main(words: list[str]) -> None:
    if not words:
        print(close_network())
        return
    network, memory, file, seconds, *command = words
    if network == "closed" and (problem := close_network()):
        sys.exit(f"the network could not be closed: {problem}")
    bounds = (
        (resource.RLIMIT_DATA, int(memory)),
        (resource.RLIMIT_FSIZE, int(file)),
        (resource.RLIMIT_CPU, int(seconds)),
        (resource.RLIMIT_CORE, 0),
    )
    for kind, most in bounds:
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
