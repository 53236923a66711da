"""References that are easily read in part, and answers to each: right ones and wrong ones.

The truth is the author's.

An answer stands in a box, after words; one that begins with "!" is the whole completion.
`python -m tests.math_hard_pairs` prints how `math` and `deepscaler` decide, and
math-verify as its README uses it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator

from tests.math_held_out_pairs import FIRST, SECOND, THIRD

Topics = dict[str, list[tuple[str, list[str], list[str]]]]

HELD_OUT: Topics = {"first": FIRST, "second": SECOND, "third": THIRD}  # not those that the rules were first made for
HARD: Topics = {
    "congruences": [
        (r"x \equiv 3 \pmod 7", [r"x \equiv 3 \pmod 7", r"x \equiv 3 \pmod{7}", r"x\equiv 3\ (\text{mod}\ 7)",
                                 r"3 \pmod 7"],
         ["7", "3", r"x \equiv 3 \pmod 5", r"x \equiv 7 \pmod 3", r"x \equiv 2 \pmod{7}"]),
        (r"n \equiv 1, 4 \pmod{5}", [r"n\equiv 1,4\pmod 5"], ["5", "4", "1,4,5", r"n \equiv 1 \pmod 5"]),
        ("7", ["7"], [r"x \equiv 3 \pmod 7", r"7 \pmod{10}", "!so x \\equiv 3 \\pmod 7", "!so $x \\equiv 3 \\pmod 7$"]),
        ("3 mod 8", ["3 mod 8", r"3 \pmod 8", r"3 \bmod 8"], ["8", "5 mod 8"]),
    ],
    "repeating decimals": [
        (r"0.\overline{3}", [r"\frac{1}{3}", r"0.\overline{3}", r"0.\overline3", "0.333333", "1/3"],
         ["0", "3", "0.3", "0.33", r"0.\overline{6}", r"0.\overline{03}"]),
        (r"0.1\overline{6}", [r"\frac16", r"0.1\overline{6}", r"0.16\overline{6}", "0.1666..."],
         ["0.1", "0.16", r"0.\overline{16}", "6"]),
        (r"0.\overline{142857}", [r"\frac{1}{7}"], ["142857", "0", r"\frac{1}{142857}"]),
        (r"2.\overline{45}", [r"\frac{27}{11}", r"2\frac{5}{11}"], ["2", "2.45", "45"]),
        (r"\frac{1}{3}", [r"0.\overline{3}", r"0.\bar{3}", r"0.\dot{3}", r"0.333\ldots"],
         [r"0.\overline{6}", r"0.3\ldots", "0.3"]),
        ("0", ["0", "0.0"], [r"0.\overline{3}", "!0.\\overline{3}", r"0.\overline{1}"]),
        ("1", [r"0.\overline{9}"], [r"0.\overline{8}"]),
    ],
    "vectors": [
        (r"\langle 1,2\rangle", [r"\langle 1,2\rangle", "(1,2)", r"\left\langle 1, 2\right\rangle"],
         ["1.2", r"\langle 2,1\rangle", "12", "2", r"\langle 1,2,0\rangle"]),
        (r"\left\langle 3, -1, 2 \right\rangle", ["(3,-1,2)", r"\langle 3,-1,2\rangle"],
         ["2", "(3,1,2)", r"\langle 3,-1\rangle"]),
        (r"2\mathbf{i}+3\mathbf{j}", [r"2\mathbf{i}+3\mathbf{j}", r"3\mathbf j + 2\mathbf i", r"2\hat{i}+3\hat{j}",
                                      r"2\vec{i}+3\vec{j}"],
         ["2", "5", r"3\mathbf{i}+2\mathbf{j}", r"2\mathbf{i}-3\mathbf{j}", r"2\mathbf{i}"]),
        (r"\vec{a} + 2\vec{b}", [r"2\vec{b} + \vec{a}", r"\mathbf{a}+2\mathbf{b}"], ["2", r"2\vec{a}+\vec{b}"]),
        ("1.2", ["1.2", r"\frac{6}{5}"], [r"\langle 1,2\rangle", "(1,2)"]),
        (r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}",
         [r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", r"\begin{bmatrix}1\\-2\end{bmatrix}"],
         ["-2", "1", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} -2 \\ 1 \end{pmatrix}"]),
    ],
    "times": [
        ("10:30 am", ["10:30 am", "10:30 a.m.", "10:30 AM", r"10{:}30\text{ a.m.}", r"10:30\text{ am}",
                      "!<answer>10:30 am</answer>"],
         ["10:30 pm", "1/3", "10", "30", "10:03 am", "11:30 am", "!It closes at 10:30 pm"]),
        ("2:00", ["2:00"], ["2", "3:00", "2:30", "200"]),
        (r"3{:}45 \text{ PM}", ["3:45 pm", "3:45 p.m."], ["3:45 am", "4:45 pm", "345", "1/15"]),
        ("09:05", ["9:05", "09:05"], ["9:50", "5:09", "9/5"]),
        ("2 hours 30 minutes", ["2 hours 30 minutes", r"2\text{ hours }30\text{ minutes}", "2 hours and 30 minutes",
                                "2 h 30 min"], ["2", "30", "30 hours 2 minutes", "2 hours 3 minutes", "32"]),
        (r"5\text{ pm}", ["5 pm", r"5\text{ p.m.}"], ["5 am", r"5\text{ a.m.}", "6 pm"]),
        ("30", ["30"], ["10:30 am", "!It opens at 10:30", "2 hours 30 minutes"]),
    ],
    "degrees": [
        (r"45^\circ 30'", [r"45^\circ 30'", r"45^{\circ}30'", "45° 30'"],
         ["75", "45", "30", "45.3", r"30^\circ 45'", "1350"]),
        (r"12^\circ 15' 30''", [r"12^{\circ} 15' 30''"], ["57", "12", r"12^\circ 30' 15''"]),
        (r"90^\circ", ["90", r"90^\circ", "90°", r"90\text{ degrees}", "90 degrees"],
         ["9", r"45^\circ", r"90^\circ 30'"]),
        (r"\angle ABC = 45^\circ", ["45", r"45^\circ", r"\angle ABC = 45^\circ"], ["54", r"\angle ABC = 54^\circ"]),
        (r"\cos 60^\circ", [r"\frac12", r"\cos 60^\circ", r"\sin 30^\circ", "0.5"],
         [r"\cos 60", r"\cos 30^\circ", "60"]),
        (r"\frac{\pi}{4}", [r"\frac{\pi}{4}", r"\frac{\pi}{4}\text{ radians}"], ["45", r"45^\circ", r"\pi", "4"]),
        ("75", ["75", r"75^\circ"], [r"45^\circ 30'", "45 30"]),
    ],
    "units": [
        ("5 ft 3 in", ["5 ft 3 in", r"5\text{ ft }3\text{ in}", "5 feet 3 inches", "5 ft. 3 in."],
         ["3 ft 5 in", "5", "3", "15", "53", "8"]),
        (r"5\text{ ft }3\text{ in}", ["5 ft 3 in", r"5 \text{ feet } 3 \text{ inches}"],
         ["5", "3 ft 5 in", r"5\text{ ft}"]),
        (r"2\text{ lb }4\text{ oz}", ["2 lb 4 oz", "2 pounds 4 ounces"], ["2", "4 lb 2 oz", r"2\text{ lb}"]),
        (r"5\text{ cm}", ["5", r"5\text{ cm}", "5 cm", "5cm", r"5\,\mathrm{cm}", "5 centimeters"],
         [r"5\text{ m}", "5 km", "6 cm", r"5\text{ mm}"]),
        (r"12 \text{ cm}^2", ["12", r"12\text{ cm}^2", r"12\,\mathrm{cm}^{2}", "12 square centimeters"],
         [r"12\text{ m}^2", "144", "122"]),
        ("60 mph", ["60", "60 mph", r"60 \text{ mph}"], ["6", "60 km"]),
        (r"3t", ["3t", r"t\cdot 3"], ["3", "t", "3s"]),
        (r"\pi r^2 h", [r"\pi r^2 h", r"\pi h r^2"], [r"\pi r^2", r"\pi r h", r"\pi h"]),
        (r"6\sqrt{2}\text{ units}", [r"6\sqrt{2}", r"6\sqrt2 \text{ units}"], ["6", r"\sqrt{2}", r"2\sqrt{6}"]),
        ("5", ["5", "5 apples"], ["5 ft 3 in", r"5\text{ ft }3\text{ in}", "5 apples and 3 pears"]),
    ],
    "money and percent": [
        (r"\$12.50", ["12.50", r"\$12.50", "12.5", r"12.50\text{ dollars}", "!It costs $12.50"],
         ["12", "50", r"\$12.05", "1250", "12.50 euros", "12.5 cents"]),
        (r"\$1{,}234.56", ["1234.56", "1,234.56", r"\$1234.56"], ["1,234", "1234.65", "56"]),
        (r"25\%", ["25", r"25\%", "0.25", r"\frac14", "25 percent"], ["2.5", r"52\%", "4"]),
        (r"33\frac{1}{3}\%", [r"33\frac13\%", r"\frac{100}{3}\%", r"\frac13"], ["33", r"33\%", r"13\%", "11"]),
        ("50 cents", ["50", "50 cents"], [r"\$50", "5 cents"]),
    ],
    "scientific notation": [
        (r"6.63 \times 10^{-34}", [r"6.63 \times 10^{-34}", r"6.63\cdot 10^{-34}", "6.63e-34", r"0.663\times 10^{-33}"],
         [r"9.11 \times 10^{-31}", r"6.63 \times 10^{-33}", "0", r"6.64 \times 10^{-34}", "6.63", "-34"]),
        ("1/52!", ["1/52!", r"\frac{1}{52!}"], ["1/20!", r"\frac{1}{51!}", "0", "52"]),
        ("10^{16}", ["1e16", "10^{16}", "10000000000000000", "1E+16"], ["1e15", "16", "10", "1e61"]),
        ("1e16", ["10^{16}", r"1\times 10^{16}"], ["16", "e", "10^{15}"]),
        ("0.000001", ["10^{-6}", "1e-6", "0.000001"], ["0", "0.000002", "10^{-7}"]),
        ("1.6e-19", [r"1.6 \times 10^{-19}"], ["1.7e-19", r"1.6\times 10^{-18}", "0"]),
        ("0", ["0", "0.0"], ["0.001", "1e-3"]),
        (r"3.00 \times 10^8", ["300000000", r"3\times 10^8"], [r"3.01\times 10^8", "3", "8"]),
        (r"\frac{1}{10^{12}}", ["10^{-12}"], ["10^{-13}", "0", r"2\times 10^{-12}"]),
        (r"(10^{-8}, 2)", [r"(10^{-8}, 2)"], [r"(2\times 10^{-8}, 2)", "(0,2)"]),
    ],
    "intervals and inequalities": [
        ("[1,2)", ["[1,2)", "[1, 2)", r"1 \le x < 2"], ["(1,2]", "[1,2]", "1,2", "1.2"]),
        (r"(-\infty, 3]", [r"(-\infty, 3]", r"x \le 3", r"\left(-\infty,3\right]"],
         [r"(-\infty,3)", "3", r"x<3", r"[3,\infty)"]),
        (r"x \leq 2 \text{ or } x \geq 5", [r"x \le 2 \text{ or } x \ge 5", r"x\leq 2, x\geq 5"],
         ["2", "5", r"x \leq 2", r"2 \le x \le 5"]),
        (r"1 < x < 2", ["(1,2)", "1<x<2"], ["[1,2]", "1 < x", "x<2"]),
        (r"x \in [-2,7]", ["[-2,7]", r"x\in[-2,7]"], ["7", "(-2,7)", "[-2,6]"]),
        (r"x \neq 3", [r"x \ne 3", r"x\neq 3"], ["3", "x = 3", "x > 3"]),
        (r"|x| < 3", ["|x|<3"], ["3", "x < 3", r"|x| \le 3"]),
    ],
    "sets and sequences": [
        (r"1,2,3,\ldots,10", [r"1,2,3,\ldots,10", r"1, 2, 3, \dots, 10", "1,2,3,...,10"],
         ["1,2,3,10", "10", "13", r"1,2,3,\ldots,100"]),
        (r"1+2+\cdots+n", [r"1+2+\cdots+n", r"1 + 2 + \dots + n"], ["1", "3", "n", r"1+2+\cdots+2n"]),
        (r"\{1,2,3\}", [r"\{3,2,1\}", r"\{1,2,3\}"], [r"\{1,2\}", "123", "6", r"\{1,2,3,\ldots\}"]),
        (r"\{2k+1 \mid k \in \mathbb{Z}\}", [r"\{2k+1 \mid k\in\mathbb{Z}\}"],
         ["1", "2", r"\{2k \mid k \in \mathbb{Z}\}"]),
        (r"2k+1, k\in\mathbb{Z}", [r"2k+1, k \in \mathbb{Z}"], ["2", "1", "2k, k \\in \\mathbb{Z}"]),
        (r"12\text{ and }13", ["12, 13", r"12\text{ and }13", "!\\boxed{12} and \\boxed{13}", "13,12"],
         ["12", "13", "25", "12.13"]),
        ("10", ["10"], [r"1,2,\ldots,10", "!$1, 2, \\ldots, 10$"]),
        (r"(3,4), (5,6)", ["(3,4), (5,6)", "(5,6), (3,4)"], ["(3,4)", "(3,4), (6,5)", "6"]),
    ],
    "cases, matrices, systems": [
        (r"\begin{cases} 1 & x>0\\ 0 & x\le 0\end{cases}", [r"\begin{cases} 1 & x>0 \\ 0 & x\leq 0 \end{cases}"],
         ["0", "1", r"\begin{cases} 0 & x>0\\ 1 & x\le 0\end{cases}"]),
        (r"\begin{cases} x=1\\ y=2\end{cases}", [r"\begin{cases} x = 1 \\ y = 2\end{cases}"],
         ["2", "1", r"\begin{cases} x=2\\ y=1\end{cases}"]),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", [r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"],
         ["4", r"\begin{pmatrix}1&2\\4&3\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"]),
        (r"x=1, y=2", ["x=1, y=2", r"x = 1 \text{ and } y = 2"], ["x=2, y=1", "1", "x=1"]),
        ("(x,y)=(1,2)", ["(1,2)", "(x,y)=(1,2)"], ["(2,1)", "2", "1"]),
    ],
    "derivatives and functions": [
        ("f'(x)=2x", ["f'(x)=2x", "2x", r"f^{\prime}(x) = 2x"], ["f(x)=2x", "f''(x)=2x", "2", "f'(x)=x^2"]),
        ("y'' + y = 0", ["y''+y=0"], ["y'+y=0", "0", "y+y=0"]),
        (r"\frac{dy}{dx}=3", [r"\frac{dy}{dx}=3", "3"], [r"\frac{dx}{dy}=3", r"\frac13", r"\frac{dy}{dx}=2"]),
        (r"\sqrt(2)", [r"\sqrt{2}", r"\sqrt2", r"\sqrt(2)"], ["2", "1.4", r"\sqrt{3}", "4"]),
        (r"f(x)=x^2+C", ["x^2+C", "f(x) = C + x^2"], ["x^2", "2x", "x^2+1"]),
        (r"\ln|x| + C", [r"\ln |x| + C"], [r"\ln x", r"\ln|x|", "C"]),
        ("f(x) = 2x", ["2x"], ["f'(x)=2x", "f(x)=x"]),
    ],
    "bases, ratios, mixed numbers": [
        ("1011_2", ["1011_2", r"1011_{2}", r"1011_{\text{2}}", "1011"], ["1011_3", "11", "1011_{10}", "2"]),
        ("1:2:3", ["1:2:3", "1 : 2 : 3"], ["1/6", "3:2:1", "1:2", "3", "6"]),
        ("3:2", ["3:2", r"\frac32", "1.5", "6:4"], ["2:3", "3", "2"]),
        (r"2\frac{1}{2}", ["2.5", r"\frac52", "2 1/2", r"2\frac12"], ["1", "2", r"\frac12", "2 1/3"]),
        ("2 1/2", ["2.5", r"\frac{5}{2}"], ["1", "2", "21/2"]),
        ("45 30", ["45 30"], ["75", "1350", "30"]),
    ],
    "words and choices": [
        (r"\text{(B)}", ["B", "(B)", r"\text{B}", r"\textbf{(B)}"], ["C", "(A)", "8"]),
        (r"\text{Monday}", ["Monday", r"\text{Monday}", r"\text{ Monday}"], ["Sunday", "1", r"\text{Yadnom}"]),
        ("DAC", ["DAC", r"\text{DAC}"], ["ACD", "CAD", "A"]),
        (r"\text{June 20}", ["June 20", r"\text{June 20}"], ["20", r"\text{June 2}", r"\text{July 20}"]),
        (r"\text{3 red, 2 blue}", ["3 red, 2 blue"], ["3", "2 red, 3 blue", "5"]),
        (r"2\text{ red and }3\text{ blue}", [r"2\text{ red and }3\text{ blue}"],
         [r"3\text{ red and }2\text{ blue}", "2", "6"]),
    ],
    "what nobody named": [
        (r"\gcd(12,18)=6", [r"\gcd(12,18)=6", "6"], [r"\gcd(12,18)=92", "12"]),
        ("P(X=3)=0.25", ["P(X=3)=0.25"], ["3", "P(X=91)=0.25"]),
        ("2 million", ["2000000", r"2\text{ million}", r"2\times 10^6"], ["2", "2 billion", "!the value is 2"]),
        ("12 R 5", ["12 R 5"], ["5 R 12", "60", "17", "5"]),
        ("0x1F", ["0x1F"], ["0", "0x2F"]),
        ("2024-03-05", ["2024-03-05"], ["2016", "2024", "2024-05-03"]),
        ("x^2=-1", ["x^2=-1", "x^2+1=0"], ["x^2=-2", "-2"]),
        ("0", ["x=0"], ["x^2-1=0"]),
        ("5", ["x=5", "!We have 3. So 5", "!We have 3. So it is \\frac{10}{2}.", "!Then 3 are left, so 2 + 3 = 5"],
         ["!the value is 12 R 5", "!the value is 1 in 5", "!the value is 10:05", "5!"]),
        ("2024", ["2024"], ["!the value is 2024-03-05", "2024-03-05"]),
    ],
    "which answer wins": [
        ("42", ["!\\boxed{42}\n#### Check\n6*7", "!\\boxed{42}\n##### 7", "!\\boxed{42}\n####",
                "!\\boxed{42}\n#### 2. Check", "!\\fbox{42}", "!\\boxed 42", "!\\boxed {42}", "!\\boxed{42} \\boxed{}",
                "!#### Step 1\n\\boxed{42}", "!\\boxed{41}\n#### 42", "!#### 42", "!#### $42$.",
                "!\\boxed{41} no, \\boxed{42}", "!#### 1\nfirst\n#### 2\n\\boxed{42}", "!$\\boxed{\\boxed{42}}$",
                "!\\boxed{42}\n### Section 7"],
         ["!\\boxed{41}\n#### Check of 42", "!\\boxed{41}\n##### 42", "!\\boxed{42}\n#### 41",
          "!\\boxed{42}, \\boxed{41}", "!\\boxed{42} and \\boxed{43}", "!\\fbox{41}", "!\\boxed 41",
          "!\\boxed{41} \\boxed{}", "!#### Section 42\n\\boxed{41}", "!\\boxed{4}2",
          "!<answer>41</answer> \\boxed{42}"]),
        (r"\frac{1}{2}", ["!#### \\frac{1}{2}", "!\\fbox{\\frac12}", "!\\boxed{\\frac{1}{2}}\n#### Done."],
         ["!\\boxed{\\frac{1}{3}}\n#### Part 1/2", "!\\boxed{2}\n#### 1. and \\frac12"]),
        (r"\{1,2\}", ["!\\boxed{1} and \\boxed{2}", "!$\\boxed{\\{1,2\\}}$"],
         ["!\\boxed{1}", "!\\boxed{1} then \\boxed{2}"]),
    ],
}  # fmt: skip
ORDINARY = [
    *["42", "-3", "0", "1/2", "3.14", "0.5", ".5", "1,000", "12,345.67", "1{,}000", r"10\,000", "25%", r"25\%",
      r"\$12.50", "$18$", r"-\frac{35}{9}"],
    *[r"\frac{3}{4}", r"\frac34", r"\dfrac{9}{7}", r"\tfrac{1}{6}", r"2\frac{1}{2}", r"4\frac12", r"\sqrt{2}",
      r"\sqrt 5", r"2\sqrt{3}", r"\sqrt[3]{2}"],
    *[r"\frac{\pi}{2}", r"\frac{3\sqrt{3}}{4}", r"\frac{1+\sqrt{5}}{2}", r"2\pi", r"4\pi-8", r"6-5i", r"3+4i",
      r"e^{i\pi/4}", r"e^2", r"10^{16}", "2^{10}-1"],
    *[r"3 \times 10^5", r"7!", r"\binom{10}{3}", r"\log_2 3", r"\ln 2", r"\sin 2x", r"\tan^{-1} 2", r"\arctan 2",
      r"\cot 10^\circ", r"90^\circ", r"60^{\circ}"],
    *["x=5", "x = -2", "y=2x+1", r"y = \frac{1}{2}x - 3", "x^2+1", "(x-1)(x+2)", "x^2-2x+1", "3x^2 - 5",
      r"\frac{x-1}{x+1}", "p - q", "a(b+c)", "2n+1", "n!"],
    *["a^2+b^2=c^2", "x^2+y^2=25", r"(x-1)^2+(y+2)^2=9", "x_1 = 3", "S_n = n^2", r"\theta = \frac{\pi}{4}",
      r"\alpha+\beta", "f(x)=x^2+1", "k = 10", "|x|"],
    *["(1,2)", "[1,2]", "[1,2)", "(-2,7]", r"(-\infty, 3]", r"(-\infty,2)\cup(3,\infty)", r"[0,1] \cup [2,3]",
      r"x \in [-2,7]", r"(0, \frac{1}{2})", "(3,4), (5,6)"],
    *[r"\left( 3, \frac{\pi}{2} \right)", "(1,2,3)", "(3, -4)", r"(2, \frac{\pi}{3})", r"\{1,2,3\}", r"\{-1, 0, 1\}",
      "7, 8", "1, -1", r"\pm 3", r"5 \pm 2\sqrt{3}"],
    *["x > 3", r"x \le 3", r"1 < x < 2", r"1 \le x < 3", r"n \ge 5", r"x \neq 3", r"\mathbb{R}", r"\emptyset",
      r"\infty", r"-\infty", r"\mathbb{R}\setminus\{0\}"],
    *[r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}",
      r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", r"\begin{pmatrix} 0 & 1 \\ -1 & 0 \end{pmatrix}"],
    *[r"5\text{ cm}", r"12 \mbox{ cm}^3", r"10 \text{ inches}", "18 cm", r"5\text{ km}^2", r"6\sqrt{2}\text{ units}",
      "120 square inches", "18 dollars", "15 apples", r"\$32,\!348"],
    *[r"11,\! 111,\! 111,\! 100", "B", "(A)", "x", r"\text{5 cm}", "3\\text{ or }4", r"x \leq 2 \text{ or } x \geq 5",
      "x=1, y=2", r"\boxed{7}", "so 5\n#### 18", r"\text{Area}=25"],
    *[r"\angle ABC = 45^\circ", r"\frac{1}{x}", r"\frac{a}{b+c}", r"x^{n+1}", r"2^{\frac{1}{3}}",
      r"\frac{1}{2}\ln 2 + C", r"\lfloor x \rfloor", r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}", "3:2"],
    *["100", "2024", "1.5", "-0.25", "8\\sqrt{5}", "70\\sqrt{2}", "\\frac{25\\pi}{4}", "204", "113", "025",
      "\\frac{\\sqrt{6}-\\sqrt{2}}{4}", "1+\\frac{\\pi}{2}", "16\\pi\\text{ cm}^2"],
]  # fmt: skip


def pairs(topics: Topics) -> Iterator[tuple[str, str, str, bool]]:
    """(topic, reference, completion, whether it is right)."""
    for topic, rows in topics.items():
        for reference, *answers in rows:
            for answer, right in [
                (answer, right) for right, each in zip((True, False), answers, strict=True) for answer in each
            ]:
                yield (
                    topic,
                    reference,
                    answer[1:] if answer[0] == "!" else f"So the answer is $\\boxed{{{answer}}}$.",
                    right,
                )


def verdict(reward: Callable[[dict[str, str], str], float], reference: str, completion: str) -> float | None:
    """The reward of a completion; None where it is refused as a fault."""
    try:
        return reward({"prompt_id": "p/0", "answer": reference}, completion)
    except ValueError:
        return None


def main() -> None:
    from math_verify import parse, verify

    from rlpipe.rewards.registry import resolve

    def plain(prompt: dict[str, str], completion: str) -> float:
        return float(verify(parse(f"${prompt['answer']}$"), parse(completion)))

    logging.disable(logging.CRITICAL)
    judges = {name: resolve(name) for name in ("math", "deepscaler")} | {"math-verify": plain}
    print("right accepted, right 0.0, right refused as a fault | wrong 0.0, wrong accepted, wrong refused as a fault")
    for title, topics in {"easily read in part": HARD, "held out": HELD_OUT}.items():
        print(f"{title}: {len([*pairs(topics)])} pairs")
        for name, judge in judges.items():
            _print_verdicts(name, judge, topics)


def _print_verdicts(name: str, judge: Callable[[dict[str, str], str], float], topics: Topics) -> None:
    counted: Counter[tuple[bool, float | None]] = Counter()
    for topic, reference, completion, right in pairs(topics):
        if name == "deepscaler":
            if "boxed" not in completion or "####" in completion or "<answer>" in completion:
                continue
            completion = "<think>hm</think>" + completion
        given = verdict(judge, reference, completion)
        counted[right, given] += 1
        if name != "math-verify" and given != float(right):
            print(f"  {name}: {topic}: {reference!r}, {completion!r} is {right}, got {given}")
    print(
        name,
        *(counted[True, given] for given in (1.0, 0.0, None)),
        "|",
        *(counted[False, given] for given in (0.0, 1.0, None)),
    )


if __name__ == "__main__":
    main()
