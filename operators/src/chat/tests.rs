use std::sync::OnceLock;

use arrow::array::AsArray;
use arrow::datatypes::{UInt32Type, UInt64Type};
use proptest::prelude::*;
use stillhouse_schemas::spec;

use super::*;
use crate::registry::job_format;
use crate::testing::{context, documents, drive, fetched, job_with, statistics};

/// SmolLM2's vocabulary, whose special tokens are found in text.
fn smollm2() -> Arc<Vocabulary> {
    static LOADED: OnceLock<Arc<Vocabulary>> = OnceLock::new();
    let load = || {
        let path = fetched("smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
        let spec = spec::Tokenizer { special_tokens: spec::SpecialTokens::Parse, ..spec::Tokenizer::default() };
        Arc::new(Vocabulary::load(&path, "smollm2", &spec, None).unwrap())
    };
    LOADED.get_or_init(load).clone()
}

fn config() -> ChatConfig {
    ChatConfig {
        messages: "messages".into(),
        tools: None,
        template: smollm2().chat_template().unwrap().to_owned(),
        special_tokens: BTreeMap::new(),
        options: "{}".into(),
        date: None,
        train: TrainedMessages::Assistant,
        block: None,
        on_error: OnError::Skip,
    }
}

const RECORD: &str = r#"{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"},
{"role": "assistant", "content": "2"}, {"role": "user", "content": "And Δ?"}, {"role": "assistant", "content": "Δ is delta."}]}"#;

/// A conversation: document, ids, trained.
type Tokens = (u64, Vec<u32>, Vec<bool>);

/// Runs the operator over records. Returns the tokens of each conversation: (document, ids, trained).
fn run(config: &ChatConfig, records: &[&str]) -> (Vec<Tokens>, SplitContext) {
    let context = context(&smollm2());
    let mut operator = config.operator(&context).unwrap();
    let pieces: Vec<(u64, &str, bool)> = (0..).zip(records).map(|(id, record)| (id, *record, true)).collect();
    let output = drive(operator.as_mut(), &[documents(&pieces)]).unwrap();
    let mut conversations = Vec::new();
    for batch in &output {
        let (ids, tokens) = (batch["document_id"].as_primitive::<UInt64Type>(), batch["tokens"].as_list::<i32>());
        for row in 0..batch.num_rows() {
            let tokens = tokens.value(row).as_primitive::<UInt32Type>().values().to_vec();
            let trained = tokens.iter().map(|token| token & TRAINED != 0).collect();
            conversations.push((ids.value(row), tokens.iter().map(|token| token & !TRAINED).collect(), trained));
        }
    }
    (conversations, context)
}

/// The texts of the runs of trained tokens.
fn trained_texts(ids: &[u32], trained: &[bool]) -> Vec<String> {
    let runs = ids.iter().zip(trained).collect::<Vec<_>>();
    let runs = runs.chunk_by(|a, b| a.1 == b.1).filter(|run| *run[0].1);
    runs.map(|run| smollm2().decode(&run.iter().map(|token| *token.0).collect::<Vec<_>>())).collect()
}

#[test]
fn the_model_is_trained_on_what_the_assistant_says_and_on_its_end() {
    let (conversations, context) = run(&config(), &[RECORD]);
    let [(0, ids, trained)] = conversations.as_slice() else { panic!("{conversations:?}") };
    let text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n\
                <|im_start|>user\nAnd Δ?<|im_end|>\n<|im_start|>assistant\nΔ is delta.<|im_end|>\n";
    assert_eq!(*ids, smollm2().encode(text).unwrap(), "{}", smollm2().decode(ids));
    assert_eq!(trained_texts(ids, trained), ["2<|im_end|>\n", "Δ is delta.<|im_end|>\n"]);
    let counted = statistics(&context);
    assert_eq!(counted.text_tokens, ids.len() as u64);

    let (last, _) = run(&ChatConfig { train: TrainedMessages::Last, ..config() }, &[RECORD]);
    assert_eq!(trained_texts(&last[0].1, &last[0].2), ["Δ is delta.<|im_end|>\n"]);
    let (all, _) = run(&ChatConfig { train: TrainedMessages::All, ..config() }, &[RECORD]);
    assert!(all[0].2.iter().all(|trained| *trained));
}

