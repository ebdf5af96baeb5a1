"""A coding agent that mends broken reports, trained as the program that it is: `docs/tutorials/repair.md`."""
