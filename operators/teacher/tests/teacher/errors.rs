use std::fs;
use std::path::Path;

use stillhouse_teacher::{TeacherConfig, check_weights, parse_devices};

use super::*;

/// Copies a model and edits its `config.json`.
fn edited(model: &str, from: &str, to: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(testdata(model).join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let config = fs::read_to_string(testdata(model).join("config.json")).unwrap();
    assert!(config.contains(from), "{from} is not in the config");
    fs::write(folder.path().join("config.json"), config.replace(from, to)).unwrap();
    folder
}

fn complaint(path: &Path) -> String {
    match load_on_host(path, Precision::F32) {
        Ok(_) => panic!("loaded"),
        Err(error) => error.to_string(),
    }
}

pub(crate) fn assert_all(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in `{text}`");
    }
}

#[test]
fn config_is_read_without_weights() {
    let folder = edited("llama-gqa", r#""eos_token_id": 2"#, r#""eos_token_id": [7, 2]"#);
    fs::write(folder.path().join("model.safetensors"), b"never read").unwrap();
    let config = TeacherConfig::read(folder.path()).unwrap();
    assert_eq!((config.architecture.name(), config.vocab_size), ("llama", 199));
    assert_eq!((config.bos_token_id, config.eos_token_id), (Some(1), Some(7)));
    let qwen = TeacherConfig::read(&testdata("qwen3")).unwrap();
    assert_eq!((qwen.architecture.name(), qwen.bos_token_id, qwen.max_positions), ("qwen3", None, 128));
}

#[test]
fn what_is_not_supported_is_refused_with_what_is() {
    let other = edited("qwen3", r#""model_type": "qwen3""#, r#""model_type": "mamba""#);
    assert_all(
        &complaint(other.path()),
        &["config.json", "model_type", "mamba", "gpt2, llama, mistral", "olmo2, phi3"],
    );
    let rope = edited("llama-gqa", r#""rope_type": "default""#, r#""rope_type": "spiral""#);
    let valid = "default, linear, dynamic, llama3, yarn, longrope";
    assert_all(&complaint(rope.path()), &["rope_parameters.rope_type", "spiral", valid]);
    let yarn = edited("llama-gqa", r#""rope_type": "default""#, r#""rope_type": "linear""#);
    assert_all(&complaint(yarn.path()), &["rope_parameters.factor", "nothing", "a number above 0"]);
    let gelu = edited("gpt2", "gelu_new", "relu");
    assert_all(&complaint(gelu.path()), &["activation_function", "relu", "gelu_new"]);
    let heads = edited("llama-gqa", r#""num_key_value_heads": 2"#, r#""num_key_value_heads": 4"#);
    assert_all(&complaint(heads.path()), &["num_key_value_heads", "4", "divisor"]);
    let eos = edited("llama-gqa", r#""eos_token_id": 2"#, r#""eos_token_id": "</s>""#);
    assert_all(&complaint(eos.path()), &["eos_token_id", "</s>", "null"]);
    let vocab = edited("llama-gqa", r#""vocab_size": 199"#, r#""vocab_size": null"#);
    assert_all(&complaint(vocab.path()), &["vocab_size", "nothing"]);
}

#[test]
fn weights_that_do_not_fit_are_named() {
    let wide = edited("llama-gqa", r#""intermediate_size": 96"#, r#""intermediate_size": 97"#);
    assert_all(&complaint(wide.path()), &["model.safetensors", "gate_proj.weight", "[96, 48]", "[97, 48]"]);
    let untied = edited("llama-gqa", r#""tie_word_embeddings": true"#, r#""tie_word_embeddings": false"#);
    assert_all(&complaint(untied.path()), &["model.safetensors", "lm_head.weight", "missing"]);
    let bias = edited("llama-gqa", r#""attention_bias": false"#, r#""attention_bias": true"#);
    assert_all(&complaint(bias.path()), &["q_proj.bias", "missing"]);
}

#[test]
fn damaged_and_absent_files_are_named() {
    let folder = edited("gpt2", "gpt2", "gpt2");
    let weights = folder.path().join("model.safetensors");
    let whole = fs::read(&weights).unwrap();
    for length in [0, 7, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&weights, &whole[..length]).unwrap();
        assert_all(&complaint(folder.path()), &["model.safetensors", "cut short"]);
    }
    fs::remove_file(&weights).unwrap();
    assert_all(&complaint(folder.path()), &["cannot read", "model.safetensors"]);
    fs::write(folder.path().join("config.json"), "{").unwrap();
    assert_all(&complaint(folder.path()), &["config.json", "json"]);
    assert_all(&complaint(Path::new("nowhere.gguf")), &["nowhere.gguf"]);
}

#[test]
fn inputs_are_checked() {
    let teacher = teacher("gpt2", Precision::F32);
    let hidden = |tokens: &[u32], batch, length| teacher.hidden(tokens, batch, length).unwrap_err().to_string();
    assert_all(&hidden(&[0; 65], 1, 65), &["length", "65", "1 to 64"]);
    assert_all(&hidden(&[0; 5], 2, 3), &["number of tokens", "5", "2 sequences of 3"]);
    assert_all(&hidden(&[], 0, 3), &["number of tokens", "at least one"]);
    assert_all(&hidden(&[3, 211], 1, 2), &["token", "211", "0 to 210"]);
    let narrow = Tensor::zeros((2, 47), DType::F32, &Device::Cpu).unwrap();
    assert_all(&teacher.logits(&narrow).unwrap_err().to_string(), &["[2, 47]", "[n, 48]"]);
    assert_all(&teacher.logits_into(&narrow, &mut Vec::new()).unwrap_err().to_string(), &["[2, 47]"]);
}

#[test]
fn devices_and_types_are_parsed() {
    for name in ["auto", "cpu", "cuda:0", "cuda:3"] {
        assert_eq!(name.parse::<DeviceChoice>().unwrap().to_string(), name);
    }
    assert_all(&"gpu".parse::<DeviceChoice>().unwrap_err().to_string(), &["gpu", "auto, cpu, cuda, cuda:N"]);
    assert_all(&"int4".parse::<Precision>().unwrap_err().to_string(), &["int4", "f32, bf16, f16, bf16x3, fp8"]);
    assert_eq!(parse_devices("cuda:1").unwrap(), [DeviceChoice::Cuda(1)]);
    assert_eq!(parse_devices("cuda:1,cuda:0").unwrap(), [DeviceChoice::Cuda(1), DeviceChoice::Cuda(0)]);
    assert_all(&parse_devices("cuda:1,cuda:1").unwrap_err().to_string(), &["there twice", "`cuda:1`"]);
    assert_all(&parse_devices("cpu,cuda:0").unwrap_err().to_string(), &["one of several devices", "`cpu`"]);
    assert_all(&parse_devices("cuda:0,").unwrap_err().to_string(), &["device: got ``", "all, or several cuda:N"]);
    if !cfg!(feature = "cuda") {
        assert_all(&DeviceChoice::Cuda(0).open().unwrap_err().to_string(), &["cuda:0", "valid: cpu"]);
        assert!(DeviceChoice::Auto.open().unwrap().is_cpu());
        assert_all(&parse_devices("all").unwrap_err().to_string(), &["all", "no GPU", "valid: cpu"]);
    }
}

#[test]
fn an_index_names_files_of_its_folder_only() {
    let folder = edited("llama-gqa", r#""eos_token_id": 2"#, r#""eos_token_id": 2"#);
    let index = folder.path().join("model.safetensors.index.json");
    let outside = testdata("llama-gqa").join("model.safetensors");
    for name in [
        "\"../model.safetensors\"".to_owned(),
        "\"x/../../model.safetensors\"".to_owned(),
        "\"/etc/passwd\"".to_owned(),
        format!("{:?}", outside.display().to_string()),
        "\"\"".to_owned(),
        "\".\"".to_owned(),
        "\"..\"".to_owned(),
        "7".to_owned(),
    ] {
        fs::write(&index, format!("{{\"weight_map\": {{\"a.weight\": {name}}}}}")).unwrap();
        let text = complaint(folder.path());
        assert_all(&text, &["model.safetensors.index.json", "weight_map.a.weight", &name, "relative, without .."]);
        assert!(TeacherConfig::read(folder.path()).is_err(), "{name}");
    }
    fs::write(&index, r#"{"weight_map": {"a.weight": "model.safetensors"}}"#).unwrap();
    assert_eq!(TeacherConfig::read(folder.path()).unwrap().weights, [folder.path().join("model.safetensors")]);
}

/// A key that affects logits in some program but not in this one is refused by name, in every family.
#[test]
fn keys_that_nothing_honours_are_refused_by_name() {
    let with =
        |model: &str, more: &str| edited(model, r#""use_cache": true"#, &format!(r#""use_cache": true, {more}"#));
    for (model, key, value) in [
        ("llama-gqa", "quantization_config", r#"{"quant_method": "fp8"}"#),
        ("gpt2", "quantization_config", r#"{"quant_method": "gptq", "bits": 4}"#),
        ("llama-gqa", "sliding_window", "16"),
        ("llama-gqa", "final_logit_softcapping", "30.0"),
        ("qwen3", "attn_logit_softcapping", "50.0"),
        ("llama-gqa", "logits_scaling", "8.0"),
        ("qwen3", "embedding_multiplier", "12.0"),
        ("qwen3", "attention_multiplier", "0.0078125"),
        ("llama-gqa", "rope_scaling", r#"{"rope_type": "linear", "factor": 2.0}"#),
        ("llama-gqa", "rope_theta", "10000.0"),
        ("gpt2", "rope_theta", "10000.0"),
        ("llama-gqa", "rope_interleaved", "true"),
        ("llama-gqa", "layer_types", r#"["full_attention", "sliding_attention", "full_attention"]"#),
        ("gpt2", "is_encoder_decoder", "true"),
        ("gpt2", "pruned_heads", r#"{"0": [1]}"#),
        ("llama-gqa", "clip_qkv", "8.0"),
        ("qwen3", "query_pre_attn_scalar", "24"),
    ] {
        let error = complaint(with(model, &format!("{key:?}: {value}")).path());
        assert_all(&error, &["config.json", &format!("field `{key}`: got"), "valid: "]);
    }
    let error = complaint(with("gpt2", r#""quantization_config": {"bits": 4}"#).path());
    assert_all(&error, &["valid: null or no such key: weights in f32, f16 or bf16", ".gguf"]);
    // A key inside the rotation's object.
    let inside = r#""rope_theta": 100000.0, "attention_factor": 2.0"#;
    let error = complaint(edited("llama-gqa", r#""rope_theta": 100000.0"#, inside).path());
    assert_all(&error, &["rope_parameters.attention_factor", "got 2.0", "rope_type"]);
    // A model with an adapter.
    let adapted = edited("gpt2", "gpt2", "gpt2");
    fs::write(adapted.path().join("adapter_config.json"), r#"{"peft_type": "LORA", "r": 8}"#).unwrap();
    assert_all(&complaint(adapted.path()), &["adapter_config.json", "peft_type", "LORA", "merge the adapter"]);

    // Neutral values are accepted, and unknown keys cause a warning.
    for (more, expected) in [
        (
            r#""sliding_window": null, "logit_scale": 1.0, "rope_scaling": null, "rope_theta": 100000.0, "pretraining_tp": 4"#,
            None,
        ),
        (
            r#""sliding_window": 4096, "quantization_config": null, "rope_interleaved": false, "torch_dtype": "bfloat16""#,
            None,
        ),
        (r#""layer_types": ["full_attention", "full_attention", "full_attention"], "is_llama_config": true"#, None),
        (r#""warp_factor": 9, "mystery": {"a": 1}"#, Some("mystery, warp_factor")),
    ] {
        let warning = check_weights(with("llama-gqa", more).path(), &[]).unwrap();
        assert_eq!(warning.is_some(), expected.is_some(), "{warning:?}");
        assert_all(&warning.unwrap_or_default(), expected.as_slice());
    }
}
