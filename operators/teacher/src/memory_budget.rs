//! The memory that a teacher on the CPU takes, from headers alone: so that who has too little can say so before anything is loaded.

use std::path::Path;

use crate::config::TeacherConfig;
use crate::contract::host_slice_rows;
use crate::device::Precision;
use crate::error::Result;
use crate::model::{Built, build};
use crate::net::{Arithmetic, Layer};
use crate::weights::Read;

/// Slices of logits at once: two, and as much for what the extraction makes of them; dense noise takes most.
const SLICES: usize = 4;

/// Bytes of a teacher in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostBytes {
    /// Its weights, as they are multiplied.
    pub weights: u64,
    /// The states of one pass.
    pub pass: u64,
    /// Slices of logits and what is made of them.
    pub logits: u64,
}

impl HostBytes {
    /// All of it.
    pub fn sum(self) -> u64 {
        self.weights + self.pass + self.logits
    }
}

/// What a teacher on the CPU takes for passes of so many tokens: not much less than it will, seldom more than half as much again. Reads headers
/// only.
///
/// # Errors
/// As [`crate::check_weights`].
pub fn host_bytes(path: &Path, dtype: Precision, batch_tokens: usize, ignore: &[String]) -> Result<HostBytes> {
    let config = TeacherConfig::read(path)?;
    let Built { net, weights, .. } = build(path, &config, Arithmetic::F32, Read::Headers, ignore)?;
    let of_weight = match dtype {
        Precision::Bf16 | Precision::F16 => 2,
        // two parts of 16 bits; fp8 is on no CPU
        Precision::F32 | Precision::Bf16x3 | Precision::Fp8 => 4,
    };
    // rows of the embedding are looked up, in f32; the head is a product: two copies of one table where they are tied
    let embedding = (config.vocab_size * config.hidden_size) as u64;
    let products = if weights.has_own_head() { weights.parameters() - embedding } else { weights.parameters() };
    let wide = |layer: &Layer| (layer.attention.heads + 2 * layer.attention.kv_heads) * layer.attention.head_dim;
    let widest = net.layers.iter().map(wide).max().unwrap_or(0);
    // states and their copy that is handed out; what queries, keys and values are in, of two layers
    let of_token = 2 * config.hidden_size + 2 * widest;
    let logits = SLICES * host_slice_rows(config.vocab_size) * config.vocab_size;
    Ok(HostBytes {
        weights: products * of_weight + embedding * size_of::<f32>() as u64,
        pass: (batch_tokens * of_token * size_of::<f32>()) as u64,
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
        // loading it counts the same parameters; the head is tied to the embedding, and is a second table
        let teacher =
            crate::load(&path, &crate::LoadOptions { device: crate::DeviceChoice::Cpu, ..Default::default() });
        let info = teacher.unwrap().info().clone();
        let table = (info.vocab_size * info.hidden_size) as u64;
        assert_eq!(small.weights, 4 * (info.parameters + table));
        // what is multiplied has 16 bits, or two parts of them; what is looked up stays f32
        for (dtype, each) in [(Precision::F16, 2), (Precision::Bf16, 2), (Precision::Bf16x3, 4)] {
            assert_eq!(bytes(dtype, 1024).weights, each * info.parameters + 4 * table, "{dtype}");
        }
    }
}
