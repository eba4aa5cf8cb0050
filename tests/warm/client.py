"""`python client.py SOCKET LINE...`: runs `python LINE...` in a fork of the server, with this process's files.

It ends as the fork does. It imports little, so that it starts in no time.
"""

import array
import json
import os
import signal
import socket
import sys
import time

SECONDS = 120.0  # that a server may take to get ready


def main() -> None:
    """Send what this process has, and wait for the status."""
    path, *line = sys.argv[1:]
    files = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    files = [file for file in files if _is_open(file)]
    with socket.socket(socket.AF_UNIX) as server:
        _connect(server, path)
        asked = json.dumps([line, os.getcwd(), dict(os.environ), files]).encode("utf-8", "surrogateescape")
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        server.sendmsg([len(asked).to_bytes(8, "little")], ancillary)
        server.sendall(asked)
        for file in files:  # the fork has them: who reads from it sees its end, not this one's
            if file > 2:
                os.close(file)
        pid = int.from_bytes(_receive(server, 8), "little")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        status = int.from_bytes(_receive(server, 8), "little", signed=True)
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):  # which nobody handles
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _is_open(file: int) -> bool:
    """Tell whether a file is open, and no folder, such as the one that lists them."""
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def _connect(server: socket.socket, path: str) -> None:
    ends = time.monotonic() + SECONDS
    while True:
        try:
            return server.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):  # it is not ready
            if time.monotonic() > ends:
                raise
            time.sleep(0.02)


def _receive(server: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = server.recv(count - len(found))
        if not part:
            os._exit(255)
        found += part
    return found


if __name__ == "__main__":
    main()
