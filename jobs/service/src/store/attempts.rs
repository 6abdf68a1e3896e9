//! Attempts at jobs: their worker processes, and how they ended.

use rusqlite::{Connection, params};

use super::{Result, inconsistent};
use crate::model::{Failure, Time};

/// An attempt without a stored end.
#[derive(Debug, Clone)]
pub struct OpenAttempt {
    /// Row number of the job.
    pub job: i64,
    /// The worker's process id, and the kernel's start time of the process.
    pub process: Option<(i32, u64)>,
}

/// Stores the start of an attempt.
pub fn begin(connection: &Connection, job: i64, attempt: u32, user: &str, now: Time) -> Result<()> {
    connection
        .prepare_cached("INSERT INTO attempts (job, attempt, user, started_at) VALUES (?, ?, ?, ?)")?
        .execute(params![job, attempt, user, now.0])?;
    Ok(())
}

/// Stores the worker process of an attempt.
pub fn set_process(connection: &Connection, job: i64, attempt: u32, process: i32, began: u64) -> Result<()> {
    connection
        .prepare_cached("UPDATE attempts SET process = ?, process_began = ? WHERE job = ? AND attempt = ?")?
        .execute(params![process, began.cast_signed(), job, attempt])?;
    Ok(())
}

/// Stores how the open attempt of a job ended.
pub fn end(connection: &Connection, job: i64, outcome: &str, reason: Option<&str>, now: Time) -> Result<()> {
    connection
        .prepare_cached("UPDATE attempts SET ended_at = ?, outcome = ?, reason = ? WHERE job = ? AND ended_at IS NULL")?
        .execute(params![now.0, outcome, reason, job])?;
    Ok(())
}

/// Counts a failed attempt, and stores its failure and the time of the next one.
pub fn fail(connection: &Connection, seq: i64, failure: &Failure, not_before: Option<Time>) -> Result<()> {
    let text = serde_json::to_string(failure).map_err(inconsistent)?;
    connection
        .prepare_cached("UPDATE jobs SET failures = failures + 1, failure = ?, not_before = ? WHERE seq = ?")?
        .execute(params![text, not_before.map(|t| t.0), seq])?;
    Ok(())
}

/// Sets the time of the next attempt at a job that waits for another run; not counted as a failure.
pub fn wait_until(connection: &Connection, seq: i64, not_before: Time) -> Result<()> {
    connection.prepare_cached("UPDATE jobs SET not_before = ? WHERE seq = ?")?.execute(params![not_before.0, seq])?;
    Ok(())
}

/// Counts a start lost to the end of the service; returns the new count.
pub fn count_interruption(connection: &Connection, seq: i64) -> Result<u32> {
    let sql = "UPDATE jobs SET interruptions = interruptions + 1 WHERE seq = ? RETURNING interruptions";
    Ok(connection.prepare_cached(sql)?.query_row([seq], |row| row.get(0))?)
}

/// All attempts without a stored end.
pub fn open(connection: &Connection) -> Result<Vec<OpenAttempt>> {
    let mut statement =
        connection.prepare_cached("SELECT job, process, process_began FROM attempts WHERE ended_at IS NULL")?;
    let rows = statement.query_map([], |row| {
        let (process, began): (Option<i32>, Option<i64>) = (row.get(1)?, row.get(2)?);
        Ok(OpenAttempt { job: row.get(0)?, process: process.zip(began.map(i64::cast_unsigned)) })
    })?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

/// Milliseconds of slots that each user's jobs used since a time, including running jobs.
pub fn used_since(connection: &Connection, since: Time, now: Time) -> Result<Vec<(String, i64)>> {
    let mut statement = connection.prepare_cached(
        "SELECT user, SUM(MIN(COALESCE(ended_at, ?1), ?1) - MAX(started_at, ?2)) FROM attempts
         WHERE ended_at IS NULL OR ended_at > ?2 GROUP BY user",
    )?;
    let rows = statement.query_map(params![now.0, since.0], |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}
