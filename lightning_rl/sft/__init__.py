"""Supervised training on recorded answers: traces are read, written in the student's ids, and made training rows."""
