//! Checks of a mixture: tables without a query, and the amounts of each.

use std::collections::BTreeSet;

use crate::problems::Problem;
use crate::spec::{Input, JobSpec, SOURCE_COLUMN, Table};

/// Runs the checks.
pub(super) fn check(job: &JobSpec, problems: &mut Vec<Problem>) {
    let input = &job.input;
    if !input.is_mixture() {
        without_mixture(input, problems);
        return;
    }
    if !input.paths.is_empty() {
        let message =
            "is a table of its own beside `tables` only in a query (`sql`); valid: one more entry of `tables`";
        problems.push(Problem::missing("input.paths", message));
    } else if let Some(format) = input.format {
        let message = "applies to `paths`; valid: the format of each table";
        problems.push(Problem::new("input.format", format.name(), message));
    }
    for field in ["input.messages", "input.tools"] {
        let given = if field == "input.tools" { &input.tools } else { &input.messages };
        if given.is_some() {
            let message = "a mixture has text, no conversations, in this version; remove it or `tables`";
            problems.push(Problem::missing(field, message));
        }
    }
    // first, the program put it there for the processes that work for a run
    if let Some(i) = input.carry.iter().rposition(|name| name == SOURCE_COLUMN).filter(|i| *i > 0) {
        let message = "is the name of the table in a mixture, which is always carried; remove it";
        problems.push(Problem::new(format!("input.carry[{i}]"), format!("{SOURCE_COLUMN:?}"), message));
    }
    amounts(input, problems);
}

/// The amounts that a table has: (key, whether it is given).
fn amounts_of(table: &Table) -> [(&'static str, bool); 3] {
    [("weight", table.weight.is_some()), ("tokens", table.tokens.is_some()), ("epochs", table.epochs.is_some())]
}

fn without_mixture(input: &Input, problems: &mut Vec<Problem>) {
    if input.mixture.is_some() {
        let message = match input.sql {
            Some(_) => "a query chooses its rows itself; remove `mixture` or `sql`",
            None => "mixes tables; set input.tables, too",
        };
        problems.push(Problem::missing("input.mixture", message));
    }
    for (name, table) in &input.tables {
        for (key, _) in amounts_of(table).into_iter().filter(|(_, given)| *given) {
            let message = "applies to mixtures, and a query chooses its rows itself; remove it or `sql`";
            problems.push(Problem::missing(format!("input.tables.{name}.{key}"), message));
        }
    }
}

fn amounts(input: &Input, problems: &mut Vec<Problem>) {
    let stages = input.mixture.as_ref().map_or(&[][..], |mixture| &mixture.stages);
    let is_weighted = input.tables.values().any(|table| table.weight.is_some());
    for (name, table) in &input.tables {
        let given: Vec<_> = amounts_of(table).into_iter().filter(|(_, given)| *given).map(|(key, _)| key).collect();
        let field = |key: &str| format!("input.tables.{name}.{key}");
        match given.as_slice() {
            [key, ..] if !stages.is_empty() => {
                problems.push(Problem::missing(field(key), "the stages of the mixture have the weights; remove it"));
            }
            [_, second, ..] => {
                let message = "a table has one of weight, tokens and epochs; remove the others";
                problems.push(Problem::missing(field(second), message));
            }
            ["weight"] => {}
            [] if is_weighted => {
                problems.push(Problem::missing(field("weight"), "is required where other tables have a weight"));
            }
            [key] if is_weighted => {
                problems.push(Problem::missing(field(key), "other tables have a weight; valid: a weight"));
            }
            _ => {}
        }
    }
    if let Some(tokens) = input.mixture.as_ref().and_then(|mixture| mixture.tokens)
        && !is_weighted
        && stages.is_empty()
    {
        let message = "applies to weights; valid: a weight for each table, or stages";
        problems.push(Problem::new("input.mixture.tokens", tokens, message));
    }
    let mut named = BTreeSet::new();
    for (i, stage) in stages.iter().enumerate() {
        for (name, weight) in &stage.weights {
            let field = format!("input.mixture.stages[{i}].weights.{name}");
            named.insert(name);
            if !input.tables.contains_key(name) {
                let valid: Vec<_> = input.tables.keys().map(String::as_str).collect();
                let message = format!("is not a table; valid: {}", valid.join(", "));
                problems.push(Problem::new(field, format!("{name:?}"), message));
            } else if !(1e-9..=1e9).contains(weight) {
                problems.push(Problem::new(field, weight, "valid: 0.000000001 to 1000000000"));
            }
        }
    }
    if !stages.is_empty()
        && let Some(unused) = input.tables.keys().find(|name| !named.contains(name))
    {
        let message = "is in no stage of the mixture; remove it or give it a weight in one";
        problems.push(Problem::missing(format!("input.tables.{unused}"), message));
    }
}
