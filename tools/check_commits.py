"""Subjects of commits are in the imperative and at most 72 characters long.

Checked are the commits after the one with which the rule began, as far as the clone has them.
"""

import re
import subprocess
import sys

BEGIN = "5632ae8"
LONGEST = 72
NOT_IMPERATIVE = re.compile(
    r"(a|an|the|this|that|these|those|it|its|we|i|you|they|he|she|some|all|no|every|each|more)|.*(ed|ing|[^s]s)",
    re.IGNORECASE,
)
EXCEPTIONS = {"alias", "bias", "bring", "embed", "exceed", "feed", "focus", "need", "proceed", "seed", "shed", "speed"}


def faults(subject: str) -> list[str]:
    """What is wrong with a subject.

    >>> faults("Seed every test"), faults("Pass the seed on")
    ([], [])
    >>> faults("Seeded every test")
    ["begins with 'Seeded', which is no imperative"]
    >>> faults("The tests are seeded")
    ["begins with 'The', which is no imperative"]
    >>> faults("Say " + "x" * 70)
    ['has 74 characters, more than 72']
    """
    found = []
    word = re.split(r"\W", subject.strip(), maxsplit=1)[0]
    if not word or (NOT_IMPERATIVE.fullmatch(word) and word.lower() not in EXCEPTIONS):
        found.append(f"begins with {word!r}, which is no imperative")
    if len(subject) > LONGEST:
        found.append(f"has {len(subject)} characters, more than {LONGEST}")
    return found


def new_commits() -> list[tuple[str, str]]:
    """Hash and subject of the commits since the rule began; none where the clone is too shallow to tell."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], capture_output=True, text=True, check=True).stdout

    try:
        git("merge-base", "--is-ancestor", BEGIN, "HEAD")
        lines = git("log", "--no-merges", "--format=%h %s", f"{BEGIN}..HEAD").splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def main() -> int:
    wrong = [f"{name} {subject!r} {fault}" for name, subject in new_commits() for fault in faults(subject)]
    for line in wrong:
        print(f"commit {line}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
