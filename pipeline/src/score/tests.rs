use std::fs;

use serde_json::{Value, json};
use stillhouse_gpu_host::Host;
use stillhouse_teacher::stillhouse_gpu::Device;
use stillhouse_teacher::{LoadOptions, Logits, gpu};
use stillhouse_tests::nano_teacher;
use tempfile::TempDir;

use super::*;

/// Values from `scripts/score-goldens`: transformers, numpy, and MAUVE's own code.
fn goldens() -> Value {
    serde_json::from_str(include_str!("goldens.json")).unwrap()
}

fn options(folder: &TempDir, golden: &Value) -> ScoreOptions {
    let lines: Vec<String> =
        golden["texts"].as_array().unwrap().iter().map(|t| json!({"text": t["text"]}).to_string()).collect();
    let file = folder.path().join("texts.jsonl");
    // an empty text in the middle
    fs::write(&file, [&lines[..2], &["{\"text\":\"\"}".to_owned()], &lines[2..]].concat().join("\n")).unwrap();
    ScoreOptions {
        file: file.display().to_string(),
        reference: None,
        format: None,
        text: "text".into(),
        document: TextDocument::Line,
        teacher: nano_teacher().display().to_string(),
        tokenizer: None,
        device: "cpu".into(),
        dtype: Dtype::F32,
        batch_tokens: 100,
        window_tokens: golden["window"].as_u64().unwrap() as u32,
        stride_tokens: golden["stride"].as_u64().unwrap() as u32,
        first_token: FirstToken::Bos,
        special_tokens: SpecialTokens::Parse,
        most_texts: 100,
        mauve: MauveOptions::default(),
    }
}

fn scored(options: &ScoreOptions) -> Result<(Scores, Vec<TextScore>)> {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _entered = runtime.enter();
    let mut texts = Vec::new();
    let scores = score(options, &crate::events::NullObserver, &mut |text| {
        texts.push(text.clone());
        Ok(())
    })?;
    Ok((scores, texts))
}

#[test]
fn texts_have_the_scores_that_transformers_gives_them() {
    let (folder, golden) = (TempDir::new().unwrap(), goldens());
    for (first_token, name) in [(FirstToken::Bos, "bos"), (FirstToken::Given, "given")] {
        let (scores, texts) = scored(&ScoreOptions { first_token, ..options(&folder, &golden) }).unwrap();
        let expected: Vec<&Value> =
            golden["texts"].as_array().unwrap().iter().filter(|text| text[name]["predicted"] != 0).collect();
        assert_eq!(texts.len(), expected.len());
        // texts are numbered like the records: the third has no token
        let numbers: &[u64] = if name == "bos" { &[0, 1, 3, 4, 5] } else { &[0, 1, 4, 5] };
        assert_eq!(texts.iter().map(|text| text.text).collect::<Vec<_>>(), numbers);
        let (mut nats, mut predicted, mut perplexities) = (0.0, 0, Vec::new());
        for (got, expected) in texts.iter().zip(&expected) {
            let of = &expected[name];
            assert_eq!(got.tokens, expected["tokens"].as_u64().unwrap());
            assert_eq!(got.predicted, of["predicted"].as_u64().unwrap());
            let mean = of["nats"].as_f64().unwrap() / got.predicted as f64;
            assert!((got.perplexity / mean.exp() - 1.0).abs() < 1e-5, "{} {}", got.perplexity, mean.exp());
            assert!((got.entropy_nats - expected["entropy"].as_f64().unwrap()).abs() < 1e-12);
            nats += of["nats"].as_f64().unwrap();
            predicted += got.predicted;
            perplexities.push(mean.exp());
        }
        assert_eq!((scores.texts, scores.empty_texts), (expected.len() as u64, 6 - expected.len() as u64));
        assert!((scores.perplexity / (nats / predicted as f64).exp() - 1.0).abs() < 1e-5);
        let n = perplexities.len() as f64;
        let mean = perplexities.iter().sum::<f64>() / n;
        let error = (perplexities.iter().map(|p| (p - mean).powi(2)).sum::<f64>() / (n - 1.0) / n).sqrt();
        assert!((scores.text_perplexity.mean / mean - 1.0).abs() < 1e-5);
        assert!((scores.text_perplexity.standard_error.unwrap() / error - 1.0).abs() < 1e-5);
    }
}

