//! Jobs: submit, look up, take from the queue, change the state.

use std::time::Duration;

use rusqlite::types::Type;
use rusqlite::{Connection, OptionalExtension, Row, params, params_from_iter};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::events::{self, JobRef};
use super::{Result, StoreError, attempts, inconsistent};
use crate::model::{Device, EventType, EventView, Job, JobId, JobState, ResultView, Slot, Time};

/// A job to submit.
#[derive(Debug, Clone)]
pub struct NewJob {
    pub id: JobId,
    pub name: String,
    pub user: String,
    pub priority: i32,
    pub slot: Slot,
    pub media_type: String,
    pub file: String,
    pub folder: String,
    pub max_attempts: u32,
    pub time_limit_seconds: u64,
    pub output_limit_bytes: u64,
    pub overwrite: bool,
    pub append: bool,
    pub output: String,
}

/// An idempotency key, and a hash of the request that came with it.
#[derive(Debug, Clone)]
pub struct IdempotencyKey {
    pub text: String,
    pub request: [u8; 32],
}

/// Most waiting jobs.
#[derive(Debug, Clone, Copy)]
pub struct QueueLimits {
    pub all: u32,
    pub per_user: u32,
}

/// The result of a submission.
#[derive(Debug, Clone)]
pub enum Submitted {
    /// A new job.
    New(Job),
    /// The existing job of an earlier request with the same key and content.
    Existing(Job),
}

/// A job that a worker is about to run.
#[derive(Debug, Clone)]
pub struct Task {
    pub job_ref: JobRef,
    pub user: String,
    pub slot: Slot,
    pub file: String,
    pub folder: String,
    pub overwrite: bool,
    pub append: bool,
    pub max_attempts: u32,
    pub failures: u32,
    pub time_limit_seconds: u64,
    pub output_limit_bytes: u64,
    /// Milliseconds in the queue.
    pub waited_ms: i64,
}

const COLUMNS: &str = "id, name, state, user, priority, slot, gpu, created_at, updated_at, started_at, finished_at, \
    not_before, attempt, failures, max_attempts, time_limit, output_limit, overwrite, output, reason, failure, teacher, \
    progress, result, append";

fn from_row(row: &Row<'_>) -> rusqlite::Result<Job> {
    let time = |i| row.get::<_, Option<i64>>(i).map(|t| t.map(Time));
    Ok(Job {
        id: parse_column(row, 0)?,
        name: row.get(1)?,
        state: parse_column(row, 2)?,
        user: row.get(3)?,
        priority: row.get(4)?,
        device: if parse_column::<Slot>(row, 5)? == Slot::Cpu { Device::Cpu } else { Device::Gpu },
        gpu: row.get(6)?,
        created_at: Time(row.get(7)?),
        updated_at: Time(row.get(8)?),
        started_at: time(9)?,
        finished_at: time(10)?,
        not_before: time(11)?,
        queue_position: None,
        attempt: row.get(12)?,
        failures: row.get(13)?,
        max_attempts: row.get(14)?,
        time_limit_seconds: row.get::<_, i64>(15)?.cast_unsigned(),
        output_limit_bytes: row.get::<_, i64>(16)?.cast_unsigned(),
        overwrite: row.get(17)?,
        output: row.get(18)?,
        reason: row.get(19)?,
        failure: parse_json_column(row, 20)?,
        teacher: row.get(21)?,
        progress: parse_json_column(row, 22)?,
        result: parse_json_column(row, 23)?,
        append: row.get(24)?,
    })
}

fn parse_column<T: std::str::FromStr>(row: &Row<'_>, i: usize) -> rusqlite::Result<T> {
    let text: String = row.get(i)?;
    text.parse().map_err(|_| {
        let what = format!("{text:?} is not valid in column {i}");
        rusqlite::Error::FromSqlConversionFailure(i, Type::Text, what.into())
    })
}

/// Parses JSON that is only displayed. If it cannot be parsed, perhaps because another version wrote it, the field is
/// `None` and the job stays readable.
fn parse_json_column<T: DeserializeOwned>(row: &Row<'_>, i: usize) -> rusqlite::Result<Option<T>> {
    let text: Option<String> = row.get(i)?;
    Ok(text.and_then(|t| {
        serde_json::from_str(&t).map_err(|e| tracing::warn!("cannot read column {i} of a job: {e}")).ok()
    }))
}

