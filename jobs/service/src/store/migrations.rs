//! The schema, one migration per version. Never edit a released migration: add another one.

use rusqlite::{Connection, TransactionBehavior};

use super::{Result, StoreError};

const MIGRATIONS: [&str; 2] = [include_str!("001_first.sql"), include_str!("002_append.sql")];

/// Migrates the file to the newest version, each step in its own transaction.
///
/// # Errors
/// When a newer program wrote the file.
pub fn run(connection: &mut Connection) -> Result<()> {
    // read again in each transaction: two programs may open a new folder at the same time
    let found = |c: &Connection| c.query_row("PRAGMA user_version", [], |row| row.get::<_, u32>(0));
    let newest = MIGRATIONS.len() as u32;
    let before = found(connection)?;
    if before > newest {
        return Err(StoreError::Version(format!(
            "the service's database has version {before}, but this program reads versions up to {newest}; start a newer program, or choose another data folder"
        )));
    }
    for (version, step) in (1_u32..).zip(MIGRATIONS).skip(before as usize) {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        if found(&transaction)? >= version {
            continue;
        }
        transaction.execute_batch(step)?;
        transaction.pragma_update(None, "user_version", version)?;
        transaction.commit()?;
    }
    Ok(())
}
