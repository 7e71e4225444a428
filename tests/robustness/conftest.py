"""The count of what was tried, at the end of a session; `make fuzz` copies it into docs/robustness.md by hand."""

from .fuzzing import EFFORT, OUTCOMES


def pytest_terminal_summary(terminalreporter):
    if EFFORT > 1:
        terminalreporter.section("fuzz: inputs tried")
        for target, counts in sorted(OUTCOMES.items()):
            parts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
            terminalreporter.line(f"{target:<44} {sum(counts.values()):>6}: {parts}")