/// Adds a job to the queue.
///
/// # Errors
/// [`StoreError::Full`], [`StoreError::KeyReused`].
pub fn submit(
    connection: &Connection,
    new: &NewJob,
    key: Option<&IdempotencyKey>,
    limits: QueueLimits,
    now: Time,
    appended: &mut Vec<EventView>,
) -> Result<Submitted> {
    if let Some(key) = key
        && let Some(job) = existing_submission(connection, &new.user, key)?
    {
        return Ok(Submitted::Existing(job));
    }
    let waiting = "SELECT COUNT(*) FROM jobs WHERE state IN ('queued', 'retrying')";
    let all: u32 = connection.prepare_cached(waiting)?.query_row([], |r| r.get(0))?;
    if all >= limits.all {
        return Err(StoreError::Full(format!(
            "{all} jobs are waiting, the most that this server allows (limits.queued_jobs)"
        )));
    }
    let own: u32 =
        connection.prepare_cached(&format!("{waiting} AND user = ?"))?.query_row([&new.user], |r| r.get(0))?;
    if own >= limits.per_user {
        return Err(StoreError::Full(format!(
            "{own} jobs of {} are waiting, the most that this server allows one user (limits.queued_jobs_per_user)",
            new.user
        )));
    }
    connection
        .prepare_cached(
            "INSERT INTO jobs (id, name, user, state, priority, slot, media_type, file, folder, created_at, updated_at,
                 queued_at, max_attempts, time_limit, output_limit, overwrite, output, append)
             VALUES (?1, ?2, ?3, 'queued', ?4, ?5, ?6, ?7, ?8, ?9, ?9, ?9, ?10, ?11, ?12, ?13, ?14, ?15)",
        )?
        .execute(params![
            new.id.as_str(),
            new.name,
            new.user,
            new.priority,
            new.slot.to_string(),
            new.media_type,
            new.file,
            new.folder,
            now.0,
            new.max_attempts,
            new.time_limit_seconds.cast_signed(),
            new.output_limit_bytes.cast_signed(),
            new.overwrite,
            new.output,
            new.append,
        ])?;
    let job_ref = JobRef { seq: connection.last_insert_rowid(), id: new.id.clone(), attempt: 0 };
    if let Some(key) = key {
        connection
            .prepare_cached("INSERT INTO submissions (user, key, request, job, created_at) VALUES (?, ?, ?, ?, ?)")?
            .execute(params![new.user, key.text, key.request, job_ref.seq, now.0])?;
    }
    let data = json!({"from": null, "to": JobState::Queued, "reason": "submitted"});
    appended.push(events::add(connection, &job_ref, EventType::State, data, now)?);
    Ok(Submitted::New(get(connection, &new.id)?))
}

/// The job of an earlier request with this key.
///
/// # Errors
/// [`StoreError::KeyReused`].
pub fn existing_submission(connection: &Connection, user: &str, key: &IdempotencyKey) -> Result<Option<Job>> {
    let found: Option<(Vec<u8>, String)> = connection
        .prepare_cached(
            "SELECT s.request, j.id FROM submissions s JOIN jobs j ON j.seq = s.job WHERE s.user = ? AND s.key = ?",
        )?
        .query_row(params![user, key.text], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    match found {
        None => Ok(None),
        Some((request, _)) if request != key.request => Err(StoreError::KeyReused),
        Some((_, id)) => get(connection, &id.parse().map_err(|()| inconsistent("a job's id"))?).map(Some),
    }
}

/// One job.
///
/// # Errors
/// [`StoreError::NoJob`].
pub fn get(connection: &Connection, id: &JobId) -> Result<Job> {
    connection
        .prepare_cached(&format!("SELECT {COLUMNS} FROM jobs WHERE id = ?"))?
        .query_row([id.as_str()], from_row)
        .optional()?
        .ok_or_else(|| StoreError::NoJob(id.clone()))
}

/// One job, with its position in the queue.
///
/// # Errors
/// [`StoreError::NoJob`].
pub fn get_with_position(connection: &Connection, id: &JobId) -> Result<Job> {
    let mut job = get(connection, id)?;
    if job.state == JobState::Queued {
        let before =
            "SELECT COUNT(*) FROM jobs w, jobs j WHERE j.id = ? AND w.state = 'queued' AND (w.priority > j.priority
            OR (w.priority = j.priority AND (w.queued_at, w.seq) <= (j.queued_at, j.seq)))";
        let position: i64 = connection.prepare_cached(before)?.query_row([id.as_str()], |r| r.get(0))?;
        job.queue_position = Some(position.cast_unsigned());
    }
    Ok(job)
}

