//! Attempts at jobs: which process made them, and how they ended.

use rusqlite::{Connection, params};

use super::{Result, damaged};
use crate::model::{Failure, Time};

/// An attempt that nobody has closed.
#[derive(Debug, Clone)]
pub struct OpenAttempt {
    /// Number of the job's row.
    pub job: i64,
    /// The worker, and when the kernel says that it began.
    pub process: Option<(i32, u64)>,
}

/// Notes that an attempt begins.
pub fn begin(connection: &Connection, job: i64, attempt: u32, user: &str, now: Time) -> Result<()> {
    connection
        .prepare_cached("INSERT INTO attempts (job, attempt, user, started_at) VALUES (?, ?, ?, ?)")?
        .execute(params![job, attempt, user, now.0])?;
    Ok(())
}

/// Notes which process makes it.
pub fn set_process(connection: &Connection, job: i64, attempt: u32, process: i32, began: u64) -> Result<()> {
    connection
        .prepare_cached("UPDATE attempts SET process = ?, process_began = ? WHERE job = ? AND attempt = ?")?
        .execute(params![process, began.cast_signed(), job, attempt])?;
    Ok(())
}

/// Notes how the open attempt of a job ended.
pub fn end(connection: &Connection, job: i64, outcome: &str, reason: Option<&str>, now: Time) -> Result<()> {
    connection
        .prepare_cached("UPDATE attempts SET ended_at = ?, outcome = ?, reason = ? WHERE job = ? AND ended_at IS NULL")?
        .execute(params![now.0, outcome, reason, job])?;
    Ok(())
}

/// Counts a failed attempt at a job, with its failure and the time of the next one.
pub fn fail(connection: &Connection, seq: i64, failure: &Failure, not_before: Option<Time>) -> Result<()> {
    let text = serde_json::to_string(failure).map_err(damaged)?;
    connection
        .prepare_cached("UPDATE jobs SET failures = failures + 1, failure = ?, not_before = ? WHERE seq = ?")?
        .execute(params![text, not_before.map(|t| t.0), seq])?;
    Ok(())
}

/// Sets the time of the next attempt at a job that waits for another run. This counts no failure.
pub fn wait_until(connection: &Connection, seq: i64, not_before: Time) -> Result<()> {
    connection.prepare_cached("UPDATE jobs SET not_before = ? WHERE seq = ?")?.execute(params![not_before.0, seq])?;
    Ok(())
}

/// Counts a start that was lost with the service; gives how many there were.
pub fn count_interruption(connection: &Connection, seq: i64) -> Result<u32> {
    let sql = "UPDATE jobs SET interruptions = interruptions + 1 WHERE seq = ? RETURNING interruptions";
    Ok(connection.prepare_cached(sql)?.query_row([seq], |row| row.get(0))?)
}

/// Attempts without an end.
pub fn open(connection: &Connection) -> Result<Vec<OpenAttempt>> {
    let mut statement =
        connection.prepare_cached("SELECT job, process, process_began FROM attempts WHERE ended_at IS NULL")?;
    let rows = statement.query_map([], |row| {
        let (process, began): (Option<i32>, Option<i64>) = (row.get(1)?, row.get(2)?);
        Ok(OpenAttempt { job: row.get(0)?, process: process.zip(began.map(i64::cast_unsigned)) })
    })?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

/// Milliseconds that each user's jobs took of slots since a time, those that still run included.
pub fn used_since(connection: &Connection, since: Time, now: Time) -> Result<Vec<(String, i64)>> {
    let mut statement = connection.prepare_cached(
        "SELECT user, SUM(MIN(COALESCE(ended_at, ?1), ?1) - MAX(started_at, ?2)) FROM attempts
         WHERE ended_at IS NULL OR ended_at > ?2 GROUP BY user",
    )?;
    let rows = statement.query_map(params![now.0, since.0], |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}
