//! Templates and records from strangers: errors, never panics, endless loops or unbounded memory.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use proptest::prelude::*;
use stillhouse_chat::{ChatError, ChatTemplate, Conversation, MAX_CONVERSATION_BYTES, MAX_MESSAGES, TrainOn};

fn render(template: &str) -> Result<String, ChatError> {
    let conversation = Conversation::parse(r#"[{"role": "user", "content": "Hi"}]"#, None).unwrap();
    ChatTemplate::new(template, &BTreeMap::new(), None, None)?.render(&conversation, false)
}

#[test]
fn endless_work_is_an_error() {
    let loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    let doubling = "{% set ns = namespace(x='x') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}";
    let output = "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}";
    let padding = "{{ 'x'.ljust(999999999999) }}";
    for template in [loops, doubling, output, padding] {
        let error = render(template).unwrap_err();
        assert!(matches!(error, ChatError::Limit { .. }), "{template}: {error}");
    }
}

#[test]
fn endless_recursion_is_an_error() {
    let recursion = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}";
    assert!(matches!(render(recursion), Err(ChatError::Render(_))), "{:?}", render(recursion));
    let brackets = format!("{{{{ {}1{} }}}}", "(".repeat(9999), ")".repeat(9999));
    assert!(matches!(render(&brackets), Err(ChatError::Template(_))));
    let tags = "{% if true %}".repeat(9999);
    assert!(matches!(render(&tags), Err(ChatError::Template(_))));
}

#[test]
fn deep_values_are_an_error_or_a_text() {
    for value in ["[ns.x]", "{'a': ns.x}", "(ns.x,)"] {
        for use_of in ["", "{{ ns.x }}", "{{ ns.x|tojson }}", "{{ ns.x == ns.x }}", "{{ ns.x|string }}"] {
            let nest = format!(
                "{{% set ns = namespace(x=[]) %}}{{% for i in range(99999) %}}{{% set ns.x = {value} %}}{{% endfor %}}{use_of}"
            );
            assert!(matches!(render(&nest), Err(ChatError::Render(_))), "{nest}");
        }
    }
    let chain = "{% set ns = namespace(x=1) %}{% for i in range(9999) %}{% set p = ns.x %}\
                 {% macro m() %}{{ p }}{% endmacro %}{% set ns.x = m %}{% endfor %}{{ ns.x }}";
    let batches =
        "{% set ns = namespace(x=[1]) %}{% for i in range(9999) %}{% set ns.x = ns.x|batch(1)|list %}{% endfor %}";
    let lazy =
        "{% set ns = namespace(x=[1]) %}{% for i in range(9999) %}{% set ns.x = {1: ns.x}.items() %}{% endfor %}";
    for template in [chain, batches, lazy] {
        let _ = render(template);
    }
    let unrolled = format!("{{% set x = 1 %}}{}", "{% set x = [x] %}".repeat(7000));
    assert!(render(&unrolled).is_err());
}

#[test]
fn values_that_contain_themselves_are_an_error() {
    for template in [
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns ~ '' }}",
        "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns ~ '' }}",
        "{% set ns = namespace() %}{% set m = {'ns': ns} %}{% set ns.a = m %}{{ ns ~ '' }}",
        "{% set ns = namespace(a=namespace()) %}{% set ns.a.b = ns %}{{ ns|string }}",
    ] {
        assert!(matches!(render(template), Err(ChatError::Render(_))), "{template}: {:?}", render(template));
    }
}

#[test]
fn large_records_are_an_error() {
    let message = r#"{"role": "user", "content": "Hi"}"#;
    let many = format!("[{}]", vec![message; MAX_MESSAGES + 1].join(","));
    let error = Conversation::parse(&many, None).unwrap_err().to_string();
    assert_eq!(error, "the conversation exceeds the limit of 1000 messages");
    let long = format!("[{}]", " ".repeat(MAX_CONVERSATION_BYTES));
    let error = Conversation::parse(&long, None).unwrap_err().to_string();
    assert_eq!(error, "the conversation exceeds the limit of 16 MiB of JSON");
    let deep = format!("{}{}", "[".repeat(9999), "]".repeat(9999));
    assert!(matches!(Conversation::parse(&deep, None), Err(ChatError::Json { .. })));
}

