"""Follow-up of BIOS jobs while the controller is sometimes silent."""

from __future__ import annotations

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _errors
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import _bios, _bios_jobs

ID = "JID_763788807801"


def unavailable(code: str) -> _errors.Refusal:
    return _errors.Refusal(code, expected="", found="HTTP 503", remedy="")


class Looks:
    """Answers in order; the last answer repeats for ever."""

    def __init__(self, *answers: str | _errors.Refusal) -> None:
        self.answers = list(answers)

    def __call__(self, job_id: str) -> _bios.Job:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, _errors.Refusal):
            raise answer
        return _bios.Job(job_id, _bios.TARGET, answer)


def test_a_silent_controller_is_looked_at_again_and_each_change_told_once() -> None:
    events: list[str] = []
    looks = Looks("Scheduled", unavailable("bmc_unreachable"), "Scheduled", "Running", "Completed")
    watch = _bios_jobs.Watch(looks, 5, 0, lambda job: events.append(job.status))
    assert [job.status for job in _bios_jobs.follow(watch, [ID])] == ["Completed"]
    assert events == ["Scheduled", "Running", "Completed"]


@pytest.mark.parametrize(
    ("looks", "code", "reason"),
    [
        (Looks("Failed"), "bios_job_failed", ID),
        (Looks("Running"), "bios_job_timeout", f"{ID} is Running"),
        (
            Looks(unavailable("bmc_busy")),
            "bios_job_timeout",
            f"{ID}; last look: bmc_busy: HTTP 503",
        ),
        (Looks(unavailable("bmc_login_refused")), "bmc_login_refused", "HTTP 503"),
    ],
)
def test_what_does_not_end_well_says_so(looks: Looks, code: str, reason: str) -> None:
    watch = _bios_jobs.Watch(looks, 0.02, 0, fatal=("bmc_login_refused",))
    with pytest.raises(_errors.Refusal) as caught:
        _bios_jobs.follow(watch, [ID])
    assert caught.value.code == code
    assert reason in caught.value.found


def test_nothing_to_follow_has_ended() -> None:
    assert _bios_jobs.follow(_bios_jobs.Watch(Looks("x"), 0, 0), []) == []
