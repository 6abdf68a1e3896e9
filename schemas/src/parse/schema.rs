//! The JSON Schema of the job file, made from the types, and what it says of a place in it.

use std::sync::OnceLock;

use schemars::SchemaGenerator;
use serde_json::{Map, Value, json};

use crate::spec::JobSpec;

impl JobSpec {
    /// The JSON Schema of the job file (draft 2020-12), as editors take it: where a list of text is meant, one text is taken too.
    pub fn json_schema() -> Value {
        static SCHEMA: OnceLock<Value> = OnceLock::new();
        SCHEMA
            .get_or_init(|| {
                let mut schema = strict().clone();
                one_or_more(&mut schema);
                schema
            })
            .clone()
    }
}

/// The schema that values are held against, once lists of one are lists: it gives one message for one mistake.
pub(super) fn strict() -> &'static Value {
    static SCHEMA: OnceLock<Value> = OnceLock::new();
    SCHEMA.get_or_init(|| {
        let mut schema = Value::from(SchemaGenerator::default().into_root_schema_for::<JobSpec>());
        simplify(&mut schema);
        schema
    })
}

/// The schema of a property, or of any that has no name of its own.
fn property<'a>(schema: &'a Value, key: &str) -> Option<&'a Value> {
    let named = schema.get("properties").and_then(|p| p.get(key));
    named.or_else(|| schema.get("additionalProperties").filter(|p| p.is_object())).map(resolved)
}

fn resolved(schema: &Value) -> &Value {
    let reference = schema.get("$ref").and_then(Value::as_str);
    reference.and_then(|r| strict().pointer(r.trim_start_matches('#'))).unwrap_or(schema)
}

/// The keys that are valid at a field.
pub(super) fn keys(field: &str) -> Vec<&'static str> {
    let mut schema = strict();
    for part in field.split('.').filter(|part| !part.is_empty()) {
        match property(schema, part) {
            Some(inner) => schema = inner,
            None => return Vec::new(),
        }
    }
    let properties = schema.get("properties").and_then(Value::as_object);
    properties.map(|map| map.keys().map(String::as_str).collect()).unwrap_or_default()
}

/// The fields of the whole schema that end with this key, such as `pack.length` and `subtokens.length`.
pub(super) fn fields_named(key: &str) -> Vec<String> {
    fn below(schema: &Value, path: &str, key: &str, found: &mut Vec<String>) {
        let Some(Value::Object(properties)) = schema.get("properties") else { return };
        for (name, property) in properties {
            let field = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            below(resolved(property), &field, key, found);
            if name == key {
                found.push(field);
            }
        }
    }
    let mut found = Vec::new();
    below(strict(), "", key, &mut found);
    found
}

/// One text where a list of text is meant becomes a list of one.
pub(super) fn listed(value: &mut Value) {
    fn below(value: &mut Value, schema: &Value) {
        match value {
            Value::String(text) if is_list_of_text(schema) => *value = json!([text]),
            Value::Object(map) => {
                for (key, value) in map {
                    if let Some(schema) = property(schema, key) {
                        below(value, schema);
                    }
                }
            }
            _ => {}
        }
    }
    below(value, strict());
}

fn is_list_of_text(schema: &Value) -> bool {
    schema.get("type") == Some(&json!("array")) && schema.pointer("/items/type") == Some(&json!("string"))
}

fn one_or_more(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            map.values_mut().for_each(one_or_more);
            if is_list_of_text(&Value::Object(map.clone())) {
                let list: Map<String, Value> = ["type", "items", "minItems"]
                    .into_iter()
                    .filter_map(|key| Some((key.to_owned(), map.remove(key)?)))
                    .collect();
                map.insert("anyOf".into(), json!([{"type": "string"}, list]));
            }
        }
        Value::Array(items) => items.iter_mut().for_each(one_or_more),
        _ => {}
    }
}

/// Rewrites what schemars makes of `Option` and of documented enums into the plain form: `$ref`, `enum`.
///
/// The plain form gives messages that name the valid values instead of "not valid under any of the schemas".
fn simplify(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            if let Some(Value::Array(options)) = map.get_mut("anyOf") {
                options.retain(|o| o.get("type") != Some(&json!("null")));
                if let [Value::Object(only)] = options.as_slice() {
                    let only = only.clone();
                    map.remove("anyOf");
                    map.extend(only);
                }
            }
            if let Some(Value::Array(types)) = map.get_mut("type") {
                types.retain(|t| t != "null");
                if let [only] = types.as_slice() {
                    let only = only.clone();
                    map.insert("type".into(), only);
                }
            }
            flatten_enum(map);
            map.values_mut().for_each(simplify);
        }
        Value::Array(items) => items.iter_mut().for_each(simplify),
        _ => {}
    }
}

fn flatten_enum(map: &mut Map<String, Value>) {
    let Some(Value::Array(options)) = map.get("oneOf") else { return };
    let mut values = Vec::new();
    let mut lines = Vec::new();
    for option in options {
        let given: Vec<&Value> = match (option.get("const"), option.get("enum")) {
            (Some(v), _) => vec![v],
            (None, Some(Value::Array(vs))) => vs.iter().collect(),
            _ => return,
        };
        for value in given {
            if let (Some(name), Some(text)) = (value.as_str(), option.get("description")) {
                lines.push(format!("{name}: {}", text.as_str().unwrap_or_default()));
            }
            values.push(value.clone());
        }
    }
    let head = map.get("description").and_then(Value::as_str).unwrap_or_default().to_owned();
    map.remove("oneOf");
    map.insert("type".into(), json!("string"));
    map.insert("enum".into(), Value::Array(values));
    map.insert("description".into(), json!(format!("{head}\n\n{}", lines.join("\n")).trim()));
}
