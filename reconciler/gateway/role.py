"""The gateway's role in PostgreSQL: the rights that it has, and the proof that it has no others.

Tenants reach the machine of a gateway. Its role reads the columns that decide about access, and
writes rows of sessions, recordings, refusals and of its own process. Tables and columns that are
not listed here are closed to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import sqlalchemy as sa

from reconciler.db.schema import ssh_keys, ssh_sessions
from reconciler.model.errors import Problem

NAME = "gpuaas_gateway"
# Prefix of the names of rules. The name of each contains its digest, so that an altered rule shows.
_RULE = "gpuaas_gateway_"
_OTHERS = "gpuaas_others"
_NOW = "extract(epoch FROM clock_timestamp())"
# Audit rows and sessions of the past would be forged, those of the future would outlast a gateway.
_PRESENT = f"abs({{}} - {_NOW}) < 60"
# A session, and its last report: the digest of a recording comes after the end. Terminals in the
# browser are the service's own.
_OPEN = f"way <> 'web' AND (closed_at IS NULL OR seen_at > {_NOW} - 900)"
# Readers of a session take no other values, and the rows of sessions are kept.
_SOUND = (
    "way IN ('jump', 'terminal') AND bytes_in >= 0 AND bytes_out >= 0"
    " AND octet_length(concat(address, actor, owner, fingerprint, reason, recording_digest)) < 4096"
)
_GATEWAY_ROW = """roles = '["gateway"]'::jsonb"""


@dataclass(frozen=True)
class _Table:
    """Columns by right, and rules for rows: commands with USING and WITH CHECK, "" for none.

    Rights of columns lock no table. A right to delete would.
    """

    read: str = ""
    insert: str = ""
    update: str = ""
    rules: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def columns(self) -> dict[str, list[str]]:
        given = {"SELECT": self.read, "INSERT": self.insert, "UPDATE": self.update}
        return {right: names.split() for right, names in given.items() if names}


_TABLES = {
    "alembic_version": _Table(read="version_num"),
    "projects": _Table(read="id records_terminals"),
    "allocations": _Table(
        read="id project_id node_id state capacity_shape username ssh_keys connection parameters"
        " requested_by owner created_at"
    ),
    "allocation_resource_claims": _Table(read="allocation_id slot_id position private_ip"),
    "nodes": _Table(read="id address port tenant_address tenant_port"),
    "node_certificates": _Table(read="public_key revoked_at"),
    # Without the hashes of tokens: a key of SSH is what proves a member here.
    "api_tokens": _Table(read="id parent_id owner role project_id expires_at revoked_at"),
    "ssh_keys": _Table(read=" ".join(ssh_keys.c.keys())),
    "settings": _Table(read="name value", rules={"SELECT": ("name = 'ssh_authorities'", "")}),
    "ssh_sessions": _Table(
        read=" ".join(ssh_sessions.c.keys()),
        insert="id way allocation_id project_id actor owner fingerprint address opened_at seen_at"
        " reason bytes_in bytes_out recording_digest",
        update="seen_at closed_at reason bytes_in bytes_out recording_digest",
        rules={
            "INSERT": (
                "",
                f"{_SOUND} AND {_PRESENT.format('opened_at')} AND {_PRESENT.format('seen_at')}",
            ),
            "UPDATE": (
                _OPEN,
                f"{_SOUND} AND seen_at BETWEEN opened_at AND {_NOW} + 60"
                f" AND (closed_at IS NULL OR closed_at BETWEEN opened_at AND {_NOW} + 60)",
            ),
        },
    ),
    # Neither their content nor their end: the service deletes them.
    "terminal_recordings": _Table(
        read="session_id project_id size",
        insert="session_id project_id at size lines",
        rules={
            "INSERT": (
                "",
                f"{_PRESENT.format('at')} AND size = octet_length(lines) AND size < 1 << 20"
                " AND EXISTS (SELECT FROM ssh_sessions AS s WHERE s.id = session_id"
                f" AND s.project_id = terminal_recordings.project_id AND {_OPEN})",
            )
        },
    ),
    "audit_log": _Table(
        insert="at actor role action subject_kind subject_id project_id reason detail"
        " correlation_id",
        rules={
            "INSERT": (
                "",
                f"{_PRESENT.format('at')} AND role = ''"
                " AND action IN ('gateway.opened', 'gateway.closed', 'gateway.refused')"
                " AND jsonb_typeof(detail) = 'object' AND octet_length(detail::text) < 8192"
                " AND octet_length(concat(actor, subject_kind, subject_id, project_id, reason,"
                " correlation_id)) < 4096",
            )
        },
    ),
    "service_processes": _Table(
        read="id roles seen_at",
        insert="id roles host pid version started_at seen_at",
        update="roles seen_at",
        rules={
            "ALL": (
                _GATEWAY_ROW,
                f"{_GATEWAY_ROW} AND seen_at BETWEEN 0 AND {_NOW} + 60"
                f" AND started_at BETWEEN 0 AND {_NOW} + 60"
                " AND octet_length(concat(id, host, version)) < 1024",
            )
        },
    ),
}
# Numbers of rows; the role can take the next number, and set none.
_SEQUENCES = ("audit_log_id_seq", "terminal_recordings_id_seq")
# For a gateway that hangs. A gateway that is taken over can set them for itself, its connections
# not.
_SETTINGS = {
    "lock_timeout": "3s",
    "statement_timeout": "60s",
    "idle_in_transaction_session_timeout": "10s",
}
_ATTRIBUTES = {
    "rolsuper": "superuser",
    "rolcreaterole": "may create roles",
    "rolcreatedb": "may create databases",
    "rolreplication": "may replicate",
    "rolbypassrls": "passes by rules for rows",
}


def sql(conn: sa.Connection, connections: int) -> str:
    """SQL for an administrator of the server that makes the role, or brings it up to date."""
    _require_postgresql(conn)
    # A site's tables are those of the role that migrates them.
    query = "SELECT current_schema(), current_database(), tableowner FROM pg_tables"
    of_ours = f"{query} WHERE schemaname = current_schema() AND tablename = 'allocations'"
    quoted = conn.dialect.identifier_preparer.quote_identifier
    schema, database, owner = map(quoted, conn.exec_driver_sql(of_ours).one())
    return "\n".join(
        [
            "\\set ON_ERROR_STOP on",
            "BEGIN;",
            "SET LOCAL lock_timeout = '10s';",
            f"SET LOCAL search_path = {schema};",
            f"DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{NAME}')"
            f" THEN CREATE ROLE {NAME}; END IF; END $$;",
            f"ALTER ROLE {NAME} LOGIN CONNECTION LIMIT {connections};",
            *(f"ALTER ROLE {NAME} SET {key} = '{value}';" for key, value in _SETTINGS.items()),
            # Every role has these two, until they are taken from all but the service's.
            f"GRANT CREATE ON SCHEMA {schema} TO {owner};",
            f"REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC;",
            f"GRANT TEMPORARY ON DATABASE {database} TO {owner};",
            f"REVOKE TEMPORARY ON DATABASE {database} FROM PUBLIC;",
            f"GRANT CONNECT ON DATABASE {database} TO {NAME};",
            f"GRANT USAGE ON SCHEMA {schema} TO {NAME};",
            f"REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {NAME};",
            f"REVOKE ALL ON ALL SEQUENCES IN SCHEMA {schema} FROM {NAME};",
            f"GRANT USAGE ON SEQUENCE {', '.join(_SEQUENCES)} TO {NAME};",
            _DROP_RULES,
            *(line for table in _TABLES for line in _grants(table)),
            "COMMIT;\n",
        ]
    )


def _grants(table: str) -> Iterator[str]:
    rights = _TABLES[table]
    for right, columns in rights.columns.items():
        yield f"GRANT {right} ({', '.join(columns)}) ON {table} TO {NAME};"
    if not rights.rules:
        return
    # Rules restrict this role alone. The service owns the tables, and others read as before.
    yield f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY;"
    yield f"DROP POLICY IF EXISTS {_OTHERS} ON {table};"
    yield f"CREATE POLICY {_OTHERS} ON {table} USING (true) WITH CHECK (true);"
    for rule, command, using, check in _rules(rights):
        yield (
            f"CREATE POLICY {rule} ON {table} AS RESTRICTIVE FOR {command} TO {NAME}"
            + (f" USING ({using})" if using else "")
            + (f" WITH CHECK ({check})" if check else "")
            + ";"
        )


def _rules(rights: _Table) -> Iterator[tuple[str, str, str, str]]:
    for command, (using, check) in rights.rules.items():
        digest = hashlib.sha256(f"{using}\n{check}".encode()).hexdigest()[:12]
        yield f"{_RULE}{command.lower()}_{digest}", command, using, check


def require_least(conn: sa.Connection) -> None:
    """Problem `gateway_role_excessive` unless this connection has the gateway's rights and no
    others; `gateway_role_insufficient` when it lacks one. On SQLite a gateway is on the service's
    own machine, and reads its file.
    """
    if conn.dialect.name != "postgresql":
        return
    expected = {*_expected(), *((sequence, "", "USAGE") for sequence in _SEQUENCES)}
    actual = set(map(tuple, conn.execute(_RIGHTS)))
    excess = [*conn.execute(_ROLE).scalars(), *_missing_rules(conn)]
    excess += sorted(f"{right} of {_name(*where)}" for *where, right in actual - expected)
    if excess:
        raise _refusal(
            "gateway_role_excessive",
            f"a role with the rights of a gateway and no others, such as {NAME}",
            f"{conn.execute(_USER).scalar_one()}: {_first(excess)}",
        )
    if lacking := sorted(f"{right} of {_name(*where)}" for *where, right in expected - actual):
        raise _refusal(
            "gateway_role_insufficient", "the rights of this version", f"no {_first(lacking)}"
        )


def _expected() -> Iterator[tuple[str, str, str]]:
    for table, rights in _TABLES.items():
        for right, columns in rights.columns.items():
            yield from ((table, column, right) for column in columns)


def _missing_rules(conn: sa.Connection) -> Iterator[str]:
    """Tables whose rules for rows do not hold for this role as they are here."""
    in_force = {(table, rule) for table, rule in conn.execute(_RULES)}
    for table, rights in _TABLES.items():
        if any((table, rule) not in in_force for rule, *_ in _rules(rights)):
            yield f"no rule for rows of {table}"


def _name(table: str, column: str) -> str:
    return f"{table} ({column})" if column else table


def _first(names: list[str]) -> str:
    more = f", and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _refusal(code: str, expected: str, found: str) -> Problem:
    return Problem(
        code,
        403,
        expected=expected,
        found=found,
        remedy="let an administrator of the database run what `gpuaas gateway-role` prints on the"
        f" service's machine, and set GPUAAS_DATABASE_URL of the gateway with the user {NAME}",
    )


def _require_postgresql(conn: sa.Connection) -> None:
    if conn.dialect.name != "postgresql":
        raise Problem(
            "gateway_role_needless",
            expected="a site on PostgreSQL",
            found="SQLite",
            remedy="nothing; its gateway is on the service's machine, as its user",
        )


_DROP_RULES = f"""DO $$ DECLARE r record; BEGIN
 FOR r IN SELECT tablename, policyname FROM pg_policies
 WHERE schemaname = current_schema() AND policyname LIKE '{_RULE}%'
 LOOP EXECUTE format('DROP POLICY %I ON %I', r.policyname, r.tablename); END LOOP; END $$;
