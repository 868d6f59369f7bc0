"""Lowers phases to JAX functions of one rank's arrays, for every backend.

- `phase` lowers a phase, `ops` a local op, `collectives` a collective on a mesh.
- `backend` is the interface that a backend implements; `servers` packs requests to servers.
- `packing` avoids packing buckets; `layers` reduces and gathers layer by layer.
- `functions` calls user functions; `check` compares arguments with the schedule.
- `aot` compiles ahead of time, for devices that are not present.
- `primitives` are identities that change types or warn; `jaxprs` analyzes traced functions.
- `_compat` and the other modules with a leading underscore use private names of JAX.
"""
