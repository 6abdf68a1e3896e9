//! `stillhouse token`: creates, lists and revokes the service's tokens on its machine.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::failure::Failure;
use crate::page::{Line, Page};
use crate::printer::Printer;
use crate::table::Table;
use crate::verbs::serve::configuration;
use stillhouse_service::make_data_folder;
use stillhouse_service::model::Time;
use stillhouse_service::store::tokens::{self, Scope};
use stillhouse_service::store::{Store, StoreError};

const EXAMPLES: &str = "\
Examples:
  stillhouse token create --user ada                          may look and submit
  stillhouse token create --user grafana --scope read --days 365
  stillhouse token list
  stillhouse token revoke 3f9a1c02be";

/// Create, list and revoke the bearer tokens of a service
///
/// Works on the data folder of the service, which may be running. A token is shown once; only its hash is stored.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
    /// Configuration file of the service
    #[arg(long, value_name = "FILE", env = "STILLHOUSE_CONFIG", global = true)]
    config: Option<PathBuf>,
    /// Data folder of the service [default: the configuration's, or ~/.local/state/stillhouse]
    #[arg(long, value_name = "FOLDER", global = true)]
    data: Option<PathBuf>,
    /// Write JSON to stdout
    #[arg(long, global = true)]
    pub json: bool,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// Create a token and show it, once
    Create {
        /// User whose jobs the token submits: letters, digits, `.`, `_`, `-`, `@`
        #[arg(long, value_name = "NAME", value_parser = user)]
        user: String,
        /// Scopes of the token [default: read and submit]
        #[arg(long, value_name = "SCOPE")]
        scope: Vec<Scope>,
        /// Days until the token expires [default: never]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=36500))]
        days: Option<u32>,
    },
    /// List the tokens, without their secrets
    List,
    /// Revoke a token: it is refused from the next request on
    Revoke {
        /// Id of the token: the part between the underscores
        #[arg(value_name = "ID")]
        id: String,
    },
}

fn user(text: &str) -> Result<String, String> {
    let valid =
        (1..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-@".contains(&b));
    if valid { Ok(text.to_owned()) } else { Err("valid: 1 to 64 letters, digits, `.`, `_`, `-`, `@`".into()) }
}

/// Runs the command.
pub fn call(args: &Args, printer: &Arc<Printer>) -> Result<(), Failure> {
    let config = configuration(args.config.as_deref(), args.data.as_deref(), None, &[], &[])?;
    make_data_folder(&config.data).map_err(Failure::System)?;
    let failed = |e: StoreError| Failure::System(format!("{}: {e}", config.data.display()));
    let store = Store::open(&config.data).map_err(failed)?;
    let now = Time::now();
    match &args.verb {
        Verb::Create { user, scope, days } => {
            let mut scopes = if scope.is_empty() { vec![Scope::Read, Scope::Submit] } else { scope.clone() };
            scopes.sort_unstable();
            scopes.dedup();
            let over = days.map(|days| now.after(Duration::from_secs(u64::from(days) * 86_400)));
            let token = store.write_blocking(|t, _| tokens::create(t, user, &scopes, over, now)).map_err(failed)?;
            if args.json {
                let value = serde_json::json!({"id": token.id, "token": token.to_string(), "user": user, "scopes": scopes, "expires_at": over});
                printer.json(&value)?;
            } else {
                printer.text(&format!("{token}\n"))?;
                let mut page = Page::new();
                page.line(Line::plain("shown once; give it as STILLHOUSE_TOKEN, or to the page when it asks"));
                printer.note(&page);
            }
        }
        Verb::List => {
            let all = store.read_blocking(tokens::list).map_err(failed)?;
            if args.json {
                printer.json(&all)?;
                return Ok(());
            }
            let mut table = Table::new("lllll").header(&["id", "user", "scopes", "created", "state"]).indent(0);
            for token in all {
                let scopes: Vec<&str> = token.scopes.iter().map(|s| s.name()).collect();
                let state = match (token.revoked_at, token.expires_at) {
                    (Some(at), _) => format!("revoked {at}"),
                    (_, Some(at)) if at <= now => format!("over since {at}"),
                    (_, Some(at)) => format!("until {at}"),
                    _ => "valid".into(),
                };
                table.texts([token.id, token.user, scopes.join(", "), token.created_at.to_string(), state]);
            }
            let mut page = Page::new();
            page.table(table, printer.view());
            printer.page(&page)?;
        }
        Verb::Revoke { id } => {
            if !store.write_blocking(|t, _| tokens::revoke(t, id, now)).map_err(failed)? {
                return Err(Failure::Usage(format!("there is no token {id:?}; `stillhouse token list` lists them")));
            }
            if args.json {
                printer.json(&serde_json::json!({"id": id, "revoked_at": now}))?;
            } else {
                let mut page = Page::new();
                page.line(Line::plain(format!("{id} is revoked: requests with this token are refused from now on")));
                printer.note(&page);
            }
        }
    }
    Ok(())
}
