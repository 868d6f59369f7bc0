"""The stages of a phase over blocks of records, in threads and in worker processes."""
