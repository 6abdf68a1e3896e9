//! Phi-3: Abdin et al. 2024, "Phi-3 Technical Report" (section 2). A Llama that stores q, k and v in one weight, and
//! gate and up in another. It may rotate only a part of each head, and scales positions with LongRoPE (Ding et al.
//! 2024).

use super::activation;
use super::decoder::{Decoder, Defaults};
use crate::config::ConfigFile;
use crate::error::Result;
use crate::net::{Activation, Loader, Net, RopeFields};

pub(crate) fn load(config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
    let mut decoder = Decoder::read(config, &Defaults { kv_heads: None, head_dim: None, eps: 1e-5, tied: false })?;
    decoder.activation = activation(config, "hidden_act", Activation::SwiGlu, true)?;
    decoder.fused = true;
    let window = config.window("sliding_window", None)?;
    decoder.positions.iter_mut().for_each(|layer| layer.window = window);
    let mut rope = RopeFields::usual(config, decoder.head_dim);
    rope.rotated = config.rotated("partial_rotary_factor", decoder.head_dim, 1.0)?;
    rope.original = Some(4096.0);
    rope.yarn_is_longrope = true;
    decoder.with_rope(&rope, loader)?.net(config, loader)
}
