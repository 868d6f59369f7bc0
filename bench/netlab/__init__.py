"""An emulated cluster on one machine: hosts are network namespaces, and the network between them is shaped.

    with Lab(Shape(hosts=4, rate="200mbit")) as lab:
        lab.spawn(0, ["python", "program.py"])              # on the host of rank 0
        subprocess.run(lab.mpirun(["python", "program.py"]))  # one rank on each host

    python -m bench.netlab up --hosts 4 --racks 2           # the same from the command line

Needs root and iproute2. Whatever the load of the machine, the shaped links stay the bottleneck of everything
that moves more than a few kilobytes, which makes figures comparable that were not taken at the same moment.
"""

from bench.netlab.lab import Host as Host
from bench.netlab.lab import Lab as Lab
from bench.netlab.lab import Shape as Shape
from bench.netlab.rate import line_rate as line_rate
from bench.netlab.traffic import Counters as Counters
from bench.netlab.traffic import counters as counters