#[test]
fn an_answer_fills_whole_blocks() {
    let plain = run(&config(), &[RECORD]).0.remove(0);
    for (fill, is_trained) in [(2, true), (0, false)] {
        let (filled, context) = run(&ChatConfig { block: Some((4, fill, is_trained)), ..config() }, &[RECORD]);
        let (_, ids, trained) = &filled[0];
        let mut expected = (Vec::new(), Vec::new());
        let (mut run, mut filled_tokens) = (0_usize, 0);
        for (i, (id, is_answer)) in plain.1.iter().zip(&plain.2).enumerate() {
            expected.0.push(*id);
            expected.1.push(*is_answer);
            run = if *is_answer { run + 1 } else { 0 };
            if *is_answer && !plain.2.get(i + 1).copied().unwrap_or(false) {
                while !run.is_multiple_of(4) {
                    expected.0.push(fill);
                    expected.1.push(is_trained);
                    run += 1;
                    filled_tokens += 1;
                }
            }
        }
        assert_eq!((ids, trained), (&expected.0, &expected.1));
        assert_eq!(statistics(&context).operators[FILLED_TOKENS], Statistic::Sum(filled_tokens));
        assert!(filled_tokens > 0);
    }
}

#[test]
fn a_record_that_is_no_conversation_ends_the_job_or_is_counted() {
    let nothing = r#"{"messages": [{"role": "user", "content": "?"}]}"#;
    let json_in_a_string =
        r#"{"messages": "[{\"from\": \"human\", \"value\": \"a\"}, {\"from\": \"gpt\", \"value\": \"b\"}]"}"#;
    for (record, message) in [
        ("[]", "document 0 of split 0: is not a JSON object: "),
        (r#"{"message": []}"#, "the record has no key \"messages\", which `input.messages` names; its keys: message"),
        (r#"{"messages": []}"#, "`messages` is a list of 0; valid: a list of at least one message"),
        (r#"{"messages": [{"content": "a"}]}"#, "message 0: `role`"),
        (r#"{"messages": 7}"#, "`messages` is 7; valid: a list"),
    ] {
        let (conversations, counted) = run(&config(), &[record, nothing, json_in_a_string]);
        assert_eq!(conversations.iter().map(|made| made.0).collect::<Vec<_>>(), [2]);
        let dropped: Vec<_> = statistics(&counted).dropped.into_iter().collect();
        assert_eq!(dropped, [(BAD_CONVERSATION.to_owned(), 1), (NOTHING.to_owned(), 1)]);
        let strict = ChatConfig { on_error: OnError::Fail, ..config() };
        let mut operator = strict.operator(&context(&smollm2())).unwrap();
        let error = drive(operator.as_mut(), &[documents(&[(0, record, true)])]).unwrap_err().to_string();
        assert!(error.starts_with("chat: document 0 of split 0: ") && error.contains(message), "{record}: {error}");
    }
}

#[test]
fn a_job_that_contradicts_the_template_is_refused() {
    for (section, problem) in [
        ("chat: {}", "input.messages: is required with `chat`"),
        ("chat: {}", "tokenizer.special_tokens: must be parse"),
        ("chat: {}", "pack.separator: must be none"),
        ("chat: {}", "pack.boundary: must be none"),
        ("chat: {train: all, block: {length: 4}}", "chat.block: fills answers"),
        ("chat: {}\nfilter: {rules: [{pii: {}}]}", "filter: judges text"),
        ("chat: {}\nclean: {detokenizer: ptb}", "pack.separator"),
        ("chat: {train: user}", "chat.train: got \"user\": not valid"),
    ] {
        let error = job_format().parse(&job_with(section)).problems.to_string();
        assert!(error.contains(problem), "{section}: {error}");
    }
    let text = job_with("").replace("paths: [x.jsonl]", "paths: [x.jsonl], messages: m");
    let error = job_format().parse(&text).problems.to_string();
    assert!(error.contains("chat: is required with `input.messages`"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// The ids are those of the rendered text, whatever the messages contain, and the trained tokens are the assistant's. (An
    /// answer that begins with white space may share its first token with the header's line break.)
    #[test]
    fn ids_are_those_of_the_text(turns in prop::collection::vec("[a-zA-Z0-9][a-zA-Z0-9 ,.!?\n'\"\\\\{}<|>éΔ漢🦀]{0,24}", 2..6)) {
        let messages: Vec<_> = turns
            .iter()
            .enumerate()
            .map(|(i, text)| serde_json::json!({"role": if i % 2 == 0 { "user" } else { "assistant" }, "content": text}))
            .collect();
        let record = serde_json::json!({"messages": messages}).to_string();
        let (conversations, counted) = run(&config(), &[&record]);
        prop_assert_eq!(statistics(&counted).documents_dropped(), 0);
        let (_, ids, trained) = &conversations[0];
        let json = serde_json::to_string(&messages).unwrap();
        let template = config().compiled().unwrap();
        let text = template.render(&Conversation::parse(&json, None).unwrap(), false).unwrap();
        prop_assert_eq!(ids, &smollm2().encode(&text).unwrap());
        let said: Vec<String> = turns.iter().skip(1).step_by(2).map(|text| format!("{text}<|im_end|>\n")).collect();
        let joined = trained_texts(ids, trained).join("");
        prop_assert_eq!(joined, said.join(""));
    }
}
