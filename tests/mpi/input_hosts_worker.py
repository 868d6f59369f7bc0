"""A rank of a whole program on pretended hosts: input_hosts_worker.py FOLDER HOSTS '{"what": "everything",
..}'.

HOSTS gives the name of each rank's host, such as `a,a,b,b`: ranks of one name share memory, the others MPI.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from mpi4py import MPI
from support import host_processes

import commplan
from commplan.diagnostics import CommplanError
from commplan.runtime.input.device.batches import shared_group

# Fewer bytes than a message, so that hosts may run ahead of each other as far as they ever may.
SURVIVED = """plan survived
ensemble member = {members}
source images : u8[6]
fn decode(u8[6]) -> u8[2, 3], i32 on host
each step {{
    raw       = load images batch 8 visit exactly_once seed 3 tail short {{ on_failure = {on_failure} }}
    x, labels = map decode(raw)
    x         = share x over member via {design}
    labels    = share labels over member via {design}
    output x, labels
}}
"""
HERE = MPI.COMM_WORLD


def grouped(run: Any, hosts: list[str], timeout: float = 60.0) -> dict[str, Any]:
    phase = run.program.schedule.phase("step")
    host = hosts[HERE.rank]
    among = shared_group(run.context, phase, run.context.machine.input.local(), host=host, timeout=timeout)
    if among is None:
        return {}
    with (Path(sys.argv[1]) / f"runs-{HERE.rank}").open("a") as file:
        file.write(f"{among.run_id}\n")  # so that the test knows what to look for
    return {"group": among}


def everything(hosts: list[str], words: dict[str, Any]) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for design in words["designs"]:
        run, decoded = host_processes.bound(design, HERE.size, HERE)
        options = grouped(run, hosts)
        items = host_processes.seen(run, 2, **options)
        carrier = options["group"].carrier if options else None
        moved = [carrier.sent, carrier.received] if carrier else [0, 0]
        report[design] = {"items": items, "decoded": decoded, "moved": moved}
    return report


def failing(hosts: list[str], words: dict[str, Any]) -> dict[str, Any]:
    """A record that only one process decodes is bad."""
    bad = int(host_processes.RECORDS[13, 0])
    run, _ = host_processes.bound("all_shared", HERE.size, HERE, bad=bad)
    host_processes.seen(run, 1, **grouped(run, hosts))
    return {}


def survived(hosts: list[str], words: dict[str, Any]) -> dict[str, Any]:
    """The labels of every batch. This rank dies on request: before it takes a batch, or while it decodes
    one."""
    die = words.get("die", {}).get(str(HERE.rank), {})
    decoded: list[int] = []

    def decode(record: Any) -> Any:
        decoded.append(int(record[0]))
        if len(decoded) == die.get("decoding"):
            os.kill(os.getpid(), signal.SIGKILL)
        return host_processes.np.asarray(record).reshape(2, 3), host_processes.np.int32(record[0])

    settings = {"design": words["design"], "on_failure": words["on_failure"], "members": HERE.size}
    program = commplan.loads(SURVIVED.format(**settings)).compile(HERE)
    run = program.bind(HERE, sources={"images": host_processes.RECORDS}, functions={"decode": decode})
    labels: list[list[list[int]]] = []
    with run.batches(**grouped(run, hosts)) as batches:
        for _ in range(words["epochs"]):
            labels.append([])
            for item in batches:
                labels[-1].append(host_processes.np.asarray(item["labels"]).tolist())
                if sum(map(len, labels)) == die.get("batch"):
                    os.kill(os.getpid(), signal.SIGKILL)
        summary = batches.summary()
    return {"labels": labels, "decoded": len(decoded), "checked": summary.checked}


def main() -> None:
    folder, hosts, words = Path(sys.argv[1]), sys.argv[2].split(","), json.loads(sys.argv[3])
    does = {"everything": everything, "failing": failing, "survived": survived}[words["what"]]
    try:
        report = does(hosts, words)
    except CommplanError as error:
        first = error.diagnostics[0]
        report = {"code": first.code, "message": first.message, "notes": [note.text for note in first.notes]}
    (folder / f"{HERE.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
