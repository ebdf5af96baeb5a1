"""The shapes of bodies as each API types them: what the dialects decode, and what the OpenAPI document shows.

A `Wire` is decoded: it types no more than the dialect checks through it. Messages, items and tools that a dialect reads
by hand, with errors of its own, are loose there; the request types next to it name their shapes for the document.
"""
