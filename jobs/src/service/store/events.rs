//! Events of jobs, numbered over the whole service.

use rusqlite::{Connection, Row, params};
use serde_json::Value;

use super::{Result, damaged};
use crate::service::model::{EventType, EventView, JobId, Time};

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

/// Events of a job after a number, oldest first.
pub fn history(connection: &Connection, id: &JobId, after: i64, limit: u32) -> Result<Vec<EventView>> {
    let mut statement = connection.prepare_cached(
        "SELECT e.seq, e.time, e.attempt, e.kind, e.data FROM events e JOIN jobs j ON j.seq = e.job
         WHERE j.id = ? AND e.seq > ? ORDER BY e.seq LIMIT ?",
    )?;
    let rows = statement.query_map(params![id.as_str(), after, limit], raw)?;
    rows.map(|row| {
        let (seq, time, attempt, kind, data) = row?;
        Ok(EventView {
            seq: Some(seq),
            job: id.clone(),
            time: Time(time),
            attempt,
            kind: kind.parse().map_err(|()| damaged(format!("event {seq} of kind {kind:?}")))?,
            data: serde_json::from_str(&data).map_err(damaged)?,
        })
    })
    .collect()
}

type Raw = (i64, i64, u32, String, String);

fn raw(row: &Row<'_>) -> rusqlite::Result<Raw> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?))
}

/// Whether an earlier attempt began this split.
pub fn was_started(connection: &Connection, job: i64, data: &Value) -> Result<bool> {
    let sql = "SELECT EXISTS (SELECT 1 FROM events WHERE job = ? AND kind = 'split_started' AND data = ?)";
    Ok(connection.prepare_cached(sql)?.query_row(params![job, data.to_string()], |row| row.get(0))?)
}
