//! Bearer tokens: `sh_<id>_<secret>`. The store keeps only the SHA-256 of the secret.
//!
//! The secret is 256 random bits, so a plain hash is enough: no dictionary attack can work.

use std::fmt;
use std::str::FromStr;

use rusqlite::{Connection, OptionalExtension, params};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use utoipa::ToSchema;

use super::{Result, inconsistent};
use crate::model::Time;

/// What a token allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Look at all jobs.
    Read,
    /// Submit jobs, and follow, cancel, retry and delete one's own.
    Submit,
    /// All of that, and cancel, retry and delete everybody's.
    Admin,
}

impl Scope {
    /// The name in tokens and in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Submit => "submit",
            Self::Admin => "admin",
        }
    }
}

impl FromStr for Scope {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        [Self::Read, Self::Submit, Self::Admin].into_iter().find(|s| s.name() == text).ok_or(())
    }
}

/// The user and scopes of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// The user who owns the jobs submitted with the token.
    pub user: String,
    /// What the token allows.
    pub scopes: Vec<Scope>,
    /// Id of the token; `None` on loopback, where none is needed.
    pub token: Option<String>,
}

/// A token as `list` returns it.
#[derive(Debug, Clone, Serialize)]
pub struct TokenView {
    /// The id, by which the token is revoked.
    pub id: String,
    /// The user who owns the jobs submitted with the token.
    pub user: String,
    /// What the token allows.
    pub scopes: Vec<Scope>,
    /// Time of creation.
    pub created_at: Time,
    /// Time of expiry; `None` for never.
    pub expires_at: Option<Time>,
    /// Time of revocation; `None` if not revoked.
    pub revoked_at: Option<Time>,
}

/// A new token with its secret, which is shown only once.
pub struct NewToken {
    /// The id, by which the token is revoked.
    pub id: String,
    secret: String,
}

impl fmt::Display for NewToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sh_{}_{}", self.id, self.secret)
    }
}

const ID_BYTES: usize = 5;
const SECRET_BYTES: usize = 32;

fn random_hex<const N: usize>() -> Result<String> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

/// Creates a token.
pub fn create(
    connection: &Connection,
    user: &str,
    scopes: &[Scope],
    expires_at: Option<Time>,
    now: Time,
) -> Result<NewToken> {
    let token = NewToken { id: random_hex::<ID_BYTES>()?, secret: random_hex::<SECRET_BYTES>()? };
    let names: Vec<&str> = scopes.iter().map(|s| s.name()).collect();
    connection.execute(
        "INSERT INTO tokens (id, user, scopes, hash, created_at, expires_at) VALUES (?, ?, ?, ?, ?, ?)",
        params![token.id, user, names.join(","), hash(&token.secret), now.0, expires_at.map(|t| t.0)],
    )?;
    Ok(token)
}

/// The holder of a token; `None` if the text is not a valid token, or the token has expired or was revoked.
pub fn holder(connection: &Connection, text: &str, now: Time) -> Result<Option<Holder>> {
    let Some((id, secret)) = text.strip_prefix("sh_").and_then(|rest| rest.split_once('_')) else { return Ok(None) };
    let mut statement = connection.prepare_cached(
        "SELECT user, scopes, hash FROM tokens
         WHERE id = ? AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > ?)",
    )?;
    let found: Option<(String, String, Vec<u8>)> =
        statement.query_row(params![id, now.0], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?))).optional()?;
    let Some((user, scopes, stored_hash)) = found else { return Ok(None) };
    let is_valid: bool = stored_hash.as_slice().ct_eq(&hash(secret)).into();
    Ok(if is_valid { Some(Holder { user, scopes: parse_scopes(&scopes)?, token: Some(id.to_owned()) }) } else { None })
}

/// Whether the token with this id exists and is neither revoked nor expired.
pub fn is_good(connection: &Connection, id: &str, now: Time) -> Result<bool> {
    let sql = "SELECT EXISTS (SELECT 1 FROM tokens WHERE id = ? AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > ?))";
    Ok(connection.prepare_cached(sql)?.query_row(params![id, now.0], |row| row.get(0))?)
}

/// All tokens, without secrets.
pub fn list(connection: &Connection) -> Result<Vec<TokenView>> {
    let mut statement = connection
        .prepare("SELECT id, user, scopes, created_at, expires_at, revoked_at FROM tokens ORDER BY created_at, id")?;
    let rows = statement.query_map([], |row| {
        let scopes: String = row.get(2)?;
        let time = |at: Option<i64>| at.map(Time);
        Ok((row.get(0)?, row.get(1)?, scopes, Time(row.get(3)?), time(row.get(4)?), time(row.get(5)?)))
    })?;
    rows.map(|row| {
        let (id, user, scopes, created_at, expires_at, revoked_at) = row?;
        Ok(TokenView { id, user, scopes: parse_scopes(&scopes)?, created_at, expires_at, revoked_at })
    })
    .collect()
}

/// Revokes a token; `false` if there is none with this id.
pub fn revoke(connection: &Connection, id: &str, now: Time) -> Result<bool> {
    let n = connection
        .execute("UPDATE tokens SET revoked_at = COALESCE(revoked_at, ?) WHERE id = ?", params![now.0, id])?;
    Ok(n > 0)
}

fn parse_scopes(text: &str) -> Result<Vec<Scope>> {
    text.split(',').map(|s| s.parse().map_err(|()| inconsistent(format!("scope {s:?}")))).collect()
}

fn hash(secret: &str) -> [u8; 32] {
    Sha256::digest(secret.as_bytes()).into()
}
