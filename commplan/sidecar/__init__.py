"""One process for each host and user that observes the processes of jobs, and outlives them.

`attend` introduces a process and starts the sidecar (`commplan.sidecar.__main__`) if there is none. While
processes run, the sidecar reads their records, finds the rank that blocks the others (`decision`) and writes
the verdict to the records. After the last process of a job has ended, it prints how they ended. It ends with
the last process that it attends, and removes its files.
"""

from commplan.sidecar.attend import attend as attend
from commplan.sidecar.attend import introduce_hosts as introduce_hosts
from commplan.sidecar.attend import is_attended as is_attended
from commplan.sidecar.attend import leave as leave
from commplan.sidecar.attend import unwatch as unwatch
