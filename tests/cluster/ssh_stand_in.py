"""A replacement for `ssh` on machines without sshd: runs the command here, and forwards the port.

The first argument is the home folder for the command. The others are those of `ssh`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

from scripts.delayed_connection import forward


def serve(server: socket.socket, port: int) -> None:
    while True:
        client, _ = server.accept()
        threading.Thread(target=forward, args=(client, port, 0.0), daemon=True).start()


def main(home: str, *arguments: str) -> None:
    host, local_port, _, port = arguments[arguments.index("-L") + 1].split(":")
    try:
        server = socket.create_server((host, int(local_port)))
    except OSError:
        sys.stderr.write(f"bind [{host}]:{local_port}: Address already in use\n")
        sys.exit(255)
    environment = {**os.environ, "HOME": home, "SHELL": "/bin/sh"}
    with subprocess.Popen(["/bin/sh", "-c", arguments[-1]], env=environment) as process:
        threading.Thread(target=serve, args=(server, int(port)), daemon=True).start()
    sys.exit(process.returncode)


if __name__ == "__main__":
    main(*sys.argv[1:])
