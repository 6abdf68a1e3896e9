//! Estimates a CPU teacher's memory from headers alone, so that a job can be rejected before anything is loaded.

use std::path::Path;

use crate::config::TeacherConfig;
use crate::contract::host_slice_rows;
use crate::device::Precision;
use crate::error::Result;
use crate::model::{BuiltNet, build};
use crate::net::{Arithmetic, Layer};
use crate::weights::Read;

/// Number of slices' worth of memory: two slices of logits, and as much again for the extraction, which is largest for
/// dense noise.
const SLICES: usize = 4;

/// Memory of a teacher, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostBytes {
    /// Weights, in the format that products use.
    pub weights: u64,
    /// States of one pass.
    pub pass: u64,
    /// Slices of logits and the extraction's results.
    pub logits: u64,
}

impl HostBytes {
    /// The total.
    pub fn total(self) -> u64 {
        self.weights + self.pass + self.logits
    }
}

/// Estimates the memory of a CPU teacher for passes of `batch_tokens` tokens. The result is hardly below the real use,
/// and seldom more than half above it. Reads only headers.
///
/// # Errors
/// As [`crate::check_weights`].
pub fn host_bytes(path: &Path, dtype: Precision, batch_tokens: usize, ignore: &[String]) -> Result<HostBytes> {
    let config = TeacherConfig::read(path)?;
    let BuiltNet { net, weights, .. } = build(path, &config, Arithmetic::F32, Read::Headers, ignore)?;
    let bytes_per_weight = match dtype {
        Precision::Bf16 | Precision::F16 => 2,
        // bf16x3 stores two 16-bit parts. CPUs do not support fp8.
        Precision::F32 | Precision::Bf16x3 | Precision::Fp8 => 4,
    };
    // The embedding is a lookup table in f32 and the head a product, so a tied table is stored twice.
    let embedding = (config.vocab_size * config.hidden_size) as u64;
    let products = if weights.has_own_head() { weights.parameters() - embedding } else { weights.parameters() };
    let wide = |layer: &Layer| (layer.attention.heads + 2 * layer.attention.kv_heads) * layer.attention.head_dim;
    let widest = net.layers.iter().map(wide).max().unwrap_or(0);
    // Per token: states and their returned copy, and q, k and v of two layers.
    let floats_per_token = 2 * config.hidden_size + 2 * widest;
    let logits = SLICES * host_slice_rows(config.vocab_size) * config.vocab_size;
    Ok(HostBytes {
        weights: products * bytes_per_weight + embedding * size_of::<f32>() as u64,
        pass: (batch_tokens * floats_per_token * size_of::<f32>()) as u64,
        logits: (logits * size_of::<f32>()) as u64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_teacher_takes_its_weights_a_pass_and_slices_of_logits() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/teacher-nano-gpt2");
        let bytes = |dtype, tokens| host_bytes(&path, dtype, tokens, &[]).unwrap();
        let [small, large] = [bytes(Precision::F32, 1024), bytes(Precision::F32, 2048)];
        assert_eq!(large.pass, 2 * small.pass);
        assert_eq!((large.weights, large.logits), (small.weights, small.logits));
        // Loading counts the same parameters. The head is tied to the embedding and stored as a second table.
        let teacher =
            crate::load(&path, &crate::LoadOptions { device: crate::DeviceChoice::Cpu, ..Default::default() });
        let info = teacher.unwrap().info().clone();
        let table = (info.vocab_size * info.hidden_size) as u64;
        assert_eq!(small.weights, 4 * (info.parameters + table));
        // Weights of products take 16 bits, or two 16-bit parts; the embedding stays f32.
        for (dtype, each) in [(Precision::F16, 2), (Precision::Bf16, 2), (Precision::Bf16x3, 4)] {
            assert_eq!(bytes(dtype, 1024).weights, each * info.parameters + 4 * table, "{dtype}");
        }
    }
}
