//! The JSON Schema of the job file, generated from the types, and queries on it.

use schemars::SchemaGenerator;
use serde_json::{Map, Value, json};

use super::JobFormat;
use crate::sections::SectionKind;
use crate::spec::JobSpec;

/// Generates the schema of the built-in keys and of these sections, in the plain form.
pub(super) fn plain_schema(sections: &[SectionKind]) -> Value {
    let mut generator = SchemaGenerator::default();
    let mut section = |kind: &SectionKind| {
        let mut schema = Value::from((kind.schema)(&mut generator));
        if let (Some(schema), Some(default)) = (schema.as_object_mut(), (kind.when_absent)()) {
            schema.insert("default".into(), default);
        }
        (kind.key.to_owned(), schema)
    };
    let sections: Vec<(String, Value)> = sections.iter().map(&mut section).collect();
    let mut schema = Value::from(generator.into_root_schema_for::<JobSpec>());
    if let Some(Value::Object(properties)) = schema.get_mut("properties") {
        properties.extend(sections);
    }
    simplify(&mut schema);
    schema
}

/// The keyword of a key that changes no byte of the shards. A key declares it: `#[schemars(extend("x-identity" = false))]`.
const IDENTITY: &str = "x-identity";

/// Removes the keyword [`IDENTITY`], which is no part of the published schema.
pub(super) fn remove_identity_keyword(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            map.remove(IDENTITY);
            map.values_mut().for_each(remove_identity_keyword);
        }
        Value::Array(items) => items.iter_mut().for_each(remove_identity_keyword),
        _ => {}
    }
}

impl JobFormat {
    /// Removes the keys that a schema declares to change no byte of the shards.
    pub(super) fn retain_identity_below(&self, value: &mut Value, schema: &Value) {
        let Value::Object(map) = value else { return };
        let declared = |key: &str| schema.get("properties").and_then(|properties| properties.get(key)?.get(IDENTITY));
        map.retain(|key, _| declared(key) != Some(&json!(false)));
        for (key, value) in map {
            if let Some(schema) = self.property(schema, key) {
                self.retain_identity_below(value, schema);
            }
        }
    }

    /// The schema of a property; if it has none of its own, that of additional properties.
    fn property<'a>(&'a self, schema: &'a Value, key: &str) -> Option<&'a Value> {
        let named = schema.get("properties").and_then(|p| p.get(key));
        named
            .or_else(|| schema.get("additionalProperties").filter(|p| p.is_object()))
            .map(|schema| self.resolved(schema))
    }

    fn resolved<'a>(&'a self, schema: &'a Value) -> &'a Value {
        let reference = schema.get("$ref").and_then(Value::as_str);
        reference.and_then(|r| self.schema.pointer(r.trim_start_matches('#'))).unwrap_or(schema)
    }

    /// The keys that are valid at a field.
    pub(super) fn keys(&self, field: &str) -> Vec<&str> {
        let mut schema = &self.schema;
        for part in field.split('.').filter(|part| !part.is_empty()) {
            // an item of a list: `rules[0]`
            let (key, is_item) = part.split_once('[').map_or((part, false), |(key, _)| (key, true));
            let inner = self.property(schema, key);
            let item = || inner.and_then(|list| list.get("items")).map(|item| self.resolved(item));
            match if is_item { item() } else { inner } {
                Some(inner) => schema = inner,
                None => return Vec::new(),
            }
        }
        let properties = schema.get("properties").and_then(Value::as_object);
        properties.map(|map| map.keys().map(String::as_str).collect()).unwrap_or_default()
    }

    /// The fields of the whole schema whose last part is this key, such as `pack.length` and `subtokens.length`.
    pub(super) fn fields_named(&self, key: &str) -> Vec<String> {
        let mut found = Vec::new();
        self.fields_below(&self.schema, "", key, &mut found);
        found
    }

    fn fields_below(&self, schema: &Value, path: &str, key: &str, found: &mut Vec<String>) {
        let Some(Value::Object(properties)) = schema.get("properties") else { return };
        for (name, property) in properties {
            let field = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            self.fields_below(self.resolved(property), &field, key, found);
            if name == key {
                found.push(field);
            }
        }
    }

    /// Wraps a single value in a list where the schema requires a list.
    pub(super) fn wrap_single_values(&self, value: &mut Value) {
        self.wrap_single_values_below(value, &self.schema);
    }

    fn wrap_single_values_below(&self, value: &mut Value, schema: &Value) {
        match value {
            Value::String(text) if is_list_of(schema, "string") => *value = json!([text]),
            Value::Number(number) if is_list_of(schema, "integer") => *value = json!([number]),
            Value::Object(map) => {
                for (key, value) in map {
                    if let Some(schema) = self.property(schema, key) {
                        self.wrap_single_values_below(value, schema);
                    }
                }
            }
            _ => {}
        }
    }
}

fn is_list_of(schema: &Value, item: &str) -> bool {
    schema.get("type") == Some(&json!("array")) && schema.pointer("/items/type") == Some(&json!(item))
}

pub(super) fn allow_single_values(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            map.values_mut().for_each(allow_single_values);
            let this = Value::Object(map.clone());
            if is_list_of(&this, "string") || is_list_of(&this, "integer") {
                let list: Map<String, Value> = ["type", "items", "minItems", "maxItems"]
                    .into_iter()
                    .filter_map(|key| Some((key.to_owned(), map.remove(key)?)))
                    .collect();
                map.insert("anyOf".into(), json!([list.get("items"), list]));
            }
        }
        Value::Array(items) => items.iter_mut().for_each(allow_single_values),
        _ => {}
    }
}

/// Rewrites schemars' output for `Option` and for documented enums into the plain form: `$ref`, `enum`.
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
            // a section without keys: with a list of properties, even an empty one, the message names an unknown key
            if map.get("additionalProperties") == Some(&json!(false)) {
                map.entry("properties").or_insert_with(|| json!({}));
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
