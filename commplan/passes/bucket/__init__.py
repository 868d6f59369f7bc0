"""bucket: collectives on trees become collectives on flat buffers of bounded size.

`bucket` is the pass; `size_model` chooses the bound, `bin_packing` which leaves share a buffer, and `packing`
writes the packs, collectives and unpacks.
"""
