"""Formulas as people write them, for the rewards `math` and `deepscaler`: mended for math-verify,
or as text that can be compared. Pure.

math-verify's grammar reads a formula whole or not at all; but what is done to it before drops
quotes, dots and units, and the grammar has no word for a time, a congruence or a base. `says_more`
tells which formulas mean more than their value there.
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

from rlpipe.algorithms.answers import LATEX_TEXT

_UNICODE = str.maketrans({
    "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "π": "\\pi ",
    "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ",
    "≠": "\\ne ", "∪": "\\cup ", "∩": "\\cap ", "°": "^\\circ ", "²": "^2", "³": "^3",
    "½": "\\frac{1}{2}", "≡": "\\equiv ",
    "≈": "\\approx ", "…": "\\ldots ", "⟨": "\\langle ", "⟩": "\\rangle ", "′": "'", "’": "'", "″": "''",
    "∈": "\\in ", "±": "\\pm ", "\u00a0": " ",
})  # fmt: skip
_ENVIRONMENT = re.compile(r"\$\$([^$]*)\$\$|\$([^$]*)\$|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
THOUSANDS = re.compile(r"(?<=\d)(?:\\[,;:! ]|[ \u202f])(?=\d{3}(?!\d))")  # spaces between groups of digits: 1\,234
_TEXT = r"\\(?:text\w*|mathrm|mbox|operatorname)\s*\{([^{}]*)\}"
_LETTER = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|hat|vec|mathbb)\s*(?:\{\s*\\?([a-zA-Z])(?:math)?\s*\}|([a-zA-Z])(?![a-zA-Z]))"
)
_REPEATED = re.compile(r"(?<![\d.])(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*\{?(\d+)\}?|\((\d+)\))(?![\d.({])")
# 0.1666..., 0.2727...
_THIRDS = re.compile(r"(?<![\d.])(\d*)\.(\d*?)(?:(\d)\3{2,}|(\d{2,9})\4+)\s*(?:\\[lc]?dots|\.\.\.)")
_SCIENTIFIC = re.compile(r"(?<![\w.}])(\d+(?:\.\d+)?|\.\d+)[eE]([+-]?\d+)(?![\w.{])")
_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc))\s*[({]?\s*(\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*[)}]?"
)
_NAMED = re.compile(
    r"(?:m\s*)?(?:\\(?:angle|measuredangle|triangle|text\w*|mathrm|overline|widehat)\b[^=<>\d]*"
    r"|[A-Z]{2,}\s*|P\s*\([A-Z][^()=]*\)\s*)=([^=]+)"
)
# {x | x > 2}
_SOLUTIONS = re.compile(
    r"\\\{\s*([a-zA-Z])\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|\\vert|\\colon|[|:])"
    r"\s*([^|:]*(?:[<>]|\\[lg]e)[^|:]*)\\\}"
)
_UNIT_WORDS = {
    "mm": "mm millimeter millimeters millimetre millimetres", "cm": "cm centimeter centimeters centimetre centimetres",
    "m": "m meter meters metre metres", "km": "km kilometer kilometers kilometre kilometres", "in": "in inch inches",
    "ft": "ft foot feet", "yd": "yd yard yards", "mi": "mi mile miles",
    "mg": "mg milligram milligrams", "g": "g gram grams",
    "kg": "kg kilogram kilograms", "lb": "lb lbs pound pounds", "oz": "oz ounce ounces",
    "s": "s sec secs second seconds",
    "min": "min mins minute minutes", "h": "h hr hrs hour hours", "day": "day days",
    "week": "week weeks", "month": "month months",
    "year": "year years", "l": "l liter liters litre litres", "ml": "ml milliliter milliliters",
    "usd": "dollar dollars usd",
    "cent": "cent cents", "eur": "euro euros eur", "am": "am", "pm": "pm", "mph": "mph", "degree": "degree degrees",
    "unit": "unit units", "sq": "sq square", "cubic": "cubic", "radian": "radian radians rad",
}  # fmt: skip
UNITS = {word: unit for unit, words in _UNIT_WORDS.items() for word in words.split()}
_ANY_UNIT = "|".join(sorted(UNITS, key=len, reverse=True))
_POWER = r"\s*(?:\^\s*(?:\{\s*-?\d\s*\}|\d))?"
_LAST_UNIT = re.compile(
    r"(?:\\[,;:! ]|~|\s)*"
    rf"(?:\\(?:text\w*|mathrm|mbox)\s*\{{[^{{}}\d]*\}}|(?:(?<=[\d}}])(?=[a-z]{{2}})|\s+)(?:{_ANY_UNIT})\.?){_POWER}\s*$"
)
MEASURES = re.compile(rf"(?:\d[\d.,/]*\s*(?:{_ANY_UNIT})\.?(?:\s*(?:,|and)?\s*)){{2,}}")  # 5 ft 3 in
_MORE = re.compile(
    r"\\[lcdv]?dots|\.\.|['\"]|\\prime|:|\\[bp]?mod|\bmod\b|(?<![\d.])0[a-zA-Z]|\d\s*\\angle|\\equiv|\\cong|\\sim\b"
    r"|\d\s*(?:\\[,; ])?\s*[aApP]\.?\s?[mM]\b"  # a time of the day
    r"|(?<![\w{}])\d+\s*_"  # a number in another base
    r"|(?<![\w^{}])\d+(?:\s|\\[,;:! ])+(?:[A-Za-z]+\.?\s+)?\d"  # numbers with only a space between, or a word
    r"|\d{4}-\d\d?-\d|\d\d?/\d\d?/\d{4}"  # a date
    r"|\([^()]*=[^()]*\)\s*="  # P(X = 3) = 0.25, whose inside the grammar leaves out
    r"|(?<![A-Za-z\\])[A-Z]{3,}(?![a-z])"  # a word, not a product
    r"|\\partial|\\frac\s*\{\s*d[^{}]*\}\s*\{\s*d\s*[a-zA-Z]"  # a derivative, which has no value of its own
    r"|\\dot\b|\\overline\s*\{?\d|\\bar\s*\{?\d"
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(
    rf"(?<![\d.,])(\d+(?:,\d{{3}})*(?:\.\d+)?)\s*(?:\\text\w*\{{)?\s*({'|'.join(_SCALES)})\b\s*\}}?", re.IGNORECASE
)
_RATIO = re.compile(r"(?!\d{1,2}:[0-5]\d$)\d+(?:\.\d+)?:\d+(?:\.\d+)?")  # one that is no time of the day
_FEW_LETTERS = re.compile(r"(?<![a-zA-Z\\])([a-zA-Z]{1,4})(?![a-zA-Z])(?:\s*_\s*(?:\{(\w*)\}|(\w)))?")  # no word
_COMMANDS = re.compile(r"\\[a-zA-Z]+")
_SAME_TEXT = [(re.compile(pattern), put) for pattern, put in [
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits|mathbf|boldsymbol|bm)(?![a-zA-Z])"
     r"|(?<!\\)\\[,;:! ()\[\]$]|~|\\q?quad|\$", " "),
    (r"\s{2,}", " "), (r"\\[dtc]frac", r"\\frac"), (r"\\varnothing", r"\\emptyset"),
    (r"\\le(?![a-z])", r"\\leq"), (r"\\ge(?![a-z])", r"\\geq"), (r"\\ne(?![a-z])", r"\\neq"),
    (r"\\[lcd]?dots\w?|\.{2,}", "..."), (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree|\bdegrees?\b|\bdeg\b", r"°"),
    (r"\^\s*\{?((?:\\prime\s*)+)\}?", lambda match: "'" * match[1].count("prime")),
    (r"\(?\s*\\?[pb]?mod\b\s*\{?([^(){}]*)\}?\s*\)?", r"(mod \1)"), (r"\\(?:cdot|times)(?![a-z])", "*"),
    (r"(?i)\b([ap])\.?\s?m\.?(?![a-z])", r"\1m"), (r"\b0(?=\d:\d\d)", ""), (r"\\operatorname\*?", ""),
    (rf"(?i)(?<=[\d\s])({_ANY_UNIT})\.?(?![a-zA-Z^_(])", lambda match: UNITS.get(match[1].lower(), match[1])),
    (r"(?<=\d)\s+to\s+(?=\d)", ":"), (r"(?<!\d)\s+|\s+(?!\d)", ""), (r"_\{?\\?(?:text|mathrm)?\{?(\w+)\}+", r"_\1"),
    (r"(?<!\\)\{([^{}\\])\}", r"\1"), (r"\\([{}%])", r"\1"),
]]  # fmt: skip


def bare(text: str) -> str:
    """A formula without the marks around it (`$...$`, `\\(...\\)`, `\\[...\\]`) and the period at
    its end.
    """
    text = scaled(re.sub(r"(?<!\.)\.$", "", " ".join(text.split()))).strip()
    around = _ENVIRONMENT.fullmatch(text)
    return bare(next(inside for inside in around.groups() if inside is not None)) if around else text


def scaled(text: str) -> str:
    """The text with "2.5 million" as 2500000."""
    return _SCALED.sub(_scaled, text)


def mended(formula: str) -> str:
    """The formula with what math-verify does not know written in its words: `0.\\overline{3}` as a
    fraction, `1e16`, `\\langle`, `f'`.

    Its unit is left out (`last_unit`), and of `\\angle A = 45` the name.
    """
    text = THOUSANDS.sub("", re.sub(r"\\!\s*", "", bare(formula)).translate(_UNICODE).replace("\\$", ""))
    text = re.sub(r"^\s*\\approx(?![a-z])|\\q?quad|\\displaystyle|[€£¥]|~", " ", text).strip()
    text = re.sub(r"(?<![a-zA-Z\\])infinity(?![a-zA-Z])", r"\\infty ", text)
    text = re.sub(r"\s*(?:\\text\s*\{\s*)?\b(?:percent|percentage|pct)\b(?:\s*\})?", r"\\%", text)
    text = re.sub(
        r"\s*,?\s*(?:\\(?:text\w*|mathrm)\s*\{\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*", ", ", text
    )
    text = re.sub(r"\\(?:mathbf|textbf|text|mathrm)\s*\{\s*(-?[\d.,/]+)\s*\}", r"\1", text)
    if whole := re.fullmatch(_TEXT, text):
        text = whole[1] if re.match(r"\s*-?[\d.]", whole[1]) else text
    for _ in range(2):  # \mathbf{\hat{i}}
        text = _LETTER.sub(_letter, text)
    text = _THIRDS.sub(lambda match: _repeating(match[1], match[2], match[3] or match[4]), text)
    text = _REPEATED.sub(lambda match: _repeating(match[1], match[2], match[3] or match[4]), text)
    text = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)
    if (solutions := _SOLUTIONS.fullmatch(text)) and solutions[1] in solutions[2]:
        text = solutions[2].strip()
    text = re.sub(r"\\left\s*\\langle|\\langle", "(", re.sub(r"\\right\s*\\rangle|\\rangle", ")", text))
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\w.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"([a-zA-Z])('+|\^\s*\{?\s*(?:\\prime\s*)+\}?)", _primed, text)
    text = _DEGREES.sub(r"\1(\\frac{\2\\pi}{180})", text)
    # the grammar knows percent of a number alone
    text = re.sub(r"(?<=[a-zA-Z})])\s*\\?%$", "", text)
    text = re.sub(r"\\[dt]?frac\s*\{\s*d\s*([a-zA-Z])\s*\}\s*\{\s*d\s*([a-zA-Z])\s*\}", r"\1_{d\2}", text)
    named = _NAMED.fullmatch(text)
    return _in_both_cases(_without_unit(named[1] if named else text))


def letters(formula: str) -> frozenset[str]:
    """The letters of what a formula is equal to, of commands and words none, nor a constant's c;
    none of a letter alone.
    """
    right = LATEX_TEXT.sub(" ", bare(formula)).rpartition("=")[2]
    signs = frozenset(re.findall(r"[abd-zABD-Z]", _COMMANDS.sub(" ", right)))
    return frozenset() if re.fullmatch(r"[\s({]*[a-zA-Z]?[\s)}]*", right) else signs


def says_more(formula: str, read: str) -> bool:
    """True when a mended formula means more than math-verify's value of it; `read` is the text that
    math-verify made from it.

    That is so where numbers or letters are missing there, or where it has signs that the grammar
    ignores or reads differently.
    """
    words = _unwrapped(formula)
    if (_MORE.search(words) and not _RATIO.fullmatch(formula)) or MEASURES.search(words):
        return True
    if LATEX_TEXT.search(formula) and (re.search(r"\d", formula) or _LATEX_END.search(formula)):
        return True  # words between numbers, or at the end
    return _signs(formula) != _signs("0.5" if read == "\\frac{1}{2}" and formula in ("0.5", ".5") else read)


def same_text(formula: str) -> str:
    """The formula as text in one spelling: `\\dfrac` and `\\frac`, `\\left(` and `(`, `\\text{cm}`
    and `centimeters` are the same there.
    """
    text = bare(formula).translate(_UNICODE)
    text = _unwrapped(_in_both_cases(THOUSANDS.sub("", re.sub(r"\\!\s*", "", text))))
    if MEASURES.fullmatch(text.strip()):
        text = re.sub(r",|\band\b", " ", text)
    for pattern, put in _SAME_TEXT:
        text = pattern.sub(put, text)
    text = re.sub(r"(?<!\.)[.,;]$", "", text.lower())
    congruence = re.fullmatch(r"[a-z]\\equiv(.*\(mod.*\))", text)
    choice = re.fullmatch(r"\(([a-z])\)", text)
    return congruence[1] if congruence else choice[1] if choice else text


def last_unit(text: str) -> str:
    """The unit after the last number, or a currency before it, in one spelling; empty when there is
    no known one.
    """
    text = re.sub(rf"{_POWER}\s*$", "", _unwrapped(text.strip().removesuffix(".")))
    words = re.findall(r"[A-Za-z]+", re.split(r"[\d}]", text)[-1].replace(".", "")) if re.search(r"\d", text) else []
    known = [UNITS[word.lower()] for word in words if word.lower() in UNITS and word != "\\"]
    known = [unit for unit in known if unit not in ("sq", "cubic", "unit")]
    if known:
        return known[0]
    return "usd" if re.search(r"\\\$|^\$?\$\d", text) else "eur" if "€" in text else ""


def _scaled(match: re.Match[str]) -> str:
    value = Fraction(match[1].replace(",", "")) * 10 ** _SCALES[match[2].lower()]
    return str(value) if value.denominator == 1 else match[0]


def _letter(match: re.Match[str]) -> str:
    return match[0] if match[0].startswith("\\mathbb") else f" {match[1] or match[2]} "


def _repeating(whole: str, fixed: str, repeated: str) -> str:
    """0.1 6 6 6 ... as a fraction."""
    scale, period = 10 ** len(fixed), 10 ** len(repeated) - 1
    value = Fraction(int((whole or "0") + fixed)) / scale + Fraction(int(repeated), scale * period)
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _in_both_cases(text: str) -> str:
    """The formula with R as `R_{cap}` where there is an r too: neither math-verify nor `same_text`
    tells the two apart.
    """
    cases = {letter for run in _FEW_LETTERS.findall(LATEX_TEXT.sub(" ", text)) for letter in run[0]}
    both = {letter for letter in cases if letter.isupper() and letter.lower() in cases}

    def told(match: re.Match[str]) -> str:
        *first, last = match[1]
        index = match[2] or match[3] or ""
        before = "".join(f"{{{letter}_{{cap}}}}" if letter in both else letter for letter in first)
        return before + (f"{{{last}_{{cap{index}}}}}" if last in both else match[0][len(first) :])

    return _FEW_LETTERS.sub(told, text) if both else text


def _primed(match: re.Match[str]) -> str:
    strokes = match[2].count("'") + match[2].count("prime")
    return f"{match[1]}_{{{'prime' * strokes}}}"


def _without_unit(text: str) -> str:
    """A unit is words in `\\text{}` at the end, or a known word after a number."""
    for _ in range(3):
        shorter = _LAST_UNIT.sub("", text).strip()
        if shorter == text or not shorter or not re.search(r"[\d}a-zA-Z]$|\\%$|[)!]$", shorter):
            break
        if not _LATEX_END.search(text) and re.search(r"[a-zA-Z]", _COMMANDS.sub("", shorter)):
            break  # x^2 h: a letter beside letters is none
        ending = text[len(shorter) :]
        if _STATEMENT.search(ending) or not (re.search(r"\d|\\pi", shorter) or _is_unit(ending)):
            break  # n is odd
        text = shorter
    return text


def _is_unit(text: str) -> bool:
    return any(word in UNITS for word in re.findall(r"[a-z]+", _unwrapped(text).lower()))


_STATEMENT = re.compile(r"\b(?:is|are|not|if|for|when|where|odd|even|prime)\b", re.IGNORECASE)
_LATEX_END = re.compile(r"\\(?:text\w*|mathrm|mbox)\s*\{[^{}]*\}" + _POWER + r"\s*$")


def _unwrapped(text: str) -> str:
    return re.sub(_TEXT, r" \1 ", text)


def _signs(text: str) -> Counter[str]:
    """The digits and letters of a formula without commands. Leading zeros do not count."""
    return Counter(re.findall(r"[a-z]|\d", _COMMANDS.sub("", re.sub(r"(?<!\d)0(?=\.)", "", text)).lower()))
