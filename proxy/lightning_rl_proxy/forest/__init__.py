"""The live forest of an attempt: where a request stands in it, and what it adds."""
