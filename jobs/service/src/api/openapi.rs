//! The OpenAPI document: made from the handlers, with the job file's schema inserted.

use std::sync::OnceLock;

use serde_json::{Map, Value, json};
use stillhouse_operators::registry::job_format;

const DESCRIPTION: &str = "Batch jobs that turn raw corpora into training shards for parallel (discrete-diffusion) language models.\n\n\
    Errors are problem details (RFC 9457). Where the service needs tokens, every path but health, readiness, version and the documents \
    answers 401 without one.";

/// The OpenAPI document.
pub fn document() -> Value {
    static DOCUMENT: OnceLock<Value> = OnceLock::new();
    DOCUMENT.get_or_init(make).clone()
}

fn make() -> Value {
    let (_, api) = super::documented().split_for_parts();
    let mut document = serde_json::to_value(api).unwrap_or_default();
    document["info"] = json!({
        "title": "Stillhouse", "version": env!("CARGO_PKG_VERSION"), "description": DESCRIPTION,
        "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
    });
    document["servers"] = json!([{"url": super::BASE}]);
    document["security"] = json!([{"token": []}]);
    document["components"]["securitySchemes"] = json!({"token": {"type": "http", "scheme": "bearer"}});
    job_file(&mut document);
    common_answers(&mut document);
    plain_headers(&mut document);
    document
}

/// Removes `null` from the types of headers: a header is absent or has text, but the schema of an `Option` allows null.
fn plain_headers(document: &mut Value) {
    let operations = document["paths"].as_object_mut().into_iter().flatten();
    for (_, operation) in operations.flat_map(|(_, methods)| methods.as_object_mut().into_iter().flatten()) {
        for parameter in operation.get_mut("parameters").and_then(Value::as_array_mut).into_iter().flatten() {
            if parameter["in"] == "header"
                && let Some(kinds) = parameter["schema"]["type"].as_array()
                && let Some(kind) = kinds.iter().find(|kind| *kind != "null").cloned()
            {
                parameter["schema"]["type"] = kind;
            }
        }
    }
}

/// Replaces the placeholder `JobFile` by the job file's schema, and adds the schema's definitions.
fn job_file(document: &mut Value) {
    let mut schema = job_format().json_schema();
    let definitions = schema.as_object_mut().and_then(|s| s.remove("$defs"));
    if let Some(s) = schema.as_object_mut() {
        s.remove("$schema");
    }
    let Some(components) = document["components"]["schemas"].as_object_mut() else { return };
    let own: Map<String, Value> = definitions.and_then(|d| d.as_object().cloned()).unwrap_or_default();
    for (name, mut definition) in own {
        point_to_components(&mut definition);
        components.insert(format!("JobFile.{name}"), definition);
    }
    point_to_components(&mut schema);
    components.insert("JobFile".into(), schema);
}

fn point_to_components(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            if let Some(Value::String(reference)) = fields.get_mut("$ref")
                && let Some(name) = reference.strip_prefix("#/$defs/")
            {
                *reference = format!("#/components/schemas/JobFile.{name}");
            }
            fields.values_mut().for_each(point_to_components);
        }
        Value::Array(items) => items.iter_mut().for_each(point_to_components),
        _ => {}
    }
}

/// Adds the answers that every path may give besides its own.
fn common_answers(document: &mut Value) {
    let problem = |description: &str| json!({"description": description, "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}});
    let Some(paths) = document["paths"].as_object_mut() else { return };
    for (path, methods) in paths {
        for (method, operation) in methods.as_object_mut().into_iter().flatten() {
            let public = operation["security"].as_array().is_some_and(|s| s.contains(&json!({})));
            let Some(answers) = operation["responses"].as_object_mut() else { continue };
            let mut add = |status: &str, description: &str| {
                answers.entry(status).or_insert_with(|| problem(description));
            };
            add("400", "The request is not valid");
            add("403", "The request comes from another web site, or the token lacks the scope");
            add("421", "The Host header names another server");
            add("429", "Too many requests in a minute");
            answers
                .entry("431")
                .or_insert_with(|| json!({"description": "The head of the request is larger than 64 kB"}));
            let mut add = |status: &str, description: &str| {
                answers.entry(status).or_insert_with(|| problem(description));
            };
            add("500", "The service failed; its log has the reason");
            if method != "get" && path != "/validate" {
                add("507", "The disk of the data folder is full; nothing was changed");
            }
            if !public {
                add("401", "The request has no valid token");
            }
            if path.contains("{id}") {
                add("404", "There is no such job");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// To update the file: `cargo run -p stillhouse -- schema --openapi > jobs/openapi.json`.
    #[test]
    fn the_document_in_the_repository_is_that_of_the_code() {
        let kept: Value = serde_json::from_str(include_str!("../../../openapi.json")).unwrap();
        assert!(
            kept == document(),
            "jobs/openapi.json is out of date: cargo run -p stillhouse -- schema --openapi > jobs/openapi.json"
        );
    }

    /// The page's code is that of `getJobFile`, so it is compiled and its tests are those of the endpoint.
    #[test]
    fn contributing_quotes_an_endpoint_as_it_is() {
        let code = include_str!("jobs.rs");
        let begin = code.find("/// Get the job file as it was submitted").unwrap();
        let function = &code[begin..][..code[begin..].find("\n\n").unwrap()];
        let (page, routes) = (include_str!("../../../../CONTRIBUTING.md"), include_str!("mod.rs"));
        assert!(page.contains(function), "CONTRIBUTING.md does not quote {function}");
        let line = ".routes(routes!(jobs::file))";
        assert!(page.contains(line) && routes.contains(line));
    }

    #[test]
    fn operations_have_names_that_make_good_clients() {
        const VERBS: [&str; 8] = ["list", "get", "submit", "validate", "cancel", "retry", "delete", "watch"];
        let document = document();
        let mut names = std::collections::BTreeSet::new();
        for methods in document["paths"].as_object().unwrap().values() {
            for operation in methods.as_object().unwrap().values() {
                let name = operation["operationId"].as_str().unwrap();
                let noun = VERBS.iter().find_map(|verb| name.strip_prefix(verb)).unwrap_or_else(|| panic!("{name}"));
                assert!(noun.starts_with(|c: char| c.is_ascii_uppercase()), "{name}");
                assert!(noun.bytes().all(|b| b.is_ascii_alphanumeric()), "{name}");
                assert!(names.insert(name.to_owned()), "{name} is there twice");
                assert!(operation["summary"].is_string() && operation["tags"].is_array(), "{name}");
            }
        }
        for name in ["listJobs", "submitJob", "getJob", "cancelJob", "retryJob", "deleteJob", "getMetrics"] {
            assert!(names.contains(name), "{name}");
        }
    }

    #[test]
    fn every_reference_leads_somewhere() {
        fn references(value: &Value, found: &mut Vec<String>) {
            match value {
                Value::Object(fields) => {
                    found.extend(fields.get("$ref").and_then(Value::as_str).map(str::to_owned));
                    fields.values().for_each(|v| references(v, found));
                }
                Value::Array(items) => items.iter().for_each(|v| references(v, found)),
                _ => {}
            }
        }
        let document = document();
        let mut found = Vec::new();
        references(&document, &mut found);
        assert!(found.len() > 30);
        for reference in found {
            assert!(document.pointer(reference.trim_start_matches('#')).is_some(), "{reference}");
        }
        assert_eq!(document["openapi"], "3.1.0");
    }
}
