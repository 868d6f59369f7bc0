"""The written forms of both graphs and the way back: `text`, in the notation of `text_syntax`, and
`canonical_json`, which digests are taken of.
"""
