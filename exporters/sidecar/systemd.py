"""Tells systemd that the sidecar is ready, and that it stops: a unit of ``Type=notify`` waits for it.

The protocol is one datagram to the socket in ``NOTIFY_SOCKET``:
https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html
"""

from __future__ import annotations

import contextlib
import os
import socket

VARIABLE = "NOTIFY_SOCKET"


def notify(**state: object) -> bool:
    """Send ``READY=1`` and the like; returns False without systemd. Never raises."""
    address = os.environ.get(VARIABLE, "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):  # an abstract socket
        address = f"\0{address[1:]}"
    lines = "\n".join(f"{name}={value}" for name, value in state.items())
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(lines.encode(), address)
        return True
    return False
