"""The ledger: rows by month, their ids, price versions, rollups, closed periods, removals.

Append-only is the tables' own doing: triggers refuse what is no insert, whoever asks. Months are partitions of
``requests``; a function makes them (as the tables' owner, so that a gateway needs no right to create anything), another
drops those that a removal was noted for. The unique id cannot be an index of a partitioned table, which would have to
hold the month: it is a table of its own, written in the same transaction.
"""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_SUMS = ", ".join(
    f"s_{name} BIGINT NOT NULL"
    for name in (
        "requests", "corrections", "unpriced", "hits_not_told", "prompt_tokens", "fresh_tokens", "hit_device_tokens",
        "hit_host_tokens", "hit_disk_tokens", "hit_pool_tokens", "hit_unknown_tokens", "write_tokens", "output_tokens",
        "reasoning_tokens", "amount_nano", "saved_nano",
    )
)  # fmt: skip
_KEYS = (
    "tenant", "team", "key", "model", "served_model", "agent", "instance", "endpoint", "outcome", "status",
    "usage_source", "hit_source", "price_version", "unpriced", "currency",
)  # fmt: skip

_TABLES = f"""
CREATE TABLE prices (version TEXT PRIMARY KEY, name TEXT NOT NULL, currency TEXT NOT NULL, body TEXT NOT NULL);
CREATE SEQUENCE requests_seq AS BIGINT;
CREATE TABLE requests (
  seq BIGINT NOT NULL DEFAULT nextval('requests_seq'),
  request_id TEXT NOT NULL,
  revision BIGINT NOT NULL,
  arrived_ns BIGINT NOT NULL,
  first_token_ns BIGINT,
  closed_ns BIGINT NOT NULL,
  posted_ns BIGINT NOT NULL,
  settles_unpriced BIGINT NOT NULL,
  endpoint TEXT NOT NULL,
  model TEXT NOT NULL,
  served_model TEXT NOT NULL,
  tenant TEXT NOT NULL,
  team TEXT NOT NULL,
  key_id TEXT NOT NULL,
  instance TEXT,
  run_id TEXT,
  step BIGINT,
  agent TEXT,
  outcome TEXT NOT NULL,
  status BIGINT NOT NULL,
  stream BIGINT NOT NULL,
  finish_reason TEXT,
  error TEXT,
  fresh_tokens BIGINT NOT NULL,
  hit_device_tokens BIGINT NOT NULL,
  hit_host_tokens BIGINT NOT NULL,
  hit_disk_tokens BIGINT NOT NULL,
  hit_pool_tokens BIGINT NOT NULL,
  hit_unknown_tokens BIGINT NOT NULL,
  write_tokens BIGINT NOT NULL,
  write_5m_tokens BIGINT NOT NULL,
  write_1h_tokens BIGINT NOT NULL,
  output_tokens BIGINT NOT NULL,
  reasoning_tokens BIGINT NOT NULL,
  usage_source TEXT NOT NULL,
  hit_source TEXT NOT NULL,
  gateway_prompt_tokens BIGINT,
  currency TEXT NOT NULL,
  price_version TEXT NOT NULL,
  amount_nano BIGINT,
  saved_nano BIGINT,
  unpriced_reason TEXT,
  price_model TEXT,
  price_at_ns BIGINT,
  price_team TEXT,
  price_region TEXT,
  price_service_tier TEXT,
  price_rule TEXT,
  lines TEXT NOT NULL,
  attempts TEXT NOT NULL,
  usage_problems TEXT NOT NULL,
  labels TEXT NOT NULL,
  CHECK ((amount_nano IS NULL) = (unpriced_reason IS NOT NULL))
) PARTITION BY RANGE (posted_ns);
CREATE INDEX requests_by_seq ON requests (seq);
CREATE INDEX requests_by_id ON requests (request_id);
CREATE INDEX requests_by_posting ON requests USING brin (posted_ns) WITH (pages_per_range = 16);
CREATE INDEX requests_by_run ON requests (run_id, step) WHERE run_id IS NOT NULL;
CREATE INDEX requests_corrected ON requests (request_id) WHERE revision > 0;
CREATE TABLE request_ids (
  request_id TEXT NOT NULL,
  revision BIGINT NOT NULL,
  posted_ns BIGINT NOT NULL,
  PRIMARY KEY (request_id, revision)
);
CREATE INDEX request_ids_by_posting ON request_ids USING brin (posted_ns);
CREATE TABLE refused (
  seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  request_id TEXT NOT NULL,
  reason TEXT NOT NULL,
  payload BYTEA NOT NULL
);
CREATE TABLE rollup_keys (
  id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  {", ".join(f"k_{name} TEXT NOT NULL" for name in _KEYS)},
  UNIQUE ({", ".join(f"k_{name}" for name in _KEYS)})
);
CREATE TABLE rollups (
  hour BIGINT NOT NULL, key_id BIGINT NOT NULL REFERENCES rollup_keys (id), {_SUMS}, PRIMARY KEY (hour, key_id)
);
CREATE TABLE day_rollups (
  day BIGINT NOT NULL, key_id BIGINT NOT NULL REFERENCES rollup_keys (id), {_SUMS}, PRIMARY KEY (day, key_id)
);
CREATE TABLE value_rollups (
  day BIGINT NOT NULL, dimension TEXT NOT NULL, value TEXT NOT NULL, currency TEXT NOT NULL, {_SUMS},
  PRIMARY KEY (dimension, day, value, currency)
);
CREATE TABLE rolled (one BIGINT PRIMARY KEY CHECK (one = 1), seq BIGINT NOT NULL);
INSERT INTO rolled VALUES (1, 0);
CREATE TABLE closings (until_ns BIGINT PRIMARY KEY, closed_ns BIGINT NOT NULL, totals TEXT NOT NULL);
CREATE TABLE removals (before_ns BIGINT PRIMARY KEY, removed_ns BIGINT NOT NULL, totals TEXT NOT NULL);
"""

