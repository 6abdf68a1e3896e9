//! Equality with transformers on published templates: `golden.json`, written by `golden.py`.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;
use stillhouse_chat::{ChatError, ChatTemplate, Conversation, Rendered, TrainOn};

/// A golden file and the folder of its templates.
struct Golden {
    json: Json,
    /// The JSON text of each conversation's messages and tools, in the order of its keys.
    conversations: BTreeMap<String, (String, Option<String>)>,
    templates: PathBuf,
}

#[derive(Default)]
struct Report {
    cases: usize,
    traced: usize,
    untraceable: Vec<String>,
    differences: Vec<String>,
}

impl Golden {
    fn read(path: &Path, templates: &Path) -> Self {
        let text = std::fs::read_to_string(path).unwrap();
        let json: Json = serde_json::from_str(&text).unwrap();
        // serde_json's maps are sorted: the texts are cut out of the file
        let raw: BTreeMap<&str, &serde_json::value::RawValue> = serde_json::from_str(&text).unwrap();
        let raw: BTreeMap<String, BTreeMap<String, &serde_json::value::RawValue>> =
            serde_json::from_str(raw["conversations"].get()).unwrap();
        let text = |value: &serde_json::value::RawValue| value.get().to_string();
        let conversations = raw.into_iter().map(|(name, fields)| {
            let tools = Some(text(fields["tools"])).filter(|tools| tools != "null");
            (name, (text(fields["messages"]), tools))
        });
        Self { json, conversations: conversations.collect(), templates: templates.to_path_buf() }
    }

    fn conversation(&self, name: &str) -> Conversation {
        let (messages, tools) = &self.conversations[name];
        Conversation::parse(messages, tools.as_deref()).unwrap()
    }

    fn template(&self, name: &str, options: &Json) -> Result<ChatTemplate, ChatError> {
        let source = std::fs::read_to_string(self.templates.join(format!("{name}.jinja"))).unwrap();
        let tokens = self.json["templates"][name]["special_tokens"].as_object().unwrap();
        let tokens = tokens.iter().map(|(key, text)| (key.clone(), text.as_str().unwrap().into())).collect();
        let options = options.is_object().then(|| options.to_string());
        ChatTemplate::new(&source, &tokens, options.as_deref(), self.json["date"].as_str())
    }

    fn names(&self) -> Vec<&str> {
        self.json["templates"].as_object().unwrap().keys().map(String::as_str).collect()
    }

    fn cases(&self, name: &str) -> &[Json] {
        self.json["templates"][name]["cases"].as_array().unwrap()
    }

    /// Renders every case of a template as transformers did, and finds the trained text.
    fn check(&self, name: &str) -> Report {
        let mut report = Report::default();
        for case in self.cases(name) {
            let label = format!(
                "{name}/{}{}",
                case["conversation"].as_str().unwrap(),
                case.get("options").unwrap_or(&Json::from(""))
            );
            let template = match self.template(name, &case["options"]) {
                Ok(template) => template,
                Err(error) => {
                    report.cases += 1;
                    if !case["text"].is_null() {
                        report.differences.push(format!("{label}: {error}"));
                    }
                    continue;
                }
            };
            let conversation = self.conversation(case["conversation"].as_str().unwrap());
            let text = case["text"].as_str();
            let prompted = match case.get("prompt") {
                Some(prompt) => Some(format!("{}{}", text.unwrap(), prompt.as_str().unwrap())),
                None => case["prompted"].as_str().map(String::from),
            };
            for (prompt, expected) in [(false, text), (true, prompted.as_deref())] {
                report.cases += 1;
                match (template.render(&conversation, prompt), expected) {
                    (Ok(ours), Some(theirs)) if ours == theirs => {}
                    (Err(_), None) => {}
                    (Ok(ours), Some(theirs)) => {
                        let at = ours.bytes().zip(theirs.bytes()).take_while(|(a, b)| a == b).count();
                        let around = |text: &str| {
                            String::from_utf8_lossy(&text.as_bytes()[at.saturating_sub(20)..(at + 40).min(text.len())])
                                .into_owned()
                        };
                        report.differences.push(format!(
                            "{label} {prompt}: {:?} instead of {:?}",
                            around(&ours),
                            around(theirs)
                        ));
                    }
                    (Ok(_), None) => report.differences.push(format!("{label} {prompt}: transformers fails")),
                    (Err(error), Some(_)) => report.differences.push(format!("{label} {prompt}: {error}")),
                }
            }
            if let Some(text) = text {
                match template.render_trained(&conversation, TrainOn::Assistant) {
                    Ok(rendered) => {
                        report.traced += 1;
                        check_ranges(&rendered, case.get("ranges"), &label, text, &mut report);
                    }
                    Err(error) => report.untraceable.push(format!("{label}: {error}")),
                }
            }
        }
        report
    }
}

