"""One process for each host and user that outlives the processes of a job and says how they ended.

Where a process can speak, it or those that wait for it say what is wrong. Who is killed cannot, and a
launcher that ends the others when one has died leaves nobody to speak for it. `attend` introduces a process
and starts the sidecar (`commplan.sidecar.__main__`) where there is none; it ends with the last of those that
it knows, and leaves nothing behind.
"""

from commplan.sidecar.attend import attend as attend
from commplan.sidecar.attend import leave as leave