const TEMPLATES: [&str; 4] = [
    include_str!("templates/qwen3.jinja"),
    include_str!("templates/qwen3_training.jinja"),
    include_str!("templates/mistral_v1.jinja"),
    include_str!("templates/phi3.jinja"),
];

/// JSON that often is a conversation.
fn json() -> impl Strategy<Value = String> {
    let text = prop_oneof![
        ".{0,12}",
        Just("<think>\na\n</think>\n\nb".to_string()),
        Just("<|im_end|>\n<|im_start|>assistant\n".to_string()),
        Just("assistant".to_string()),
        Just(String::new()),
    ];
    let leaf = prop_oneof![
        Just("null".to_string()),
        any::<i64>().prop_map(|number| number.to_string()),
        any::<bool>().prop_map(|flag| flag.to_string()),
        text.prop_map(|text| serde_json::to_string(&text).unwrap()),
    ];
    let value = leaf.clone().prop_recursive(3, 16, 4, |inner| {
        let key = prop_oneof![
            Just("type"),
            Just("text"),
            Just("function"),
            Just("name"),
            Just("arguments"),
            Just("items"),
            Just("keys"),
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(|items| format!("[{}]", items.join(","))),
            prop::collection::vec((key, inner), 0..4).prop_map(|fields| {
                let fields = fields.iter().map(|(key, value)| format!("{key:?}:{value}")).collect::<Vec<_>>();
                format!("{{{}}}", fields.join(","))
            }),
        ]
    });
    let role = prop_oneof![Just("system"), Just("user"), Just("assistant"), Just("assistant"), Just("tool")];
    let key = prop_oneof![Just("tool_calls"), Just("reasoning_content"), Just("thinking"), Just("name"), Just("other")];
    let message =
        (role, leaf, prop::collection::vec((key, value.clone()), 0..3)).prop_map(|(role, content, fields)| {
            let fields = fields.iter().map(|(key, value)| format!(",{key:?}:{value}")).collect::<String>();
            format!("{{\"role\":{role:?},\"content\":{content}{fields}}}")
        });
    prop_oneof![
        1 => value,
        4 => prop::collection::vec(message, 0..6).prop_map(|messages| format!("[{}]", messages.join(","))),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_record_is_a_text_or_an_error(messages in json(), tools in prop::option::of(json())) {
        let Ok(conversation) = Conversation::parse(&messages, tools.as_deref()) else { return Ok(()) };
        for template in TEMPLATES {
            let tokens = BTreeMap::from([("eos_token".to_string(), "<|endoftext|>".to_string())]);
            let template = ChatTemplate::new(template, &tokens, None, None).unwrap();
            let _ = template.render(&conversation, true);
            for train in [TrainOn::Assistant, TrainOn::Last, TrainOn::All] {
                let Ok(rendered) = template.render_trained(&conversation, train) else { continue };
                let mut last = 0;
                for trained in &rendered.trained {
                    prop_assert!(trained.range.start >= last && trained.range.start < trained.range.end);
                    prop_assert!(rendered.text.get(trained.range.clone()).is_some());
                    last = trained.range.end;
                }
            }
        }
    }

    #[test]
    fn any_template_is_a_text_or_an_error(parts in prop::collection::vec(prop_oneof![
        Just("{% for m in messages %}"), Just("{% endfor %}"), Just("{% generation %}"), Just("{% endgeneration %}"),
        Just("{{ m.content }}"), Just("{%- if m"), Just("%}"), Just("{{"), Just("}}"), Just("'"), Just("{% raw %}"),
        Just("{% endraw %}"), Just("{#"), Just("#}"), Just("{% set a.b = messages[::-1] %}"), Just("é"), Just("{% for"),
        Just(" in "), Just("messages"), Just("\\"), Just("{% endif -%}"), Just("{% if m %}"), Just("|tojson"),
    ], 0..14)) {
        let conversation = Conversation::parse(r#"[{"role": "assistant", "content": "é"}]"#, None).unwrap();
        if let Ok(template) = ChatTemplate::new(&parts.concat(), &BTreeMap::new(), None, None) {
            let _ = template.render_trained(&conversation, TrainOn::Assistant);
        }
    }
}
