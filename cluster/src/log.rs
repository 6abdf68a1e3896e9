//! What Ballista logs, in this program's log: its warnings and errors, with the parts of the program that they come from.

use ::log::{LevelFilter, Log, Metadata, Record};

struct Bridge;

impl Log for Bridge {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.level() <= ::log::max_level()
    }

    fn log(&self, record: &Record) {
        match record.level() {
            ::log::Level::Error => tracing::error!(from = record.target(), "{}", record.args()),
            ::log::Level::Warn => tracing::warn!(from = record.target(), "{}", record.args()),
            _ => tracing::debug!(from = record.target(), "{}", record.args()),
        }
    }

    fn flush(&self) {}
}

/// Takes what is logged from now on; everything where `STILLHOUSE_LOG` asks for it, else warnings.
pub fn take() {
    let level = if std::env::var_os("STILLHOUSE_LOG").is_some() { LevelFilter::Debug } else { LevelFilter::Warn };
    if ::log::set_logger(&Bridge).is_ok() {
        ::log::set_max_level(level);
    }
}
