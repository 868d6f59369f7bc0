"""Phases as JAX functions of one rank's arrays, for every backend.

`phase` lowers a phase, `ops` an op, `collectives` what ranks send each other; `packing` is buckets,
`layers` layers one after another; `functions` calls the user's; `check` compares what arrives with the
schedule; `servers` packs what servers get; `aot` compiles for devices that need not be there; `backend` is
what another backend has to offer; `primitives` change types or warn; `jaxprs` splits traced functions;
`_compat` and the other modules whose names begin with `_` hold JAX's private names.
"""
