//! Events of jobs, numbered across the whole service.

use rusqlite::{Connection, OptionalExtension, Row, params};
use serde_json::Value;

use super::{Result, inconsistent};
use crate::model::{EventType, EventView, JobId, Time};

/// A job as events refer to it: row number, id and current attempt.
#[derive(Debug, Clone)]
pub struct JobRef {
    pub seq: i64,
    pub id: JobId,
    pub attempt: u32,
}

/// Adds an event.
pub fn add(connection: &Connection, job_ref: &JobRef, kind: EventType, data: Value, now: Time) -> Result<EventView> {
    connection
        .prepare_cached("INSERT INTO events (job, time, attempt, kind, data) VALUES (?, ?, ?, ?, ?)")?
        .execute(params![job_ref.seq, now.0, job_ref.attempt, kind.name(), data.to_string()])?;
    let seq = connection.last_insert_rowid();
    connection.prepare_cached("UPDATE jobs SET event_count = event_count + 1 WHERE seq = ?")?.execute([job_ref.seq])?;
    Ok(EventView { seq: Some(seq), job: job_ref.id.clone(), time: now, attempt: job_ref.attempt, kind, data })
}

/// The number of the newest event ever, including deleted ones.
pub fn newest_seq(connection: &Connection) -> Result<i64> {
    let sql = "SELECT COALESCE(MAX(seq), 0) FROM sqlite_sequence WHERE name = 'events'";
    Ok(connection.prepare_cached(sql)?.query_row([], |row| row.get(0))?)
}

/// Whether the store still has every event after a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Position {
    /// It has all of them.
    Complete,
    /// This service never used that number; holds the newest number that it used.
    Unknown(i64),
    /// Some were deleted with their jobs.
    Deleted,
    /// There are too many.
    TooOld,
}

/// Most events that a watcher of all jobs may lag behind.
pub const MAX_LAG: i64 = 100_000;

/// The position of a watcher of all jobs that has seen everything up to `after`. Only deleted jobs leave gaps in the
/// numbers.
pub fn position(connection: &Connection, after: i64) -> Result<Position> {
    let newest = newest_seq(connection)?;
    let lag = newest.saturating_sub(after);
    if lag < 0 {
        return Ok(Position::Unknown(newest));
    }
    if lag > MAX_LAG {
        return Ok(Position::TooOld);
    }
    let sql = "SELECT COUNT(*) FROM events WHERE seq > ?";
    let stored: i64 = connection.prepare_cached(sql)?.query_row([after], |row| row.get(0))?;
    Ok(if stored == lag { Position::Complete } else { Position::Deleted })
}

/// Changes of state after a number, of all jobs or of one user's, oldest first.
pub fn state_changes(connection: &Connection, user: Option<&str>, after: i64, limit: u32) -> Result<Vec<EventView>> {
    let mut statement = connection.prepare_cached(
        "SELECT e.seq, e.time, e.attempt, e.kind, e.data, j.id FROM events e JOIN jobs j ON j.seq = e.job
         WHERE e.seq > ?1 AND e.kind = 'state' AND (?2 IS NULL OR j.user = ?2) ORDER BY e.seq LIMIT ?3",
    )?;
    let rows = statement.query_map(params![after, user, limit], |row| Ok((raw(row)?, row.get::<_, String>(5)?)))?;
    rows.map(|row| {
        let (raw, id) = row?;
        to_view(raw, &id.parse().map_err(|()| inconsistent("a job's id"))?)
    })
    .collect()
}

/// Events of a job after a number, oldest first.
pub fn history(connection: &Connection, id: &JobId, after: i64, limit: u32) -> Result<Vec<EventView>> {
    let mut statement = connection.prepare_cached(
        "SELECT e.seq, e.time, e.attempt, e.kind, e.data FROM events e JOIN jobs j ON j.seq = e.job
         WHERE j.id = ? AND e.seq > ? ORDER BY e.seq LIMIT ?",
    )?;
    let rows = statement.query_map(params![id.as_str(), after, limit], raw)?;
    rows.map(|row| to_view(row?, id)).collect()
}

fn to_view((seq, time, attempt, kind, data): Raw, id: &JobId) -> Result<EventView> {
    Ok(EventView {
        seq: Some(seq),
        job: id.clone(),
        time: Time(time),
        attempt,
        kind: kind.parse().map_err(|()| inconsistent(format!("event {seq} of kind {kind:?}")))?,
        data: serde_json::from_str(&data).map_err(inconsistent)?,
    })
}

type Raw = (i64, i64, u32, String, String);

fn raw(row: &Row<'_>) -> rusqlite::Result<Raw> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?))
}

/// The job hash in the newest `started` or `finished` event of a job.
pub fn job_hash(connection: &Connection, job: i64) -> Result<Option<String>> {
    let sql = "SELECT data ->> 'job_hash' FROM events WHERE job = ? AND kind IN ('started', 'finished') AND data ->> 'job_hash' <> '' ORDER BY seq DESC LIMIT 1";
    let found: Option<Option<String>> =
        connection.prepare_cached(sql)?.query_row([job], |row| row.get(0)).optional()?;
    Ok(found.flatten())
}

/// Whether an earlier attempt began this split, on any executor.
pub fn was_started(connection: &Connection, job: i64, data: &Value) -> Result<bool> {
    let sql = "SELECT EXISTS (SELECT 1 FROM events WHERE job = ?1 AND kind = 'split_started' AND data ->> 'split' = ?2 ->> 'split')";
    Ok(connection.prepare_cached(sql)?.query_row(params![job, data.to_string()], |row| row.get(0))?)
}
