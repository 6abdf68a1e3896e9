use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::testing::{bert, fetched, gpt2, repository};

/// Creates a folder with a tokenizer of whole words and its configuration.
fn folder(words: &[(String, u32)], added: &[(&str, u32)], normalizer: &Value, config: &Value) -> tempfile::TempDir {
    let vocab: serde_json::Map<String, Value> = words.iter().map(|(word, id)| (word.clone(), json!(id))).collect();
    let added: Vec<Value> = added
        .iter()
        .map(|(content, id)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
        })
        .collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    });
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    folder
}

fn words(n: u32) -> Vec<(String, u32)> {
    (0..n).map(|i| (format!("w{i}"), i)).collect()
}

fn own(folder: &tempfile::TempDir) -> TeacherVocabulary {
    TeacherVocabulary::load(folder.path(), TeacherSpecials::default()).unwrap().unwrap()
}

fn loaded(path: PathBuf, spec: &spec::Tokenizer) -> Vocabulary {
    Vocabulary::load(&path, "tok", spec, None).unwrap()
}

fn differences(teacher: &tempfile::TempDir, job: &tempfile::TempDir) -> Option<String> {
    let spec = spec::Tokenizer::default();
    own(teacher).differences(&loaded(job.path().into(), &spec), &spec)
}

#[test]
fn real_tokenizers_are_themselves_and_no_other() {
    let specials = TeacherSpecials { bos: Some(50256), eos: Some(50256) };
    let teacher = TeacherVocabulary::load(&repository("assets/teacher-nano-gpt2"), specials).unwrap().unwrap();
    let spec = spec::Tokenizer::default();
    assert_eq!(teacher.differences(&gpt2(), &spec), None);
    let found = teacher.differences(&bert(), &spec).unwrap();
    assert!(
        found.starts_with(r#"id 0 is "[PAD]", the teacher's "!"; id 1 is "#) && found.contains(" more ids"),
        "{found}"
    );
    let smollm2 = fetched("smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    let teacher = TeacherVocabulary::load(&smollm2, TeacherSpecials::default()).unwrap().unwrap();
    assert_eq!(teacher.differences(&loaded(smollm2, &spec), &spec), None);
    assert!(teacher.differences(&gpt2(), &spec).unwrap().contains("more ids"));
    let nothing = tempfile::tempdir().unwrap();
    assert!(TeacherVocabulary::load(nothing.path(), specials).unwrap().is_none());
}

#[test]
fn added_tokens_count_and_normalizers_and_fillers_do_not() {
    let (none, plain) = (Value::Null, json!({}));
    let base = folder(&words(5), &[("<s>", 5)], &none, &plain);
    assert_eq!(differences(&base, &folder(&words(5), &[("<s>", 5)], &json!({"type": "Lowercase"}), &plain)), None);
    let filled = [words(5), ["<s>", "[PAD6]", "[PAD7]"].map(String::from).into_iter().zip(5..).collect()].concat();
    assert_eq!(differences(&base, &folder(&filled, &[("<s>", 5)], &none, &plain)), None);
    assert_eq!(differences(&folder(&filled, &[("<s>", 5)], &none, &plain), &base), None);
    let other = folder(&words(5), &[("</s>", 5)], &none, &plain);
    assert_eq!(differences(&base, &other).unwrap(), r#"id 5 is "</s>", the teacher's "<s>""#);
    let more = folder(&words(5), &[("<s>", 5), ("<m>", 6)], &none, &plain);
    assert_eq!(differences(&base, &more).unwrap(), r#"id 6 is "<m>", the teacher's nothing"#);
    assert_eq!(differences(&more, &base).unwrap(), r#"id 6 is nothing, the teacher's "<m>""#);
}

#[test]
fn ends_that_the_job_does_not_name_are_compared() {
    let with = |config: Value| folder(&words(5), &[("<s>", 5), ("</s>", 6)], &Value::Null, &config);
    let teacher = with(json!({"bos_token": "<s>", "eos_token": "</s>"}));
    let swapped = with(json!({"bos_token": "</s>", "eos_token": "</s>"}));
    let found = differences(&teacher, &swapped).unwrap();
    assert_eq!(found, r#"its bos is "</s>", the teacher's "<s>": name one in `tokenizer.bos`"#);
    let spec = spec::Tokenizer { bos: Some("</s>".into()), ..Default::default() };
    assert_eq!(own(&teacher).differences(&loaded(swapped.path().into(), &spec), &spec), None);
    assert_eq!(differences(&teacher, &teacher), None);
}

#[test]
fn ids_beyond_the_rows_are_named() {
    let tokenizer = folder(&words(5), &[("<s>", 5)], &Value::Null, &json!({}));
    let vocabulary = loaded(tokenizer.path().into(), &spec::Tokenizer::default());
    assert_eq!(vocabulary.tokens_from(4), [(4, "w4".to_owned()), (5, "<s>".to_owned())]);
    assert!(vocabulary.tokens_from(6).is_empty());
}

#[test]
fn a_damaged_tokenizer_is_named() {
    let broken = tempfile::tempdir().unwrap();
    fs::write(broken.path().join("tokenizer.json"), "{").unwrap();
    let error = TeacherVocabulary::load(broken.path(), TeacherSpecials::default()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]
    /// For any changes of a vocabulary, the reported ids are exactly those whose token changed.
    #[test]
    fn every_change_is_found(edits in prop::collection::vec((0u32..3, 0u32..40, 0u32..40), 0..4)) {
        let mut changed = words(40);
        for (kind, a, b) in edits {
            match kind {
                0 => {
                    let (Some(i), Some(j)) =
                        (changed.iter().position(|w| w.1 == a), changed.iter().position(|w| w.1 == b)) else { continue };
                    (changed[i].1, changed[j].1) = (b, a);
                }
                1 => changed.retain(|word| word.1 != a || word.0 == "w0"),
                _ => changed.push((format!("x{b}"), 40 + a)),
            }
        }
        let by_id = |words: &[(String, u32)]| words.iter().cloned().map(|(w, id)| (id, w)).collect::<BTreeSet<_>>();
        let unlike: BTreeSet<u32> =
            by_id(&changed).symmetric_difference(&by_id(&words(40))).map(|(id, _)| *id).collect();
        // skip duplicates: of a repeated word only the last id counts, and the message names one word per id
        prop_assume!(changed.iter().map(|w| &w.0).collect::<BTreeSet<_>>().len() == changed.len());
        prop_assume!(changed.iter().map(|w| w.1).collect::<BTreeSet<_>>().len() == changed.len());
        let none = Value::Null;
        let (teacher, job) = (folder(&words(40), &[], &none, &json!({})), folder(&changed, &[], &none, &json!({})));
        let found = differences(&teacher, &job);
        prop_assert_eq!(found.is_some(), !unlike.is_empty());
        if let (Some(found), Some(first)) = (found, unlike.first()) {
            prop_assert!(found.starts_with(&format!("id {first} is ")), "{} in {}", first, found);
            let counted = found.matches("id ").count() + found.split("and ").nth(1).map_or(0, |n| n.split(' ').next().unwrap().parse::<usize>().unwrap());
            prop_assert_eq!(counted, unlike.len());
        }
    }
}