_REFUSALS = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'the ledger is append-only' USING ERRCODE = 'integrity_constraint_violation'; END $$;

CREATE FUNCTION refuse_closed_period() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF EXISTS (SELECT 1 FROM inserted WHERE posted_ns < (SELECT max(until_ns) FROM closings)) THEN
    RAISE EXCEPTION 'the period is closed' USING ERRCODE = 'integrity_constraint_violation';
  END IF;
  RETURN NULL;
END $$;
CREATE TRIGGER requests_closed_period AFTER INSERT ON requests
REFERENCING NEW TABLE AS inserted FOR EACH STATEMENT EXECUTE FUNCTION refuse_closed_period();

CREATE FUNCTION refuse_removal_of_open_period() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF NEW.before_ns > coalesce((SELECT max(until_ns) FROM closings), NEW.before_ns - 1) THEN
    RAISE EXCEPTION 'the period is not closed' USING ERRCODE = 'integrity_constraint_violation';
  END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER removals_of_closed_periods BEFORE INSERT ON removals
FOR EACH ROW EXECUTE FUNCTION refuse_removal_of_open_period();
"""
_GUARDED = ("requests", "prices", "closings", "removals")

_MONTHS = """
CREATE FUNCTION ledger_month_ns(months BIGINT) RETURNS BIGINT LANGUAGE sql IMMUTABLE AS $$
  SELECT extract(epoch FROM make_timestamptz(
    (1970 + floor(months / 12.0))::int, (months - 12 * floor(months / 12.0))::int + 1, 1, 0, 0, 0, 'UTC'
  ))::bigint * 1000000000
$$;

CREATE FUNCTION make_ledger_month(at_ns BIGINT) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  at TIMESTAMP := to_timestamp(at_ns / 1000000000) AT TIME ZONE 'UTC';
  months BIGINT := (extract(year FROM at)::bigint - 1970) * 12 + extract(month FROM at)::bigint - 1;
  name TEXT := 'requests_' || to_char(at, 'YYYY_MM');
BEGIN
  IF to_regclass(name) IS NOT NULL THEN RETURN; END IF;
  -- attached, not made in place: that would wait for every reader of the ledger, and let others wait behind it
  EXECUTE format('CREATE TABLE %I (LIKE requests INCLUDING ALL)', name);
  EXECUTE format('ALTER TABLE requests ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)',
                 name, ledger_month_ns(months), ledger_month_ns(months + 1));
  EXECUTE format('CREATE TRIGGER no_truncate BEFORE TRUNCATE ON %I FOR EACH STATEMENT EXECUTE FUNCTION refuse()', name);
END $$;

CREATE FUNCTION drop_ledger_months(before_ns BIGINT) RETURNS BIGINT
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  month RECORD;
  rows_in BIGINT;
  gone BIGINT := 0;
BEGIN
  IF before_ns > coalesce((SELECT max(removals.before_ns) FROM removals), before_ns - 1) THEN
    RAISE EXCEPTION 'no removal was noted' USING ERRCODE = 'integrity_constraint_violation';
  END IF;
  FOR month IN
    SELECT c.oid::regclass AS name FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'requests'::regclass
      AND (regexp_match(pg_get_expr(c.relpartbound, c.oid), 'TO \\(''?(-?[0-9]+)''?\\)'))[1]::bigint <= before_ns
  LOOP
    EXECUTE format('SELECT count(*) FROM %s', month.name) INTO rows_in;
    EXECUTE format('DROP TABLE %s', month.name);
    gone := gone + rows_in;
  END LOOP;
  DELETE FROM request_ids WHERE posted_ns < before_ns;
  RETURN gone;
END $$;
REVOKE ALL ON FUNCTION drop_ledger_months(BIGINT), make_ledger_month(BIGINT) FROM PUBLIC;
"""


def upgrade() -> None:
    """Make everything."""
    op.execute(_TABLES)
    op.execute(_REFUSALS)
    for table in _GUARDED:
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE ON {table}"
            " FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
        op.execute(
            f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table}"
            " FOR EACH STATEMENT EXECUTE FUNCTION refuse()"
        )
    op.execute(_MONTHS)


def downgrade() -> None:
    """Refuse: it would delete what was billed."""
    raise NotImplementedError("a ledger is not taken back; drop its schema by hand")
