//! Finds the chat template in a tokenizer's folder, where transformers looks for it.

use std::io::ErrorKind;
use std::path::Path;

use serde_json::Value;

use super::VocabularyError;
use super::specials::read_object;

/// Returns the template of a folder: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`, which is a text
/// or a list of named texts, of which `default` counts. A file that is not UTF-8 is no template.
pub(super) fn of_folder(folder: &Path) -> Result<Option<String>, VocabularyError> {
    let path = folder.join("chat_template.jinja");
    match std::fs::read_to_string(&path) {
        Ok(template) => return Ok(Some(template)),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::InvalidData) => {}
        Err(source) => return Err(VocabularyError::Io { path, source }),
    }
    let config = read_object(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let named =
        |list: &Vec<Value>| list.iter().find(|entry| entry["name"] == "default").and_then(|e| text(&e["template"]));
    let template = &config["chat_template"];
    Ok(text(template).or_else(|| template.as_array().and_then(named)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_template_is_found_where_transformers_looks() {
        let folder = tempfile::tempdir().unwrap();
        let found = || of_folder(folder.path()).unwrap();
        assert_eq!(found(), None);
        let write = |config: Value| {
            std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        };
        write(json!({"chat_template": null}));
        assert_eq!(found(), None);
        write(json!({"chat_template": "one"}));
        assert_eq!(found().as_deref(), Some("one"));
        write(json!({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}));
        assert_eq!(found().as_deref(), Some("d"));
        std::fs::write(folder.path().join("chat_template.jinja"), "file").unwrap();
        assert_eq!(found().as_deref(), Some("file"));
    }
}