fn check_ranges(rendered: &Rendered, ranges: Option<&Json>, label: &str, text: &str, report: &mut Report) {
    // transformers knows no weights: the message with `weight: 0` is missing from ours
    if let Some(ranges) = ranges.filter(|_| !label.contains("/multi")) {
        let places = text.char_indices().map(|(place, _)| place).chain([text.len()]).collect::<Vec<_>>();
        let expected = ranges.as_array().unwrap().iter().map(|pair| {
            let place = |index: usize| places[pair[index].as_u64().unwrap() as usize];
            place(0)..place(1)
        });
        let ours = rendered.trained.iter().map(|trained| trained.range.clone());
        let (ours, expected) = (ours.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
        if ours != expected {
            report.differences.push(format!("{label}: trained {ours:?} instead of {expected:?}"));
        }
    }
}

fn golden() -> Golden {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    Golden::read(&folder.join("golden.json"), &folder.join("templates"))
}

#[test]
fn texts_and_generation_blocks_equal_those_of_transformers() {
    let golden = golden();
    let reports = golden.names().into_iter().map(|name| (name, golden.check(name))).collect::<Vec<_>>();
    let differences = reports.iter().flat_map(|(_, report)| &report.differences).collect::<Vec<_>>();
    assert!(reports.len() >= 25, "{} templates", reports.len());
    assert!(differences.is_empty(), "{differences:#?}");
}

/// `CHAT_GOLDEN=FILE CHAT_TEMPLATES=DIR cargo test -- --ignored --nocapture`, with the arguments of `golden.py`.
#[test]
#[ignore = "needs a golden file of other templates"]
fn other_templates() {
    let path = |name: &str| PathBuf::from(std::env::var(name).unwrap());
    let golden = Golden::read(&path("CHAT_GOLDEN"), &path("CHAT_TEMPLATES"));
    for name in golden.names() {
        let report = golden.check(name);
        let (different, untraceable) = (report.differences.len(), report.untraceable.len());
        println!("{name}: {} cases, {different} different, {} traced, {untraceable} not", report.cases, report.traced);
        report.differences.iter().chain(&report.untraceable).for_each(|line| println!("    {line}"));
    }
}

/// Templates of which trl has a variant with generation blocks, and the beginnings of its blocks that ours leave out.
/// Each is the end of the generation prompt: text that the model is given and never writes.
const TRAINING: [(&str, &[&str]); 15] = [
    ("qwen2_5", &["\n"]),
    ("qwen3", &[]),
    ("qwen3_instruct_2507", &[]),
    ("qwen3_5_think", &["<think>\n"]),
    ("gemma", &[]),
    ("gemma3", &[]),
    ("llama3", &[]),
    ("phi3", &[]),
    ("phi3_5", &[]),
    ("deepseek_r1_distill", &["<｜Assistant｜>"]),
    ("deepseekv3", &["<｜Assistant｜>"]),
    ("glm4moe", &[]),
    ("gptoss", &["<|start|>assistant"]),
    ("lfm2_v2", &[]),
    ("nemotron_3_nano", &["<think>\n", "<think></think>"]),
];

#[test]
fn derived_text_equals_the_generation_blocks_of_trl() {
    let golden = golden();
    for (name, given) in TRAINING {
        let mut compared = 0;
        for case in golden.cases(name) {
            let conversation = golden.conversation(case["conversation"].as_str().unwrap());
            let render = |name: &str| {
                golden.template(name, &case["options"]).unwrap().render_trained(&conversation, TrainOn::Assistant)
            };
            let (Ok(ours), Ok(theirs)) = (render(name), render(&format!("{name}_training"))) else { continue };
            if ours.text != theirs.text {
                continue; // trl's variant keeps the reasoning that the template drops
            }
            // Phi-3's end-of-text token is a block of its own
            let mut blocks: Vec<std::ops::Range<usize>> = Vec::new();
            for block in theirs.trained {
                match blocks.last_mut().filter(|last| last.end == block.range.start) {
                    Some(last) => last.end = block.range.end,
                    None => blocks.push(block.range),
                }
            }
            assert_eq!(ours.trained.len(), blocks.len(), "{name} {case}");
            for (ours_range, block) in ours.trained.iter().zip(blocks) {
                assert_eq!(ours_range.range.end, block.end, "{name} {case}");
                let extra = &ours.text[block.start..ours_range.range.start];
                assert!(extra.is_empty() || given.contains(&extra), "{name} {case}: {extra:?}");
            }
            compared += 1;
        }
        assert!(compared >= 4, "{name}: {compared} conversations");
    }
}
