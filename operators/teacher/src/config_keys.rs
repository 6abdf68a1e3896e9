//! The keys of a `config.json` that the code of its family does not read.
//!
//! [`ConfigFile`] records each key that is read. Every other key falls into one of these classes:
//!
//! | key | result |
//! |---|---|
//! | does not affect logits ([`HARMLESS`]): names, token ids, training, generation, storage | nothing |
//! | affects logits in some program ([`neutral_values`]), and its value is not neutral | an error that names the key |
//! | in `rope_scaling` or `rope_parameters`, and not used by this `rope_type` | an error that names the key |
//! | any other | a warning, because it may affect something |
//!
//! The tensors, not the keys, determine whether there are biases, norms and experts: each tensor must exist and be used
//! ([`crate::check_weights`]).

use serde_json::{Value, json};

use crate::config_file::ConfigFile;
use crate::error::Result;
use crate::families::Architecture;

/// Keys that do not affect the logits of a pass without dropout, by topic.
const HARMLESS: [&[&str]; 7] = [
    // Names and programs.
    &[
        "_name_or_path",
        "name_or_path",
        "architectures",
        "model_type",
        "transformers_version",
        "auto_map",
        "custom_pipelines",
        "tokenizer_class",
        "_commit_hash",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "torchscript",
        "tf_legacy_loss",
        "use_cache",
        "cache_implementation",
        "unsloth_version",
        "unsloth_fixed",
        "is_llama_config",
        "transformers.js_config",
        "vllm_config",
        "pretraining_tp",
        "chunk_size_feed_forward",
        "gradient_checkpointing",
        "return_dict",
        "return_dict_in_generate",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
    ],
    // Storage types of weights: each tensor states its own type.
    &["torch_dtype", "dtype", "use_bfloat16"],
    // Length and vocabulary, which `TeacherConfig` reads.
    &[
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "vocab_size",
        "hidden_size",
        "n_embd",
        "num_hidden_layers",
        "n_layer",
    ],
    // Token ids, which `TeacherConfig` and the tokenizer read.
    &[
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        "cls_token_id",
        "mask_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
    ],
    // Training.
    &[
        "initializer_range",
        "initializer_factor",
        "attention_dropout",
        "hidden_dropout",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "attn_pdrop",
        "embd_pdrop",
        "resid_pdrop",
        "embd_dropout",
        "resid_dropout",
        "ffn_dropout",
        "dropout",
        "layerdrop",
        "classifier_dropout",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "tie_encoder_decoder",
        "is_decoder",
        "cross_attention_hidden_size",
    ],
    // Generation.
    &[
        "max_length",
        "min_length",
        "max_new_tokens",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "remove_invalid_values",
        "prefix",
    ],
    // Keys whose effect shows in the tensors, or that are the default of a key that is present.
    &[
        "attention_bias",
        "mlp_bias",
        "qkv_bias",
        "use_qk_norm",
        "qk_layernorm",
        "original_max_position_embeddings",
        "max_window_layers",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "no_rope_layer_interval",
    ],
];

/// Keys that affect logits in some family or program, each with its neutral values.
fn neutral_values() -> Vec<(&'static str, Vec<Value>)> {
    let none = [
        "quantization_config",
        "compression_config",
        "sparsity_config",
        "attention_chunk_size",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "logit_softcapping",
        "query_pre_attn_scalar",
        "attention_multiplier",
        "clip_qkv",
        "rope_scaling",
        "rope_parameters",
        "rope_local_base_freq",
        "rotary_emb_base",
        "no_rope_layers",
    ];
    let one = [
        "partial_rotary_factor",
        "rotary_pct",
        "logit_scale",
        "logits_scaling",
        "lm_head_multiplier",
        "embedding_multiplier",
        "residual_multiplier",
        "scale_emb",
        "mup_width_multiplier",
        "mup_embeddings_multiplier",
        "rotary_scaling_factor",
    ];
    let no = [
        "is_encoder_decoder",
        "add_cross_attention",
        "alibi",
        "use_alibi",
        "rope_interleaved",
        "use_sliding_window",
        "use_bidirectional_attention",
        "use_parallel_residual",
        "parallel_attn",
        "apply_residual_connection_post_layernorm",
    ];
    let none = none.into_iter().map(|key| (key, Vec::new()));
    let one = one.into_iter().map(|key| (key, vec![json!(1.0), json!(1)]));
    let no = no.into_iter().map(|key| (key, vec![json!(false)]));
    let others = [("is_causal", vec![json!(true)]), ("pruned_heads", vec![json!({})])];
    none.chain(one).chain(no).chain(others).collect()
}

