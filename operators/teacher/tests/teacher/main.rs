//! Compares teachers with logits computed by Hugging Face transformers.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod conformance;
mod decoding;
mod errors;
mod gguf;
mod golden;
mod gpu;
mod levels;
mod memory;
mod probe;
mod vocabularies;
mod weights;
mod widen;

use std::path::PathBuf;

use stillhouse_teacher::candle_core::{self, DType, Device, Tensor};
use stillhouse_teacher::{DeviceChoice, HostTeacher, Precision, load_on_host};

const MODELS: [&str; 3] = ["gpt2", "llama-gqa", "qwen3"];

fn testdata(model: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata").join(model)
}

fn teacher(model: &str, dtype: Precision) -> Box<dyn HostTeacher> {
    load_on_host(&testdata(model), dtype).unwrap()
}

struct Expected {
    tokens: Vec<u32>,
    batch: usize,
    length: usize,
    logits: Tensor,
}

fn expected(model: &str) -> Expected {
    let file = testdata(model).join("expected.safetensors");
    let mut tensors = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
    let tokens = tensors.remove("input_ids").unwrap();
    let (batch, length) = tokens.dims2().unwrap();
    let tokens = tokens.flatten_all().unwrap().to_dtype(DType::U32).unwrap().to_vec1().unwrap();
    let logits = tensors.remove("logits").unwrap().flatten(0, 1).unwrap();
    Expected { tokens, batch, length, logits }
}

fn rows(hidden: &Tensor) -> Tensor {
    hidden.flatten(0, 1).unwrap()
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    let tensor = tensor.to_dtype(DType::F32).unwrap().to_device(&Device::Cpu).unwrap();
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn worst(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    floats(a).iter().zip(floats(b)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}
