"""Program dell_redfish_slice_firmware.py: plan, and with --apply stage, BIOS settings.

Exit codes: 0 the plan was printed or the request was carried out, 1 refused, 2 wrong command line
or environment. Each line on stdout is machine-readable; the reason of a refusal is on stderr too.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.core._report_line import (
    quoted,
    report_line,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import (
    _bios,
    _redfish_bios,
    _redfish_session,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware._redfish_connection import Trust

DONE, REFUSED, WRONG_CALL = 0, 1, 2

_ATTRIBUTE = re.compile(r"([A-Za-z0-9_.]+)=([\x20-\x7e]{1,128})")


def main(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run for `words` (without the program's name); the exit code."""
    options = _options(words, environment)
    secret = environment["IDRAC_PASSWORD"]
    say = _Lines(secret)
    _redfish_session.end_by_signals()
    account = _redfish_session.Account(environment["IDRAC_USER"], secret)
    trust = Trust(options.ca_file, options.fingerprint)
    try:
        with _redfish_session.Client(
            options.host, account, trust, timeout=options.timeout
        ) as client:
            outcome = _change.drive(
                _redfish_bios.subject(client, say.job),
                _params(options),
                check_mode=not options.apply,
            )
    except Refusal as refusal:
        say.refused(refusal)
        return REFUSED
    if client.opened:
        say.aside("warning: the BMC did not confirm the logout; its session ends by itself")
    say.outcome(outcome, applied=options.apply, power_cycle=options.power_cycle)
    return DONE if outcome.failure is None else REFUSED


class _Lines:
    """The printed lines. They do not contain the password, and it is hidden even if a BMC returns
    it.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def outcome(self, outcome: _change.Outcome, *, applied: bool, power_cycle: bool) -> None:
        for attribute in outcome.facts.get("attributes", ()):
            self._line(
                "GPUAAS_SLICE_BIOS",
                attribute=attribute["name"],
                current=attribute["current"],
                pending=attribute["pending"] or "",
                wanted=attribute["wanted"],
                status=attribute["status"],
            )
        for step in outcome.plan.steps:
            changes = step.after if step.name == "commit_job" else {}
            if step.name == "stage_attribute":
                changes = {step.subject: step.after["pending"]}
            for name, value in changes.items():
                self._print(f"GPUAAS_SLICE_BIOS_PLAN {quoted(name)}={quoted(value)}")
        if outcome.plan.steps:
            self._line("GPUAAS_SLICE_BIOS_RESTART", **_restart(power_cycle=power_cycle))
        for job in outcome.facts.get("jobs", ()):
            if _bios.Job(**job).phase is _bios.Phase.OPEN:
                self.job(_bios.Job(**job))
        if outcome.failure is not None:
            self.refused(outcome.failure)
        else:
            self._line("GPUAAS_SLICE_BIOS_RESULT", status=_status(outcome, applied=applied))

    def job(self, job: _bios.Job) -> None:
        self._line(
            "GPUAAS_SLICE_BIOS_JOB",
            id=job.id, status=job.status, percent=job.percent, message=job.message,
        )  # fmt: skip

    def refused(self, refusal: Refusal) -> None:
        self.aside(str(refusal))
        self._line(
            "GPUAAS_SLICE_BIOS_RESULT",
            status="refused", code=refusal.code, found=refusal.found, remedy=refusal.remedy,
        )  # fmt: skip

    def aside(self, text: str) -> None:
        sys.stderr.write(f"{self._hidden(text)}\n")

    def _line(self, name: str, **words: str) -> None:
        # Hidden before quoting, because the quoted password is a different string.
        self._print(report_line(name, **{key: self._hidden(word) for key, word in words.items()}))

    def _print(self, line: str) -> None:
        sys.stdout.write(f"{self._hidden(line)}\n")
        # A job takes many minutes, and a reader of the pipe needs the lines immediately.
        sys.stdout.flush()

    def _hidden(self, text: str) -> str:
        return text.replace(self._secret, "(hidden)")


def _restart(*, power_cycle: bool) -> dict[str, str]:
    """The plan's entry for the restart. The BMC cannot report the machine's users."""
    when = "with_this_call" if power_cycle else "by_whoever_resets_next"
    return {"when": when, "ends": "whatever runs on the machine, unasked"}


def _status(outcome: _change.Outcome, *, applied: bool) -> str:
    if outcome.facts["settled"]:
        return "settled"
    if applied or not outcome.plan.steps:
        return "waits_for_reset"
    return "changes_needed"


def _options(words: Sequence[str], environment: Mapping[str, str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dell_redfish_slice_firmware.py",
        description="Plan the BIOS settings that slices need through a Dell iDRAC's Redfish; "
        "a dry run unless --apply is given.",
        epilog="Environment: IDRAC_HOST, IDRAC_USER, IDRAC_PASSWORD, and IDRAC_CA_FILE or "
        "IDRAC_FINGERPRINT instead of the options. Exit codes: 0 done, 1 refused, 2 wrong call.",
    )
    add = parser.add_argument
    add("--apply", action="store_true", help="stage the changes; their job waits for a reset")
    add("--power-cycle", action="store_true",
        help="with --apply: reset now, which ends whatever runs on the machine (drain the node "
        "first: a BMC does not see it), and follow the job")  # fmt: skip
    add("--no-wait", action="store_true", help="with --power-cycle: do not follow the job")
    add("--attr", action="append", default=[], metavar="NAME=VALUE", type=_attribute,
        help="a setting of this BIOS, instead of the usual three; may be repeated")  # fmt: skip
    add("--system", default="", help="id of the system, where the BMC has several")
    add("--acknowledge", action="append", default=[], metavar="JID",
        help="a failed job that was looked at; may be repeated")  # fmt: skip
    add("--ca-file", default=environment.get("IDRAC_CA_FILE", ""),
        help="PEM file of the CAs of the BMCs; without it this machine's own store")  # fmt: skip
    add("--fingerprint", default=environment.get("IDRAC_FINGERPRINT", ""),
        help="SHA-256 of the BMC's certificate, instead of a CA")  # fmt: skip
    add("--timeout", type=float, default=180, help="seconds for one look or change (180)")
    add("--deadline", type=float, default=3600, help="seconds for a job to end (3600)")
    add("--interval", type=float, default=15, help="seconds between two looks at a job (15)")
    options = parser.parse_args(words)
    missing = [
        name for name in ("IDRAC_HOST", "IDRAC_USER", "IDRAC_PASSWORD") if not environment.get(name)
    ]
    if missing:
        parser.error(f"the environment lacks {', '.join(missing)}")
    if (options.power_cycle and not options.apply) or (options.no_wait and not options.power_cycle):
        parser.error("--power-cycle goes with --apply, --no-wait with --power-cycle")
    options.host = environment["IDRAC_HOST"]
    return options


def _attribute(word: str) -> tuple[str, str]:
    match = _ATTRIBUTE.fullmatch(word)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, found {word!a}")
    return match[1], match[2]


def _params(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "attributes": dict(options.attr) or _bios.BARE,
        "state": "present",
        "power_cycle": options.power_cycle,
        "wait": not options.no_wait,
        "deadline": options.deadline,
        "interval": options.interval,
        "timeout": options.timeout,
        "acknowledged_jobs": options.acknowledge,
        "system": options.system,
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], os.environ))
