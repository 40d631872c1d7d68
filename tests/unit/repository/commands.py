"""Options that make commands destroy data in use (I8), and their detection in command lines.

Without them these commands refuse a disk with a mounted partition; with them they destroy it. `dd`
is not listed: it has no such option, and the code that writes to our disks does not use it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Stands for a template's placeholder, which can be any word.
ANY = "@any@"


@dataclass(frozen=True)
class Rule:
    """A command by its name, with the options that are its forced variants.

    short: letters. long: words after `--`. takes: letters with an argument; text behind such a
    letter in the same word is that argument (`-tf2fs` is no `-f`).
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
    # Any other or unknown filesystem: both letters count.
    Rule(rf"mkfs\.(?!ext|v?fat|msdos|exfat)[\w{ANY}]+|mkntfs", "fF", takes="bdilLmnprst"),
    Rule("mkswap", "f", takes="pLUvo"),
    Rule("swapon", "f", ("fixpgsz",), takes="opLU"),
    Rule("sfdisk", "f", ("force",), takes="bdXYwWNO"),
    # `--fix` and the hidden option answer its questions, among them whether a disk is in use.
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
    # Takes a mount away from the processes that use it.
    Rule("umount", "fl", ("force", "lazy"), takes="NOt"),
    Rule("fuser", "k", ("kill",), takes="n"),
)
_PATTERNS = [(re.compile(rule.name), rule) for rule in RULES]

# End of a simple shell command, and the characters that may surround a word.
_ENDS = re.compile(r"&&|\|\||[;|&\n()`]|\$\(")
_AROUND = "\"'`,[]{}()<>:."
_CONTINUED = re.compile(r"\\\n\s*")
_TEMPLATE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\$\{[^}]*\}", re.DOTALL)
_YES = re.compile(r"(?:^|[;&|\n(]\s*)yes\b[^|;&\n]*\|(?P<rest>[^|;&\n]*)")


def in_words(words: Sequence[str]) -> Iterator[str]:
    """Yield the forced variants in a command's words; the command may follow `sudo` and similar."""
    for index, word in enumerate(words):
        rule = _rule(word)
        if rule is not None:
            for option in _options(words[index + 1 :]):
                if _forces(rule, option):
                    yield f"{_name(word)} {option}"


def in_text(text: str) -> Iterator[str]:
    """Yield the forced variants in shell text, or in any text that quotes commands."""
    text = _CONTINUED.sub(" ", plain(text))
    for command in _ENDS.split(text):
        yield from in_words([word for each in command.split() if (word := each.strip(_AROUND))])
    for piped in _YES.finditer(text):
        words = [word.strip(_AROUND) for word in piped["rest"].split()]
        yield from (f"yes | {_name(word)}" for word in words if _rule(word) is not None)


def plain(text: str) -> str:
    """Return the text with a placeholder word for each template or variable."""
    return _TEMPLATE.sub(ANY, text)


def _rule(word: str) -> Rule | None:
    name = _name(word)
    return next((rule for pattern, rule in _PATTERNS if pattern.fullmatch(name)), None)


def _name(word: str) -> str:
    return word.rpartition("/")[2]


def _options(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        # Operands follow it: a file may be called `-f`.
        if word == "--":
            return
        if len(word) > 1 and word.startswith("-"):
            yield word


def _forces(rule: Rule, option: str) -> bool:
    if option.startswith("--"):
        given = option[2:].partition("=")[0]
        # getopt accepts an unambiguous prefix, such as `--fo`.
        return any(given == opt or (len(given) > 1 and opt.startswith(given)) for opt in rule.long)
    for letter in option[1:]:
        if letter in rule.short:
            return True
        if letter in rule.takes or not letter.isalpha():
            return False
    return False
