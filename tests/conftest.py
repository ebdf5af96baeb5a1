"""For all tests: no example of hypothesis is judged by the clock, since machines are busy at times."""

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
