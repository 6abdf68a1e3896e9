//! Derives the net of a device from the net of the CPU. Both read configurations with the same code, so neither
//! computes a model that the other refuses, and a newly supported field applies to both.

use stillhouse_gpu::net::{Activation as DeviceActivation, Architecture as DeviceArchitecture, Shape};

use crate::error::{Result, TeacherError};
use crate::net::{Activation, Attention, Embedding, Head, Layer, Mlp, Net, Norm};

/// Properties that all layers must share on a device. The code destructures every field of a layer, so the compiler
/// reports a new one.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Facts {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    inner: usize,
    activation: Activation,
    /// Whether q, k and v have biases, and whether the output projection has one.
    attention_bias: [bool; 2],
    mlp_bias: [bool; 2],
    /// Epsilons of the norms before attention and before the MLP; `None` if the device does not support the kind of
    /// norm.
    eps: [Option<f32>; 2],
    norms_after: [bool; 2],
    /// Epsilon of the norms of queries and keys.
    head_eps: Option<f32>,
    soft_cap: Option<f32>,
    rope: Option<usize>,
    parallel: bool,
}

impl Facts {
    /// Collects the properties of a layer. [`shape`] checks window and scale, which may differ between layers.
    fn from_layer(kind: DeviceArchitecture, layer: &Layer) -> Self {
        let Layer { before_attention, qkv, attention, out, after_attention, before_mlp, mlp, after_mlp, parallel } =
            layer;
        let Attention { heads, kv_heads, head_dim, scale: _, soft_cap, window: _, rope, norms } = attention;
        let Mlp { up, activation, down } = mlp;
        let eps = |norm: &Option<Norm>| norm.as_ref().and_then(|norm| eps(kind, norm));
        Self {
            heads: *heads,
            kv_heads: *kv_heads,
            head_dim: *head_dim,
            inner: down.inputs(),
            activation: *activation,
            attention_bias: [qkv.has_bias(), out.has_bias()],
            mlp_bias: [up.has_bias(), down.has_bias()],
            eps: [eps(before_attention), eps(before_mlp)],
            norms_after: [after_attention.is_some(), after_mlp.is_some()],
            head_eps: norms.as_ref().map(|norms| norms.eps),
            soft_cap: *soft_cap,
            rope: *rope,
            parallel: *parallel,
        }
    }
}

fn eps(kind: DeviceArchitecture, norm: &Norm) -> Option<f32> {
    match (kind, norm) {
        (DeviceArchitecture::Gpt2, Norm::Layer { weight: _, bias: _, eps }) => Some(*eps),
        (DeviceArchitecture::Llama | DeviceArchitecture::Qwen3, Norm::Rms { weight: _, eps }) => Some(*eps),
        _ => None,
    }
}

fn unsupported(what: &'static str, got: impl ToString, valid: impl std::fmt::Display) -> TeacherError {
    TeacherError::Input { what, got: got.to_string(), valid: format!("{valid}, or device: cpu") }
}

/// Returns the shape of a net whose headers were read, for runs of up to `length` tokens out of `positions`.
///
/// # Errors
/// If the device does not support a property of the net; the error names it and the valid values.
pub(super) fn shape(kind: DeviceArchitecture, net: &Net, positions: usize, length: usize) -> Result<Shape> {
    let Net { width, embedding, ropes, layers, last, head } = net;
    let Embedding { tokens: _, scale, positions: learned } = embedding;
    let Head { weight: head, tied, soft_cap } = head;
    let gpt2 = kind == DeviceArchitecture::Gpt2;
    let Some(properties) = layers.first().map(|layer| Facts::from_layer(kind, layer)) else {
        return Err(unsupported("layers of a teacher on a GPU", 0, "at least 1"));
    };
    let [attention_bias, mlp_bias] = [properties.attention_bias[0], properties.mlp_bias[0]];
    let last = eps(kind, last);
    let checks = [
        ("layers that differ, on a GPU", layers.iter().all(|layer| Facts::from_layer(kind, layer) == properties)),
        ("norms on a GPU", last.is_some() && properties.eps == [last; 2] && properties.norms_after == [false; 2]),
        (
            "norms of queries and keys on a GPU",
            properties.head_eps == last.filter(|_| kind == DeviceArchitecture::Qwen3),
        ),
        ("soft caps on a GPU", properties.soft_cap.is_none() && soft_cap.is_none()),
        ("positions on a GPU", properties.rope == (!gpt2).then_some(0) && learned.is_some() == gpt2),
        ("layers with two parts side by side, on a GPU", !properties.parallel),
        ("biases on a GPU", properties.attention_bias == [attention_bias; 2] && properties.mlp_bias == [mlp_bias; 2]),
        ("a GPT-2 without biases, on a GPU", !gpt2 || attention_bias && mlp_bias),
        ("scale of embeddings on a GPU", *scale == 1.0),
    ];
    if let Some((what, _)) = checks.iter().find(|(_, holds)| !holds) {
        return Err(unsupported(what, format!("{properties:?}"), format!("those of a {kind:?}")));
    }
    let narrow = layers.iter().enumerate().filter_map(|(i, layer)| Some((i, layer.attention.window?)));
    if let Some((layer, window)) = narrow.clone().find(|(_, window)| *window < length) {
        let got = format!("{window} tokens in layer {layer}, with sequences of {length}");
        return Err(unsupported("sliding window on a GPU", got, format!("none, or one of at least {length} tokens")));
    }
    if ropes.iter().any(|rope| rope.is_long(length)) {
        let valid = "at most the context length before scaling";
        return Err(unsupported("length of sequences under longrope, on a GPU", length, valid));
    }
    let (scaled, scaled_by_layer) = scales(layers, properties.head_dim).ok_or_else(|| {
        unsupported("scale of scores on a GPU", layers[0].attention.scale, "1, or 1 / sqrt(head_dim)")
    })?;
    Ok(Shape {
        architecture: kind,
        vocab: head.outputs(),
        width: *width,
        layers: layers.len(),
        heads: properties.heads,
        kv_heads: properties.kv_heads,
        head_dim: properties.head_dim,
        inner: properties.inner,
        activation: match properties.activation {
            Activation::SwiGlu => DeviceActivation::SwiGlu,
            Activation::GeGlu => DeviceActivation::GeGlu,
            Activation::GeluTanh => DeviceActivation::GeluTanh,
            Activation::Gelu => DeviceActivation::Gelu,
        },
        scaled,
        scaled_by_layer,
        eps: last.unwrap_or_default(),
        // Rotations need no angles beyond the longest sequence, but the table of learned positions has a fixed size.
        positions: if gpt2 { positions } else { length },
        tied: *tied,
        attention_bias,
        mlp_bias,
    })
}

/// Returns whether scores are divided by sqrt(D), and whether also by the layer's number.
fn scales(layers: &[Layer], head_dim: usize) -> Option<(bool, bool)> {
    let of = |scaled: bool, by_layer: bool, i: usize| {
        let scale = if scaled { 1.0 / (head_dim as f32).sqrt() } else { 1.0 };
        if by_layer { scale / (i + 1) as f32 } else { scale }
    };
    let all = [(true, false), (false, false), (true, true), (false, true)];
    all.into_iter().find(|(scaled, by_layer)| {
        layers.iter().enumerate().all(|(i, layer)| layer.attention.scale == of(*scaled, *by_layer, i))
    })
}
