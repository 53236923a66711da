"""The table of a page that a script makes: it lies between two marks."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class PageTable:
    """Where it is. `page`: below the root of the checkout."""

    page: str
    begin: str
    end: str

    def lines(self) -> list[str]:
        """The lines that the page has."""
        return (ROOT / self.page).read_text().split(self.begin)[1].split(self.end)[0].strip().splitlines()

    def show(self, text: str) -> None:
        """Prints the table; with `--write` on the command line it goes into the page instead."""
        if sys.argv[1:] != ["--write"]:
            print(text)
            return
        before, rest = (ROOT / self.page).read_text().split(self.begin)
        (ROOT / self.page).write_text(f"{before}{self.begin}\n{text}\n{self.end}{rest.split(self.end)[1]}")