#[test]
fn scores_are_the_same_however_tokens_share_a_pass() {
    let (folder, golden) = (TempDir::new().unwrap(), goldens());
    let of = |batch_tokens, stride_tokens| {
        scored(&ScoreOptions { batch_tokens, stride_tokens, ..options(&folder, &golden) }).unwrap().1
    };
    assert_eq!(of(64, 24), of(100_000, 24));
    // windows that do not overlap: as in the guide, the first token of each but the first is not predicted
    let apart = of(64, 64);
    assert_eq!(apart[0].predicted, 285 - 4);
    // the smallest stride gives every token the longest context
    assert!(of(64, 1)[0].nats < of(64, 64)[0].nats / 281.0 * 285.0);
}

/// The teacher of these options on the host, and on the host as a device that takes a GPU's place.
fn teachers(options: &ScoreOptions, prepared: &Prepared) -> [Arc<dyn Teacher>; 2] {
    let on_host = load(prepared, options, &crate::events::NullObserver).unwrap();
    let device: Arc<dyn Device> = Arc::new(Host::new(5));
    let loaded = LoadOptions { batch_tokens: 200, length: 64, ..LoadOptions::default() };
    let on_device = gpu::load(&nano_teacher(), &device, &loaded).unwrap();
    assert!(matches!(on_device.buffer().unwrap(), Logits::Device(_)));
    [on_host, on_device.into()]
}

#[test]
fn the_features_of_mauve_are_the_last_hidden_states() {
    let (folder, golden) = (TempDir::new().unwrap(), goldens());
    let options = options(&folder, &golden);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _entered = runtime.enter();
    let observer = crate::events::NullObserver;
    let prepared = Arc::new(job::prepare(&options, &options.file, "FILE", &observer).unwrap());
    // the first four records, of which the third has no token
    let mut expected = Features::default();
    for text in &golden["texts"].as_array().unwrap()[..3] {
        expected
            .push(&text["state"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect::<Vec<_>>());
    }
    let [host, device] = teachers(&options, &prepared);
    // in passes of their own, and in passes with windows that are scored
    for (teacher, scores) in [(&host, false), (&host, true), (&device, false)] {
        let texts = Texts { options: &options, prepared: &prepared, teacher, most_texts: 4, scores };
        let features = texts.run(&observer, "texts", &mut |_| Ok(())).unwrap();
        assert_eq!(features.len(), 3);
        let off = features.distance(&expected);
        assert!(off < 1e-3, "{}: {off}", teacher.info().device);
    }
}

/// Computes perplexity and MAUVE together, on a device and on the host. One reference text is longer than a window.
#[test]
fn a_teacher_on_a_device_gives_mauve_too() {
    let (folder, golden) = (TempDir::new().unwrap(), goldens());
    let mut options = options(&folder, &golden);
    let texts =
        |rows: &[&str]| rows.iter().map(|text| json!({"text": text}).to_string()).collect::<Vec<_>>().join("\n");
    let [file, other] = ["file.jsonl", "other.jsonl"].map(|name| folder.path().join(name));
    let long = "one and two and three and four and five ".repeat(20);
    // few tokens, because the host computes logits over the whole vocabulary for each
    fs::write(&file, texts(&["A red house", "in May", "2, 3, 5", "It is", "Oh"])).unwrap();
    fs::write(&other, texts(&["One sheep.", "Two cows", &long, "in the red house", "1, 2, 3, 4, 5"])).unwrap();
    options.file = file.display().to_string();
    options.reference = Some(other.display().to_string());
    options.mauve = MauveOptions { clusters: Some(3), ..MauveOptions::default() };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _entered = runtime.enter();
    let observer = crate::events::NullObserver;
    let prepared = Arc::new(job::prepare(&options, &options.file, "FILE", &observer).unwrap());
    let reference = Arc::new(job::prepare(&options, &other.display().to_string(), "--reference", &observer).unwrap());
    let of = |teacher: Arc<dyn Teacher>| {
        score_under(&teacher, &options, &prepared, Some(&reference), &observer, &mut |_| Ok(())).unwrap()
    };
    let [host, device] = teachers(&options, &prepared).map(of);
    assert!((host.perplexity / device.perplexity - 1.0).abs() < 1e-4, "{} {}", host.perplexity, device.perplexity);
    let [host, device] = [host, device].map(|scores| scores.mauve.unwrap());
    assert!((host.mauve - device.mauve).abs() < 1e-9, "{} {}", host.mauve, device.mauve);
    assert!((0.0..1.0).contains(&host.mauve), "{}", host.mauve);
}

/// Same as `points` of `scripts/score-goldens`.
fn points(count: usize, seed: u64, centres: &Value) -> Features {
    let (mut state, mut features) = (seed, Features::default());
    let centres = centres.as_array().unwrap();
    for at in 0..count {
        let row: Vec<f32> = (0..6)
            .map(|axis| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let part = (state >> 40) as f64 / f64::from(1 << 24) * 0.1;
                (part + if centres[at % centres.len()] == axis { 1.0 } else { 0.0 }) as f32
            })
            .collect();
        features.push(&row);
    }
    features
}