"""  # noqa: S608 - no word of another's
_USER = sa.text("SELECT session_user")
_RELATIONS = """
    (SELECT c.oid, c.relkind, c.oid::regclass::text AS name FROM pg_class AS c
     JOIN pg_namespace AS n ON n.oid = c.relnamespace
     WHERE n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname NOT LIKE 'pg\\_%'
     AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S')) AS c"""
# A superuser has all rights. `session_user`, because a connection can take another role on.
_RIGHTS = sa.text(f"""
SELECT c.name, a.attname::text, p FROM {_RELATIONS} JOIN pg_attribute AS a ON a.attrelid = c.oid
 CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'REFERENCES']) AS p
 WHERE c.relkind <> 'S' AND a.attnum > 0 AND NOT a.attisdropped
 AND has_column_privilege(session_user, c.oid, a.attnum, p)
UNION SELECT c.name, '', p FROM {_RELATIONS}
 CROSS JOIN unnest(ARRAY['DELETE', 'TRUNCATE', 'TRIGGER']) AS p
 WHERE c.relkind <> 'S' AND has_table_privilege(session_user, c.oid, p)
UNION SELECT c.name, '', p FROM {_RELATIONS}
 CROSS JOIN unnest(ARRAY['SELECT', 'USAGE', 'UPDATE']) AS p
 WHERE CASE c.relkind WHEN 'S' THEN has_sequence_privilege(session_user, c.oid, p) END
""")  # noqa: S608
_ROLE = sa.text(
    "WITH me AS (SELECT * FROM pg_roles WHERE rolname = session_user) "  # noqa: S608
    + " UNION ALL ".join(
        [
            *(f"SELECT '{text}' FROM me WHERE {name}" for name, text in _ATTRIBUTES.items()),  # noqa: S608
            "SELECT 'acts as ' || current_user WHERE current_user <> session_user",
            "SELECT 'member of ' || r.rolname FROM me JOIN pg_auth_members AS m ON m.member ="
            " me.oid JOIN pg_roles AS r ON r.oid = m.roleid",
            "SELECT 'owner of ' || c.oid::regclass FROM me JOIN pg_class AS c"
            " ON c.relowner = me.oid",
            "SELECT 'owner of the database' FROM me JOIN pg_database AS d ON d.datdba = me.oid",
            "SELECT 'owner of ' || n.nspname FROM me JOIN pg_namespace AS n ON n.nspowner = me.oid",
            "SELECT 'owner of ' || f.proname FROM me JOIN pg_proc AS f ON f.proowner = me.oid",
            "SELECT 'CREATE in ' || n.nspname FROM pg_namespace AS n"
            " WHERE has_schema_privilege(session_user, n.oid, 'CREATE')",
            "SELECT p || ' of the database' FROM unnest(ARRAY['CREATE', 'TEMPORARY']) AS p"
            " WHERE has_database_privilege(session_user, current_database(), p)",
        ]
    )
)
_RULES = sa.text(
    "SELECT tablename::text, policyname::text FROM pg_policies WHERE schemaname = current_schema()"
    " AND permissive = 'RESTRICTIVE' AND session_user = ANY (roles)"
    " AND row_security_active(format('%I.%I', schemaname, tablename)::regclass)"
)
