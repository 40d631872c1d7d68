"""Plan of BIOS settings, against every possible state of a controller."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import _bios
from hypothesis import given
from hypothesis import strategies as st

NAMES = ("ProcSettings.A", "ProcSettings.B", "IntegratedDevices.C")
VALUES = st.sampled_from(["Enabled", "Disabled"])
JOBS = st.builds(
    _bios.Job,
    id=st.sampled_from(
        [f"{kind}_{number}" for kind in ("JID", "RID") for number in (10**6, 10**7)]
    ),
    name=st.sampled_from(["Configure: BIOS.Setup.1-1", "Reboot1", "Firmware Update: NIC"]),
    status=st.sampled_from(
        ["Scheduled", "Running", "Completed", "Failed", "Reboot Failed", "Reboot Completed", "Odd"]
    ),
)
STATES = st.builds(
    lambda attributes, jobs: _bios.State(attributes, tuple(jobs)),
    st.fixed_dictionaries({}, optional={
        name: st.builds(
            _bios.Attribute, st.just(name), VALUES, st.none() | VALUES, st.booleans()
        )
        for name in NAMES
    }),
    st.lists(JOBS, max_size=3, unique_by=lambda job: job.id),
)  # fmt: skip
WISHES = st.builds(
    _bios.Wish,
    attributes=st.dictionaries(st.sampled_from(NAMES[:2]), VALUES),
    power_cycle=st.booleans(),
    wait=st.booleans(),
    acknowledged=st.frozensets(st.sampled_from(["JID_1000000", "JID_10000000"])),
)


def acted(state: _bios.State, plan: _bios.Plan) -> _bios.State:
    """Return the state after a controller has executed all steps correctly."""
    attributes, jobs = dict(state.attributes), state.jobs
    for step in plan.steps:
        if step.name == "stage_attribute":
            attribute, value = attributes[step.subject], step.after["pending"]
            pending = None if value == attribute.current else value
            attributes[step.subject] = replace(attribute, pending=pending)
        else:
            attributes = {
                name: replace(other, current=other.coming, pending=None)
                for name, other in attributes.items()
            }
            jobs = tuple(
                replace(job, status="Completed") if job.phase is _bios.Phase.OPEN else job
                for job in jobs
            )
    return _bios.State(attributes, jobs)


@given(WISHES, STATES)
def test_an_unhindered_plan_ends_settled_and_says_so(wish: _bios.Wish, state: _bios.State) -> None:
    plan = _bios.plan(wish, state)
    waits_for_another = not wish.wait and any(job.is_bios for job in state.open_jobs())
    if plan.blockers or waits_for_another:
        return
    after = acted(state, plan)
    assert _bios.settled(wish, after)
    again = _bios.plan(wish, after)
    assert not again.steps and not again.blockers


@pytest.mark.covers("P15")
@given(WISHES, STATES)
def test_nothing_is_staged_or_cycled_without_leave_or_over_an_open_job(
    wish: _bios.Wish, state: _bios.State
) -> None:
    plan = _bios.plan(wish, state)
    names = {step.name for step in plan.steps}
    if plan.blockers:
        return
    if "commit_job" in names:
        assert wish.power_cycle and not state.open_jobs()
        strange = [a for n, a in state.attributes.items() if n not in wish.attributes]
        assert all(attribute.coming == attribute.current for attribute in strange)
    if "stage_attribute" in names:
        assert not any(job.is_bios for job in state.open_jobs())
        assert not any(
            state.attributes[step.subject].read_only
            for step in plan.steps
            if step.name == "stage_attribute"
        )


@given(WISHES, STATES)
def test_what_is_settled_needs_nothing(wish: _bios.Wish, state: _bios.State) -> None:
    if _bios.settled(wish, state):
        plan = _bios.plan(wish, state)
        assert not plan.steps and not plan.blockers
        rows = _bios.document(wish, state)["attributes"]
        assert all(row["status"] == "right" for row in rows)


def test_the_ids_of_an_answer_are_read_once_each() -> None:
    text = (
        "Verify with -i JID_xxxxx\nCommit JID = JID_763788807801\nReboot JID = RID_763788809560\n"
    )
    assert _bios.job_ids(text + text) == ["JID_763788807801", "RID_763788809560"]