#[test]
fn mauve_is_that_of_its_authors() {
    for case in goldens()["mauve"].as_array().unwrap() {
        let (p, q) = (points(60, 1, &case["p"]), points(40, 2, &case["q"]));
        let options = MauveOptions { clusters: Some(4), ..MauveOptions::default() };
        let found = mauve(&p, &q, &options).unwrap();
        let of = |name: &str| case[name].as_f64().unwrap();
        assert!((found.frontier_integral - of("frontier_integral")).abs() < 1e-9);
        assert!((found.frontier_integral_star - of("frontier_integral_star")).abs() < 1e-9);
        if case["p"] == case["q"] {
            // the authors' sort gives 0.75
            assert_eq!((found.mauve, found.mauve_star), (1.0, 1.0));
        } else {
            assert!((found.mauve - of("mauve")).abs() < 1e-9, "{} {}", found.mauve, of("mauve"));
            assert!((found.mauve_star - of("mauve_star")).abs() < 1e-9);
        }
        assert_eq!(mauve(&p, &q, &options).unwrap(), found);
    }
}

#[test]
fn what_mauve_cannot_compare_is_told() {
    let some = points(30, 1, &json!([0, 1, 2]));
    let mut narrow = Features::default();
    (0..3).for_each(|_| narrow.push(&[1.0, 2.0]));
    let mut broken = some.clone();
    broken.push(&[0.0, f32::NAN, 0.0, 0.0, 0.0, 0.0]);
    let plain = MauveOptions::default();
    let many = MauveOptions { clusters: Some(61), ..plain };
    for (p, q, options, says) in [
        (&some, &Features::default(), plain, "MAUVE of 30 and 0 texts; valid: two or more on each side"),
        (&some, &narrow, plain, "features of 6 and 2 numbers"),
        (&some, &broken, plain, "a hidden state that is no number"),
        (&some, &some, many, "61 clusters of 60 texts"),
    ] {
        let said = mauve(p, q, &options).unwrap_err();
        assert!(said.contains(says), "{said}");
    }
    // all points are equal: some clusters have no points, and the histograms are equal
    let mut same = Features::default();
    (0..20).for_each(|_| same.push(&[1.0, 2.0]));
    assert_eq!(mauve(&same, &same, &plain).unwrap().mauve, 1.0);
}

#[test]
fn what_cannot_be_scored_is_told_by_the_names_of_the_options() {
    let (folder, golden) = (TempDir::new().unwrap(), goldens());
    let good = options(&folder, &golden);
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let file = |file: String| ScoreOptions { file, ..good.clone() };
    for (options, says) in [
        (file("nowhere.jsonl".into()), "FILE: got \"nowhere.jsonl\": no such file"),
        (file(write("texts.abc", "x")), "--format jsonl, text, csv, parquet or arrow"),
        (file(write("empty.jsonl", "")), "no text in which a token is to be predicted (0 without)"),
        (file(write("blank.jsonl", "{\"text\":\"\"}\n")), "no text in which a token is to be predicted (1 without)"),
        (file(write("broken.jsonl", "{\"text\":\n")), "line 1: broken JSON"),
        (ScoreOptions { text: "body".into(), ..good.clone() }, "no key \"body\""),
        (ScoreOptions { teacher: "nowhere".into(), ..good.clone() }, "--teacher: got \"nowhere\": no file or folder"),
        (
            ScoreOptions { window_tokens: 2048, ..good.clone() },
            "--window-tokens: got 2048: longer than the teacher's context",
        ),
        (
            ScoreOptions { reference: Some("nowhere.txt".into()), ..good.clone() },
            "--reference: got \"nowhere.txt\": no such file",
        ),
    ] {
        let said = scored(&options).map(|_| ()).unwrap_err().to_string();
        assert!(said.contains(says), "{says:?} is not in {said:?}");
    }
}
