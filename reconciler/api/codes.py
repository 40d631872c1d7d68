"""Every code that a refusal of the API can carry. A code keeps its meaning for ever.

A test compares this list with what the code raises; the contract has it as `ProblemCode`.
"""

from __future__ import annotations

from reconciler.model.approval import REMEDIES

_REQUEST = """
    body_too_large conflict cursor_invalid database_missing database_unavailable
    generation_conflict http_error
    idempotency_in_flight idempotency_key_invalid idempotency_key_required
    idempotency_key_reused internal_error leader_missing method_not_allowed period_invalid
    precondition_failed process_missing reason_required request_invalid route_not_found
    schema_missing schema_outdated secret_shown_once transition_refused
"""
_ACCESS = """
    certificate_invalid enrolment_ca_unreadable enrolment_invalid enrolment_pin_without_tls
    host_certificate_expired host_certificate_missing host_key_invalid host_key_not_accepted
    identity_provider_unavailable keygen_failed node_id_invalid origin_refused role_required
    token_invalid unauthenticated
"""
_UNKNOWN = """
    allocation_not_found claim_not_found disk_not_found fabric_vf_not_found gpu_not_found
    image_file_not_found image_not_found node_not_found profile_unknown project_not_found
    proof_not_found slot_not_found task_not_found token_not_found
"""
_NODES = """
    expected_identity_missing fabric_link_missing field_not_changeable machine_clean
    machine_not_clean
    mgmt_attachment_unsupported no_drift node_exists node_in_use node_is_baremetal
    node_not_enrolled node_not_slice node_reachable node_unhealthy node_unreachable project_exists
    public_url_missing scheduling_not_ready
"""
_SLOTS = """
    bundle_incomplete discovery_missing discovery_stale disk_in_use disk_is_partition disk_present
    disk_not_by_identity duplicate_disk duplicate_fabric_vf duplicate_gpu duplicate_ip
    duplicate_mac duplicate_slot_index fabric_not_vf gate_closed identity_mismatch ip_invalid
    mac_invalid numa_mismatch proof_class_refused proof_mismatch proof_missing proof_unverified
    slot_in_use slot_not_blocked
"""
_ALLOCATIONS = """
    absence_unproven allocation_active allocation_baremetal allocation_not_baremetal
    allocation_not_releasable allocation_released allocation_releasing attempts_exhausted
    claim_live digest_invalid gpu_count_invalid image_exists image_file_invalid no_capacity
    scheduling_off shape_not_schedulable sku_unknown stale_lease
"""
_APPS = """
    allocation_in_app allocation_not_active app_instance_ended app_instance_exists
    app_instance_not_found app_member_not_found app_member_repeated app_operation_not_found
"""

CODES: frozenset[str] = frozenset(
    " ".join((_REQUEST, _ACCESS, _UNKNOWN, _NODES, _SLOTS, _ALLOCATIONS, _APPS)).split()
) | frozenset(REMEDIES)