/// Which jobs to list.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    pub states: Vec<JobState>,
    pub user: Option<String>,
    pub name: Option<String>,
    /// Only jobs with a smaller row number.
    pub before: Option<i64>,
    pub limit: u32,
}

/// A page of jobs, newest first, and the cursor of the next page. Failures have only the first line of their message
/// and no problems, so that the size of a page is bounded.
pub fn list(connection: &Connection, filter: &Filter) -> Result<(Vec<Job>, Option<i64>)> {
    // SQLite removes the problems, because reading and parsing up to a hundred of them per job would be wasted
    let columns =
        COLUMNS.replace("failure,", "CASE WHEN json_valid(failure) THEN json_remove(failure, '$.problems') END,");
    let mut sql = format!("SELECT {columns}, seq FROM jobs WHERE TRUE");
    let mut values: Vec<rusqlite::types::Value> = Vec::new();
    if !filter.states.is_empty() {
        sql += &format!(" AND state IN ({})", vec!["?"; filter.states.len()].join(", "));
        values.extend(filter.states.iter().map(|s| s.name().to_owned().into()));
    }
    for (column, value) in [("user", &filter.user), ("name", &filter.name)] {
        if let Some(value) = value {
            sql += &format!(" AND {column} = ?");
            values.push(value.clone().into());
        }
    }
    if let Some(before) = filter.before {
        sql += " AND seq < ?";
        values.push(before.into());
    }
    sql += " ORDER BY seq DESC LIMIT ?";
    values.push(i64::from(filter.limit + 1).into());
    let mut statement = connection.prepare_cached(&sql)?;
    let rows = statement.query_map(params_from_iter(values), |row| Ok((from_row(row)?, row.get::<_, i64>(25)?)))?;
    let mut rows: Vec<(Job, i64)> = rows.collect::<rusqlite::Result<_>>()?;
    let has_more = rows.len() > filter.limit as usize;
    rows.truncate(filter.limit as usize);
    let next = rows.last().filter(|_| has_more).map(|(_, seq)| *seq);
    let short = |(mut job, _): (Job, i64)| {
        if let Some(failure) = &mut job.failure {
            failure.message.truncate(failure.message.find('\n').unwrap_or(failure.message.len()));
        }
        job
    };
    Ok((rows.into_iter().map(short).collect(), next))
}

/// The submitted job file: media type and text.
pub fn file(connection: &Connection, id: &JobId) -> Result<(String, String)> {
    query_one(connection, id, "media_type, file", |row| Ok((row.get(0)?, row.get(1)?)))
}

/// The user of a job.
pub fn owner(connection: &Connection, id: &JobId) -> Result<String> {
    query_one(connection, id, "user", |row| row.get(0))
}

/// The points of the rate plot, as JSON.
pub fn rates(connection: &Connection, id: &JobId) -> Result<Option<String>> {
    query_one(connection, id, "rates", |row| row.get(0))
}

fn query_one<T>(
    connection: &Connection,
    id: &JobId,
    columns: &str,
    read: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
) -> Result<T> {
    connection
        .prepare_cached(&format!("SELECT {columns} FROM jobs WHERE id = ?"))?
        .query_row([id.as_str()], read)
        .optional()?
        .ok_or_else(|| StoreError::NoJob(id.clone()))
}

/// The row number, current attempt and state of a job.
pub fn job_ref(connection: &Connection, id: &JobId) -> Result<(JobRef, JobState)> {
    query_one(connection, id, "seq, attempt, state", |row| {
        Ok((JobRef { seq: row.get(0)?, id: id.clone(), attempt: row.get(1)? }, parse_column(row, 2)?))
    })
}

/// A job by its row number.
pub fn job_ref_by_row(connection: &Connection, seq: i64) -> Result<(JobRef, JobState)> {
    let found = connection
        .prepare_cached("SELECT id, attempt, state FROM jobs WHERE seq = ?")?
        .query_row([seq], |row| {
            Ok((JobRef { seq, id: parse_column(row, 0)?, attempt: row.get(1)? }, parse_column(row, 2)?))
        })
        .optional()?;
    found.ok_or_else(|| inconsistent(format!("an attempt of job {seq}, which does not exist")))
}

