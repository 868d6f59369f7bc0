"""Open MPI's remote shell in a lab: `agent.py LAB [options] ADDRESS COMMAND...`, called by mpirun.

Runs the command in the namespace that has the address, under the hostname of that host. A standalone script,
started by path: it imports nothing from the surrounding packages.
"""

import os
import sys


def main() -> None:
    lab, *words = sys.argv[1:]
    while words and words[0].startswith("-"):
        del words[0]
    address, *command = words
    host = f"{lab}-{address.rpartition('.')[2]}"
    script = f"hostname {host}; {' '.join(command)}"
    os.execvp("ip", ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", script])


if __name__ == "__main__":
    main()
