//! Both shapes of records, and the message of each error.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use stillhouse_chat::{ChatError, ChatTemplate, Conversation, TrainOn};

/// What a template sees of a conversation.
fn seen(messages: &str, tools: Option<&str>) -> String {
    let template = "{{ messages|tojson }}{% if tools is not none %} {{ tools|tojson }}{% endif %}";
    let template = ChatTemplate::new(template, &BTreeMap::new(), None, None).unwrap();
    template.render(&Conversation::parse(messages, tools).unwrap(), false).unwrap()
}

fn error(messages: &str) -> String {
    Conversation::parse(messages, None).unwrap_err().to_string()
}

#[test]
fn templates_see_all_keys_in_their_order() {
    let json = r#"[{"z": 1, "role": "user", "content": "é", "a": {"y": 1.0, "b": [true, null]}, "name": null}]"#;
    let expected = r#"[{"z": 1, "role": "user", "content": "é", "a": {"y": 1.0, "b": [true, null]}}]"#;
    assert_eq!(seen(json, None), expected);
    assert_eq!(
        seen(r#"[{"role": "user", "content": "a", "role": "tool"}]"#, None),
        r#"[{"role": "tool", "content": "a"}]"#
    );
}

#[test]
fn reasoning_has_the_names_of_transformers() {
    let json = r#"[{"role": "assistant", "content": "4", "reasoning": "Two."}]"#;
    let expected = r#"[{"thinking": "Two.", "role": "assistant", "content": "4", "reasoning": "Two.", "reasoning_content": "Two."}]"#;
    assert_eq!(seen(json, None), expected);
}

#[test]
fn sharegpt_becomes_the_shape_of_openai() {
    let json = r#"[{"from": "system", "value": "s"}, {"from": "human", "value": "h", "weight": null}, {"from": "gpt", "value": "g", "train": false},
        {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {}}"}, {"value": "o", "from": "observation"}]"#;
    let expected = concat!(
        r#"[{"role": "system", "content": "s"}, {"role": "user", "content": "h"}, {"role": "assistant", "content": "g", "train": false}, "#,
        r#"{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}, "#,
        r#"{"role": "tool", "content": "o"}]"#
    );
    assert_eq!(seen(json, None), expected);
    let conversation = Conversation::parse(json, None).unwrap();
    let trained = conversation.messages().map(|message| message.trained).collect::<Vec<_>>();
    assert_eq!(trained, [false, false, false, true, false]);
}

#[test]
fn tools_are_a_list_or_a_string_that_contains_one() {
    let user = r#"[{"role": "user", "content": ""}]"#;
    let plain = r#"[{"role": "user", "content": ""}]"#;
    for none in ["null", "", "  ", r#""""#, r#""null""#] {
        assert_eq!(seen(user, Some(none)), plain);
    }
    assert_eq!(seen(user, Some("[]")), format!("{plain} []"));
    assert_eq!(seen(user, Some(r#""[{\"b\": 1, \"a\": 2}]""#)), format!(r#"{plain} [{{"b": 1, "a": 2}}]"#));
    let error = |tools: &str| Conversation::parse(user, Some(tools)).unwrap_err().to_string();
    let valid = "valid: a list of objects, a string that contains the JSON of one, or null";
    assert_eq!(error("3"), format!("`tools` is 3; {valid}"));
    assert_eq!(error("[\"f\"]"), format!("`tools` is a list that contains the string \"f\"; {valid}"));
    assert!(error("\"[\"").starts_with("`tools` is not JSON: "));
}

#[test]
fn errors_name_the_message_the_field_and_what_is_valid() {
    const CONTENT: &str = "a string, a list of {\"type\": \"text\", \"text\": …} parts, or null in a message with `tool_calls` or reasoning";
    let of = |fields: &str| error(&format!(r#"[{{"role": "user", "content": ""}}, {{{fields}}}]"#));
    for (fields, expected) in [
        (r#""role": 3, "content": """#, "`role` is 3; valid: a string, such as \"system\", \"user\", \"assistant\" or \"tool\"".to_string()),
        (r#""content": """#, "`role` is missing; valid: a string, such as \"system\", \"user\", \"assistant\" or \"tool\"".into()),
        (r#""role": "user", "content": {"a": 1}"#, format!("`content` is an object with the keys [\"a\"]; valid: {CONTENT}")),
        (r#""role": "assistant""#, format!("`content` is null or missing; valid: {CONTENT}")),
        (r#""role": "user", "content": ["a"]"#, "`content[0]` is the string \"a\"; valid: an object {\"type\": \"text\", \"text\": …}".into()),
        (r#""role": "user", "content": [{"type": "text"}]"#, "`content[0].text` is missing; valid: a string".into()),
        (
            r#""role": "user", "content": [{"type": "image"}]"#,
            "`content[0].type` is the string \"image\"; valid: \"text\": images, audio and video have no text to train on".into(),
        ),
        (r#""role": "user", "content": "", "name": []"#, "`name` is a list of 0; valid: a string or null".into()),
        (r#""role": "user", "content": "", "tool_calls": "f()""#, "`tool_calls` is the string \"f()\"; valid: a list of objects, or null".into()),
        (r#""role": "user", "content": "", "weight": 0.5"#, "`weight` is 0.5; valid: 0, which leaves the message out, or 1".into()),
        (r#""role": "user", "content": "", "train": "no""#, "`train` is the string \"no\"; valid: true or false".into()),
        (r#""from": "gpt", "value": 3"#, "`value` is 3; valid: a string".into()),
        (
            r#""from": "function_call", "value": "f()""#,
            "`value` is the string \"f()\"; valid: the JSON of {\"name\": …, \"arguments\": …}, or of a list of these".into(),
        ),
    ] {
        assert_eq!(of(fields), format!("message 1: {expected}"));
    }
    assert!(
        of(r#""from": "alice", "value": """#)
            .starts_with("message 1: `from` is the string \"alice\"; valid: \"system\", \"human\"")
    );
    assert_eq!(error("[]"), "`messages` is a list of 0; valid: a list of at least one message");
    assert_eq!(error("{}"), "`messages` is an object with the keys []; valid: a list of at least one message");
    assert!(error("[3]").starts_with("`messages` is a list that contains 3; valid: objects with `role`"));
    assert!(error("[").starts_with("`messages` is not JSON: "));
}

#[test]
fn templates_and_options_have_errors_of_their_own() {
    let new = |template: &str, options: Option<&str>, date: Option<&str>| {
        ChatTemplate::new(template, &BTreeMap::new(), options, date)
    };
    let error = |template: &str, options, date| new(template, options, date).unwrap_err().to_string();
    assert!(error("{% if %}", None, None).starts_with("the chat template does not compile: "));
    assert!(error("{% generation %}", None, None).contains("{% generation %} without {% endgeneration %}"));
    assert_eq!(
        error("", None, Some("2024-02-30")),
        "`date` is \"2024-02-30\"; valid: a date as YYYY-MM-DD, such as 2024-07-26"
    );
    assert!(error("", Some("[]"), None).starts_with("`options` is a list of 0; valid: an object"));
    assert!(error("", Some("{\"messages\": 1}"), None).starts_with("`options` is an object with the key \"messages\""));
    let conversation = Conversation::parse(r#"[{"role": "user", "content": ""}]"#, None).unwrap();
    let render = |template: &str, date| new(template, Some("{\"x\": [1]}"), date).unwrap().render(&conversation, true);
    assert_eq!(
        render("{{ x }}{{ strftime_now('%d %b %Y %A %j') }}", Some("2024-02-29")).unwrap(),
        "[1]29 Feb 2024 Thursday 060"
    );
    let no_date = render("{{ strftime_now('%Y') }}", None).unwrap_err().to_string();
    assert!(no_date.contains("set `date: YYYY-MM-DD`"), "{no_date}");
    let raised = render("{{ raise_exception('Only user roles') }}", None).unwrap_err().to_string();
    assert_eq!(raised, "the chat template fails on this conversation: Only user roles (line 1 of the template)");
}

const CHATML: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}\
                      {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

fn trained(template: &str, messages: &str, train: TrainOn) -> Result<Vec<(String, Option<usize>)>, ChatError> {
    let template = ChatTemplate::new(template, &BTreeMap::new(), None, None).unwrap();
    let rendered = template.render_trained(&Conversation::parse(messages, None).unwrap(), train)?;
    let text = |range: &std::ops::Range<usize>| rendered.text[range.clone()].to_string();
    Ok(rendered.trained.iter().map(|trained| (text(&trained.range), trained.message)).collect())
}

const CONVERSATION: &str = r#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
    {"role": "assistant", "content": "b", "weight": 0}, {"role": "assistant", "content": "e"}, {"role": "user", "content": "f"}]"#;

#[test]
fn train_on_selects_messages() {
    let expect = |texts: &[(&str, Option<usize>)]| {
        texts.iter().map(|(text, message)| (text.to_string(), *message)).collect::<Vec<_>>()
    };
    let blocks = CHATML.replace("m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}", "m.role + '\\n' }}\
        {%- if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}");
    for template in [CHATML, &blocks] {
        let end = if template == CHATML { "<|im_end|>\n" } else { "<|im_end|>" };
        let (b, e) = (format!("b{end}"), format!("e{end}"));
        let assistant = trained(template, CONVERSATION, TrainOn::Assistant).unwrap();
        let texts = assistant.iter().map(|(text, message)| (text.trim_end().to_string(), *message)).collect::<Vec<_>>();
        assert_eq!(texts, expect(&[(b.trim_end(), Some(1)), (e.trim_end(), Some(4))]));
        let last = trained(template, CONVERSATION, TrainOn::Last).unwrap();
        assert_eq!(last.iter().map(|(_, message)| *message).collect::<Vec<_>>(), [Some(4)]);
        assert_eq!(trained(template, CONVERSATION, TrainOn::All).unwrap().len(), 1);
    }
    let left_out = CONVERSATION.replace(r#""e""#, r#""e", "train": false"#);
    assert_eq!(trained(CHATML, &left_out, TrainOn::Last).unwrap(), []);
}

#[test]
fn contents_that_look_like_markers_change_nothing() {
    let fake = CONVERSATION
        .replace(r#""a""#, r#""<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n""#)
        .replace(r#""b"}"#, r#""<|im_start|>assistant\n"}"#);
    let texts = trained(CHATML, &fake, TrainOn::Assistant).unwrap();
    assert_eq!(texts[0], ("<|im_start|>assistant\n<|im_end|>\n".to_string(), Some(1)));
}

#[test]
fn what_cannot_be_established_is_an_error() {
    let error = |template: &str| trained(template, CONVERSATION, TrainOn::Assistant).unwrap_err().to_string();
    let no_prompt = CHATML.replace("add_generation_prompt", "false");
    assert_eq!(
        error(&no_prompt),
        "message 1: cannot tell which text is trained on, because the template has no generation prompt that ends before its \
         text; use a template with {% generation %} blocks, or set `train: false` on the message"
    );
    assert!(
        error(&CHATML.replace("m.content", "m.content|upper")).contains("the template changes or drops its content")
    );
    assert!(error("{% for m in messages|reverse %}{{ m.content }}{% endfor %}").contains("message 1: cannot tell"));
}
