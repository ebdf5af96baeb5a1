"""What every agent here is asked, in two turns, and its two tools."""

QUESTIONS = ("What is the weather in Oslo, and how many people live there?", "And in Rome?")
INSTRUCTIONS = "Answer with the help of your tools."


def weather(city: str) -> str:
    """The weather in a city now."""
    return {"Oslo": "sunny", "Rome": "rainy"}[city]


def population(city: str) -> str:
    """How many people live in a city."""
    return {"Oslo": "700,000", "Rome": "2,800,000"}[city]
