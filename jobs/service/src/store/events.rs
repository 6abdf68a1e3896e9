//! Events of jobs, numbered over the whole service.

use rusqlite::{Connection, OptionalExtension, Row, params};
use serde_json::Value;

use super::{Result, damaged};
use crate::model::{EventType, EventView, JobId, Time};

/// A job as events name it.
#[derive(Debug, Clone)]
pub struct Whose {
    pub seq: i64,
    pub id: JobId,
    pub attempt: u32,
}

/// Adds an event.
pub fn add(connection: &Connection, whose: &Whose, kind: EventType, data: Value, now: Time) -> Result<EventView> {
    connection
        .prepare_cached("INSERT INTO events (job, time, attempt, kind, data) VALUES (?, ?, ?, ?, ?)")?
        .execute(params![whose.seq, now.0, whose.attempt, kind.name(), data.to_string()])?;
    let seq = connection.last_insert_rowid();
    connection.prepare_cached("UPDATE jobs SET event_count = event_count + 1 WHERE seq = ?")?.execute([whose.seq])?;
    Ok(EventView { seq: Some(seq), job: whose.id.clone(), time: now, attempt: whose.attempt, kind, data })
}

/// The number of the newest event there ever was.
pub fn newest(connection: &Connection) -> Result<i64> {
    let sql = "SELECT COALESCE(MAX(seq), 0) FROM sqlite_sequence WHERE name = 'events'";
    Ok(connection.prepare_cached(sql)?.query_row([], |row| row.get(0))?)
}

/// Whether everything after a number can be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Position {
    /// All of it is here.
    Here,
    /// This service never gave that number; the newest one that it gave.
    NeverGiven(i64),
    /// Some of it went with jobs that were deleted.
    Gone,
    /// It is too long ago.
    TooFar,
}

/// Numbers of events that a watcher of all jobs may be behind.
pub const BEHIND: i64 = 100_000;

/// Where a watcher of all jobs stands who has seen everything up to a number. Numbers have no gaps but those of deleted jobs.
pub fn position(connection: &Connection, after: i64) -> Result<Position> {
    let newest = newest(connection)?;
    let behind = newest.saturating_sub(after);
    if behind < 0 {
        return Ok(Position::NeverGiven(newest));
    }
    if behind > BEHIND {
        return Ok(Position::TooFar);
    }
    let sql = "SELECT COUNT(*) FROM events WHERE seq > ?";
    let there: i64 = connection.prepare_cached(sql)?.query_row([after], |row| row.get(0))?;
    Ok(if there == behind { Position::Here } else { Position::Gone })
}

/// Changes of state of all jobs, or of one user's, after a number, oldest first.
pub fn changes(connection: &Connection, user: Option<&str>, after: i64, limit: u32) -> Result<Vec<EventView>> {
    let mut statement = connection.prepare_cached(
        "SELECT e.seq, e.time, e.attempt, e.kind, e.data, j.id FROM events e JOIN jobs j ON j.seq = e.job
         WHERE e.seq > ?1 AND e.kind = 'state' AND (?2 IS NULL OR j.user = ?2) ORDER BY e.seq LIMIT ?3",
    )?;
    let rows = statement.query_map(params![after, user, limit], |row| Ok((raw(row)?, row.get::<_, String>(5)?)))?;
    rows.map(|row| {
        let (raw, id) = row?;
        view(raw, &id.parse().map_err(|()| damaged("a job's id"))?)
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
    rows.map(|row| view(row?, id)).collect()
}

fn view((seq, time, attempt, kind, data): Raw, id: &JobId) -> Result<EventView> {
    Ok(EventView {
        seq: Some(seq),
        job: id.clone(),
        time: Time(time),
        attempt,
        kind: kind.parse().map_err(|()| damaged(format!("event {seq} of kind {kind:?}")))?,
        data: serde_json::from_str(&data).map_err(damaged)?,
    })
}

type Raw = (i64, i64, u32, String, String);

fn raw(row: &Row<'_>) -> rusqlite::Result<Raw> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?))
}

/// The hash that the newest attempt at a job told with its plan, or with the data set that it found finished.
pub fn job_hash(connection: &Connection, job: i64) -> Result<Option<String>> {
    let sql = "SELECT data ->> 'job_hash' FROM events WHERE job = ? AND kind IN ('started', 'finished') AND data ->> 'job_hash' <> '' ORDER BY seq DESC LIMIT 1";
    let found: Option<Option<String>> =
        connection.prepare_cached(sql)?.query_row([job], |row| row.get(0)).optional()?;
    Ok(found.flatten())
}

/// Whether an earlier attempt began this split, whoever made it then.
pub fn was_started(connection: &Connection, job: i64, data: &Value) -> Result<bool> {
    let sql = "SELECT EXISTS (SELECT 1 FROM events WHERE job = ?1 AND kind = 'split_started' AND data ->> 'split' = ?2 ->> 'split')";
    Ok(connection.prepare_cached(sql)?.query_row(params![job, data.to_string()], |row| row.get(0))?)
}
