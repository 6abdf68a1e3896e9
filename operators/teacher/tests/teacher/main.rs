//! Teachers against logits computed by Hugging Face transformers, on every device there is.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod conformance;
mod errors;
mod gguf;
mod weights;

use std::path::PathBuf;

use stillhouse_teacher::candle_core::{self, DType, Device, Tensor};
use stillhouse_teacher::{DeviceChoice, LoadOptions, Precision, Teacher, load};

const MODELS: [&str; 3] = ["gpt2", "llama-gqa", "qwen3"];

fn testdata(model: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata").join(model)
}

/// The CPU, and a GPU where this binary has CUDA and the machine has one.
fn test_devices() -> Vec<DeviceChoice> {
    let gpu = DeviceChoice::Cuda(0);
    let mut devices = vec![DeviceChoice::Cpu];
    devices.extend(gpu.open().is_ok().then_some(gpu));
    devices
}

fn teacher(model: &str, device: DeviceChoice, dtype: Precision) -> Box<dyn Teacher> {
    load(&testdata(model), &LoadOptions { device, dtype }).unwrap()
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
