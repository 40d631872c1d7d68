"""Which options of which commands destroy what is in use (I8), and how they are found in words.

Without them these commands refuse a disk with a mounted partition; with them they destroy it. `dd`
is not here: it has no such option, and what writes to disks of ours does not use it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# What a placeholder of a template stands for: any word at all.
ANY = "@any@"


@dataclass(frozen=True)
class Rule:
    """A command by its name, with the options that are its forced variants.

    short: letters. long: words after `--`. takes: letters with an argument; what follows one of
    them in the same word is that argument (`-tf2fs` is no `-f`).
    """

    name: str
    short: str
    long: tuple[str, ...] = ("force",)
    takes: str = ""


RULES = (
    Rule("wipefs", "f", takes="oOtp"),
    Rule("blkdiscard", "f", takes="olp"),
    Rule(r"mkfs(\.(ext[234]|ext4dev))?|mke2fs", "F", takes="bCdeEgGiIJLmMNoOrTUzt"),
    # `-F 16` is the size of its FAT; `-I` takes a whole disk with partitions on it.
    Rule(r"mkfs\.(v?fat|msdos)|mkdosfs|mkfs\.exfat", "I", takes="bCDfFghiLmMnrRsS"),
    # The kind is another one, or is not known here: either letter.
    Rule(rf"mkfs\.(?!ext|v?fat|msdos|exfat)[\w{ANY}]+|mkntfs", "fF", takes="bdilLmnprst"),
    Rule("mkswap", "f", takes="pLUvo"),
    Rule("swapon", "f", ("fixpgsz",), takes="opLU"),
    Rule("sfdisk", "f", ("force",), takes="bdXYwWNO"),
    # `--fix` and the hidden one answer its questions, among them whether a disk is in use.
    Rule("parted", "f", ("fix", "-pretend-input-tty"), takes="a"),
    Rule("sgdisk|gdisk|cgdisk|fdisk", "", ("force",)),
    Rule("nvme", "f", ("force",), takes="nltsaupmibcdorv"),
    Rule(
        "(pv|vg|lv)(create|remove|change|reduce|resize|convert|move|extend)", "f", takes="LlnsZzW"
    ),
    Rule("mdadm", "f", takes="lncexbpN"),
    Rule("cryptsetup", "q", ("force", "batch-mode"), takes="chsiSdlo"),
    Rule("dmsetup", "f"),
    Rule("zpool|zfs", "f", takes="oOmRt"),
    Rule("btrfs", "f", takes="Ldmn"),
    Rule("resize2fs|tune2fs|debugfs", "f", takes="bdMpPScCeEgiIjJLmoOrTuU"),
    Rule("badblocks|shred", "f", takes="bcdeiopstnsu"),
    Rule("hdparm", "", ("yes-i-know-what-i-am-doing", "please-destroy-my-drive", "security-erase")),
    Rule("sg_format|sg_sanitize", "Q", ("quick",)),
    # Takes a mount away from those who use it.
    Rule("umount", "fl", ("force", "lazy"), takes="NOt"),
    Rule("fuser", "k", ("kill",), takes="n"),
)
_PATTERNS = [(re.compile(rule.name), rule) for rule in RULES]

# Where one simple command of a shell ends, and what may stand around a word.
_ENDS = re.compile(r"&&|\|\||[;|&\n()`]|\$\(")
_AROUND = "\"'`,[]{}()<>:."
_CONTINUED = re.compile(r"\\\n\s*")
_TEMPLATE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\$\{[^}]*\}", re.DOTALL)
_YES = re.compile(r"(?:^|[;&|\n(]\s*)yes\b[^|;&\n]*\|(?P<rest>[^|;&\n]*)")


def in_words(words: Sequence[str]) -> Iterator[str]:
    """The forced variants in one command's words; the command may follow `sudo` and the like."""
    for index, word in enumerate(words):
        rule = _rule(word)
        if rule is not None:
            for option in _options(words[index + 1 :]):
                if _forces(rule, option):
                    yield f"{_name(word)} {option}"


def in_text(text: str) -> Iterator[str]:
    """The forced variants in a shell's text, or in any other in which commands are quoted."""
    text = _CONTINUED.sub(" ", plain(text))
    for command in _ENDS.split(text):
        yield from in_words([word for each in command.split() if (word := each.strip(_AROUND))])
    for piped in _YES.finditer(text):
        words = [word.strip(_AROUND) for word in piped["rest"].split()]
        yield from (f"yes | {_name(word)}" for word in words if _rule(word) is not None)


def plain(text: str) -> str:
    """The text with one word for whatever a template or a variable brings into it."""
    return _TEMPLATE.sub(ANY, text)


def _rule(word: str) -> Rule | None:
    name = _name(word)
    return next((rule for pattern, rule in _PATTERNS if pattern.fullmatch(name)), None)


def _name(word: str) -> str:
    return word.rpartition("/")[2]


def _options(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        # After it come operands: a file may be called `-f`.
        if word == "--":
            return
        if len(word) > 1 and word.startswith("-"):
            yield word


def _forces(rule: Rule, option: str) -> bool:
    if option.startswith("--"):
        given = option[2:].partition("=")[0]
        # getopt takes a beginning that is unambiguous, such as `--fo`.
        return any(given == one or (len(given) > 1 and one.startswith(given)) for one in rule.long)
    for letter in option[1:]:
        if letter in rule.short:
            return True
        if letter in rule.takes or not letter.isalpha():
            return False
    return False