/// Number of jobs in each state.
pub fn counts(connection: &Connection) -> Result<Vec<(JobState, u64)>> {
    let mut statement = connection.prepare_cached("SELECT state, COUNT(*) FROM jobs GROUP BY state")?;
    let rows = statement.query_map([], |row| Ok((parse_column(row, 0)?, row.get::<_, i64>(1)?.cast_unsigned())))?;
    let found: Vec<(JobState, u64)> = rows.collect::<rusqlite::Result<_>>()?;
    let count = |state| found.iter().find(|(s, _)| *s == state).map_or(0, |(_, n)| *n);
    Ok(JobState::ALL.into_iter().map(|state| (state, count(state))).collect())
}

/// Number of queued jobs for each kind of slot.
pub fn queued_by_slot(connection: &Connection) -> Result<Vec<(Slot, u64)>> {
    let mut statement =
        connection.prepare_cached("SELECT slot, COUNT(*) FROM jobs WHERE state = 'queued' GROUP BY slot")?;
    let rows = statement.query_map([], |row| Ok((parse_column(row, 0)?, row.get::<_, i64>(1)?.cast_unsigned())))?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

/// Moves a job to another state. A job that goes from running to queued keeps its position in the queue.
///
/// # Errors
/// [`StoreError::Inconsistent`] when the diagram of [`JobState`] has no such arrow, or the job is no longer in state
/// `from`.
pub fn transition(
    connection: &Connection,
    job_ref: &JobRef,
    from: JobState,
    to: JobState,
    reason: Option<&str>,
    now: Time,
    appended: &mut Vec<EventView>,
) -> Result<()> {
    if !from.can_transition_to(to) {
        return Err(inconsistent(format!("job {} cannot go from {from} to {to}", job_ref.id)));
    }
    let finished = to.is_final().then_some(now.0);
    let changed = connection
        .prepare_cached(
            "UPDATE jobs SET state = ?1, reason = ?2, updated_at = ?3, finished_at = ?4,
                 gpu = CASE WHEN ?1 IN ('running', 'cancelling') THEN gpu END,
                 not_before = CASE WHEN ?1 = 'retrying' THEN not_before END,
                 queued_at = CASE WHEN ?1 = 'queued' AND ?6 <> 'running' THEN ?3 ELSE queued_at END
             WHERE seq = ?5 AND state = ?6",
        )?
        .execute(params![to.name(), reason, now.0, finished, job_ref.seq, from.name()])?;
    if changed != 1 {
        return Err(inconsistent(format!("job {} is no longer {from}", job_ref.id)));
    }
    let data = json!({"from": from, "to": to, "reason": reason});
    appended.push(events::add(connection, job_ref, EventType::State, data, now)?);
    Ok(())
}

/// Takes the next job that fits one of the free slots, and sets it to running.
///
/// The order:
///
/// 1. the highest priority;
/// 2. the user with the fewest running jobs;
/// 3. the user with the least slot time in the last day;
/// 4. the oldest job.
///
/// A job whose slot is not free does not block jobs whose slot is.
pub fn take_next(
    connection: &Connection,
    free: &[Slot],
    now: Time,
    appended: &mut Vec<EventView>,
) -> Result<Option<Task>> {
    const DAY: i64 = 86_400_000;
    if free.is_empty() {
        return Ok(None);
    }
    let slots = vec!["?"; free.len()].join(", ");
    let names: Vec<String> = free.iter().map(Slot::to_string).collect();
    // jobs with the same output run one at a time: the next one finds what the first made
    let ready = format!(
        "state = 'queued' AND slot IN ({slots}) AND NOT EXISTS
            (SELECT 1 FROM jobs o WHERE o.state IN ('running', 'cancelling') AND o.output = jobs.output)"
    );
    let mut statement = connection.prepare_cached(&format!(
        "SELECT user FROM jobs WHERE {ready} AND priority = (SELECT MAX(priority) FROM jobs WHERE {ready})
         GROUP BY user ORDER BY MIN(queued_at), MIN(seq)"
    ))?;
    let twice = names.iter().chain(&names);
    let users = statement.query_map(params_from_iter(twice), |row| row.get::<_, String>(0))?;
    let users: Vec<String> = users.collect::<rusqlite::Result<_>>()?;
    let Some(user) = pick_user(connection, users, Time(now.0 - DAY), now)? else { return Ok(None) };
    let mut statement = connection.prepare_cached(&format!(
        "SELECT seq, id, attempt, slot, file, folder, overwrite, max_attempts, failures, time_limit, output_limit, updated_at, append
         FROM jobs WHERE {ready} AND user = ? ORDER BY priority DESC, queued_at, seq LIMIT 1"
    ))?;
    let values = names.iter().cloned().chain([user.clone()]);
    let mut task = statement.query_row(params_from_iter(values), |row| {
        Ok(Task {
            job_ref: JobRef { seq: row.get(0)?, id: parse_column(row, 1)?, attempt: row.get::<_, u32>(2)? },
            slot: parse_column(row, 3)?,
            file: row.get(4)?,
            folder: row.get(5)?,
            overwrite: row.get(6)?,
            max_attempts: row.get(7)?,
            failures: row.get(8)?,
            time_limit_seconds: row.get::<_, i64>(9)?.cast_unsigned(),
            output_limit_bytes: row.get::<_, i64>(10)?.cast_unsigned(),
            waited_ms: now.0 - row.get::<_, i64>(11)?,
            append: row.get(12)?,
            user,
        })
    })?;
    task.job_ref.attempt += 1;
    transition(connection, &task.job_ref, JobState::Queued, JobState::Running, None, now, appended)?;
    connection
        .prepare_cached(
            "UPDATE jobs SET attempt = ?, started_at = COALESCE(started_at, ?), failure = NULL, progress = NULL WHERE seq = ?",
        )?
        .execute(params![task.job_ref.attempt, now.0, task.job_ref.seq])?;
    attempts::begin(connection, task.job_ref.seq, task.job_ref.attempt, &task.user, now)?;
    Ok(Some(task))
}

fn pick_user(connection: &Connection, users: Vec<String>, since: Time, now: Time) -> Result<Option<String>> {
    if users.len() < 2 {
        return Ok(users.into_iter().next());
    }
    let mut statement = connection
        .prepare_cached("SELECT user, COUNT(*) FROM jobs WHERE state IN ('running', 'cancelling') GROUP BY user")?;
    let running = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let running: Vec<(String, i64)> = running.collect::<rusqlite::Result<_>>()?;
    let used = attempts::used_since(connection, since, now)?;
    let of = |list: &[(String, i64)], user: &str| list.iter().find(|(u, _)| u == user).map_or(0, |(_, n)| *n);
    // `users` is sorted by their oldest jobs, and `min_by_key` returns the first of equals
    Ok(users.into_iter().min_by_key(|user| (of(&running, user), of(&used, user))))
}

/// Queues the jobs whose backoff is over; returns the due time of the next one.
///
/// A due time further away than `longest` was stored before the clock was set back; it becomes `now` plus `longest`.
pub fn requeue_due(
    connection: &Connection,
    now: Time,
    longest: Duration,
    appended: &mut Vec<EventView>,
) -> Result<Option<Time>> {
    connection
        .prepare_cached("UPDATE jobs SET not_before = ?1 WHERE state = 'retrying' AND not_before > ?1")?
        .execute([now.after(longest).0])?;
    let mut statement =
        connection.prepare_cached("SELECT seq FROM jobs WHERE state = 'retrying' AND not_before <= ? ORDER BY seq")?;
    let due: Vec<i64> = statement.query_map([now.0], |row| row.get(0))?.collect::<rusqlite::Result<_>>()?;
    for seq in due {
        let (job_ref, state) = job_ref_by_row(connection, seq)?;
        transition(connection, &job_ref, state, JobState::Queued, Some("the wait is over"), now, appended)?;
    }
    let next = "SELECT MIN(not_before) FROM jobs WHERE state = 'retrying'";
    let next: Option<i64> = connection.prepare_cached(next)?.query_row([], |row| row.get(0))?;
    Ok(next.map(Time))
}

/// Fields that a worker's reports change; `None` leaves a field unchanged.
#[derive(Debug, Clone, Default)]
pub struct Report {
    pub gpu: Option<u32>,
    pub teacher: Option<String>,
    pub output: Option<String>,
    pub progress: Option<Value>,
    pub rates: Option<Value>,
    pub result: Option<ResultView>,
}

/// Stores a worker's report.
pub fn report(connection: &Connection, seq: i64, report: &Report, now: Time) -> Result<()> {
    let text = |value: &Option<Value>| value.as_ref().map(Value::to_string);
    let result = report.result.as_ref().map(serde_json::to_string).transpose().map_err(inconsistent)?;
    connection
        .prepare_cached(
            "UPDATE jobs SET updated_at = ?, gpu = COALESCE(?, gpu), teacher = COALESCE(?, teacher),
                 output = COALESCE(?, output), progress = COALESCE(?, progress), rates = COALESCE(?, rates),
                 result = COALESCE(?, result) WHERE seq = ?",
        )?
        .execute(params![
            now.0,
            report.gpu,
            report.teacher,
            report.output,
            text(&report.progress),
            text(&report.rates),
            result,
            seq
        ])?;
    Ok(())
}

/// Retries a failed or cancelled job at once, with its failures reset.
pub fn retry(connection: &Connection, id: &JobId, by: &str, now: Time, appended: &mut Vec<EventView>) -> Result<Job> {
    let (job_ref, state) = job_ref(connection, id)?;
    if !state.can_transition_to(JobState::Retrying) || state == JobState::Running {
        return Err(StoreError::WrongState { state, valid: "failed or cancelled" });
    }
    let reason = format!("retried by {by}");
    transition(connection, &job_ref, state, JobState::Retrying, Some(&reason), now, appended)?;
    connection
        .prepare_cached(
            "UPDATE jobs SET failures = 0, interruptions = 0, not_before = ?, failure = NULL WHERE seq = ?",
        )?
        .execute(params![now.0, job_ref.seq])?;
    get(connection, id)
}

/// The states that a cancel accepts.
pub const CANCELLABLE: &str = "queued, running or retrying";

/// The reason of a cancelled job.
pub fn cancelled_by(user: &str) -> String {
    format!("cancelled by {user}")
}

/// Cancels a waiting job, or sets a running one to `cancelling`; the caller then stops its worker.
pub fn cancel(connection: &Connection, id: &JobId, by: &str, now: Time, appended: &mut Vec<EventView>) -> Result<Job> {
    let (job_ref, state) = job_ref(connection, id)?;
    let reason = cancelled_by(by);
    match state {
        JobState::Queued | JobState::Retrying => {
            transition(connection, &job_ref, state, JobState::Cancelled, Some(&reason), now, appended)?;
        }
        JobState::Running => {
            transition(connection, &job_ref, state, JobState::Cancelling, Some(&reason), now, appended)?;
        }
        // a repeated cancel changes nothing
        JobState::Cancelling => {}
        state => return Err(StoreError::WrongState { state, valid: CANCELLABLE }),
    }
    get(connection, id)
}

/// Deletes a finished job.
pub fn delete(connection: &Connection, id: &JobId) -> Result<()> {
    let (job_ref, state) = job_ref(connection, id)?;
    if !state.is_final() {
        return Err(StoreError::WrongState { state, valid: "succeeded, failed or cancelled (cancel it first)" });
    }
    connection.prepare_cached("DELETE FROM jobs WHERE seq = ?")?.execute([job_ref.seq])?;
    Ok(())
}

/// Up to 100 jobs that finished before a time.
pub fn finished_before(connection: &Connection, time: Time) -> Result<Vec<JobId>> {
    let sql = "SELECT id FROM jobs WHERE finished_at < ? LIMIT 100";
    let mut statement = connection.prepare_cached(sql)?;
    let rows = statement.query_map([time.0], |row| parse_column(row, 0))?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}

/// Number of stored events of a job.
pub fn event_count(connection: &Connection, seq: i64) -> Result<u32> {
    Ok(connection
        .prepare_cached("SELECT event_count FROM jobs WHERE seq = ?")?
        .query_row([seq], |row| row.get(0))
        .optional()?
        .unwrap_or_default())
}

/// The job file, and the base folder of its relative paths.
pub fn file_and_folder(connection: &Connection, id: &JobId) -> Result<(String, String)> {
    query_one(connection, id, "file, folder", |row| Ok((row.get(0)?, row.get(1)?)))
}
