-- Times are milliseconds since 1970. What is only shown is JSON.
CREATE TABLE jobs (
    seq             INTEGER PRIMARY KEY AUTOINCREMENT,
    id              TEXT NOT NULL UNIQUE,
    name            TEXT NOT NULL,
    user            TEXT NOT NULL,
    state           TEXT NOT NULL,
    priority        INTEGER NOT NULL,
    slot            TEXT NOT NULL,
    gpu             INTEGER,
    media_type      TEXT NOT NULL,
    file            TEXT NOT NULL,
    folder          TEXT NOT NULL,
    created_at      INTEGER NOT NULL,
    updated_at      INTEGER NOT NULL,
    queued_at       INTEGER NOT NULL,
    started_at      INTEGER,
    finished_at     INTEGER,
    not_before      INTEGER,
    attempt         INTEGER NOT NULL DEFAULT 0,
    failures        INTEGER NOT NULL DEFAULT 0,
    interruptions   INTEGER NOT NULL DEFAULT 0,
    max_attempts    INTEGER NOT NULL,
    time_limit      INTEGER NOT NULL,
    output_limit    INTEGER NOT NULL,
    overwrite       INTEGER NOT NULL,
    output          TEXT NOT NULL,
    reason          TEXT,
    failure         TEXT,
    teacher         TEXT,
    progress        TEXT,
    result          TEXT,
    rates           TEXT,
    event_count     INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE INDEX jobs_by_state ON jobs (state, seq);
CREATE INDEX jobs_by_user ON jobs (user, seq);
CREATE INDEX jobs_waiting_by_user ON jobs (user) WHERE state IN ('queued', 'retrying');
CREATE INDEX jobs_waiting ON jobs (slot, priority, user, queued_at) WHERE state = 'queued';

CREATE TABLE events (
    seq     INTEGER PRIMARY KEY AUTOINCREMENT,
    job     INTEGER NOT NULL REFERENCES jobs (seq) ON DELETE CASCADE,
    time    INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    kind    TEXT NOT NULL,
    data    TEXT NOT NULL
) STRICT;

CREATE INDEX events_of_job ON events (job, seq);

CREATE TABLE attempts (
    job         INTEGER NOT NULL REFERENCES jobs (seq) ON DELETE CASCADE,
    attempt     INTEGER NOT NULL,
    user        TEXT NOT NULL,
    started_at  INTEGER NOT NULL,
    ended_at    INTEGER,
    -- the worker, and when the kernel says it began: a process id alone may be another's by now
    process     INTEGER,
    process_began INTEGER,
    outcome     TEXT,
    reason      TEXT,
    PRIMARY KEY (job, attempt)
) STRICT;

CREATE INDEX attempts_by_time ON attempts (started_at);
CREATE INDEX attempts_open ON attempts (job) WHERE ended_at IS NULL;

CREATE TABLE tokens (
    id          TEXT PRIMARY KEY,
    user        TEXT NOT NULL,
    scopes      TEXT NOT NULL,
    hash        BLOB NOT NULL,
    created_at  INTEGER NOT NULL,
    expires_at  INTEGER,
    revoked_at  INTEGER
) STRICT;

CREATE TABLE submissions (
    user        TEXT NOT NULL,
    key         TEXT NOT NULL,
    request     BLOB NOT NULL,
    job         INTEGER NOT NULL REFERENCES jobs (seq) ON DELETE CASCADE,
    created_at  INTEGER NOT NULL,
    PRIMARY KEY (user, key)
) STRICT;
