use std::borrow::Cow;
use std::io::Read;
use std::sync::LazyLock;

use proptest::prelude::*;

use super::*;

fn rule(json: &str) -> Rule {
    serde_json::from_str(json).unwrap()
}

/// A filter of rules that may name the model `small.ftz`.
fn filter(rules: &[Rule]) -> Result<Filter, RuleError> {
    static MODELS: LazyLock<Models> = LazyLock::new(|| {
        let mut bytes = Vec::new();
        let packed: &[u8] = include_bytes!("../tests/classifiers/quantized-pruned.ftz.gz");
        flate2::read::GzDecoder::new(packed).read_to_end(&mut bytes).unwrap();
        [("small.ftz".to_owned(), FasttextModel::new(bytes.into()).unwrap())].into()
    });
    Filter::new(rules, &MODELS)
}

/// The JSON of a rule; the options may begin with a comma.
fn with_options(rule: &str, options: &str) -> String {
    format!(r#"{{"{rule}": {{{}}}}}"#, options.trim_start_matches(", "))
}

/// The reason for which the rule drops the text; an empty string if it keeps it.
fn reason(json: &str, text: &str) -> &'static str {
    match filter(&[rule(json)]).unwrap().judge(text) {
        Verdict::Keep(_) => "",
        Verdict::Drop(reason) => reason.reason,
    }
}

fn kept(json: &str, text: &str) -> String {
    match filter(&[rule(json)]).unwrap().judge(text) {
        Verdict::Keep(text) => text.into_owned(),
        Verdict::Drop(reason) => panic!("{reason}"),
    }
}

fn error(json: &str) -> String {
    rule(json).check().unwrap_err().to_string()
}

const ALL: &str = r#"[{"length": {"max_words": 100000000, "max_characters": 1000000000}},
    {"language": {"keep": ["eng", "fra"]}}, {"gopher_repetition": {}}, {"gopher_quality": {}}, {"c4": {}},
    {"c4_paragraphs": {}}, {"fineweb": {}}, {"pattern": {"drop_if_match": ["x{3}y"]}}, {"pii": {}},
    {"fasttext": {"model": "small.ftz", "drop": {"0": 0.99}}}]"#;

#[test]
fn a_rule_is_written_and_read() {
    for rule in serde_json::from_str::<Vec<Rule>>(ALL).unwrap() {
        let json = serde_json::to_value(&rule).unwrap();
        assert_eq!(json.as_object().unwrap().keys().collect::<Vec<_>>(), [rule.name()]);
        assert_eq!(serde_json::from_value::<Rule>(json).unwrap(), rule);
        rule.check().unwrap();
    }
}