/// Keys of the objects that describe the rotation which have no effect unless the `rope_type` uses them.
const HARMLESS_IN_ROPE: [&str; 8] = [
    "rope_type",
    "type",
    "rope_theta",
    "original_max_position_embeddings",
    "max_position_embeddings",
    "finetuned",
    // YaRN's: unused if `attention_factor` gives the result, or if only one of the two is present.
    "mscale",
    "mscale_all_dim",
];

impl ConfigFile {
    /// Refuses unread keys that affect logits, and returns a warning about those that may. Call it after the family has
    /// read all of its keys.
    pub(crate) fn check_unread(&self, architecture: Architecture) -> Result<Option<String>> {
        let neutral_values = neutral_values();
        let mut unknown = Vec::new();
        for key in self.unread("") {
            let neutral = neutral_values.iter().find(|(name, _)| *name == key).map(|(_, values)| values);
            match key.as_str() {
                known if HARMLESS.iter().any(|keys| keys.contains(&known)) => {}
                "sliding_window" => self.check_window_is_unused()?,
                "layer_types" => self.check_layer_types(architecture)?,
                "rope_theta" => self.check_same_theta()?,
                "hidden_act" if self.get("hidden_activation").is_some() => {}
                _ if neutral.is_some_and(Vec::is_empty) => {
                    let valid = format!("null or no such key: {} has none in this program", architecture.name());
                    return Err(self.invalid(&key, &valid));
                }
                _ => match neutral {
                    Some(neutral) => self.require_one_of(&key, neutral)?,
                    None => unknown.push(key),
                },
            }
        }
        let groups =
            ["rope_scaling", "rope_parameters", "rope_parameters.full_attention", "rope_parameters.sliding_attention"];
        for group in groups.into_iter().filter(|group| self.was_read(group)) {
            let is_one = |key: &str| self.get(&format!("{group}.{key}")).and_then(Value::as_f64) == Some(1.0);
            let left =
                self.unread(group).into_iter().find(|key| !HARMLESS_IN_ROPE.contains(&key.as_str()) && !is_one(key));
            if let Some(key) = left {
                let valid = "null, or no such key: this rope_type does not use it";
                return Err(self.invalid(&format!("{group}.{key}"), valid));
            }
        }
        Ok((!unknown.is_empty()).then(|| {
            format!(
                "{}: unknown keys, which are ignored: {}; if one of them changes what the model computes, the teacher's \
                 logits are wrong",
                self.path().display(),
                unknown.join(", ")
            )
        }))
    }

    /// Checks the window in a family without windows: it must be as long as the longest sequence, so that it hides
    /// nothing.
    fn check_window_is_unused(&self) -> Result<()> {
        let longest = self.get("max_position_embeddings").or(self.get("n_positions")).and_then(Value::as_u64);
        match (self.get("sliding_window").and_then(Value::as_u64), longest) {
            (Some(window), Some(longest)) if window >= longest => Ok(()),
            _ => {
                Err(self
                    .invalid("sliding_window", "null, or at least max_position_embeddings: this family has no window"))
            }
        }
    }

    /// Checks that all layers are of the one kind that the family supports.
    fn check_layer_types(&self, architecture: Architecture) -> Result<()> {
        let slides = architecture.family().every_layer_slides();
        let kind = if slides && self.get("sliding_window").is_some() { "sliding_attention" } else { "full_attention" };
        let all = self.get("layer_types").and_then(Value::as_array);
        match all.is_some_and(|all| all.iter().all(|layer| layer == kind)) {
            true => Ok(()),
            false => {
                Err(self.invalid("layer_types", &format!("{kind} for every layer: this family has no other kind")))
            }
        }
    }

    /// Checks that a base outside `rope_parameters` equals the one inside.
    fn check_same_theta(&self) -> Result<()> {
        let inside = ["rope_parameters", "rope_parameters.full_attention"];
        let inside = inside.into_iter().find_map(|group| self.get(&format!("{group}.rope_theta")));
        match (inside.and_then(Value::as_f64), self.get("rope_theta").and_then(Value::as_f64)) {
            (Some(inside), Some(beside)) if inside == beside => Ok(()),
            (Some(inside), _) => Err(self.invalid("rope_theta", &format!("{inside}, as in rope_parameters"))),
            (None, _) => {
                Err(self.invalid("rope_theta", "null or no such key: this family has no such rotation of positions"))
            }
        }
    }
}
