"""When two answers in LaTeX are the same: the normal forms by which MATH and Minerva compare them.

Both compare text, so `1/2` and `0.5` are the same and `2/4` is another. `math-verify` of PyPI compares what the
expressions are worth; a reward function of one's own may use it.
"""

import re

_LATEX = [
    ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""),
    ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""),
]  # fmt: skip
_BOX = "\\boxed{"
_UNIT = "\\text{ "  # begins a unit behind a number
# Lewkowycz et al. 2022, "Solving Quantitative Reasoning Problems with Language Models", appendix D.1.
_MINERVA_REPLACED = [
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
]  # fmt: skip
_MINERVA_REMOVED = [
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges",
    "students", "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3",
    "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
]  # fmt: skip
_MINERVA_UNWRAPPED = [
    (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
    (r"(\\text\{)(.*?)(\})", r"\2"),
    (r"(\\textbf\{)(.*?)(\})", r"\2"),
    (r"(\\overline\{)(.*?)(\})", r"\2"),
    (r"(\\boxed\{)(.*)(\})", r"\2"),
    (r"(frac)([^{])(.)", r"frac{\2}{\3}"),
    (r"(sqrt)([^{])", r"sqrt{\2}"),
]


def boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{...}` of a text, or behind its last `\\boxed `; None where there is neither."""
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    return in_braces(text) if text.rfind("\\boxed") == text.rfind(_BOX) else None


def in_braces(text: str) -> str | None:
    """What stands in the last `\\boxed{...}` of a text; None where there is none, or it is not closed."""
    _, box, rest = text.rpartition(_BOX)
    depth = 1 if box else 0
    for place, letter in enumerate(rest if box else ""):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[:place]
    return None


def math_form(answer: str) -> str:
    """The normal form of the MATH benchmark (Hendrycks et al. 2021): without spaces, units, degrees and percent, and
    each fraction and root with its braces."""
    for written, instead in _LATEX:
        answer = answer.replace(written, instead)
    answer = answer.partition(_UNIT)[0].replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if answer.startswith("."):
        answer = f"0{answer}"
    name, _, value = answer.partition("=")
    if answer.count("=") == 1 and len(name) <= 2:  # of "x = 3"
        answer = value
    answer = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", answer).replace(" ", "")
    answer = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", answer)
    if answer == "0.5":
        return "\\frac{1}{2}"
    return re.sub(r"\A(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)\Z", r"\\frac{\1}{\2}", answer)


def minerva_form(answer: str) -> str:
    """The normal form of Minerva: without units, articles, text commands and thousands separators."""
    answer = answer.rpartition("=")[2]
    for written, instead in _MINERVA_REPLACED:
        answer = answer.replace(written, instead)
    for written in _MINERVA_REMOVED:
        answer = answer.replace(written, "")
    for pattern, instead in _MINERVA_UNWRAPPED:
        answer = re.sub(pattern, instead, answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()
