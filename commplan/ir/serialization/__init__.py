"""File formats of both graphs: `text`, in the notation of `text_syntax`, and `canonical_json`."""
