//! A teacher whose weights do not match its configuration is refused, both from headers and when it is loaded.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use stillhouse_teacher::{LoadOptions, Runs, Teacher, check_weights, load};

use super::*;

type Tensors = HashMap<String, Tensor>;

fn tensors(model: &str) -> Tensors {
    candle_core::safetensors::load(testdata(model).join("model.safetensors"), &Device::Cpu).unwrap()
}

/// Writes a model with these tensors, and with these changes to its `config.json`.
fn folder(model: &str, tensors: &Tensors, changes: &[(&str, serde_json::Value)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let config = fs::read_to_string(testdata(model).join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    for (key, value) in changes {
        config[key] = value.clone();
    }
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    candle_core::safetensors::save(tensors, folder.path().join("model.safetensors")).unwrap();
    folder
}

/// Returns the error of loading a model, after checking that the headers alone give the same error.
#[track_caller]
fn verdict(path: &Path) -> Option<String> {
    let checked = check_weights(path, &[]).err().map(|e| e.to_string());
    assert_eq!(load_on_host(path, Precision::F32).err().map(|e| e.to_string()), checked);
    checked
}

#[track_caller]
fn refused(path: &Path, parts: &[&str]) {
    let error = verdict(path).expect("refused");
    for part in parts {
        assert!(error.contains(part), "`{part}` is not in `{error}`");
    }
}

fn layers_key(model: &str) -> &'static str {
    if model == "gpt2" { "n_layer" } else { "num_hidden_layers" }
}

#[test]
fn every_tensor_is_there_and_no_other() {
    for model in MODELS {
        let all = tensors(model);
        assert_eq!(verdict(folder(model, &all, &[]).path()), None);
        for name in all.keys() {
            let mut some = all.clone();
            let tensor = some.remove(name).unwrap();
            let bare = name.strip_prefix("transformer.").or(name.strip_prefix("model.")).unwrap_or(name);
            refused(folder(model, &some, &[]).path(), &["model.safetensors", bare, "is missing"]);
            // Under another name, the tensor is missing and there is also an unused one.
            some.insert(name.clone(), tensor.clone());
            some.insert(format!("{name}_scale"), tensor);
            let other = format!("`{name}_scale`");
            refused(
                folder(model, &some, &[]).path(),
                &["model.safetensors", "1 tensor is not part", &other, "config.json: model_type"],
            );
        }
    }
}

#[test]
fn a_number_of_layers_that_is_not_the_weights_is_refused() {
    for model in MODELS {
        let all = tensors(model);
        let (key, layers) = (layers_key(model), if model == "qwen3" { 2 } else { 3 });
        for configured in 1..layers + 3 {
            // Removes the list of layer types, which would contradict the number first.
            let changed = folder(model, &all, &[(key, configured.into()), ("layer_types", serde_json::Value::Null)]);
            match configured {
                configured if configured < layers => {
                    let first = format!(".{configured}.");
                    refused(
                        changed.path(),
                        &["model.safetensors", "tensors are not part", &first, &format!("{key} {configured}")],
                    );
                }
                configured if configured > layers => refused(changed.path(), &[&format!(".{layers}."), "is missing"]),
                _ => assert_eq!(verdict(changed.path()), None),
            }
        }
    }
}

#[test]
fn a_switch_that_leaves_weights_out_is_refused() {
    let mut biased = tensors("llama-gqa");
    for layer in 0..3 {
        for (part, width) in [("q", 48), ("k", 16), ("v", 16), ("o", 48)] {
            let name = format!("model.layers.{layer}.self_attn.{part}_proj.bias");
            biased.insert(name, Tensor::ones(width, DType::F32, &Device::Cpu).unwrap());
        }
    }
    assert_eq!(verdict(folder("llama-gqa", &biased, &[("attention_bias", true.into())]).path()), None);
    let left_out = folder("llama-gqa", &biased, &[]);
    refused(left_out.path(), &["12 tensors are not part", "layers.0.self_attn.k_proj.bias`", "attention_bias false"]);
    // Without the check, a Llama would run with a Qwen3's weights and ignore the norms of its heads.
    let llama = folder("qwen3", &tensors("qwen3"), &[("model_type", "llama".into())]);
    refused(llama.path(), &["4 tensors are not part", "self_attn.k_norm.weight`", "model_type \"llama\""]);
}

#[test]
fn known_buffers_are_excepted_by_name() {
    let one = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
    let buffers = [
        ("gpt2", "transformer.h.2.attn.bias"),
        ("gpt2", "transformer.h.0.attn.masked_bias"),
        ("llama-gqa", "model.layers.2.self_attn.rotary_emb.inv_freq"),
        ("qwen3", "model.rotary_emb.inv_freq"),
    ];
    for (model, name) in buffers {
        let mut all = tensors(model);
        all.insert(name.into(), one(&[1, 1, 4, 4]));
        assert_eq!(verdict(folder(model, &all, &[]).path()), None, "{name}");
    }
    let others = [
        ("gpt2", "transformer.h.3.attn.bias"),
        ("gpt2", "h.0.attn.bias"),
        ("gpt2", "transformer.h.0.attn.bias2"),
        ("gpt2", "transformer.h.x.attn.bias"),
        ("llama-gqa", "model.layers.2.attn.bias"),
        ("llama-gqa", "model.layers.2.self_attn.inv_freq"),
    ];
    for (model, name) in others {
        let mut all = tensors(model);
        all.insert(name.into(), one(&[1, 1, 4, 4]));
        refused(folder(model, &all, &[]).path(), &["1 tensor is not part", &format!("`{name}`")]);
    }
}

#[test]
fn a_tied_head_in_the_file_is_the_embedding() {
    for (model, embedding) in [("gpt2", "transformer.wte.weight"), ("llama-gqa", "model.embed_tokens.weight")] {
        let mut all = tensors(model);
        let head = all[embedding].clone();
        all.insert("lm_head.weight".into(), head.clone());
        assert_eq!(verdict(folder(model, &all, &[]).path()), None);
        all.insert("lm_head.weight".into(), (&head * 1.5).unwrap());
        let other = folder(model, &all, &[]);
        // Headers cannot reveal the difference; loading does, before any work.
        check_weights(other.path(), &[]).unwrap();
        let error = load_on_host(other.path(), Precision::F32).err().unwrap().to_string();
        assert!(error.contains(&format!("`lm_head.weight` is not equal to `{embedding}`")), "{error}");
        assert!(error.contains("`tie_word_embeddings`"), "{error}");
        assert_eq!(verdict(folder(model, &all, &[("tie_word_embeddings", false.into())]).path()), None);
        all.insert("lm_head.weight".into(), head.narrow(0, 0, 7).unwrap());
        refused(folder(model, &all, &[]).path(), &["lm_head.weight", "[7, 48]"]);
    }
}

#[test]
fn a_tensor_of_two_files_or_of_whole_numbers_is_refused() {
    let all = tensors("llama-gqa");
    let name = "model.norm.weight";
    let sharded = folder("llama-gqa", &all, &[]);
    let second = sharded.path().join("other.safetensors");
    candle_core::safetensors::save(&HashMap::from([(name, all[name].clone())]), &second).unwrap();
    let index =
        |a: &str| format!(r#"{{"weight_map": {{"{name}": "{a}", "model.embed_tokens.weight": "model.safetensors"}}}}"#);
    fs::write(sharded.path().join("model.safetensors.index.json"), index("other.safetensors")).unwrap();
    refused(sharded.path(), &["other.safetensors", name, "is in", "model.safetensors too"]);

    let mut counted = all.clone();
    counted.insert(name.into(), all[name].to_dtype(DType::U8).unwrap());
    refused(folder("llama-gqa", &counted, &[]).path(), &[name, "has type U8", "BF16"]);
}

#[test]
fn weights_of_several_files_are_named_together() {
    let (mut first, mut second) = (tensors("gpt2"), Tensors::new());
    for layer in 1..3 {
        let moved: Vec<String> = first.keys().filter(|name| name.contains(&format!(".h.{layer}."))).cloned().collect();
        second.extend(moved.into_iter().map(|name| first.remove_entry(&name).unwrap()));
    }
    let sharded = folder("gpt2", &first, &[("n_layer", 1.into())]);
    candle_core::safetensors::save(&second, sharded.path().join("more.safetensors")).unwrap();
    fs::write(
        sharded.path().join("model.safetensors.index.json"),
        r#"{"weight_map": {"a": "model.safetensors", "b": "more.safetensors"}}"#,
    )
    .unwrap();
    refused(
        sharded.path(),
        &["more.safetensors: 24 tensors are not part", "`transformer.h.1.attn.c_attn.bias`", ", …; valid"],
    );
}

/// The backbone of a student with extra heads works as a teacher once the heads are ignored by name.
#[test]
fn tensors_that_are_named_are_ignored_and_no_others() {
    for model in MODELS {
        let all = tensors(model);
        let mut student = all.clone();
        for head in 0..3 {
            let weight = Tensor::new(&[[1f32, 2.0], [3.0, head as f32]], &Device::Cpu).unwrap();
            student.insert(format!("medusa_head.{head}.0.linear.weight"), weight.clone());
            student.insert(format!("medusa_head.{head}.1.weight"), weight);
        }
        let folder = folder(model, &student, &[]);
        refused(folder.path(), &["6 tensors are not part", "`medusa_head.0.0.linear.weight`"]);
        let ignoring = |patterns: &[&str]| {
            let ignore_tensors: Vec<String> = patterns.iter().map(|pattern| (*pattern).to_owned()).collect();
            let checked = check_weights(folder.path(), &ignore_tensors).err().map(|e| e.to_string());
            let options = LoadOptions { device: DeviceChoice::Cpu, ignore_tensors, ..LoadOptions::default() };
            let loaded = load(folder.path(), &options);
            assert_eq!(loaded.as_ref().err().map(ToString::to_string), checked);
            loaded.map_err(|e| e.to_string())
        };
        let teacher = ignoring(&["medusa_head.*"]).unwrap();
        let own = load(&testdata(model), &LoadOptions { device: DeviceChoice::Cpu, ..LoadOptions::default() }).unwrap();
        assert_eq!(teacher.info().parameters, own.info().parameters);
        let logits = |teacher: &dyn Teacher| {
            let mut runs = Runs::new();
            runs.push([1, 2, 3, 4]);
            let (hidden, mut logits) = (teacher.pass(&runs).unwrap(), teacher.buffer().unwrap());
            teacher.slice(&hidden, &[0, 1, 2, 3], &mut logits).unwrap();
            logits.on_host().unwrap().into_owned()
        };
        assert_eq!(logits(teacher.as_ref()), logits(own.as_ref()));
        for (patterns, expected) in [
            (&["medusa_head.0.*"][..], "4 tensors are not part"),
            (&["medusa_head.*", "eagle.*"], "`eagle.*` matches no tensor"),
            (&["medusa_head"], "`medusa_head` matches no tensor"),
            (&["*weight"], "which is part of the model"),
            (&["medusa_head.*", "*"], "`*` matches"),
        ] {
            let error = ignoring(patterns).err().unwrap_or_default();
            assert!(error.contains(expected), "{patterns:?}: {error}");
        }
    }
}
