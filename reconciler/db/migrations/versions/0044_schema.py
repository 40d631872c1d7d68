"""The first schema: every table, index and trigger. Frozen: later changes are new migrations."""

from __future__ import annotations

from functools import partial
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from reconciler.db import clock
from reconciler.db.migrations.triggers_0044 import create_triggers

revision = "0044"
down_revision = None

# The tables of this revision. Those of the running version are in `db.schema`.
metadata = sa.MetaData(
    naming_convention={
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)
DOCUMENT = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
LIVE = "state IN ('reserved', 'provisioning', 'active', 'releasing')"
APPROVED = "retired_at IS NULL"


def upgrade() -> None:
    """Create the tables in the order in which they refer to each other, the triggers, rows."""
    metadata.create_all(op.get_bind(), checkfirst=False)
    create_triggers()
    # Claims lock the row, so it exists from the beginning.
    _insert(
        "orchestrator_control",
        id="jobs",
        mode="normal",
        reason="",
        changed_by="",
        since=clock.now(),
    )
    _insert("orchestrator_totals", id="jobs", **dict.fromkeys(_COUNTS.split(), 0))
    # The hosts of pools whose workers are elsewhere and in slices. They report nothing, so no other
    # pool is placed there.
    for host in ("remote", "allocation"):
        _insert(
            "pool_hosts",
            id=host,
            name=host,
            boot_id="",
            memory_bytes=0,
            memory_used_bytes=0,
            isolation="",
            models=[],
            devices=[],
            seen_at=0,
        )


def _insert(table: str, **row: Any) -> None:
    op.execute(sa.insert(metadata.tables[table]).values(row))


def _columns(
    kind: sa.types.TypeEngine[Any],
    names: str,
    *,
    nullable: bool = False,
    default: str | sa.ColumnElement[Any] | None = None,
) -> list[sa.Column[Any]]:
    return [
        sa.Column(name, kind, nullable=nullable, server_default=default) for name in names.split()
    ]


texts = partial(_columns, sa.Text())
optional = partial(_columns, sa.Text(), nullable=True)
numbers = partial(_columns, sa.BigInteger())
flags = partial(_columns, sa.Boolean())
documents = partial(_columns, DOCUMENT)
optional_documents = partial(_columns, DOCUMENT, nullable=True)
stamps = partial(_columns, sa.Double())
moments = partial(_columns, sa.Double(), nullable=True)


def _key(name: str = "id") -> sa.Column[Any]:
    return sa.Column(name, sa.Text(), primary_key=True)


def _sequence() -> sa.Column[Any]:
    return sa.Column("id", SEQUENCE, primary_key=True, autoincrement=True)


def _lifecycle(state: str = "state") -> list[sa.Column[Any]]:
    return [
        *texts(f"{state} {state}_reason"),
        *stamps(f"{state}_since"),
        *moments("deadline_at"),
        *numbers("generation"),
    ]


def _bundle() -> list[sa.Column[Any]]:
    return [
        *numbers("slot_index"),
        *texts("gpu_pci_address nvme_device nvme_identity nvme_serial nvme_eui"),
        *numbers("nvme_size_bytes"),
        *texts("management_mac private_ip fabric_vf_pci_address"),
        *numbers("numa_node fence disk_generation"),
    ]


def _report() -> list[sa.Column[Any]]:
    return [
        _sequence(),
        *texts("node_id"),
        *optional("task_id"),
        *texts("boot_id install_id"),
        *documents("document"),
        *moments("observed_at"),
        *stamps("created_at"),
    ]


def _one_of(column: str, values: str) -> sa.CheckConstraint:
    """Check constraint: the column holds only these values."""
    listed = ", ".join(f"'{value}'" for value in values.split())
    return sa.CheckConstraint(f"{column} IN ({listed})", name=column)


def _refers(**targets: str) -> list[sa.ForeignKeyConstraint]:
    """Foreign keys from columns to the id of other tables."""
    return [sa.ForeignKeyConstraint([column], [f"{table}.id"]) for column, table in targets.items()]


def _index(name: str, columns: str, where: str | None = None, *, unique: bool = False) -> sa.Index:
    """Index over the rows of a condition; both engines have partial indexes."""
    condition = None if where is None else sa.text(where)
    return sa.Index(
        name, *columns.split(), unique=unique, sqlite_where=condition, postgresql_where=condition
    )


_unique = partial(_index, unique=True)


def _table(name: str, *items: sa.schema.SchemaItem) -> None:
    sa.Table(name, metadata, *items)


_table(
    "projects",
    _key(),
    *texts("name"),
    *stamps("created_at"),
    *documents("quota", default="{}"),
    *flags("records_terminals", default=sa.false()),
    sa.UniqueConstraint("name"),
)

_table(
    "nodes",
    _key(),
    *texts("name address"),
    *numbers("port"),
    *texts("ssh_user region pool profile mode mode_reason"),
    *stamps("mode_since"),
    *moments("mode_deadline_at"),
    *_lifecycle(),
    *flags("slice_scheduling"),
    *texts("health_state"),
    *documents("health_detail"),
    *texts("machine_id host_key boot_id install_id"),
    *flags("reboot_required"),
    *moments("last_contact_at"),
    *stamps("created_at"),
    *texts("tenant_address telemetry_url unclean_allocation_id", default=""),
    *numbers("tenant_port", default="22"),
    *numbers("fence", default="0"),
    *texts("fabric_interface fabric_address", default=""),
    *moments("boot_learned_at"),
    # Null: unknown. Parity tells this apart from a machine without tags.
    *optional_documents("maas_tags"),
    *documents("tenant_machine_ids", default="[]"),
    *optional_documents("firmware_before"),
    *documents("firmware_differences", default="[]"),
    *optional_documents("firmware_bmc fabric_reading maas hardware netbox"),
    _one_of("health_state", "unknown healthy degraded failed"),
    _one_of("mode", "baremetal converting_to_slice slice converting_to_baremetal"),
    _one_of("state", "enrolling bootstrapping ready draining maintenance unreachable retired"),
    sa.UniqueConstraint("id", "mode"),
    sa.UniqueConstraint("name"),
)

_table(
    "api_tokens",
    _key(),
    *texts("name hash role"),
    *optional("project_id node_id"),
    *stamps("created_at"),
    *moments("expires_at revoked_at"),
    _one_of("role", "platform-admin project-member node"),
    *_refers(node_id="nodes", project_id="projects"),
    sa.UniqueConstraint("hash"),
)

_table(
    "enrolment_tokens",
    _key(),
    *texts("hash node_id"),
    *stamps("created_at"),
    *moments("expires_at used_at"),
    *documents("used_by"),
    *optional_documents("ticket"),
    *_refers(node_id="nodes"),
    sa.UniqueConstraint("hash"),
)

_table(
    "node_certificates",
    _key(),
    *texts("node_id serial public_key certificate"),
    *documents("principals"),
    *moments("valid_until revoked_at"),
    *stamps("created_at"),
    *_refers(node_id="nodes"),
    _index("ix_node_certificates_node_id", "node_id"),
)

_table(
    "idempotency_keys",
    _key("scope"),
    _key("key"),
    *texts("fingerprint holder"),
    *moments("expires_at completed_at"),
    *numbers("status"),
    *documents("body"),
    *stamps("created_at"),
)

_table("settings", _key("name"), *documents("value"), *stamps("changed_at"))

_table(
    "state_history",
    _sequence(),
    *stamps("at"),
    *texts("entity entity_id source event target"),
    *numbers("generation"),
    *texts("actor reason"),
    *documents("evidence"),
    *texts("correlation_id node_id allocation_id"),
    _index("ix_state_history_allocation_id", "allocation_id"),
    _index("ix_state_history_correlation_id", "correlation_id"),
    _index("ix_state_history_entity", "entity entity_id"),
    _index("ix_state_history_node_id", "node_id"),
)

_table(
    "outbox",
    _sequence(),
    *stamps("at"),
    *texts("topic subject_kind subject_id node_id project_id"),
    *documents("payload"),
    *texts("correlation_id"),
    *moments("published_at"),
    _index("ix_outbox_pending", "id", "published_at IS NULL"),
)

_table(
    "audit_log",
    _sequence(),
    *stamps("at"),
    *texts("actor role action subject_kind subject_id project_id reason"),
    *documents("detail"),
    *texts("correlation_id"),
    _index("ix_audit_log_action", "action"),
    _index("ix_audit_log_correlation_id", "correlation_id"),
    _index("ix_audit_log_subject_id", "subject_id"),
)

_table(
    "images",
    _key(),
    *texts("name version digest"),
    *numbers("size_bytes minimum_disk_bytes"),
    *texts("url url_digest compression guest_profile"),
    *stamps("created_at"),
    *documents("runtime", default="[]"),
    sa.UniqueConstraint("name", "version"),
)

_table(
    "wipe_proofs",
    _key(),
    *texts("kind node_id"),
    *optional("slot_id allocation_id task_id"),
    *texts("disk_identity"),
    *numbers("disk_generation"),
    *texts("method"),
    *documents("document"),
    *stamps("created_at"),
    *texts("install_id", default=""),
    _one_of("kind", "transition wipe untouched"),
    *_refers(node_id="nodes"),
    sa.UniqueConstraint("id", "disk_identity", "disk_generation"),
    _index("ix_wipe_proofs_disk", "disk_identity disk_generation"),
)

_table(
    "node_resource_slots",
    _key(),
    *texts("node_id"),
    *optional("parent_slot_id"),
    *texts("sharing_mechanism"),
    *_bundle(),
    *documents("capacity_metadata"),
    *_lifecycle("status"),
    *texts("wanted health_state"),
    *documents("health_detail"),
    *optional("available_proof_id last_proof_id"),
    *_columns(sa.BigInteger(), "approved_discovery_id", nullable=True),
    *stamps("approved_at"),
    *texts("approved_by"),
    *moments("retired_at"),
    *texts("fabric_identity", default=""),
    _one_of("health_state", "unknown healthy degraded failed"),
    _one_of(
        "sharing_mechanism",
        "exclusive_device mig_partition mdev_vgpu time_sliced mps software_shared",
    ),
    _one_of(
        "status",
        "disabled available reserved provisioning active releasing cleanup cleanup_blocked",
    ),
    sa.CheckConstraint(
        "status <> 'available' OR available_proof_id IS NOT NULL", name="available_needs_proof"
    ),
    sa.ForeignKeyConstraint(
        ["available_proof_id", "nvme_identity", "disk_generation"],
        ["wipe_proofs.id", "wipe_proofs.disk_identity", "wipe_proofs.disk_generation"],
        name="fk_node_resource_slots_available_proof",
    ),
    *_refers(last_proof_id="wipe_proofs", node_id="nodes", parent_slot_id="node_resource_slots"),
    _index("ix_slots_free", "node_id numa_node", f"{APPROVED} AND status = 'available'"),
    _index("ix_slots_busy", "node_id", f"{APPROVED} AND status NOT IN ('available', 'disabled')"),
    _unique("uq_slots_disk", "nvme_identity", APPROVED),
    _unique("uq_slots_fabric", "node_id fabric_vf_pci_address", APPROVED),
    _unique("uq_slots_fabric_identity", "fabric_identity", f"{APPROVED} AND fabric_identity <> ''"),
    _unique("uq_slots_gpu", "node_id gpu_pci_address", APPROVED),
    _unique("uq_slots_index", "node_id slot_index", APPROVED),
    _unique("uq_slots_ip", "node_id private_ip", APPROVED),
    _unique("uq_slots_mac", "management_mac", APPROVED),
)

_table(
    "allocations",
    _key(),
    *texts("project_id"),
    *optional("node_id"),
    *texts("capacity_shape sku region pool"),
    *numbers("gpu_count"),
    *texts("name hostname username"),
    *documents("ssh_keys"),
    *optional("image_id"),
    *texts("runtime_profile"),
    *documents("parameters"),
    *_lifecycle(),
    *documents("connection error"),
    *texts("requested_by correlation_id"),
    *stamps("created_at"),
    *moments("activated_at ended_at"),
    *flags("stopped", default=sa.false()),
    *texts("power_action started_boot_id", default=""),
    *documents("refused_packets refused_readings", default="{}"),
    _one_of("capacity_shape", "baremetal gpu_slice"),
    _one_of("state", "requested provisioning active releasing released failed"),
    *_refers(image_id="images", node_id="nodes", project_id="projects"),
    _index("ix_allocations_node_id", "node_id"),
    _index("ix_allocations_project_id", "project_id"),
)

_SLICE = f"kind = 'slice' AND {LIVE}"
_table(
    "allocation_resource_claims",
    _key(),
    *texts("allocation_id kind node_id"),
    *optional("slot_id"),
    *numbers("position"),
    *_bundle(),
    *_lifecycle(),
    sa.Column(
        "live_mode",
        sa.Text(),
        sa.Computed(
            f"CASE WHEN {LIVE} THEN"
            " CASE kind WHEN 'slice' THEN 'slice' ELSE 'baremetal' END ELSE NULL END",
            persisted=True,
        ),
    ),
    *stamps("created_at"),
    *moments("ended_at"),
    *documents("disks", default="[]"),
    _one_of("kind", "slice node_exclusive"),
    _one_of("state", "reserved provisioning active releasing released failed"),
    sa.CheckConstraint("kind <> 'slice' OR slot_id IS NOT NULL", name="slice_has_slot"),
    *_refers(allocation_id="allocations", node_id="nodes", slot_id="node_resource_slots"),
    sa.ForeignKeyConstraint(
        ["node_id", "live_mode"], ["nodes.id", "nodes.mode"], name="fk_claims_live_mode"
    ),
    _index("ix_claims_allocation_id", "allocation_id"),
    _index("ix_claims_node_id", "node_id"),
    _unique("uq_claims_live_slot", "slot_id", _SLICE),
    _unique("uq_claims_live_disk", "nvme_identity", _SLICE),
    _unique("uq_claims_live_fabric", "node_id fabric_vf_pci_address", _SLICE),
    _unique("uq_claims_live_gpu", "node_id gpu_pci_address", _SLICE),
    _unique("uq_claims_live_ip", "node_id private_ip", _SLICE),
    _unique("uq_claims_live_mac", "management_mac", _SLICE),
    _unique("uq_claims_live_node", "node_id", f"kind = 'node_exclusive' AND {LIVE}"),
)

_table(
    "topology_discoveries",
    *_report(),
    *flags("reboot_required"),
    *_refers(node_id="nodes"),
    _index("ix_topology_discoveries_node_id", "node_id"),
)

_table(
    "parity_reports",
    *_report(),
    *texts("intent"),
    *numbers("failures warnings"),
    *_refers(node_id="nodes"),
    _index("ix_parity_reports_node_id", "node_id"),
)

_table(
    "host_baselines",
    *_report(),
    *texts("allocation_id"),
    *_refers(node_id="nodes"),
    _index("ix_host_baselines_allocation_id", "allocation_id"),
)

_table(
    "absence_reports",
    *_report(),
    *texts("allocation_id"),
    *flags("absent"),
    *_refers(node_id="nodes"),
    _index("ix_absence_reports_allocation_id", "allocation_id"),
)

_table(
    "tasks",
    _key(),
    *texts("kind subject_kind subject_id node_id"),
    *optional("allocation_id"),
    *_lifecycle(),
    *numbers("deadline_s priority"),
    *flags("exclusive"),
    *documents("parameters fences"),
    *numbers("attempt max_attempts"),
    *texts("lease_owner lease_token"),
    *moments("lease_expires_at not_before"),
    *texts("run_id run_directory"),
    *documents("progress result error"),
    *flags("cancel_requested"),
    *texts("correlation_id requested_by"),
    *stamps("created_at"),
    *moments("started_at finished_at"),
    *texts("runner", default=""),
    *numbers("unreached progress_offset", default="0"),
    _one_of("state", "queued running waiting succeeded failed canceled lost"),
    *_refers(allocation_id="allocations", node_id="nodes"),
    _index("ix_tasks_allocation_id", "allocation_id"),
    _index("ix_tasks_correlation_id", "correlation_id"),
    _index("ix_tasks_latest", "kind node_id created_at"),
    _index("ix_tasks_node_id", "node_id"),
    _index("ix_tasks_state", "state priority created_at"),
    _unique("uq_tasks_running_exclusive", "node_id", "state = 'running' AND exclusive"),
    _unique("uq_tasks_running_subject", "subject_kind subject_id", "state = 'running'"),
)

_table(
    "task_events",
    _sequence(),
    *texts("task_id"),
    *stamps("at"),
    *documents("document"),
    *_refers(task_id="tasks"),
    _index("ix_task_events_task_id", "task_id"),
)

_table(
    "leaders", _key("name"), *numbers("epoch"), *texts("holder"), *moments("acquired_at expires_at")
)

_table(
    "service_processes",
    _key(),
    *documents("roles"),
    *texts("host"),
    *numbers("pid"),
    *texts("version"),
    *stamps("started_at seen_at"),
)

_table(
    "usage_records",
    _key("allocation_id"),
    *texts("project_id node_id capacity_shape sku region pool"),
    *numbers("gpu_count"),
    *documents("claims"),
    *stamps("started_at"),
    *moments("ended_at"),
    *texts("end_state"),
    _one_of("capacity_shape", "baremetal gpu_slice"),
    sa.CheckConstraint(
        "(ended_at IS NULL AND end_state = '') OR (ended_at >= started_at AND"
        " end_state IN ('released', 'failed'))",
        name="ended_with_state",
    ),
    *_refers(allocation_id="allocations", project_id="projects", node_id="nodes"),
    _index("ix_usage_records_project_id", "project_id started_at"),
    _index("ix_usage_records_ended_at", "ended_at"),
)

_table(
    "app_instances",
    _key(),
    *texts("project_id slug name managed_key"),
    *_lifecycle("status"),
    *texts("requested_by correlation_id"),
    *stamps("created_at"),
    *moments("ended_at"),
    _one_of("status", "deploying running failed stopped"),
    *_refers(project_id="projects"),
    _index("ix_app_instances_project_id", "project_id"),
    _unique("uq_app_instances_name", "project_id name", "status <> 'stopped'"),
)

_table(
    "app_members",
    _key(),
    *texts("instance_id allocation_id role"),
    *_lifecycle("status"),
    *documents("detail"),
    *moments("key_expires_at"),
    *stamps("created_at"),
    *moments("left_at"),
    _one_of("role", "controller worker"),
    _one_of("status", "reconciling ready failed"),
    *_refers(instance_id="app_instances", allocation_id="allocations"),
    _index("ix_app_members_instance_id", "instance_id"),
    _unique("uq_app_members_controller", "instance_id", "role = 'controller'"),
    _unique("uq_app_members_allocation", "allocation_id", "left_at IS NULL"),
)

_table(
    "app_member_operations",
    _key(),
    *texts("instance_id member_id kind"),
    *_lifecycle("status"),
    *documents("failure"),
    *optional("task_id"),
    *texts("requested_by correlation_id"),
    *stamps("created_at"),
    *moments("finished_at"),
    _one_of("kind", "member_add bootstrap_ssh_reconcile bootstrap_ssh_remove"),
    _one_of("status", "accepted running succeeded failed"),
    *_refers(instance_id="app_instances", member_id="app_members", task_id="tasks"),
    _index("ix_app_member_operations_instance_id", "instance_id"),
    _unique("uq_app_member_operations_open", "member_id", "status IN ('accepted', 'running')"),
)

_table(
    "recovery_cases",
    _key(),
    *texts("allocation_id node_id"),
    *_lifecycle(),
    *texts("requested_by role reason"),
    *stamps("requested_at"),
    *flags("remove_leftovers"),
    *documents("slot_ids"),
    *optional("task_id"),
    *documents("task_ids proof_ids"),
    *flags("confirm"),
    *documents("waits_for failure"),
    *texts("correlation_id"),
    *stamps("created_at"),
    *moments("finished_at"),
    _one_of("state", "opened verifying cleaning confirming recovered failed"),
    *_refers(allocation_id="allocations", node_id="nodes", task_id="tasks"),
    _index("ix_recovery_cases_allocation_id", "allocation_id created_at"),
    _unique(
        "uq_recovery_cases_open",
        "allocation_id",
        "state IN ('opened', 'verifying', 'cleaning', 'confirming')",
    ),
)

_table(
    "ingress_rules",
    _key(),
    *_lifecycle(),
    *texts("allocation_id project_id protocol public_address"),
    *numbers("public_port guest_port"),
    *documents("sources"),
    *texts("reason"),
    *stamps("expires_at"),
    *documents("failure"),
    *optional("task_id"),
    *texts("requested_by correlation_id"),
    *stamps("created_at"),
    *moments("ended_at"),
    _one_of("state", "requested applied removing removed failed"),
    _one_of("protocol", "tcp"),
    *_refers(allocation_id="allocations", project_id="projects", task_id="tasks"),
    _index("ix_ingress_rules_allocation_id", "allocation_id created_at"),
    _unique(
        "uq_ingress_rules_listener",
        "public_address protocol public_port",
        "state IN ('requested', 'applied', 'removing')",
    ),
)

_table(
    "fabric_segments",
    _key("kind"),
    sa.Column("number", sa.BigInteger(), primary_key=True),
    *texts("project_id"),
    *numbers("first_number"),
    *stamps("used_at"),
    _one_of("kind", "vlan partition single_tenant"),
    *_refers(project_id="projects"),
    sa.UniqueConstraint("project_id", "kind", "first_number"),
)

_table(
    "ssh_keys",
    _key(),
    *texts("project_id public_key name"),
    *optional("token_id"),
    *texts("registered_by"),
    *stamps("created_at"),
    *moments("expires_at revoked_at"),
    *_refers(project_id="projects", **{"token_id": "api_tokens"}),
    sa.UniqueConstraint("project_id", "public_key"),
)

_table(
    "ssh_sessions",
    _key(),
    *texts("allocation_id project_id actor fingerprint address"),
    *stamps("opened_at seen_at"),
    *moments("closed_at"),
    *texts("reason"),
    *numbers("bytes_in bytes_out"),
    *texts("way", default="jump"),
    *texts("recording_digest", default=""),
    *_refers(allocation_id="allocations", project_id="projects"),
    _index("ix_ssh_sessions_project_id", "project_id opened_at"),
    _index("ix_ssh_sessions_open", "seen_at", "closed_at IS NULL"),
)

_table(
    "terminal_tickets",
    _key("hash"),
    *texts("holder actor allocation_id project_id"),
    *stamps("expires_at"),
    *_refers(allocation_id="allocations", project_id="projects"),
)

_table(
    "terminal_recordings",
    _sequence(),
    *texts("session_id project_id"),
    *stamps("at"),
    *numbers("size"),
    *texts("lines"),
    *_refers(session_id="ssh_sessions", project_id="projects"),
    _index("ix_terminal_recordings_session_id", "session_id"),
)

_table(
    "telemetry_samples",
    _key("allocation_id"),
    sa.Column("minute", sa.BigInteger(), primary_key=True),
    *stamps("at"),
    *documents("host"),
    *optional_documents("guest"),
    *_refers(allocation_id="allocations"),
    _index("ix_telemetry_samples_at", "at"),
)

_table(
    "console_sessions",
    _key(),
    *texts("hash"),
    *optional("token_id"),
    *documents("claims"),
    *optional("login"),
    *stamps("created_at expires_at"),
    *texts("address agent"),
    sa.CheckConstraint("(token_id IS NULL) = (login IS NOT NULL)", name="console_sessions_holder"),
    *_refers(**{"token_id": "api_tokens"}),
    sa.UniqueConstraint("hash"),
    sa.UniqueConstraint("login"),
)

_table(
    "orchestrator_jobs",
    _key(),
    *texts("project_id model"),
    *documents("input"),
    *numbers("priority"),
    *texts("status"),
    *numbers("attempts max_attempts lost timeout_s"),
    *moments("not_before"),
    *texts("token worker"),
    *moments("lease_expires_at"),
    *optional_documents("result"),
    *documents("error"),
    *numbers("size"),
    *texts("requested_by correlation_id"),
    *stamps("enqueued_at"),
    *moments("started_at"),
    *stamps("updated_at"),
    *moments("reprocessed_at"),
    _one_of("status", "pending running done dead_letter canceled"),
    *_refers(project_id="projects"),
    _index(
        "ix_orchestrator_jobs_due",
        "model project_id priority enqueued_at",
        "status = 'pending' AND not_before IS NULL",
    ),
    _index(
        "ix_orchestrator_jobs_delayed",
        "not_before",
        "status = 'pending' AND not_before IS NOT NULL",
    ),
    _index("ix_orchestrator_jobs_running", "lease_expires_at project_id", "status = 'running'"),
    _index(
        "ix_orchestrator_jobs_ended", "updated_at", "status IN ('done', 'dead_letter', 'canceled')"
    ),
    _index("ix_orchestrator_jobs_project", "project_id enqueued_at id status size"),
)

_table(
    "orchestrator_control",
    _key(),
    *texts("mode reason changed_by"),
    *stamps("since"),
    *moments("deadline_at canceled_at"),
    _one_of("mode", "normal drain drained"),
)

_COUNTS = "reclaimed reclaimer_errors job_retries worker_pool_evictions"
_table("orchestrator_totals", _key(), *numbers(_COUNTS))

_table(
    "pool_hosts",
    _key(),
    *texts("name boot_id"),
    *numbers("memory_bytes memory_used_bytes"),
    *texts("isolation"),
    *documents("models devices"),
    *stamps("seen_at"),
)

_table(
    "pool_workers",
    _key(),
    *texts("host"),
    *numbers("pid"),
    *documents("models"),
    *stamps("started_at beat_at"),
    *moments("ended_at"),
    *texts("pool_id boot_id cgroup ending", default=""),
    *numbers("start_ticks memory_bytes oom_kills", default="0"),
    _index("ix_pool_workers_live", "pool_id", "ended_at IS NULL"),
)

_RUNNING = "state IN ('requested', 'starting', 'running', 'draining', 'stopping')"
_table(
    "worker_pools",
    _key(),
    *_lifecycle(),
    *texts("name host_id"),
    *optional("project_id"),
    *numbers("seat"),
    *documents("models"),
    *numbers("replicas memory_mib"),
    *flags("kill_on_oom"),
    *documents("devices"),
    *numbers("drain_s grace_s"),
    *texts("ends_as"),
    *documents("failure"),
    *texts("requested_by correlation_id"),
    *stamps("created_at"),
    *moments("ended_at"),
    *texts("token_hash", default=""),
    *moments("token_expires_at"),
    *optional("allocation_id"),
    _one_of("state", "requested starting running draining stopping stopped evicted failed"),
    *_refers(host_id="pool_hosts", project_id="projects", allocation_id="allocations"),
    _unique("uq_worker_pools_name", "name", _RUNNING),
    _unique("uq_worker_pools_seat", "seat", _RUNNING),
    _unique("uq_worker_pools_token_hash", "token_hash", "token_hash <> ''"),
    _unique("uq_worker_pools_allocation_id", "allocation_id", "allocation_id IS NOT NULL"),
    _index("ix_worker_pools_created_at", "created_at id"),
)

_table(
    "orchestrator_leases",
    _key(),
    *texts("pool_id host_id device"),
    *stamps("since"),
    *moments("until"),
    *_refers(pool_id="worker_pools", host_id="pool_hosts"),
    _unique("uq_orchestrator_leases_device", "host_id device", "until IS NULL"),
    _index("ix_orchestrator_leases_pool_id", "pool_id"),
)
