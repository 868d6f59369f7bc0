"""bucket: replaces collectives on trees by collectives on flat buffers of bounded size.

`bucket` is the pass, `size_model` chooses the bound, `bin_packing` assigns leaves to buffers, and `packing`
emits the packs, collectives and unpacks.
"""
