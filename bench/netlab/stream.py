"""One end of a plain TCP stream: `stream.py send|receive ADDRESS PORT SECONDS`.

The receiver prints the bytes a second that arrived after the first quarter of the time. A standalone script,
started by path: it imports nothing from the surrounding packages.
"""

import socket
import sys
import time

PIECE = 1 << 18
PATIENCE = 10.0  # seconds


def receive(address: str, port: int, seconds: float) -> None:
    with socket.create_server((address, port)) as server:
        server.settimeout(PATIENCE)
        stream, _ = server.accept()
    with stream:
        stream.settimeout(PATIENCE)
        buffer = bytearray(PIECE)
        stream.recv_into(buffer, 1)
        started = last = time.monotonic()
        counted_from, counted = started, 0
        while got := stream.recv_into(buffer):
            last = time.monotonic()
            if last - started < seconds / 4:
                counted_from = last
            else:
                counted += got
    print(counted / (last - counted_from))


def send(address: str, port: int, seconds: float) -> None:
    piece = bytes(PIECE)
    with connect(address, port) as stream:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            stream.sendall(piece)


def connect(address: str, port: int) -> socket.socket:
    """A connection, as soon as the receiver listens."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((address, port), timeout=PATIENCE)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def main() -> None:
    role, address, port, seconds = sys.argv[1:]
    {"send": send, "receive": receive}[role](address, int(port), float(seconds))


if __name__ == "__main__":
    main()
