"""bucket: replaces collectives on trees by collectives on flat buffers of bounded size.

`bucket` is the pass, and `size_model` chooses the bound. `passes.bin_packing` assigns leaves to buffers, and
`passes.packing` emits the packs, collectives and unpacks.
"""
