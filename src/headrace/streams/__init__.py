"""Streams: the record of what a request was told, and readers that are cursors into it."""