#[test]
fn unknown_keys_are_errors() {
    for rule in serde_json::from_str::<Vec<Rule>>(ALL).unwrap() {
        let mut json = serde_json::to_value(&rule).unwrap();
        json[rule.name()]["min_wurds"] = 3.into();
        let error = serde_json::from_value::<Rule>(json).unwrap_err().to_string();
        assert!(error.contains("min_wurds"), "{error}");
    }
    let limit = r#"{"gopher_repetition": {"top_ngrams": [{"words": 2, "max_character_share": 0.1, "x": 1}]}}"#;
    assert!(serde_json::from_str::<Rule>(limit).is_err());
    assert!(serde_json::from_str::<Rule>(r#"{"gopher": {}}"#).is_err());
    assert!(serde_json::from_str::<Rule>("{}").is_err());
}

#[test]
fn the_schema_has_every_rule_and_refuses_unknown_keys() {
    let schema = serde_json::to_value(schemars::schema_for!(Rule)).unwrap();
    let names: Vec<&String> = schema["properties"].as_object().unwrap().keys().collect();
    let rules: Vec<Rule> = serde_json::from_str(ALL).unwrap();
    let mut expected: Vec<&str> = rules.iter().map(Rule::name).collect();
    expected.sort_unstable();
    assert_eq!(names, expected);
    assert_eq!((&schema["minProperties"], &schema["maxProperties"]), (&1.into(), &1.into()));
    assert_eq!(schema["additionalProperties"], false);
    for (name, rule) in schema["$defs"].as_object().unwrap().iter().filter(|(_, rule)| rule["type"] == "object") {
        assert_eq!(rule["additionalProperties"], false, "{name}");
    }
}

#[test]
fn an_invalid_option_is_named() {
    assert_eq!(
        error(r#"{"length": {"min_words": 5, "max_words": 4}}"#),
        "length.min_words is 5; valid: at most 4, the value of length.max_words"
    );
    assert_eq!(
        error(r#"{"fasttext": {"model": "small.ftz", "keep": {"0": 2}}}"#),
        "fasttext.keep.0 is 2; valid: 0 to 1"
    );
    let compiled = |json| filter(&[rule(json)]).err().unwrap().to_string();
    assert_eq!(
        compiled(r#"{"fasttext": {"model": "small.ftz", "drop": {"en": 0.5}}}"#),
        "fasttext.drop is en; valid: labels of the model: 0, 2, 1"
    );
    assert_eq!(
        compiled(r#"{"fasttext": {"model": "other.bin", "drop": {"0": 0.5}}}"#),
        "fasttext.model is other.bin; valid: a file that was read"
    );
    assert!(error(r#"{"language": {"keep": ["en"]}}"#).starts_with("language.keep is en; valid: at least one of"));
    assert!(error(r#"{"language": {"keep": []}}"#).starts_with("language.keep is []; valid:"));
    assert_eq!(error(r#"{"language": {"min_confidence": 1.5}}"#), "language.min_confidence is 1.5; valid: 0 to 1");
    assert_eq!(
        error(r#"{"gopher_repetition": {"max_duplicate_line_share": -0.1}}"#),
        "gopher_repetition.max_duplicate_line_share is -0.1; valid: 0 to 1"
    );
    assert_eq!(
        error(r#"{"gopher_repetition": {"top_ngrams": [{"words": 21, "max_character_share": 0.1}]}}"#),
        "gopher_repetition.top_ngrams.words is 21; valid: 1 to 20"
    );
    assert_eq!(
        error(r#"{"gopher_quality": {"max_symbols_per_word": -1.0}}"#),
        "gopher_quality.max_symbols_per_word is -1; valid: at least 0"
    );
    assert_eq!(
        error(r#"{"gopher_quality": {"stop_words": ["a", "a"]}}"#),
        "gopher_quality.min_stop_words is 2; valid: at most 1, the number of different stop_words"
    );
    assert_eq!(error(r#"{"c4": {"max_word_characters": 0}}"#), "c4.max_word_characters is 0; valid: at least 1");
    assert_eq!(
        error(r#"{"fineweb": {"max_short_line_share": 2.0}}"#),
        "fineweb.max_short_line_share is 2; valid: 0 to 1"
    );
    assert_eq!(
        error(r#"{"pii": {"ip_replacements": []}}"#),
        "pii.ip_replacements is []; valid: at least one replacement"
    );
    assert!(error(r#"{"pattern": {}}"#).starts_with("pattern.drop_if_match is []; valid: at least one"));
    assert!(error(r#"{"pattern": {"drop_if_match": ["a", "("]}}"#).starts_with("pattern.drop_if_match is (; valid:"));
    let large = error(r#"{"pattern": {"keep_only_if_match": ["(\\w{999}){999}"]}}"#);
    assert!(large.starts_with("pattern.keep_only_if_match is (\\w{999}){999}; valid:"), "{large}");
}

#[test]
fn every_reason_is_listed() {
    let rules: Vec<Rule> = serde_json::from_str(ALL).unwrap();
    let count = rules.iter().map(|rule| rule.reasons().len()).collect::<Vec<_>>();
    assert_eq!(count, [4, 3, 14, 10, 3, 1, 5, 2, 0, 2]);
    let reasons = rules[2].reasons();
    assert!(reasons.contains(&"top_2_gram") && reasons.contains(&"duplicated_10_n_grams"));
}

#[test]
fn length_bounds_characters_and_words() {
    assert_eq!(reason(r#"{"length": {"min_characters": 4}}"#, "äöü"), "too_few_characters");
    assert_eq!(reason(r#"{"length": {"min_characters": 3, "max_characters": 3}}"#, "äöü"), "");
    assert_eq!(reason(r#"{"length": {"max_characters": 2}}"#, "äöü"), "too_many_characters");
    assert_eq!(reason(r#"{"length": {"min_words": 4}}"#, "One two."), "too_few_words");
    assert_eq!(reason(r#"{"length": {"min_words": 3, "max_words": 3}}"#, "One two."), "");
    assert_eq!(reason(r#"{"length": {"max_words": 2}}"#, "One two."), "too_many_words");
    let unbounded: Rule = serde_json::from_str(r#"{"length": {}}"#).unwrap();
    assert!(unbounded.check().unwrap_err().to_string().contains("no bound"));
}

#[test]
fn language_keeps_confident_detections() {
    let english = "The people of this country have always been proud of what they built with their own hands.";
    let german = "Die Menschen in diesem Land waren immer stolz auf das, was sie mit ihren Händen gebaut haben.";
    assert_eq!(reason(r#"{"language": {}}"#, english), "");
    assert_eq!(reason(r#"{"language": {}}"#, german), "other_language");
    assert_eq!(reason(r#"{"language": {"keep": ["deu", "eng"]}}"#, german), "");
    assert_eq!(reason(r#"{"language": {}}"#, "1234 5678"), "undetected");
    assert_eq!(reason(r#"{"language": {"min_confidence": 1.0}}"#, "the house and the garden"), "not_confident");
}

#[test]
fn patterns_drop_or_keep() {
    let drop = r#"{"pattern": {"drop_if_match": ["(?i)buy now", "^x"]}}"#;
    assert_eq!(["please BUY NOW", "xy", "yx"].map(|text| reason(drop, text)), ["match", "match", ""]);
    let keep = r#"{"pattern": {"keep_only_if_match": ["\\d{3}", "z$"]}}"#;
    assert_eq!(["a 123", "xyz", "12"].map(|text| reason(keep, text)), ["", "", "no_match"]);
}

#[test]
fn repetition_is_dropped_for_each_reason() {
    let reason = |options: &str, text: &str| reason(&with_options("gopher_repetition", options), text);
    let off = r#", "top_ngrams": [], "duplicated_ngrams": []"#;
    assert_eq!(reason("", ""), "empty");
    assert_eq!(reason(off, "ab\n\nab\n\nc"), "dup_para_frac");
    assert_eq!(reason(off, "long paragraph\n\nlong paragraph\n\nc\n\nd\n\ne"), "dup_para_char_frac");
    assert_eq!(reason(off, "a\na\nb"), "dup_line_frac");
    assert_eq!(reason(off, "a longer line\na longer line\nb\nc\nd"), "dup_line_char_frac");
    let lines_off = r#", "max_duplicate_line_share": null, "max_duplicate_line_character_share": 0.0"#;
    assert_eq!(reason(&format!("{lines_off}{off}"), "a\na\nb"), "");
    assert_eq!(reason("", "one two one two one two three"), "top_2_gram");
    let five = "a1 b2 c3 d4 e5 f6 and a1 b2 c3 d4 e5 f6";
    assert_eq!(reason(r#", "top_ngrams": []"#, five), "duplicated_5_n_grams");
    assert_eq!(reason(off, five), "");
}

const WITHOUT_TESTS: &str = r#""min_words": null, "max_words": null, "min_mean_word_characters": null,
    "max_mean_word_characters": null, "max_symbols_per_word": null, "max_bullet_line_share": null,
    "max_ellipsis_line_share": null, "min_alphabetic_word_share": null, "min_stop_words": null"#;

#[test]
fn quality_is_dropped_for_each_reason() {
    let with = |option: &str, text: &str| {
        let mut json: serde_json::Value = serde_json::from_str(&format!("{{{WITHOUT_TESTS}}}")).unwrap();
        let (key, value) = option.split_once('=').unwrap();
        json[key] = serde_json::from_str(value).unwrap();
        reason(&serde_json::json!({"gopher_quality": json}).to_string(), text)
    };
    assert_eq!(with("min_words=3", "one two . . ."), "gopher_short_doc");
    assert_eq!(with("min_words=2", "one two . . ."), "");
    assert_eq!(with("max_words=1", "one two"), "gopher_long_doc");
    assert_eq!(with("max_words=0", "one two"), "");
    assert_eq!(with("min_mean_word_characters=2.5", "ab abc a"), "gopher_below_avg_threshold");
    assert_eq!(with("max_mean_word_characters=2", "ab abc ."), "gopher_above_avg_threshold");
    assert_eq!(with("max_mean_word_characters=2", ". . ."), "");
    assert_eq!(with("max_symbols_per_word=0.3", "# # one two"), "gopher_too_many_hashes");
    assert_eq!(with("max_symbols_per_word=0.3", "one... two…"), "gopher_too_many_ellipsis");
    assert_eq!(with("max_bullet_line_share=0.5", "- a\n • b\nc"), "gopher_too_many_bullets");
    assert_eq!(with("max_ellipsis_line_share=0.5", "a...\nb… \nc"), "gopher_too_many_end_ellipsis");
    assert_eq!(with("min_alphabetic_word_share=0.6", "a 1 2"), "gopher_below_alpha_threshold");
    assert_eq!(with("min_stop_words=2", "the The of, the"), "");
    assert_eq!(with("min_stop_words=2", "the The the"), "gopher_enough_stop_words");
    let own = r#"{"gopher_quality": {"min_words": 1, "stop_words": ["der"], "min_stop_words": 1}}"#;
    assert_eq!(["der Hund", "the dog"].map(|text| reason(own, text)), ["", "gopher_enough_stop_words"]);
    // datatrove raises ZeroDivisionError for these
    assert_eq!(with("max_symbols_per_word=0.1", " \n"), "gopher_short_doc");
    assert_eq!(with("min_alphabetic_word_share=0.1", ""), "gopher_short_doc");
    assert_eq!(with("max_bullet_line_share=0.1", ""), "gopher_short_doc");
    assert_eq!(with("max_bullet_line_share=0.1", " "), "");
    assert_eq!(reason(r#"{"gopher_quality": {}}"#, ""), "gopher_short_doc");
}

#[test]
fn c4_removes_lines() {
    let kept =
        |options: &str, text: &str| kept(&with_options("c4", &format!(r#""min_sentences": null{options}"#)), text);
    let line = "This is one line.";
    assert_eq!(kept("", "This is one line.\nThis is no line\nThis goes on...\nToo short."), line);
    assert_eq!(kept(r#", "remove_unterminated_lines": false"#, "This goes on..."), "This goes on...");
    assert_eq!(kept(r#", "min_words_per_line": null"#, "Too short."), "Too short.");
    assert_eq!(kept(r#", "max_word_characters": 5"#, "This is longer words.\nThis is one line."), line);
    assert_eq!(kept("", "This is one[12] line.[edit]"), line);
    assert_eq!(kept(r#", "remove_citations": false"#, "This is one[12] line."), "This is one[12] line.");
    assert_eq!(kept("", "Please enable JavaScript now.\n This is one line.\u{85}We use cookies here."), line);
    assert_eq!(kept(r#", "remove_javascript_lines": false"#, "Enable javascript now."), "Enable javascript now.");
    assert_eq!(kept(r#", "remove_policy_lines": false"#, "We use cookies here."), "We use cookies here.");
    assert_eq!(
        kept(r#", "remove": "sentences""#, "This is one\nline. Too short. And here another one."),
        "This is one\nline. And here another one."
    );
    assert_eq!(kept("", ""), "");
}

#[test]
fn c4_drops_documents() {
    assert_eq!(reason(r#"{"c4": {}}"#, "Lorem ipsum dolor sit. More."), "lorem_ipsum");
    assert_eq!(reason(r#"{"c4": {}}"#, "This is { a bracket."), "curly_bracket");
    assert_eq!(reason(r#"{"c4": {}}"#, "This is { in no line\nOne two three."), "too_few_sentences");
    assert_eq!(reason(r#"{"c4": {"min_sentences": 2}}"#, "One two three. And four."), "");
    let off = r#"{"c4": {"min_sentences": 1, "drop_lorem_ipsum": false, "drop_curly_brackets": false}}"#;
    assert_eq!(reason(off, "Lorem ipsum { dolor."), "");
}

#[test]
fn c4_paragraphs_need_three_long_lines() {
    let line = "é".repeat(200);
    let rule = r#"{"c4_paragraphs": {}}"#;
    assert_eq!(reason(rule, &format!("{line}\n{line}\nx\n{line}")), "");
    assert_eq!(reason(rule, &format!("{line}\n{line}\n{}", "é".repeat(199))), "< 3 paragraphs");
    assert_eq!(reason(r#"{"c4_paragraphs": {"min_paragraph_characters": 0}}"#, "\n\n"), "");
}

#[test]
fn fineweb_drops_for_each_reason() {
    let reason = |options: &str, text: &str| reason(&with_options("fineweb", options), text);
    let long = "this line is long enough, it has more than thirty characters";
    assert_eq!(reason("", " \n \u{2028}"), "empty");
    assert_eq!(reason("", long), "line_punct_ratio");
    assert_eq!(reason(r#", "keep_if_no_line_is_terminated": true"#, long), "");
    assert_eq!(reason(r#", "terminal_punctuation": ["rs"]"#, long), "");
    assert_eq!(reason(r#", "min_terminated_line_share": 0.0"#, long), "");
    assert_eq!(reason("", "Short line."), "short_line_ratio");
    assert_eq!(reason(r#", "short_line_characters": 5"#, "Short line."), "");
    assert_eq!(reason("", &format!("{long}.\n{long}.")), "char_dup_ratio");
    assert_eq!(reason(r#", "max_duplicate_line_character_share": 0.5"#, &format!("{long}.\n{long}.")), "");
    assert_eq!(reason("", &format!("{long}.{}", "\n".repeat(9))), "list_ratio");
    assert_eq!(reason(r#", "max_newlines_per_word": 1"#, &format!("{long}.{}", "\n".repeat(9))), "");
}

#[test]
fn later_rules_judge_the_changed_text() {
    let rules = [rule(r#"{"c4": {"min_sentences": null}}"#), rule(r#"{"length": {"max_words": 5}}"#)];
    let filter = filter(&rules).unwrap();
    assert!(
        matches!(filter.judge("One two three.\nno line of text at all"), Verdict::Keep(Cow::Owned(text)) if text == "One two three.")
    );
    let Verdict::Drop(reason) = filter.judge("One two three four five.") else { panic!("kept") };
    assert_eq!((reason.rule, reason.to_string().as_str()), (1, "length.too_many_words"));
}

#[test]
fn an_unchanged_text_is_borrowed() {
    let filter = filter(&[rule(r#"{"c4": {"min_sentences": 1}}"#), rule(r#"{"pii": {}}"#)]).unwrap();
    assert!(matches!(filter.judge("One two three."), Verdict::Keep(Cow::Borrowed("One two three."))));
}

#[test]
fn threads_can_share_a_filter() {
    fn shared<T: Send + Sync>() {}
    shared::<Filter>();
}

/// Quadratic time would take minutes. Repeated rules drop such documents early, so each rule judges alone.
#[test]
fn large_repetitive_documents_take_linear_time() {
    let bytes = if cfg!(debug_assertions) { 1 << 17 } else { 1 << 20 };
    let rules: Vec<Rule> = serde_json::from_str(ALL).unwrap();
    let open = r#"[{"gopher_repetition": {"max_duplicate_line_share": null, "max_duplicate_line_character_share": null,
        "max_duplicate_paragraph_share": null, "max_duplicate_paragraph_character_share": null,
        "top_ngrams": [{"words": 2, "max_character_share": 1.0}], "duplicated_ngrams": [{"words": 5, "max_character_share": 1.0}]}},
        {"c4": {"min_sentences": 100000000, "max_word_characters": null, "min_words_per_line": null}}]"#;
    let open: Vec<Rule> = serde_json::from_str(open).unwrap();
    for piece in [
        "a", "word ", " ", "(", ".", "…", "'", "-", "a-", "a.", ":)", "( ", "@", "a@b.", "1.", "[", "[1", "\n",
        "http://", "x{", "é", "中", "5km", "\u{301}", "'s",
    ] {
        let text = piece.repeat(bytes / piece.len());
        for rule in rules.iter().chain(&open) {
            let start = std::time::Instant::now();
            filter(std::slice::from_ref(rule)).unwrap().judge(&text);
            let seconds = start.elapsed().as_secs_f64();
            assert!(seconds < 10.0, "{} takes {seconds} s for {piece:?}", rule.name());
        }
    }
}

fn texts() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        any::<String>(),
        "[a-zA-Z.,:;!?'\"(){}<>@#$%&*+=/_~^0-9-]{0,12}",
        "(Mr\\.|don't|:\\)|a@b\\.co|1\\.2\\.3\\.4|http://a\\.bc/|…|—|é|中|\u{301}|\u{85}|\u{2028}|\n)",
    ];
    prop::collection::vec(word, 0..40).prop_map(|words| words.join(" "))
}

proptest! {
    #[test]
    fn no_text_makes_judge_panic(text in texts()) {
        let rules: Vec<Rule> = serde_json::from_str(ALL).unwrap();
        for rule in &rules {
            filter(std::slice::from_ref(rule)).unwrap().judge(&text);
        }
        filter(&rules).unwrap().judge(&text);
    }

    #[test]
    fn without_a_changing_rule_the_text_is_borrowed(text in texts()) {
        let rules = [rule(r#"{"length": {"max_words": 99}}"#), rule(r#"{"pattern": {"drop_if_match": ["qqqq"]}}"#)];
        if let Verdict::Keep(kept) = filter(&rules).unwrap().judge(&text) {
            prop_assert!(matches!(kept, Cow::Borrowed(kept) if kept == text));
        }
    }

    #[test]
    fn words_and_sentences_cover_the_text(text in texts()) {
        let without_space: String = text.chars().filter(|&c| !python::is_space(c)).collect();
        prop_assert_eq!(words(&text).concat(), without_space);
        prop_assert_eq!(sentences(&text).concat(), text);
    }
}
